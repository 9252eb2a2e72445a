//! Tests of the exit codes of `redlatch run` when the lock is not lost, and of what CMD inherits.

use std::collections::HashSet;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;

use redlatch_testkit::{Server, shared, unique};

use crate::support::*;

fn run(options: &[&str], name: &str, cmd: &[&str]) -> Finished {
    let args = [&["run"], options, &[name, "--"], cmd].concat();
    finish(redlatch(shared(), &args))
}

#[test]
fn exit_code_is_that_of_cmd() {
    for (script, code) in [
        ("true", 0),
        ("exit 3", 3),
        ("exit 255", 255),
        ("kill -TERM $$", 143),
        ("kill -KILL $$", 137),
    ] {
        let name = unique("code");
        let finished = run(&[], &name, &["sh", "-c", script]).expect(code);
        assert_eq!(finished.stdout, "");
        assert_eq!(finished.stderr, "");
        assert!(!is_held(shared(), &name), "released");
    }
}

#[test]
fn missing_cmd_exits_127_and_non_executable_cmd_126() {
    let temp_dir = TempDir::new();
    let plain = temp_dir.path("plain");
    std::fs::write(&plain, "echo never").unwrap();
    std::fs::set_permissions(&plain, std::fs::Permissions::from_mode(0o644)).unwrap();
    let missing = temp_dir.path("missing");
    for (cmd, code, message) in [
        (missing.as_str(), 127, "not found"),
        ("no-such-command-anywhere", 127, "not found"),
        ("", 127, "not found"),
        (plain.as_str(), 126, "cannot be executed"),
        (temp_dir.0.to_str().unwrap(), 126, "cannot be executed"),
    ] {
        let name = unique("cannot");
        run(&[], &name, &[cmd]).expect(code).assert_stderr(message);
        assert!(!is_held(shared(), &name), "released");
    }
}

/// Whichever thread or process is the one that the limit of the user forbids. Such a limit does not
/// apply to root.
#[test]
fn thread_that_cannot_be_started_is_a_system_error() {
    let is_root = rustix::process::geteuid().is_root();
    let user = 20_000 + std::process::id() % 40_000;
    let mut codes = HashSet::new();
    for limit in 1..=16 {
        let command = redlatch(shared(), &["run", &unique("limited"), "--", "true"]);
        let mut limited = limited(&format!("--nproc={limit}:{limit}"), &command);
        // Nobody else's processes count.
        if is_root {
            limited.uid(user).gid(65534);
        }
        let finished = finish(limited);
        assert!(
            matches!(finished.code, Some(0 | 71)),
            "{limit}: {finished:#?}"
        );
        codes.extend(finished.code);
    }
    assert!(codes.contains(&71));
    assert!(codes.contains(&0) || !is_root);
}

#[test]
fn cmd_gets_arguments_input_output_and_environment() {
    let name = unique("cmd");
    let script = r#"echo "$1"; echo oops >&2; echo "$REDLATCH_LOCK" "$REDLATCH_OWNER"; cat"#;
    let args = ["run", &name, "--", "sh", "-c", script, "sh", "--wait"];
    let mut running = Running::start(redlatch(shared(), &args));
    running.write("input");
    let out = running.until_stdout("input");
    let owner = owner(shared(), &name);
    assert_eq!(out, format!("--wait\n{name} {owner}\ninput"));
    running.close_stdin();
    let finished = running.finish().expect(0);
    assert_eq!(finished.stderr, "oops\n");
}

#[test]
fn arguments_can_be_any_bytes() {
    let mut command = redlatch(shared(), &["run", &unique("bytes"), "--", "printf", "%s"]);
    command.arg(std::ffi::OsStr::from_bytes(b"a\xffb"));
    let finished = finish(command).expect(0);
    assert_eq!(finished.stdout, "a\u{fffd}b");
}

