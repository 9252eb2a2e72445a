//! Tests of lost locks: without the lock, CMD is ended.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use redlatch_testkit::{Proxy, shared, unique};
use rustix::process::Signal;

use crate::support::*;

/// Releases a lock by force, as another operator would.
fn unlock(name: &str) {
    let unlocked = finish(redlatch(shared(), &["unlock", "--force", name])).expect(0);
    assert_eq!(unlocked.stdout, format!("{name}: unlocked\n"));
}

/// Asserts that `redlatch` exits with 74 and reports the loss once, and that these processes have ended.
#[track_caller]
fn assert_ends_lost(holder: Running, pids: &[u32]) {
    let finished = holder.finish().expect(74);
    assert_eq!(finished.stderr.matches("lost").count(), 1, "{finished:#?}");
    for &pid in pids {
        assert!(is_dead(pid), "{pid} continues without the lock");
    }
}

#[test]
fn forced_unlock_ends_cmd() {
    let name = unique("forced");
    let holder = hold(shared(), &["--watchdog", "6s"], &name);
    let cmd = holder.cmd_pid();
    unlock(&name);
    assert_ends_lost(holder, &[cmd]);
}

#[test]
fn lock_lost_just_before_cmd_ends_is_reported() {
    let name = unique("late");
    let mut holder = hold(shared(), &["--watchdog", "1h"], &name);
    let cmd = holder.cmd_pid();
    // The next renewal is far away: only the release can discover the loss.
    unlock(&name);
    holder.close_stdin();
    assert_ends_lost(holder, &[cmd]);
}

#[test]
fn end_of_fixed_lease_ends_cmd() {
    let name = unique("fixed");
    let holder = hold(shared(), &["--lease", "6s"], &name);
    let cmd = holder.cmd_pid();
    assert_ends_lost(holder, &[cmd]);
}

/// Long before its lease ends. Another run acquires the lock, although CMD does not end by itself.
#[test]
fn cmd_that_takes_too_long_is_ended() {
    let (one, other) = (unique("too-long"), unique("too-long"));
    for names in [&[&*one][..], &[&*one, &*other]] {
        let options = ["--watchdog", "1h", "--at-most", "6s"];
        let mut args = [&["run"], &options[..], names].concat();
        args.extend(["--", "sh", "-c", "echo $$; exec cat"]);
        let holder = Running::start(redlatch(shared(), &args));
        let cmd = holder.cmd_pid();
        let next = finish(redlatch(shared(), &["run", &one, "--", "true"])).expect(0);
        assert_eq!(next.stdout, "");
        let finished = holder.finish().expect(74);
        let reason = "lost: it was held longer than its limit of 6s; ending CMD";
        assert!(finished.stderr.contains(reason), "{finished:#?}");
        assert!(is_dead(cmd));
    }
}

#[test]
fn cmd_that_ends_in_time_is_not_ended() {
    let name = unique("in-time");
    let holder = hold(shared(), &["--at-most", "1h"], &name);
    holder.release();
}

#[test]
fn cmd_is_ended_with_the_lease_if_the_store_is_unreachable() {
    let proxy = Proxy::to(shared().port());
    let name = unique("cut-off");
    let script = "echo $$; exec cat";
    let args = ["run", "--watchdog", "6s", &name, "--", "sh", "-c", script];
    let mut command = clean_command(&args);
    command.env("REDLATCH_URL", proxy.url());
    let holder = Running::start(command);
    let cmd = holder.cmd_pid();
    proxy.stall(true);
    assert_ends_lost(holder, &[cmd]);
}

#[test]
fn cmd_can_clean_up_on_sigterm() {
    let name = unique("tidy");
    let script = format!("trap 'echo tidy; exit 0' TERM; echo $$; {IDLE_SCRIPT}");
    let holder = hold_with(
        shared(),
        &["--watchdog", "6s", "--kill-after", "1h"],
        &name,
        &script,
    );
    let cmd = holder.cmd_pid();
    unlock(&name);
    let finished = holder.finish().expect(74);
    assert_eq!(finished.stdout, format!("{cmd}\ntidy\n"));
}

#[test]
fn cmd_that_ignores_sigterm_is_killed() {
    let name = unique("stubborn");
    let script = "trap '' TERM; echo $$; exec cat";
    let holder = hold_with(
        shared(),
        &["--watchdog", "6s", "--kill-after", "100ms"],
        &name,
        script,
    );
    let cmd = holder.cmd_pid();
    unlock(&name);
    assert_ends_lost(holder, &[cmd]);
}

