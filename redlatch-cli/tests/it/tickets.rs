//! Tests of `redlatch lock`, `renew`, `unlock --ticket` and `run --ticket`: each step is a process of its own.

use std::process::Stdio;

use redlatch_testkit::{Server, shared, unique};
use rustix::process::Signal;

use crate::support::*;

/// A lease that does not end during a test.
const LONG: &str = "1h";

/// Acquires a lock and returns the ticket.
fn ticket(options: &[&str], name: &str) -> String {
    let args = [&["lock"], options, &[name]].concat();
    let finished = finish(redlatch(shared(), &args)).expect(0);
    assert_eq!(finished.stderr, "");
    let line = finished.stdout.strip_suffix('\n').expect("one line");
    assert!(
        !line.contains('\n') && line.starts_with("redlatch1."),
        "{line}"
    );
    line.to_owned()
}

fn redlatch_finishes(args: &[&str]) -> Finished {
    finish(redlatch(shared(), args))
}

/// Runs `redlatch` with a ticket in the environment.
fn with_ticket(ticket: &str, args: &[&str]) -> Finished {
    let mut command = redlatch(shared(), args);
    command.env("REDLATCH_TICKET", ticket);
    finish(command)
}

/// Runs `redlatch` with this standard input.
fn with_input(input: &str, args: &[&str]) -> Finished {
    let mut running = Running::start(redlatch(shared(), args));
    running.write(input);
    running.close_stdin();
    running.finish()
}

/// Returns the remaining lease of a lock in ms.
fn remaining(server: &Server, name: &str) -> i64 {
    server.command(&["PTTL", name])
}

#[test]
fn ticket_is_renewed_and_released_by_other_processes() {
    for kind in [
        &[][..],
        &["--fair"],
        &["--write"],
        &["--fenced"],
        &["--spin"],
    ] {
        let name = unique("ticket");
        let ticket = ticket(&[kind, &["--lease", "30min"]].concat(), &name);
        let left = remaining(shared(), &name);
        assert!((1_500_000..=1_800_000).contains(&left), "{left}");
        let fields: Vec<String> = shared().command(&["HKEYS", &name]);
        assert!(
            fields.iter().any(|field| field.starts_with("ticket-")),
            "{fields:?}"
        );
        redlatch_finishes(&[&["lock", "-n"], kind, &[&*name]].concat())
            .expect(75)
            .assert_stderr(&name);
        // In all three ways.
        let renewed = redlatch_finishes(&["renew", "--ticket", &ticket, "--lease", "2h"]).expect(0);
        assert_eq!((&*renewed.stdout, &*renewed.stderr), ("", ""));
        assert!(remaining(shared(), &name) > 7_000_000);
        with_ticket(&ticket, &["renew", "--lease", "3h"]).expect(0);
        assert!(remaining(shared(), &name) > 10_000_000);
        with_input(
            &format!("{ticket}\n"),
            &["renew", "--ticket", "-", "--lease", "4h"],
        )
        .expect(0);
        assert!(remaining(shared(), &name) > 14_000_000);
        // Without --lease, it is that of the ticket. A lease is never shortened.
        with_ticket(&ticket, &["renew"]).expect(0);
        assert!(remaining(shared(), &name) > 14_000_000);
        let released = with_ticket(&ticket, &["unlock"]).expect(0);
        assert_eq!((&*released.stdout, &*released.stderr), ("", ""));
        assert!(!is_held(shared(), &name));
    }
}

#[test]
fn ticket_is_released_by_option_and_input() {
    for from_input in [false, true] {
        let name = unique("release");
        let ticket = ticket(&["--lease", LONG], &name);
        match from_input {
            true => with_input(&ticket, &["unlock", "--ticket", "-"]),
            false => redlatch_finishes(&["unlock", "--ticket", &ticket]),
        }
        .expect(0);
        assert!(!is_held(shared(), &name));
    }
}

/// The process that made the ticket has been waited for, so it is dead. The lock stays held until the lease ends.
#[test]
fn ticket_that_is_not_used_ends_with_its_lease() {
    let name = unique("unused");
    let ticket = ticket(&["--lease", "1s"], &name);
    until("the end of the lease", || !is_held(shared(), &name));
    for command in ["renew", "unlock"] {
        redlatch_finishes(&[command, "--ticket", &ticket])
            .expect(74)
            .assert_stderr("is free, because the lease of the ticket has ended");
    }
}

