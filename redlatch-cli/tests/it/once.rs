//! Tests of `redlatch run --at-least`, `--once-per` and `--slot`.

use std::collections::HashSet;

use redlatch_testkit::{Proxy, Server, shared, unique};
use rustix::process::Signal;

use crate::support::*;

/// A day that ends neither today nor tomorrow.
const LONG_SLOT: &str = "3650d";

/// Starts `redlatch run` with a CMD that appends a line to a file.
fn start(server: &Server, options: &[&str], name: &str, script: &str) -> Running {
    let args = [&["run"], options, &[name, "--", "sh", "-c", script]].concat();
    Running::start(redlatch(server, &args))
}

fn lines(path: &str) -> usize {
    std::fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

/// Asserts that this is the line about an earlier run, and nothing else. One that says that it waits
/// may precede it.
#[track_caller]
fn assert_reported(stderr: &str, name: &str, end: &str) {
    let line = match stderr.split_once('\n') {
        Some((waits, line)) if waits.contains("waiting for") => line,
        _ => stderr,
    };
    let line = line.strip_prefix(&format!("redlatch: {name}: ran on "));
    let line = line.and_then(|line| line.strip_suffix(&format!(" UTC, {end}\n")));
    let Some((host, time)) = line.and_then(|line| line.split_once(" at ")) else {
        panic!("{stderr:?}");
    };
    assert!(!host.is_empty() && !host.contains('\n'), "{stderr:?}");
    let is_time = |time: &str| {
        let parts: Vec<_> = time.split(':').map(str::parse::<u8>).collect();
        matches!(&parts[..], [Ok(..24), Ok(..60), Ok(..60)])
    };
    assert!(is_time(time), "{stderr:?}");
}

/// Some of them wait for the lock while CMD runs, others come later: in both cases they do not repeat it.
#[test]
fn one_of_many_processes_runs_cmd_in_slot() {
    for options in [["--once-per", LONG_SLOT], ["--slot", "2026-11-22T02:00"]] {
        let (temp_dir, name) = (TempDir::new(), unique("once"));
        let ran = temp_dir.path("ran");
        let script = format!("echo ran >> {ran}; exit 3");
        let all: Vec<_> = (0..8)
            .map(|_| start(shared(), &options, &name, &script))
            .collect();
        let mut codes: Vec<_> = all
            .into_iter()
            .map(|running| {
                let finished = running.finish();
                match finished.code {
                    Some(3) => assert_eq!(finished.stderr, ""),
                    _ if finished.stderr.contains("not finished") => {}
                    _ => assert_reported(&finished.stderr, &name, "exit code 3"),
                }
                finished.code.unwrap()
            })
            .collect();
        codes.sort_unstable();
        assert_eq!(codes, [3, 73, 73, 73, 73, 73, 73, 73]);
        assert_eq!(lines(&ran), 1);
        let late = start(shared(), &options, &name, &script)
            .finish()
            .expect(73);
        assert_reported(&late.stderr, &name, "exit code 3");
        assert!(!is_held(shared(), &name));
    }
}

/// Each machine's clock is in another slot, but only the server's counts.
#[test]
fn machines_with_shifted_clocks_run_each_slot_once() {
    let (temp_dir, name) = (TempDir::new(), unique("clocks"));
    let (ran, days) = (temp_dir.path("ran"), temp_dir.path("days"));
    // A slot has ten days: the clocks of the first and the last machine are six slots apart.
    let script = format!(
        "date +%F >> {days}; \
         for job in 1 2 3; do \"$@\" run --once-per 10d {name}-$job -- sh -c \"echo $job >> {ran}\"; done"
    );
    let machine = |number: i32| {
        let shift = format!("{:+}d", 3 * (number - 10));
        let mut faketime = std::process::Command::new("faketime");
        faketime.args(["-m", "-f", &shift, "sh", "-c", &script, "machine"]);
        let mut shifted = started_by(faketime, &redlatch(shared(), &[]));
        shifted.env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        Running::start(shifted)
    };
    let machines: Vec<_> = (0..20).map(machine).collect();
    for machine in machines {
        let code = machine.finish().code;
        assert!(matches!(code, Some(0 | 73)), "{code:?}");
    }
    let mut jobs: Vec<_> = std::fs::read_to_string(&ran)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect();
    jobs.sort_unstable();
    assert_eq!(jobs, ["1", "2", "3"]);
    let days = std::fs::read_to_string(&days).unwrap();
    assert_eq!(days.lines().collect::<HashSet<_>>().len(), 20, "{days}");
}

#[test]
fn another_slot_runs_again() {
    let name = unique("slots");
    for slot in ["1", "2"] {
        let options = ["--slot", slot];
        start(shared(), &options, &name, "true").finish().expect(0);
        start(shared(), &options, &name, "true").finish().expect(73);
    }
    // Each period of a millisecond is another one.
    let options = ["--once-per", "1ms"];
    start(shared(), &options, &name, "true").finish().expect(0);
    start(shared(), &options, &name, "true").finish().expect(0);
}

/// The slot is not repeated, although the lock is free again when its lease has ended.
#[test]
fn killed_process_is_not_repeated() {
    let (temp_dir, name) = (TempDir::new(), unique("killed"));
    let ran = temp_dir.path("ran");
    let options = ["--slot", "02:00", "--watchdog", "6s"];
    let script = format!("echo ran >> {ran}; echo started; {IDLE_SCRIPT}");
    let killed = start(shared(), &options, &name, &script);
    killed.until_stdout("started");
    killed.signal(Signal::KILL);
    until("the lease ends", || !is_held(shared(), &name));
    let later = start(shared(), &options, &name, &script)
        .finish()
        .expect(73);
    let expected = format!("redlatch: {name}: started on ");
    assert!(later.stderr.starts_with(&expected), "{}", later.stderr);
    assert!(
        later.stderr.ends_with(" UTC, not finished\n"),
        "{}",
        later.stderr
    );
    assert_eq!(lines(&ran), 1);
}

#[test]
fn outcome_of_signaled_and_lost_cmd_is_recorded() {
    let name = unique("outcome");
    let options = ["--slot", "1"];
    start(shared(), &options, &name, "kill -KILL $$")
        .finish()
        .expect(137);
    let later = start(shared(), &options, &name, "true").finish().expect(73);
    assert_reported(&later.stderr, &name, "signal 9");

    let options = ["--slot", "2", "--watchdog", "6s"];
    let script = format!("echo started; {IDLE_SCRIPT}");
    let losing = start(shared(), &options, &name, &script);
    losing.until_stdout("started");
    finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    losing.finish().expect(74);
    let later = start(shared(), &options, &name, "true").finish().expect(73);
    assert_reported(&later.stderr, &name, "lost the lock");
}

/// The store cannot be reached: CMD does not start, and its slot is free afterwards.
#[test]
fn cmd_does_not_start_during_outage() {
    let mut server = Server::start();
    server.kill();
    let options = ["-n", "--slot", "1"];
    let finished = start(&server, &options, "a", "echo ran")
        .finish()
        .expect(69);
    assert_eq!(finished.stdout, "");
    // Without -n it waits.
    let waiting = start(&server, &["--slot", "1"], "a", "echo ran");
    waiting.until_stderr("waiting for the store");
    server.restart();
    assert_eq!(waiting.finish().expect(0).stdout, "ran\n");
}

/// A store that does not answer delays the end of `run` only as long as it holds the lock.
#[test]
fn outcome_is_awaited_only_until_the_lock_is_lost() {
    let (proxy, name) = (Proxy::to(shared().port()), unique("unanswered"));
    let options = ["--slot", "1", "--lease", "6s", "--response-timeout", "1h"];
    let script = ["--", "sh", "-c", "echo started; exec cat"];
    let mut command = clean_command(&[&["run"], &options[..], &[&name], &script].concat());
    command.env("REDLATCH_URL", proxy.url());
    let mut running = Running::start(command);
    running.until_stdout("started");
    proxy.stall(true);
    running.close_stdin();
    let finished = running.finish().expect(74);
    let warning = "how CMD ended was not recorded: the store does not answer";
    assert!(finished.stderr.contains(warning), "{finished:#?}");
}

#[test]
fn lock_is_kept_after_short_cmd() {
    let (temp_dir, name) = (TempDir::new(), unique("kept"));
    let ran = temp_dir.path("ran");
    for (i, kind) in [None, Some("--fair"), Some("--fenced"), Some("--spin")]
        .into_iter()
        .enumerate()
    {
        let name = format!("{name}:{i}");
        let options: Vec<_> = ["-n", "--at-least", "60s"]
            .into_iter()
            .chain(kind)
            .collect();
        let script = format!("echo ran >> {ran}");
        start(shared(), &options, &name, &script).finish().expect(0);
        start(shared(), &options, &name, &script)
            .finish()
            .expect(75);
        start(shared(), &["-n"], &name, &script).finish().expect(75);
        assert_eq!(lines(&ran), i + 1);
        let left: i64 = shared().command(&["PTTL", &name]);
        assert!(left > 30_000 && left <= 60_000, "{left}");
        finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    }
}

#[test]
fn options_that_do_not_fit_are_usage_errors() {
    for (options, message) in [
        (&["--at-least", "5s", "--read"][..], "cannot be used with"),
        (
            &["--at-least", "5s", "--permits", "2"],
            "cannot be used with",
        ),
        (&["--at-least", "5s", "--slot", "1"], "cannot be used with"),
        (&["--once-per", "1h", "--slot", "1"], "cannot be used with"),
        (&["--at-least", "0"], "at_least"),
        (&["--once-per", "0"], "invalid value for --once-per: 0ns"),
        (&["--slot", ""], "invalid value for --slot: it has 0 bytes"),
        (&["--slot", "1", "second"], "work with one NAME"),
        (&["--at-least", "5s", "second"], "work with one NAME"),
    ] {
        let finished = start(shared(), options, &unique("usage"), "true")
            .finish()
            .expect(2);
        assert!(finished.stderr.contains(message), "{finished:?}");
    }
}

/// Another program has a hash under the name of the record.
#[test]
fn refusal_names_the_whole_key_of_the_record() {
    let prefix = unique("prefix:");
    let key = format!("redlatch_once:{{{prefix}job}}");
    let () = shared().command(&["HSET", &key, "field", "value"]);
    let args = [
        "--prefix",
        &prefix,
        "run",
        "--once-per",
        "1h",
        "job",
        "--",
        "true",
    ];
    let refused = finish(redlatch(shared(), &args)).expect(65);
    refused.assert_stderr(&format!("the data of {key:?} is of another kind"));
}
