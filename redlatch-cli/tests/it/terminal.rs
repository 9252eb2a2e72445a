//! Tests at a terminal: CMD can read it, and receives the signals of its keys once.

use redlatch_testkit::{shared, unique};
use rustix::process::{Signal, kill_process};

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

/// With `stty tostop`, the system stops other programs that write from the background.
#[test]
fn waiting_process_in_the_background_reports_and_is_ended_by_a_signal() {
    let name = unique("tostop");
    let holder = hold(shared(), &[], &name);
    let (shell, pid) = in_background_of_a_terminal(&format!("run {name} -- true"));
    shell.until_stdout(&format!("waiting for {name}, held by"));
    kill_process(pid, Signal::TERM).unwrap();
    shell.until_stdout("ended 143.");
    holder.release();
}

/// Acquires a lock, and returns its ticket.
fn ticket_of(name: &str) -> String {
    finish(redlatch(shared(), &["lock", name])).expect(0).stdout
}

/// Like any program that reads the terminal from the background.
#[test]
fn ticket_is_read_from_the_terminal_in_the_foreground() {
    let name = unique("ticket");
    let ticket = ticket_of(&name);
    let binary = env!("CARGO_BIN_EXE_redlatch");
    // The shell notices later than this test that its job is stopped.
    let mut shell = at_a_terminal(&format!(
        "set -m; '{binary}' run --ticket - -- echo CMD began &
        until [ \"$(jobs -s)\" ]; do sleep 0.02; done; echo stopped; fg; echo ended $?."
    ));
    shell.until_stdout("stopped");
    assert!(is_held(shared(), &name));
    shell.write(&ticket);
    let stdout = shell.until_stdout("ended 0.");
    assert!(stdout.contains("\nCMD began"), "{stdout}");
    assert!(!is_held(shared(), &name));
}

/// Ctrl-Z while it reads, and `bg`: the read continues in the background.
#[test]
fn ticket_is_not_read_in_the_background() {
    let name = unique("ticket");
    let ticket = ticket_of(&name);
    let binary = env!("CARGO_BIN_EXE_redlatch");
    let mut shell = at_a_terminal(&format!(
        "set -m; '{binary}' run --ticket - -- echo CMD of {name}; bg; echo in background
        until [ \"$(jobs -s)\" ]; do sleep 0.02; done; echo stopped; fg; echo ended $?."
    ));
    until("it reads the terminal", || reads_terminal(&name));
    shell.write("\x1a");
    shell.until_stdout("\nin background");
    shell.until_stdout("\nstopped");
    assert!(is_held(shared(), &name));
    shell.write(&ticket);
    let stdout = shell.until_stdout("ended 0.");
    assert!(stdout.contains(&format!("\nCMD of {name}")), "{stdout}");
    assert!(!is_held(shared(), &name));
}

/// Returns whether a process with this text in its command line waits for input of a terminal.
fn reads_terminal(text: &str) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut paths = processes.map(|process| process.path());
    paths.any(|process| {
        let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(text) && waits_in(&process, "wait_woken")
    })
}
