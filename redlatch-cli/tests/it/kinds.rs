//! Tests of every kind of lock by its option, its output in `show`, and the latch.

use redlatch_testkit::{Server, shared, unique};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::*;

pub(crate) fn object(name: &str) -> Value {
    let shown = finish(redlatch(shared(), &["show", "--json", name])).expect(0);
    serde_json::from_str(&shown.stdout).unwrap_or_else(|e| panic!("{shown:?}: {e}"))
}

/// Returns the number of waiters in the queue of a fair lock.
fn queue_length(name: &str) -> usize {
    object(name)["queue"].as_array().map_or(0, Vec::len)
}

/// Runs immediately or not at all; returns whether it ran.
fn try_run(options: &[&str], names: &[&str]) -> bool {
    let args = [&["run", "-n"], options, names, &["--", "true"]].concat();
    let finished = finish(redlatch(shared(), &args));
    match finished.code {
        Some(0) => true,
        Some(75) => false,
        _ => panic!("{finished:?}"),
    }
}

/// Starts a `redlatch run` that waits for a lock or permit that another owner holds.
fn start(options: &[&str], name: &str, script: &str) -> Running {
    let args = [&["run"], options, &[name, "--", "sh", "-c", script]].concat();
    Running::start(redlatch(shared(), &args))
}

#[test]
fn fair_runs_wait_in_one_queue_and_are_served_in_its_order() {
    let (name, temp_dir) = (unique("fair"), TempDir::new());
    let log = temp_dir.path("log");
    let holder = hold(shared(), &["--fair"], &name);
    let waiting: Vec<Running> = (1..=3)
        .map(|n| {
            let running = start(&["--fair"], &name, &format!("echo {n} >> {log}"));
            until("it is in the queue", || queue_length(&name) == n);
            running
        })
        .collect();
    let shown = object(&name);
    assert_eq!(shown["kind"], "fair lock");
    assert_eq!(shown["owner"], owner(shared(), &name));
    let table = finish(redlatch(shared(), &["show", &name]))
        .expect(0)
        .stdout;
    // A line about the holder follows when it is registered, after a second.
    let rows = table.lines().filter(|line| line.starts_with(&*name));
    assert_eq!(rows.count(), 4, "{table}");
    assert!(table.contains("(waits, 3)"), "{table}");

    assert!(!try_run(&["--fair"], &[&name]));
    holder.release();
    for running in waiting {
        running.finish().expect(0);
    }
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "1\n2\n3\n");
    assert_eq!(object(&name)["held"], false);
}

#[test]
fn killed_fair_waiter_delays_the_others_by_one_lease() {
    for in_multi_lock in [false, true] {
        let (name, other) = (unique("dead-waiter"), unique("other"));
        let names = match in_multi_lock {
            false => vec![&*name],
            true => vec![&*other, &*name],
        };
        let holder = hold(shared(), &["--fair"], &name);
        let wait = |n| {
            let options = ["run", "--fair", "--watchdog", "6s"];
            let args = [&options[..], &names, &["--", "true"]].concat();
            let running = Running::start(redlatch(shared(), &args));
            until("it is in the queue", || queue_length(&name) == n);
            running
        };
        let dead = wait(1);
        let left = object(&name)["queue"][0]["remaining_ms"].as_u64().unwrap();
        // At most the holder's lease and the waiter's wait time, 30 s and 6 s.
        assert!(left <= 60_000, "{left}");
        dead.signal(Signal::KILL);
        drop(dead);
        let next = wait(2);
        holder.release();
        next.finish().expect(0);
    }
}

#[test]
fn fair_run_without_wait_reports_the_holder() {
    let name = unique("before-you");
    hold_unregistered(shared(), &name, "300000");
    let args = ["run", "-n", "--fair", &name, "--", "true"];
    finish(redlatch(shared(), &args))
        .expect(75)
        .assert_stderr("not acquired: held by another-client:1 for up to");
}

#[test]
fn unlock_does_not_apply_to_a_fair_lock_with_only_waiters() {
    let name = unique("waited-for");
    // Those of processes would soon acquire the free lock.
    for waiter in ["another-client:1", "another-client:2"] {
        let queue = format!("redisson_lock_queue:{{{name}}}");
        let () = shared().command(&["RPUSH", &queue, waiter]);
        let timeouts = format!("redisson_lock_timeout:{{{name}}}");
        let () = shared().command(&["ZADD", &timeouts, "9000000000000000", waiter]);
    }
    assert_eq!(queue_length(&name), 2);
    let unlocked = finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    assert_eq!(
        unlocked.stdout,
        format!("{name}: not held; 2 wait for it\n")
    );
}

