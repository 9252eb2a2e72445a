//! Tests of `unlock --ask` and `--revoke`, and of a CMD whose lock is asked for.

use std::time::{Duration, Instant};

use redlatch_testkit::{shared, unique};

use crate::kinds::object;
use crate::support::*;

/// Waits until the holder would learn of a request at once.
fn until_holder_listens(name: &str) {
    until("the holder subscribes", || waiters(shared(), name) == 0);
}

#[test]
fn asked_run_ends_cmd_and_releases() {
    for option in [
        None,
        Some("--fair"),
        Some("--fenced"),
        Some("--spin"),
        Some("--write"),
    ] {
        let name = unique("asked");
        let script = format!("trap 'echo tidy; exit 3' TERM; echo $$; {IDLE_SCRIPT}");
        let options: Vec<_> = option
            .into_iter()
            .chain(["--watchdog", "1h", "--kill-after", "1h"])
            .collect();
        let holder = hold_with(shared(), &options, &name, &script);
        let cmd = holder.cmd_pid();
        let args = ["unlock", "--ask", "--wait", "1m", &name];
        let asked = finish(redlatch(shared(), &args)).expect(0);
        assert!(
            asked.stdout.starts_with(&format!("{name}: asked ")),
            "{asked:#?}"
        );
        assert!(
            asked.stdout.ends_with(&format!("{name}: released\n")),
            "{asked:#?}"
        );
        let finished = holder.finish().expect(3);
        assert_eq!(finished.stdout, format!("{cmd}\ntidy\n"));
        let line = format!("{name}: asked to release it; ending CMD: SIGTERM now");
        assert_eq!(finished.stderr.matches(&line).count(), 1, "{finished:#?}");
        assert!(!is_held(shared(), &name));
    }
}

/// As in `redlatch why`.
#[test]
fn holder_that_is_asked_is_named() {
    let name = unique("named");
    let script = format!("trap 'exit 3' TERM; echo $$; {IDLE_SCRIPT}");
    let holder = hold_with(shared(), &["--label", "report"], &name, &script);
    let owner = format!("report@{} (pid {}) since ", host(), holder.pid());
    until("it is registered", || {
        let why = finish(redlatch(shared(), &["why", &name])).expect(0);
        why.stdout.contains(&owner)
    });
    let asked = finish(redlatch(shared(), &["unlock", "--ask", &name])).expect(0);
    let line = format!("{name}: asked {owner}");
    assert!(asked.stdout.starts_with(&line), "{asked:#?}");
    holder.finish().expect(3);
}

/// The name of this machine.
fn host() -> String {
    let system = rustix::system::uname();
    system.nodename().to_string_lossy().into_owned()
}

/// A CMD that ignores SIGTERM is killed after the same time as at a loss, and the lock is held until then.
#[test]
fn asked_cmd_that_ignores_sigterm_is_killed() {
    let name = unique("stubborn");
    let script = "trap '' TERM; echo $$; exec cat";
    let options = ["--watchdog", "1h", "--kill-after", "100ms"];
    let holder = hold_with(shared(), &options, &name, script);
    let cmd = holder.cmd_pid();
    let args = ["unlock", "--ask", "--wait", "1m", &name];
    finish(redlatch(shared(), &args)).expect(0);
    assert!(is_dead(cmd), "it continues without the lock");
    holder.finish().expect(137);
}

/// The holder does not react, so its hold ends at the limit. CMD is ended as at each loss.
#[test]
fn revoked_run_ends_at_limit() {
    let name = unique("revoked");
    let script = "trap '' TERM; echo $$; exec cat";
    let options = ["--watchdog", "1h", "--kill-after", "1h"];
    let holder = hold_with(shared(), &options, &name, script);
    let cmd = holder.cmd_pid();
    until_holder_listens(&name);
    let begun = Instant::now();
    let args = ["unlock", "--revoke", "1s", "--wait", "1m", &name];
    let revoked = finish(redlatch(shared(), &args)).expect(0);
    assert!(
        begun.elapsed() >= Duration::from_millis(900),
        "before the limit"
    );
    assert!(
        revoked.stdout.contains("loses it after 1.0s"),
        "{revoked:#?}"
    );
    assert!(!is_held(shared(), &name) && !is_dead(cmd));
    holder.signal(rustix::process::Signal::KILL);
    until("CMD is dead", || is_dead(cmd));
}

/// As Redisson writes it. Nothing answers the request, and the lease stays as it is.
#[test]
fn holder_that_does_not_know_requests_continues() {
    let name = unique("java");
    let owner = "8743c9c0-0795-4907-87fd-6c719a6b4586:1";
    let () = shared().command(&["HSET", &name, owner, "1"]);
    let () = shared().command(&["PEXPIRE", &name, "3600000"]);
    let args = ["unlock", "--revoke", "0s", "--wait", "6s", &name];
    let asked = finish(redlatch(shared(), &args));
    assert_eq!(asked.code, Some(76));
    assert!(
        asked.stdout.contains(&format!("asked {owner}")),
        "{asked:#?}"
    );
    let late = format!("{name}: not released within 6.0s");
    assert!(asked.stderr.contains(&late), "{asked:#?}");
    let fields: Vec<String> = shared().command(&["HGETALL", &name]);
    assert_eq!(fields, [owner, "1"]);
    assert!(shared().command::<i64>(&["PTTL", &name]) > 3_500_000);
}