#[test]
fn run_adopts_ticket_for_cmd() {
    let name = unique("run");
    let ticket = ticket(&["--fenced", "--lease", LONG], &name);
    let script = r#"echo "$REDLATCH_LOCK $REDLATCH_OWNER $REDLATCH_FENCING_TOKEN"; cat"#;
    let args = [
        "run",
        "--ticket",
        "-",
        "--watchdog",
        "1h",
        "--",
        "sh",
        "-c",
        script,
    ];
    let mut running = Running::start(redlatch(shared(), &args));
    // The first line is the ticket, the rest is for CMD.
    running.write(&format!("{ticket}\nfor CMD"));
    let out = running.until_stdout("for CMD");
    let owner = owner(shared(), &name);
    assert!(!owner.starts_with("ticket-"), "{owner}");
    assert_eq!(out, format!("{name} {owner} 1\nfor CMD"));
    // It has been used.
    for args in [
        &["renew", "--ticket", &ticket][..],
        &["unlock", "--ticket", &ticket],
        &["run", "--ticket", &ticket, "--", "echo", "never"],
    ] {
        redlatch_finishes(args).expect(74).assert_stderr(&format!(
            "has already been used, or its lease has ended: {owner}"
        ));
    }
    running.close_stdin();
    running.finish().expect(0);
    assert!(!is_held(shared(), &name), "released");
}

/// A script that believes in an hour would work beside the next owner.
#[test]
fn revoked_ticket_is_not_renewed_or_adopted_silently() {
    let name = unique("revoked");
    let ticket = ticket(&["--lease", "30s"], &name);
    redlatch_finishes(&["unlock", "--revoke", "1min", "--wait", "0s", &name]).expect(76);
    // Within the limit.
    with_ticket(&ticket, &["renew", "--lease", "20s"]).expect(0);
    let refused = with_ticket(&ticket, &["renew", "--lease", LONG]).expect(74);
    refused.assert_stderr("was revoked, so its hold does not pass on, and is not extended beyond");
    assert!(remaining(shared(), &name) <= 60_000);
    let args = ["run", "--ticket", &ticket, "--", "echo", "never"];
    let refused = redlatch_finishes(&args).expect(74);
    assert_eq!(refused.stdout, "");
    refused.assert_stderr("was revoked");
    with_ticket(&ticket, &["unlock"]).expect(0);
    assert!(!is_held(shared(), &name), "released");
}

#[test]
fn exit_code_is_that_of_cmd_and_lost_ticket_ends_cmd() {
    let name = unique("cmd");
    let first = ticket(&["--lease", LONG], &name);
    redlatch_finishes(&["run", "--ticket", &first, "--", "sh", "-c", "exit 3"]).expect(3);
    let second = ticket(&["--lease", LONG], &name);
    let script = format!("echo $$; {IDLE_SCRIPT}");
    let running = Running::start(redlatch(
        shared(),
        &[
            "run",
            "--watchdog",
            "6s",
            "--ticket",
            &second,
            "--",
            "sh",
            "-c",
            &script,
        ],
    ));
    running.cmd_pid();
    redlatch_finishes(&["unlock", "--force", &name]).expect(0);
    running.finish().expect(74);
}

/// Of several processes with one ticket, one runs CMD.
#[test]
fn one_of_many_processes_adopts_ticket() {
    let (name, temp_dir) = (unique("many"), TempDir::new());
    let ticket = ticket(&["--lease", LONG], &name);
    let ran = temp_dir.path("ran");
    let script = format!("echo ran >> {ran}");
    let args = ["run", "--ticket", &ticket, "--", "sh", "-c", &script];
    let all: Vec<_> = (0..6)
        .map(|_| Running::start(redlatch(shared(), &args)))
        .collect();
    let mut codes: Vec<_> = all
        .into_iter()
        .map(|one| one.finish().code.unwrap())
        .collect();
    codes.sort_unstable();
    assert_eq!(codes, [0, 74, 74, 74, 74, 74]);
    assert_eq!(std::fs::read_to_string(ran).unwrap(), "ran\n");
}

/// A process that is killed while it holds an adopted lock keeps it for the watchdog's lease, not for that of the ticket.
#[test]
fn killed_adopter_keeps_lock_for_watchdog_lease() {
    let name = unique("killed");
    let ticket = ticket(&["--lease", LONG], &name);
    let args = [
        "run",
        "--watchdog",
        "6s",
        "--ticket",
        &ticket,
        "--",
        "sh",
        "-c",
        "echo $$; cat",
    ];
    let running = Running::start(redlatch(shared(), &args));
    running.cmd_pid();
    running.signal(Signal::KILL);
    until("the end of the watchdog's lease", || {
        !is_held(shared(), &name)
    });
    redlatch_finishes(&["run", "--ticket", &ticket, "--", "true"])
        .expect(74)
        .assert_stderr("is free");
}