#[test]
fn ended_waiter_leaves_the_queue() {
    let name = unique("leaves");
    let holder = hold(shared(), &["--fair"], &name);
    let waiter = start(&["--fair"], &name, "true");
    until("it is in the queue", || queue_length(&name) == 1);
    waiter.signal(Signal::TERM);
    waiter.finish().expect(143);
    assert_eq!(queue_length(&name), 0);
    holder.release();
}

#[test]
fn readers_run_together_and_writers_alone() {
    let name = unique("rw");
    let reader = hold(shared(), &["--read"], &name);
    assert!(try_run(&["--read"], &[&name]));
    assert!(!try_run(&["--write"], &[&name]));
    let another = hold(shared(), &["--read"], &name);
    let shown = object(&name);
    assert_eq!(shown["kind"], "read-write lock");
    let holders = shown["holders"].as_array().unwrap();
    assert_eq!(holders.len(), 2);
    assert!(holders.iter().all(|holder| holder["side"] == "read"));
    reader.release();
    another.release();

    let writer = hold(shared(), &["--write"], &name);
    assert!(!try_run(&["--read"], &[&name]));
    assert!(!try_run(&["--write"], &[&name]));
    assert_eq!(object(&name)["holders"][0]["side"], "write");
    writer.release();
    assert!(try_run(&["--write"], &[&name]));
}

#[test]
fn fenced_run_gets_a_greater_token_each_time() {
    let name = unique("fenced");
    let token = || {
        let args = ["run", "--fenced", &name, "--", "sh", "-c"];
        let args = [&args[..], &["echo $REDLATCH_FENCING_TOKEN"]].concat();
        let finished = finish(redlatch(shared(), &args)).expect(0);
        finished.stdout.trim().parse::<u64>().unwrap()
    };
    let (first, second) = (token(), token());
    assert!(second > first, "{first}, {second}");
    assert_eq!(object(&name)["token"], second);
    assert_eq!(object(&name)["kind"], "fenced lock");
    let table = finish(redlatch(shared(), &["show", &name]))
        .expect(0)
        .stdout;
    assert!(table.contains(&format!("token {second}  ")), "{table}");
}

#[test]
fn spinning_run_waits_and_acquires() {
    let name = unique("spin");
    let holder = hold(shared(), &["--spin"], &name);
    assert!(!try_run(&["--spin"], &[&name]));
    let mut waiter = start(&["--spin"], &name, "echo got; cat");
    holder.release();
    waiter.until_stdout("got");
    waiter.close_stdin();
    waiter.finish().expect(0);
}

#[test]
fn number_of_runs_is_limited_by_permits() {
    let name = unique("permits");
    let options = ["--permits", "2"];
    let one = hold(shared(), &options, &name);
    let two = hold(shared(), &options, &name);
    assert!(!try_run(&options, &[&name]));
    let shown = object(&name);
    assert_eq!(shown["kind"], "expirable semaphore");
    assert_eq!(shown["available"], 0);
    assert_eq!(shown["permits"].as_array().unwrap().len(), 2);
    let table = finish(redlatch(shared(), &["show", &name]))
        .expect(0)
        .stdout;
    let rows = table.lines().filter(|line| line.starts_with(&*name));
    assert_eq!(rows.count(), 3, "{table}");

    one.release();
    assert!(try_run(&options, &[&name]));
    two.release();
}

#[test]
fn different_number_of_permits_is_refused_unless_requested() {
    let name = unique("more-permits");
    let one = hold(shared(), &["--permits", "1"], &name);
    assert!(!try_run(&["--permits", "1"], &[&name]));
    let args = ["run", "-n", "--permits", "2", &name, "--", "true"];
    finish(redlatch(shared(), &args))
        .expect(65)
        .assert_stderr(&format!(
            "{name} has 1 permit, not 2; if this semaphore is yours"
        ));
    assert!(!try_run(&["--permits", "1"], &[&name]), "as it was");

    let args = [&["run", "--set-permits"], &args[1..]].concat();
    finish(redlatch(shared(), &args))
        .expect(0)
        .assert_stderr("changed from 1 to 2 permits");
    assert!(try_run(&["--permits", "2"], &[&name]));
    one.release();
}