#[test]
fn only_held_locks_with_one_holder_can_be_asked() {
    let name = unique("free");
    let free = finish(redlatch(shared(), &["unlock", "--ask", &name])).expect(0);
    assert_eq!(free.stdout, format!("{name}: was not locked\n"));
    let readers = hold(shared(), &["--read"], &name);
    let refused = finish(redlatch(shared(), &["unlock", "--ask", &name])).expect(65);
    refused.assert_stderr("readers cannot be asked");
    readers.release();
    let permits = unique("permits");
    let holder = hold(shared(), &["--permits", "1"], &permits);
    let refused = finish(redlatch(shared(), &["unlock", "--ask", &permits])).expect(65);
    refused.assert_stderr("name a permit with --permit");
    holder.release();
    let id = "00112233445566778899aabbccddeeff";
    let args = ["unlock", "--ask", "--permit", id, &permits];
    let free = finish(redlatch(shared(), &args)).expect(0);
    assert_eq!(
        free.stdout,
        format!("{permits}: permit {id} was not held\n")
    );
    let lock = unique("lock");
    let holder = hold(shared(), &[], &lock);
    let args = ["unlock", "--ask", "--permit", id, &lock];
    finish(redlatch(shared(), &args)).expect(65);
    let args = ["unlock", "--ask", "--permit", "123", &lock];
    finish(redlatch(shared(), &args)).expect(2);
    holder.release();
}

/// The command itself acquires none.
#[test]
fn writer_of_a_fair_read_write_lock_is_asked_and_revoked() {
    let name = unique("fair-writer");
    let unlock = |how: &[&str]| {
        let command = redlatch(shared(), &[&["unlock"], how, &[&name]].concat());
        tokio::task::spawn_blocking(move || finish(command))
    };
    current_thread_runtime().block_on(async {
        let client = redlatch::Client::connect(&shared().url()).await.unwrap();
        let lock = client.fair_read_write_lock(&name);
        for how in ["--ask", "--revoke=1h"] {
            let writer = lock.write().lock().await.unwrap();
            let mut asking = unlock(&[how, "--wait", "1m"]);
            tokio::select! {
                () = writer.asked() => {}
                refused = &mut asking => panic!("{refused:#?}"),
            }
            writer.unlock().await.unwrap();
            let asked = asking.await.unwrap().expect(0);
            assert!(asked.stdout.ends_with(": released\n"), "{asked:#?}");
        }
        let _reader = lock.read().lock().await.unwrap();
        let refused = unlock(&["--ask"]).await.unwrap().expect(65);
        refused.assert_stderr("readers cannot be asked");
    });
}

/// The others of the semaphore continue.
#[test]
fn permit_is_asked_for_and_revoked() {
    let name = unique("permits");
    let script = format!("trap 'exit 3' TERM; echo $$; {IDLE_SCRIPT}");
    let options = ["--permits", "2", "--watchdog", "1h", "--kill-after", "1h"];
    let holder = hold_with(shared(), &options, &name, &script);
    let _ = holder.cmd_pid();
    let shown = object(&name);
    let id = shown["permits"][0]["id"].as_str().unwrap().to_owned();
    let other = hold(shared(), &options, &name);
    let args = ["unlock", "--ask", "--permit", &id, "--wait", "1m", &name];
    let asked = finish(redlatch(shared(), &args)).expect(0);
    let expected = format!("{name}: asked for permit {id}\n{name}: released\n");
    assert_eq!(asked.stdout, expected);
    let finished = holder.finish().expect(3);
    let line = "asked to release it; ending CMD";
    assert!(finished.stderr.contains(line), "{finished:?}");
    other.release();

    let stubborn = "trap '' TERM; echo $$; exec cat";
    let holder = hold_with(shared(), &options, &name, stubborn);
    let cmd = holder.cmd_pid();
    let shown = object(&name);
    let id = shown["permits"][0]["id"].as_str().unwrap();
    let args = [
        "unlock", "--revoke", "1s", "--permit", id, "--wait", "1m", &name,
    ];
    let asked = finish(redlatch(shared(), &args)).expect(0);
    assert!(asked.stdout.ends_with("released\n"), "{asked:?}");
    assert!(!is_dead(cmd));
    holder.signal(rustix::process::Signal::KILL);
    until("CMD is dead", || is_dead(cmd));
}

#[test]
fn ways_to_unlock_exclude_each_other() {
    for options in [
        ["--ask", "--force"],
        ["--force", "--revoke=1s"],
        ["--ask", "--revoke=1s"],
    ] {
        let args = [&["unlock"], &options[..], &["name"]].concat();
        finish(redlatch(shared(), &args)).expect(2);
    }
}