#[test]
fn forged_and_malformed_tickets_are_refused() {
    let name = unique("forged");
    let ticket = ticket(&["--lease", LONG], &name);
    let (rest, secret) = ticket.split_at(ticket.len() - 32);
    let forged = format!("{rest}{}", secret.chars().rev().collect::<String>());
    let other_version = ticket.replace("redlatch1.", "redlatch2.");
    let long = "a".repeat(5000);
    for (ticket, code, message) in [
        (
            &*forged,
            74,
            "another ticket holds the lock, so this one is forged",
        ),
        (&ticket[..ticket.len() - 1], 2, "malformed"),
        (&*name, 2, "malformed"),
        // An empty variable is none.
        ("", 2, "ticket"),
        (&*other_version, 2, "another version"),
        (&*long, 2, "longer than"),
    ] {
        for args in [&["renew"][..], &["unlock"]] {
            with_ticket(ticket, args)
                .expect(code)
                .assert_stderr(message);
            with_input(ticket, &[args, &["--ticket", "-"]].concat())
                .expect(code)
                .assert_stderr(message);
        }
        redlatch_finishes(&["run", "--ticket", ticket, "--", "echo", "never"])
            .expect(code)
            .assert_stderr(message);
    }
    redlatch_finishes(&["renew", "--ticket", &ticket]).expect(0);
    redlatch_finishes(&["unlock", "--ticket", &ticket]).expect(0);
}

#[test]
fn wrong_usage_is_explained() {
    let ticket = "redlatch1.lock.n.-.1.00000000000000000000000000000000";
    for (args, message) in [
        (&["lock"][..], "NAME"),
        (&["lock", ""], "empty"),
        (&["lock", "--lease", "0", "n"], "lease"),
        (
            &["lock", "--hold", "--lease", "5s", "n"],
            "cannot be used with",
        ),
        (&["lock", "--watchdog", "5s", "n"], "--hold"),
        (&["lock", "--hold", "--watchdog", "1ms", "n"], "100 ms"),
        (&["lock", "--fair", "--write", "n"], "cannot be used with"),
        (&["lock", "--read", "n"], "--read"),
        (&["lock", "-n", "--wait", "1s", "n"], "cannot be used with"),
        (&["renew"], "--ticket"),
        (&["unlock"], "NAME"),
        (&["unlock", "n"], "--force"),
        (&["unlock", "--ticket", ticket, "n"], "without NAME"),
        (&["unlock", "--ticket", ticket, "--force"], "NAME"),
        (
            &["run", "--ticket", ticket, "n", "--", "true"],
            "cannot be used with",
        ),
        (
            &["run", "--ticket", ticket, "--fair", "--", "true"],
            "cannot be used with",
        ),
        (&["run", "--ticket", ticket], "CMD"),
    ] {
        let mut command = clean_command(args);
        command.env("REDLATCH_URL", "redis://127.0.0.1:1");
        finish(command).expect(2).assert_stderr(message);
    }
    let name = unique("forced");
    redlatch_finishes(&["lock", "--lease", LONG, &name]).expect(0);
    // A forced release of NAME ignores the variable.
    with_ticket(ticket, &["unlock", "--force", &name]).expect(0);
    assert!(!is_held(shared(), &name));
}

/// Nothing can use a ticket that was not read, so the lock is free.
#[test]
fn ticket_that_cannot_be_written_is_released() {
    let full = std::fs::File::options().write(true).open("/dev/full");
    let (reader, closed_pipe) = std::io::pipe().unwrap();
    drop(reader);
    for (stdout, cause) in [
        (Stdio::from(full.unwrap()), "No space left"),
        (Stdio::from(closed_pipe), "broken pipe"),
    ] {
        let name = unique("unread");
        let mut command = redlatch(shared(), &["lock", "--lease", LONG, &name]);
        command.stdout(stdout).stderr(Stdio::piped());
        let finished = Running::start_with_own_stdio(command).finish().expect(71);
        finished.assert_stderr(cause);
        assert!(!is_held(shared(), &name));
    }
}

