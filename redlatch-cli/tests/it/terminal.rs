//! Tests at a terminal: CMD can read it, and receives the signals of its keys once.

use redlatch_testkit::{shared, unique};

use crate::support::*;

/// Runs a shell script as CMD at a terminal.
fn run_at_terminal(name: &str, script: &str) -> Running {
    let binary = env!("CARGO_BIN_EXE_redlatch");
    at_a_terminal(&format!(
        "exec '{binary}' run --watchdog 6s {name} -- sh -c '{script}'"
    ))
}

#[test]
fn cmd_reads_the_terminal() {
    let name = unique("reads");
    let mut running = run_at_terminal(&name, r#"echo ready; read line; echo "got $line"; exit 4"#);
    running.until_stdout("ready");
    running.write("hello\n");
    running.until_stdout("got hello");
    running.finish().expect(4);
    assert!(!is_held(shared(), &name));
}

#[test]
fn cmd_receives_ctrl_c_once() {
    let name = unique("keys");
    // Leaves time for a second signal to arrive, if there were one.
    let script = r#"trap "n=x\$n" INT; echo ready; until [ "$n" ]; do sleep 0.02; done
        sleep 0.2; sleep 0.2; echo "got $n."; exit 4"#;
    let mut running = run_at_terminal(&name, script);
    running.until_stdout("ready");
    running.write("\x03");
    running.until_stdout("got x.");
    running.finish().expect(4);
    assert!(!is_held(shared(), &name));
}

/// While CMD is in the foreground, the terminal would stop other processes that write.
#[test]
fn message_is_written_in_the_background() {
    let name = unique("tostop");
    let binary = env!("CARGO_BIN_EXE_redlatch");
    let running = at_a_terminal(&format!(
        "stty tostop; exec '{binary}' run --verbose --watchdog 6s {name} -- sh -c 'echo ready; exec sleep 1000'"
    ));
    running.until_stdout("ready");
    finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    let finished = running.finish().expect(74);
    assert!(finished.stdout.contains("lost: "), "{finished:#?}");
}

#[test]
fn cmd_is_ended_when_the_lock_is_lost() {
    let name = unique("lost");
    let running = run_at_terminal(&name, "echo ready; exec sleep 1000");
    running.until_stdout("ready");
    finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    running.finish().expect(74);
}