#[test]
fn number_that_is_no_semaphore_stays_unchanged() {
    let name = unique("visitors");
    let () = shared().command(&["SET", &name, "12345"]);
    let args = ["run", "--permits", "3", &name, "--", "echo", "never"];
    finish(redlatch(shared(), &args))
        .expect(65)
        .assert_stderr(&format!("{name} has 12345 permits, not 3;"));
    assert_eq!(shared().command::<String>(&["GET", &name]), "12345");
}

#[test]
fn waiter_gets_a_permit_after_data_loss() {
    for options in [&[][..], &["--wait", "1h"]] {
        let server = Server::start();
        let name = unique("flushed");
        let options = [&["--permits", "1", "--watchdog", "6s"], options].concat();
        let holder = hold(&server, &options, &name);
        let args = [&["run"], &options[..], &[&name, "--", "echo", "got"]].concat();
        let waiter = Running::start(redlatch(&server, &args));
        until("it waits", || permit_waiters(&server, &name) == 1);
        let () = server.command(&["FLUSHALL"]);
        holder.finish().expect(74);
        assert_eq!(waiter.finish().expect(0).stdout, "got\n");
    }
}

#[test]
fn waiter_for_a_permit_can_time_out_and_be_ended() {
    let name = unique("patience");
    // Checks the permits several times.
    let options = ["--permits", "1", "--watchdog", "100ms"];
    let holder = hold(shared(), &["--permits", "1"], &name);
    let waiter = start(&options, &name, "true");
    until("it waits", || permit_waiters(shared(), &name) == 1);
    waiter.signal(Signal::TERM);
    waiter.finish().expect(143);

    let args = [
        &["run", "--wait", "6s"],
        &options[..],
        &[&name, "--", "true"],
    ]
    .concat();
    finish(redlatch(shared(), &args))
        .expect(75)
        .assert_stderr("not acquired within 6.0s: its only permit");
    holder.release();
}

#[test]
fn semaphore_without_a_free_permit_shows_as_held() {
    let name = unique("exhausted");
    let shown_in_table = || {
        let shown = finish(redlatch(shared(), &["show", &name])).expect(0);
        shown.stdout
    };
    let first = hold(shared(), &["--permits", "2"], &name);
    assert_eq!(object(&name)["held"], false);
    assert_eq!(object(&name)["total"], 2);
    assert!(shown_in_table().contains("(1 of 2 permits free)"));
    let second = hold(shared(), &["--permits", "2"], &name);
    assert_eq!(object(&name)["held"], true);
    assert_eq!(object(&name)["total"], 2);
    assert!(shown_in_table().contains("(held: 0 of 2 permits free)"));
    first.release();
    second.release();
    until("both are free", || object(&name)["value"] == 2);
    let shown = shown_in_table();
    assert!(shown.contains("(2 permits free, or latch at 2)"), "{shown}");
    assert!(shown.contains("without a lease are unknown"), "{shown}");

    let () = shared().command(&["SET", &name, "0"]);
    assert_eq!(object(&name)["held"], true);
    assert!(shown_in_table().contains("(held: no permit free)"));
}

#[test]
fn conflict_names_the_owner_and_the_remaining_lease() {
    let names = [unique("conflict"), unique("other-conflict")];
    hold_unregistered(shared(), &names[0], "300000");
    let owner = "another-client:1";
    let refused = |names: &[String]| {
        let mut args = vec!["run", "-n"];
        args.extend(names.iter().map(String::as_str));
        args.extend(["--", "true"]);
        finish(redlatch(shared(), &args)).expect(75)
    };
    let one = refused(&names[..1]).stderr;
    assert_eq!(
        one.trim_end_matches(" min\n")
            .trim_end_matches(char::is_numeric),
        format!(
            "redlatch: {}: not acquired: held by {owner} for up to ",
            names[0]
        )
    );
    let both = refused(&names).stderr;
    let message = format!("not acquired: {} is held by {owner} for up to ", names[0]);
    assert!(both.contains(&message), "{both}");
}