#[test]
fn cmd_inherits_signal_dispositions() {
    let cmd = ["grep", "-E", "^Sig(Blk|Ign|Cgt):", "/proc/self/status"];
    let direct = std::process::Command::new(cmd[0]).args(&cmd[1..]).output();
    let direct = String::from_utf8(direct.unwrap().stdout).unwrap();
    let ours = run(&[], &unique("mask"), &cmd).expect(0).stdout;
    assert_eq!(ours, direct);
}

#[test]
fn no_wait_exits_75_or_the_requested_code() {
    let name = unique("conflict");
    let holder = hold(shared(), &[], &name);
    for (options, code) in [
        (&["--no-wait"][..], 75),
        (&["-n"], 75),
        (&["--wait", "6s"], 75),
        (&["--wait", "0s"], 75),
        (&["--wait", "0"], 75),
        (&["--watchdog", "2min", "--wait", "0"], 75),
        (&["--watchdog", "1d", "--wait", "0"], 75),
        (&["-n", "-E", "9"], 9),
        (&["--wait", "6s", "--conflict-exit-code", "0"], 0),
        (&["-n", "-E", "255"], 255),
    ] {
        let finished = run(options, &name, &["echo", "never"]).expect(code);
        finished.assert_stderr(&name);
    }
    holder.release();
    run(&["-n"], &name, &["echo", "now"]).expect(0);
}

#[test]
fn run_waits_for_its_turn_by_default() {
    let name = unique("wait");
    let holder = hold(shared(), &[], &name);
    let next = |options: &[&str]| {
        let args = [&["run"], options, &[&name, "--", "echo", "my turn"]].concat();
        Running::start(redlatch(shared(), &args))
    };
    let waiting = [next(&[]), next(&["--wait", "1h"])];
    until("both wait", || waiters(shared(), &name) == 2);
    holder.release();
    for one in waiting {
        assert_eq!(one.finish().expect(0).stdout, "my turn\n");
    }
    assert!(!is_held(shared(), &name));
}

#[test]
fn eight_concurrent_runs_never_overlap() {
    let temp_dir = TempDir::new();
    let (inside, log) = (temp_dir.path("inside"), temp_dir.path("log"));
    let name = unique("exclusive");
    let script = r#"mkdir "$1" && echo enter >>"$2" && echo leave >>"$2" && rmdir "$1""#;
    let args = ["run", &name, "--", "sh", "-c", script, "sh", &inside, &log];
    let all: Vec<Running> = (0..8)
        .map(|_| Running::start(redlatch(shared(), &args)))
        .collect();
    for one in all {
        let finished = one.finish().expect(0);
        // On a slow machine, some wait so long that the holder is reported.
        let mut lines = finished.stderr.lines();
        assert!(lines.all(|line| line.contains("waiting")), "{finished:#?}");
    }
    assert_eq!(
        std::fs::read_to_string(&log).unwrap(),
        "enter\nleave\n".repeat(8)
    );
}

#[test]
fn lease_matches_the_options() {
    let pttl = |name: &str| shared().command::<i64>(&["PTTL", name]);
    for (options, most) in [
        (&[][..], 30_000),
        (&["--watchdog", "1h"], 3_600_000),
        (&["--lease", "5m"], 300_000),
    ] {
        let name = unique("lease");
        let holder = hold(shared(), options, &name);
        let left = pttl(&name);
        assert!(most / 2 < left && left <= most, "{options:?}: {left}");
        holder.release();
    }
    // Renewed: the remaining time is longer than a moment before.
    let name = unique("renewed");
    let holder = hold(shared(), &["--watchdog", "6s"], &name);
    let mut before = i64::MAX;
    until("a renewal", || {
        let left = pttl(&name);
        assert!((1..=6_000).contains(&left), "{left}");
        left > std::mem::replace(&mut before, left)
    });
    holder.release();
}

#[test]
fn missing_store_exits_69() {
    let name = unique("down");
    for args in [
        &["run", "-n", &name, "--", "echo", "never"][..],
        &["run", "--outage-limit", "0", &name, "--", "echo", "never"],
        &["latch", &name, "count-down"],
        &["show", &name],
        &["ls"],
        &["unlock", "--force", &name],
    ] {
        let mut command = clean_command(args);
        command.env("REDLATCH_URL", "redis://127.0.0.1:1");
        let finished = finish(command)
            .expect(69)
            .assert_stderr("cannot be reached");
        let url = "redis://127.0.0.1:1";
        assert!(finished.stderr.contains(url), "{finished:#?}");
    }
}