/// A pause of `redlatch` itself is not time that killed processes had.
#[test]
fn child_is_killed_although_redlatch_was_stopped_when_that_was_due() {
    let name = unique("paused");
    let options = ["--watchdog", "6s", "--kill-after", "1s"];
    let script = "(trap '' TERM; sleep 1000) & echo $!; wait";
    let holder = hold_with(shared(), &options, &name, script);
    let child = holder.cmd_pid();
    unlock(&name);
    holder.until_stderr("lost");
    holder.signal(Signal::STOP);
    let due = Instant::now() + Duration::from_secs(3);
    until("it has been stopped for long", || Instant::now() >= due);
    holder.signal(Signal::CONT);
    assert_ends_lost(holder, &[child]);
}

/// With few descriptors, `redlatch` does not start CMD, or it can also end its children.
#[test]
fn children_are_ended_with_few_descriptors() {
    let limits: Vec<u32> = (4..=24).collect();
    let started = AtomicUsize::new(0);
    for_each(&limits, |limit| {
        let name = unique("descriptors");
        let script = "ulimit -n 100; (trap '' TERM; sleep 1000) & echo $!; wait";
        let run = [
            "run",
            "-n",
            "--watchdog",
            "6s",
            "--kill-after",
            "100ms",
            &name,
        ];
        let command = redlatch(shared(), &[&run[..], &["--", "sh", "-c", script]].concat());
        let holder = Running::start(limited(&format!("--nofile={limit}:"), &command));
        match holder.first_line() {
            Some(child) => {
                started.fetch_add(1, Ordering::SeqCst);
                unlock(&name);
                assert_ends_lost(holder, &[child.parse().unwrap()]);
            }
            None => {
                let code = holder.finish().code;
                // 127: the dynamic loader has too few.
                assert!(matches!(code, Some(69 | 71 | 127)), "{limit}: {code:?}");
            }
        }
    });
    assert!((2..limits.len()).contains(&started.into_inner()));
}

#[test]
fn children_of_cmd_are_ended() {
    for (what, script, kill_after) in [
        // CMD ends immediately, but its child ignores the first signal.
        (
            "ignores",
            "(trap '' TERM; sleep 1000) & echo $$; echo $!; wait",
            "100ms",
        ),
        ("ends", "sleep 1000 & echo $$; echo $!; wait", "1h"),
    ] {
        let name = unique(what);
        let options = ["--watchdog", "6s", "--kill-after", kill_after];
        let holder = hold_with(shared(), &options, &name, script);
        until("both are there", || {
            holder.until_stdout("\n").lines().count() == 2
        });
        let output = holder.until_stdout("\n");
        let pids: Vec<u32> = output.lines().map(|pid| pid.parse().unwrap()).collect();
        unlock(&name);
        assert_ends_lost(holder, &pids);
    }
}

#[test]
fn stopped_cmd_is_ended() {
    let name = unique("stopped");
    let options = ["--watchdog", "6s", "--kill-after", "1h"];
    let holder = hold_with(shared(), &options, &name, "echo $$; kill -STOP $$; cat");
    let cmd = holder.cmd_pid();
    unlock(&name);
    assert_ends_lost(holder, &[cmd]);
}

#[test]
fn holder_that_was_stopped_for_too_long_ends_cmd_on_sigcont() {
    let name = unique("paused");
    let holder = hold(shared(), &["--watchdog", "6s"], &name);
    let cmd = holder.cmd_pid();
    holder.signal(Signal::STOP);
    let next = hold(shared(), &[], &name);
    holder.signal(Signal::CONT);
    assert_ends_lost(holder, &[cmd]);
    // It did not take the lock from its current holder.
    assert!(is_held(shared(), &name));
    next.release();
}

#[test]
fn killed_holder_kills_cmd_and_its_lock_expires() {
    let name = unique("killed");
    let holder = hold(shared(), &["--watchdog", "6s"], &name);
    let cmd = holder.cmd_pid();
    let args = ["run", &name, "--", "echo", "next"];
    let next = Running::start(redlatch(shared(), &args));
    until("the next waits", || waiters(shared(), &name) == 1);
    holder.signal(Signal::KILL);
    until("CMD is dead", || is_dead(cmd));
    assert_eq!(next.finish().expect(0).stdout, "next\n");
}

#[test]
fn closed_standard_error_changes_nothing() {
    let name = unique("closed-stderr");
    let (reader, closed_pipe) = std::io::pipe().unwrap();
    drop(reader);
    let script = "echo $$; exec cat";
    let args = ["run", "--watchdog", "6s", &name, "--", "sh", "-c", script];
    let mut command = redlatch(shared(), &args);
    command.stdin(std::process::Stdio::piped());
    command.stdout(std::process::Stdio::piped());
    command.stderr(closed_pipe);
    let holder = Running::start_with_own_stdio(command);
    let cmd = holder.cmd_pid();
    unlock(&name);
    holder.finish().expect(74);
    assert!(is_dead(cmd));
}