#[test]
fn long_wait_reports_the_holder() {
    let (plain, permit) = (unique("long-wait"), unique("long-wait"));
    let holders = [
        hold(shared(), &[], &plain),
        hold(shared(), &["--permits", "1"], &permit),
    ];
    let waiting = [
        start(&[], &plain, "true"),
        start(&["--permits", "1"], &permit, "true"),
    ];
    let messages = [
        // The id of its owner, or its client: about now, that is in the registry.
        format!("waiting for {plain}, held by "),
        format!("waiting for {permit}, its only permit is in use for up to "),
    ];
    for (running, message) in waiting.iter().zip(&messages) {
        running.until_stderr(message);
    }
    holders.into_iter().for_each(Running::release);
    for (running, message) in waiting.into_iter().zip(messages) {
        let finished = running.finish().expect(0);
        let rest = finished
            .stderr
            .strip_prefix(&format!("redlatch: {message}"));
        let rest = rest.unwrap_or_default().trim_end_matches(" left\n");
        let rest = rest.trim_end_matches('\n').strip_suffix(" s");
        let seconds = rest.and_then(|rest| rest.rsplit(' ').next());
        assert!(
            seconds.is_some_and(|seconds| seconds.parse::<u32>().is_ok()),
            "{finished:#?}"
        );
    }
}

#[test]
fn other_kind_of_object_is_named_and_not_suggested_for_removal() {
    let (lock, permits, latch) = (unique("a-lock"), unique("a-limit"), unique("a-latch"));
    let holders = [
        hold(shared(), &[], &lock),
        hold(shared(), &["--permits", "1"], &permits),
    ];
    finish(redlatch(shared(), &["latch", &latch, "set", "3"])).expect(0);
    let refused = |args: &[&str], message: &str| {
        let finished = finish(redlatch(shared(), args))
            .expect(65)
            .assert_stderr(message);
        assert!(!finished.stderr.contains("delete the key"), "{finished:#?}");
    };
    let is = |name: &str, what: &str| format!("{name} is {what}: redlatch show {name}");
    refused(
        &["run", "--read", &lock, "--", "true"],
        &is(&lock, "a lock, not a read-write lock"),
    );
    refused(
        &["run", &unique("another"), &latch, "--", "true"],
        &is(
            &latch,
            "a semaphore or latch (or a lock of another library), not a lock",
        ),
    );
    for args in [&["count-down"][..], &["set", "3"], &["wait"]] {
        refused(
            &[&["latch", &permits], args].concat(),
            &is(&permits, "an expirable semaphore, not a latch"),
        );
    }
    refused(
        &["unlock", "--force", &permits],
        "an expirable semaphore cannot be unlocked; its permits become available when their leases \
         end",
    );
    refused(
        &["unlock", "--force", &latch],
        "a semaphore or latch cannot be unlocked\n",
    );
    holders.into_iter().for_each(Running::release);
}

#[test]
fn permit_of_a_killed_run_is_freed() {
    let name = unique("killed-permit");
    let options = ["--permits", "1", "--watchdog", "6s"];
    let holder = hold(shared(), &options, &name);
    let cmd = holder.cmd_pid();
    holder.signal(Signal::KILL);
    until("CMD has ended too", || is_dead(cmd));
    // Waits for the end of the lease, which is not renewed.
    let args = [&["run"], &options[..], &[&name, "--", "true"]].concat();
    finish(redlatch(shared(), &args)).expect(0);
}

#[test]
fn several_names_are_held_all_or_none() {
    let (a, b) = (unique("several-a"), unique("several-b"));
    let holder = hold(shared(), &[], &b);
    assert!(!try_run(&[], &[&a, &b]));
    assert!(!is_held(shared(), &a), "released");
    let args = [
        "run",
        &b,
        &a,
        &b,
        "--",
        "sh",
        "-c",
        "echo \"$REDLATCH_LOCK\"; cat",
    ];
    let mut both = Running::start(redlatch(shared(), &args));
    until("it waits", || waiters(shared(), &b) == 1);
    // Except during another attempt.
    until("nothing is held while it waits", || !is_held(shared(), &a));
    holder.release();
    both.until_stdout(&format!("{b} {a}\n"));
    assert!(is_held(shared(), &a) && is_held(shared(), &b));
    both.close_stdin();
    both.finish().expect(0);
    assert!(!is_held(shared(), &a) && !is_held(shared(), &b));
}