#[test]
fn wrong_credentials_exit_69_and_print_no_password() {
    let server = Server::start_with(&["--requirepass", "hunter2"]);
    let at = format!("127.0.0.1:{}", server.port());
    let name = unique("auth");
    let all = [
        &["run", &name, "--", "echo", "never"][..],
        &["show", &name],
        &["ls"],
        &["unlock", "--force", &name],
    ];
    for url in [
        format!("redis://:s3cret@{at}"),
        format!("redis://me:s3cret@{at}"),
    ] {
        for args in all {
            let mut by_env = clean_command(args);
            by_env.env("REDLATCH_URL", &url);
            by_env.env("REDLATCH_LOG", "trace");
            let by_option = clean_command(&[&["--url", &url], args].concat());
            for command in [by_env, by_option] {
                let finished = finish(command).expect(69).assert_stderr("credentials");
                assert!(!finished.stderr.contains("s3cret"), "{finished:#?}");
            }
        }
    }
    finish(clean_command(&["--url", &format!("redis://{at}"), "ls"]))
        .expect(69)
        .assert_stderr("a password is required, and none was provided");
    finish(clean_command(&[
        "--url",
        &format!("redis://:hunter2@{at}"),
        "ls",
    ]))
    .expect(0);
}

#[test]
fn foreign_key_exits_65_and_stays_unchanged() {
    let name = unique("text");
    let () = shared().command(&["SET", &name, "precious"]);
    for args in [
        &["run", &name, "--", "echo", "never"][..],
        &["show", &name],
        &["unlock", "--force", &name],
    ] {
        let finished = finish(redlatch(shared(), args))
            .expect(65)
            .assert_stderr("another kind");
        let twice = finished.stderr.matches("another kind").count() > 1;
        assert!(!twice, "{finished:#?}");
    }
    assert_eq!(shared().command::<String>(&["GET", &name]), "precious");
}

#[test]
fn unreachable_store_at_the_end_does_not_change_the_exit_code() {
    let mut server = Server::start();
    let name = unique("away");
    let mut holder = hold_with(&server, &[], &name, "echo $$; cat; exit 5");
    server.kill();
    holder.close_stdin();
    let finished = holder.finish().expect(5);
    assert!(finished.stderr.contains("not released"), "{finished:#?}");
}

/// redlatch executes itself by its path in `/proc`.
#[test]
fn missing_proc_is_named() {
    let name = unique("no-proc");
    let line = r#"mount -t tmpfs none /proc && exec "$@""#;
    let mut command = std::process::Command::new("unshare");
    // Users other than root may mount only as root of a namespace.
    command.args(["--map-root-user", "--mount", "sh", "-c", line, "sh"]);
    command.args([env!("CARGO_BIN_EXE_redlatch"), "run", &name, "--", "true"]);
    command.env("REDLATCH_URL", shared().url());
    let finished = finish(command).expect(71);
    finished.assert_stderr("is /proc mounted?");
    assert!(!is_held(shared(), &name));
}

/// Its user may use only keys with another prefix.
#[test]
fn denied_key_is_named() {
    let server = Server::start();
    let rules = [
        "ACL", "SETUSER", "app", "on", ">pw", "+@all", "~app:*", "&*",
    ];
    let () = server.command(&rules);
    let name = unique("denied");
    let mut command = redlatch(&server, &["run", "--prefix", "other:", &name, "--", "true"]);
    command.envs([("REDLATCH_USERNAME", "app"), ("REDLATCH_PASSWORD", "pw")]);
    let denied = finish(command).expect(69);
    let key = format!("; keys: other:{name})");
    assert!(denied.stderr.contains(&key), "{denied:#?}");
}
