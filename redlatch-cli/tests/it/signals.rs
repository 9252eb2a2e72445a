//! Tests of signals to `redlatch`, which forwards them to CMD.

use std::net::TcpListener;

use nix::sys::signal::{SigSet, SigmaskHow, Signal as Named};
use redlatch_testkit::{shared, unique};
use rustix::process::Signal;

use crate::support::*;

const ALL: [(Signal, &str, i32); 4] = [
    (Signal::INT, "INT", 130),
    (Signal::TERM, "TERM", 143),
    (Signal::HUP, "HUP", 129),
    (Signal::QUIT, "QUIT", 131),
];

#[test]
fn signals_are_forwarded_and_the_lock_is_released_after_cmd() {
    for (signal, short, _) in ALL {
        let name = unique(short);
        let script =
            format!("trap 'echo got {short}; cat; exit 7' {short}; echo $$; {IDLE_SCRIPT}");
        let mut holder = hold_with(shared(), &[], &name, &script);
        holder.signal(signal);
        holder.until_stdout(&format!("got {short}"));
        assert!(is_held(shared(), &name), "CMD has not ended yet");
        holder.close_stdin();
        holder.finish().expect(7);
        assert!(!is_held(shared(), &name));
    }
}

#[test]
fn cmd_ended_by_a_signal_is_reported_as_shells_do() {
    for (signal, short, code) in ALL {
        let name = unique(short);
        let holder = hold(shared(), &[], &name);
        holder.signal(signal);
        holder.finish().expect(code);
        assert!(!is_held(shared(), &name));
    }
}

#[test]
fn signals_reach_children_of_cmd() {
    let name = unique("children");
    let script = "sh -c 'echo $$; sleep 1000; true'; exit 3";
    let holder = hold_with(shared(), &[], &name, script);
    let child = holder.cmd_pid();
    holder.signal(Signal::TERM);
    holder.finish().expect(143);
    until("the child is dead", || is_dead(child));
}

/// The state of a CMD that tried to read a terminal from the background.
#[test]
fn signals_reach_a_stopped_cmd() {
    let name = unique("stopped");
    let holder = hold(shared(), &[], &name);
    let cmd = holder.cmd_pid();
    let pid = rustix::process::Pid::from_raw(i32::try_from(cmd).unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::STOP).unwrap();
    until("it is stopped", || {
        let stat = std::fs::read_to_string(format!("/proc/{cmd}/stat")).unwrap();
        stat.rsplit(')')
            .next()
            .unwrap()
            .trim_start()
            .starts_with('T')
    });
    holder.signal(Signal::TERM);
    holder.finish().expect(143);
    assert!(!is_held(shared(), &name));
}

#[test]
fn signals_end_a_wait_and_leave_nothing_behind() {
    let name = unique("waiting");
    let holder = hold(shared(), &[], &name);
    let held_by = owner(shared(), &name);
    for (signal, _, code) in ALL {
        let args = ["run", &name, "--", "echo", "never"];
        let waiting = Running::start(redlatch(shared(), &args));
        until("it waits", || waiters(shared(), &name) == 1);
        waiting.signal(signal);
        let finished = waiting.finish().expect(code);
        assert_eq!(finished.stdout, "");
        until("no client waits", || waiters(shared(), &name) == 0);
        assert_eq!(owner(shared(), &name), held_by);
    }
    holder.release();
    assert!(!is_held(shared(), &name));
}

#[test]
fn ignored_sighup_stays_ignored() {
    let name = unique("nohup");
    let script = r#"trap '' HUP; exec "$0" run "$1" -- sh -c 'echo $$; exec cat'"#;
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_redlatch"), &name]);
    command.env("REDLATCH_URL", shared().url());
    let holder = Running::start(command);
    holder.cmd_pid();
    holder.signal(Signal::HUP);
    holder.signal(Signal::TERM);
    holder.finish().expect(143);
}

/// Starts a command while this thread blocks signals, which the new process inherits.
fn start_with_blocked(blocked: SigSet, command: std::process::Command) -> Running {
    let mask = blocked.thread_swap_mask(SigmaskHow::SIG_SETMASK).unwrap();
    let running = Running::start(command);
    mask.thread_set_mask().unwrap();
    running
}

/// The masks with which parents start `redlatch`.
fn masks() -> Vec<SigSet> {
    let single = [
        Named::SIGCHLD,
        Named::SIGTERM,
        Named::SIGTTOU,
        Named::SIGUSR1,
    ];
    let mut masks: Vec<SigSet> = single.map(|one| SigSet::from_iter([one])).to_vec();
    masks.extend([SigSet::empty(), SigSet::all()]);
    masks
}

#[test]
fn inherited_mask_hides_no_signal() {
    for mask in masks() {
        let name = unique("mask");
        let args = ["run", &name, "--", "true"];
        start_with_blocked(mask, redlatch(shared(), &args))
            .finish()
            .expect(0);
        let holder = hold(shared(), &[], &name);
        let waiting = start_with_blocked(mask, redlatch(shared(), &args));
        until("it waits", || waiters(shared(), &name) == 1);
        waiting.signal(Signal::TERM);
        waiting.finish().expect(143);
        holder.release();
    }
}

/// Commands that catch no signals.
#[test]
fn inherited_mask_does_not_protect_other_commands() {
    for mask in masks() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}", silent.local_addr().unwrap());
        let args = ["show", "--response-timeout", "1h", "--url", &url, "name"];
        let waiting = start_with_blocked(mask, clean_command(&args));
        let connection = silent.accept().unwrap();
        waiting.signal(Signal::TERM);
        assert_eq!(waiting.finish().signal, Some(15), "with blocked {mask:?}");
        drop(connection);
    }
}

#[test]
fn cmd_has_the_mask_and_the_ignored_signals_of_the_parent() {
    let ignored = [
        "true",
        "trap '' INT QUIT",
        "trap '' TERM HUP USR1",
        "trap '' TSTP TTIN TTOU 40",
    ];
    for (mask, ignore) in masks().into_iter().flat_map(|m| ignored.map(|i| (m, i))) {
        let name = unique("mask");
        let with = [env!("CARGO_BIN_EXE_redlatch"), "run", &name, "--"];
        let [expected, shown] = [&[][..], &with].map(|prefix| {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", &format!("{ignore}; exec \"$@\""), "sh"]);
            command.args(prefix);
            command.args(["grep", "^Sig[BIC]", "/proc/self/status"]);
            command.env("REDLATCH_URL", shared().url());
            start_with_blocked(mask, command).finish().expect(0).stdout
        });
        assert_eq!(shown, expected, "{ignore}, with blocked {mask:?}");
    }
}