#[test]
fn conflicting_kinds_are_rejected() {
    for options in [
        &["--fair", "--spin", "x"][..],
        &["--read", "--write", "x"],
        &["--permits", "0", "x"],
        &["--permits", "-1", "x"],
        &["--permits", "2", "x", "y"],
        &["--set-permits", "x"],
        &["--set-permits", "--fair", "x"],
        &["--fenced", "x", "y"],
    ] {
        let args = [&["run"], options, &["--", "true"]].concat();
        let refused = finish(redlatch(shared(), &args)).expect(2);
        assert_ne!(refused.stderr, "");
        assert_eq!(refused.stdout, "");
    }
}

#[test]
fn every_kind_can_be_force_unlocked_which_ends_its_cmd() {
    for option in ["--fair", "--read", "--write", "--fenced", "--spin"] {
        let name = unique("force");
        let holder = hold(shared(), &[option, "--watchdog", "6s"], &name);
        let unlocked = finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
        assert_eq!(unlocked.stdout, format!("{name}: unlocked\n"), "{option}");
        holder.finish().expect(74);
        assert!(!is_held(shared(), &name), "{option}");
    }
    let name = unique("force-permits");
    let holder = hold(shared(), &["--permits", "1"], &name);
    finish(redlatch(shared(), &["unlock", "--force", &name]))
        .expect(65)
        .assert_stderr("cannot be unlocked");
    holder.release();
}

/// The writer that waits is served when the readers are gone, and keeps its lock.
#[test]
fn force_unlock_of_readers_serves_the_writer_behind_them() {
    let name = unique("force-fair");
    let unlock = redlatch(shared(), &["unlock", "--force", &name]);
    current_thread_runtime().block_on(async {
        let client = redlatch::Client::connect(&shared().url()).await.unwrap();
        let lock = client.fair_read_write_lock(&name);
        let (read, write) = (lock.read(), lock.write());
        let _reader = read.lock().await.unwrap();
        let queued = name.clone();
        let unlocked = tokio::task::spawn_blocking(move || {
            until("it is in the queue", || queue_length(&queued) == 1);
            finish(unlock).expect(0)
        });
        let (writer, unlocked) = tokio::join!(write.lock(), unlocked);
        assert_eq!(unlocked.unwrap().stdout, format!("{name}: unlocked\n"));
        let owner = writer.unwrap().owner_id().to_string();
        let held = client.inspect(&name).await.unwrap().unwrap();
        let holders: Vec<_> = held
            .holders()
            .iter()
            .map(|holder| holder.owner.to_string())
            .collect();
        assert_eq!(holders, [owner]);
    });
}

#[test]
fn latch_can_be_set_counted_down_and_awaited() {
    let name = unique("latch");
    let latch = |args: &[&str]| {
        let args = [&["latch", &name], args].concat();
        finish(redlatch(shared(), &args))
    };
    latch(&["wait"]).expect(0);
    assert_eq!(latch(&["set", "3"]).expect(0).stdout, "3\n");
    latch(&["set", "2"]).expect(75).assert_stderr("3 are left");
    let shown = object(&name);
    assert_eq!(shown["kind"], "semaphore or latch");
    assert_eq!(shown["value"], 3);
    latch(&["wait", "--for", "2s"])
        .expect(75)
        .assert_stderr("not open");

    let waiter = Running::start(redlatch(shared(), &["latch", &name, "wait"]));
    assert_eq!(latch(&["count-down"]).expect(0).stdout, "2\n");
    assert_eq!(latch(&["count-down", "--by", "5"]).expect(0).stdout, "0\n");
    waiter.finish().expect(0);
    assert_eq!(latch(&["count-down"]).expect(0).stdout, "0\n");
    assert_eq!(object(&name)["kind"], Value::Null);
}

#[test]
fn signal_ends_wait_for_a_latch() {
    let name = unique("latch-signal");
    finish(redlatch(shared(), &["latch", &name, "set", "1"])).expect(0);
    let waiter = Running::start(redlatch(shared(), &["latch", &name, "wait"]));
    let channel = format!("redisson_countdownlatch__channel__{{{name}}}");
    until("it waits", || subscribers(shared(), &channel) == 1);
    waiter.signal(Signal::INT);
    waiter.finish().expect(130);
}