/// Rust opens `/dev/null` in place of a standard output that is closed, so writing does not fail.
#[test]
fn ticket_for_closed_standard_output_is_refused() {
    let name = unique("closed");
    let mut command = std::process::Command::new("sh");
    let line = r#"exec "$0" lock --lease "$1" "$2" >&-"#;
    command.args(["-c", line, env!("CARGO_BIN_EXE_redlatch"), LONG, &name]);
    command.env("REDLATCH_URL", shared().url());
    let finished = finish(command).expect(71);
    finished.assert_stderr("standard output is closed");
    assert!(!is_held(shared(), &name));
}

/// A ticket that is not read, in a pipe that is full.
#[test]
fn signal_releases_lock_whose_ticket_is_not_read() {
    let (name, unread) = (unique("unread"), FullPipe::new());
    let mut command = redlatch(shared(), &["lock", "--lease", LONG, &name]);
    command.stdout(unread.writer()).stderr(Stdio::piped());
    let waiting = Running::start_with_own_stdio(command);
    until_writing_to_pipe(&waiting);
    assert!(is_held(shared(), &name));
    waiting.signal(Signal::TERM);
    waiting.finish().expect(143);
    assert!(!is_held(shared(), &name));
}

#[test]
fn signal_ends_wait_for_lock() {
    let name = unique("signal");
    let holder = hold(shared(), &[], &name);
    for options in [&[][..], &["--hold"]] {
        let args = [&["lock"], options, &[&name]].concat();
        let waiting = Running::start(redlatch(shared(), &args));
        until("it waits", || waiters(shared(), &name) == 1);
        waiting.signal(Signal::TERM);
        assert_eq!(waiting.finish().expect(143).stdout, "");
        until("it has left", || waiters(shared(), &name) == 0);
    }
    redlatch_finishes(&["lock", "--wait", "6s", "-E", "9", &name])
        .expect(9)
        .assert_stderr("not acquired within 6.0s");
    holder.release();
}

#[test]
fn lock_is_held_until_signal() {
    for (kind, signal) in [
        (&[][..], Signal::TERM),
        (&["--fair"], Signal::INT),
        (&["--fenced"], Signal::HUP),
    ] {
        let name = unique("hold");
        let args = [&["lock", "--hold", "--watchdog", "6s"], kind, &[&name]].concat();
        let holding = Running::start(redlatch(shared(), &args));
        let line = holding.until_stdout("\n");
        let token = if kind == ["--fenced"] { " 1" } else { "" };
        assert_eq!(line, format!("{}{token}\n", owner(shared(), &name)));
        redlatch_finishes(&["lock", "-n", &name]).expect(75);
        // It is renewed.
        let is_extended = || remaining(shared(), &name) < 5_000;
        until("a part of the lease has passed", is_extended);
        until("a renewal", || remaining(shared(), &name) > 5_000);
        holding.signal(signal);
        let finished = holding.finish().expect(0);
        assert_eq!((finished.stdout, &*finished.stderr), (line, ""));
        assert!(!is_held(shared(), &name));
    }
}

#[test]
fn lost_lock_ends_hold() {
    let name = unique("lost");
    let args = ["lock", "--hold", "--watchdog", "6s", &name];
    let holding = Running::start(redlatch(shared(), &args));
    holding.until_stdout("\n");
    redlatch_finishes(&["unlock", "--force", &name]).expect(0);
    let finished = holding.finish().expect(74);
    assert!(finished.stderr.contains("lost"), "{finished:?}");
}

/// A holder that is killed keeps the lock for its lease.
#[test]
fn killed_holder_keeps_lock_for_its_lease() {
    let name = unique("killed-hold");
    let args = ["lock", "--hold", "--watchdog", "6s", &name];
    let holding = Running::start(redlatch(shared(), &args));
    holding.until_stdout("\n");
    holding.signal(Signal::KILL);
    redlatch_finishes(&["lock", "--wait", "1min", "--lease", LONG, &name]).expect(0);
}

/// A waiter gets the lock as soon as the ticket is released, and is not woken by a renewal.
#[test]
fn waiter_gets_lock_when_ticket_is_released() {
    let name = unique("waiter");
    let ticket = ticket(&["--lease", LONG], &name);
    let waiting = Running::start(redlatch(shared(), &["lock", "--lease", LONG, &name]));
    let reported = waiting.until_stderr("waiting for");
    assert!(reported.contains("held by ticket-"), "{reported}");
    redlatch_finishes(&["unlock", "--ticket", &ticket]).expect(0);
    let next = waiting.finish().expect(0).stdout;
    redlatch_finishes(&["unlock", "--ticket", next.trim()]).expect(0);
}
