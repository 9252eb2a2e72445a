//! Tests of `redlatch doctor`: what works on a server, and what to change.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use redlatch_testkit::{Proxy, SentinelPlan, Sentinels, Server, fake_sentinel, shared_cluster};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::*;

fn doctor(server: &Server, args: &[&str]) -> Finished {
    finish(redlatch(server, &[&["doctor"], args].concat()))
}

/// Returns the state and the text of a check.
#[track_caller]
fn check(report: &Finished, name: &str) -> (String, String) {
    let found = report
        .stdout
        .lines()
        .find(|line| line.get(10..).is_some_and(|rest| rest.starts_with(name)));
    let line = found.unwrap_or_else(|| panic!("no {name} in {}", report.stdout));
    let state = line.split_whitespace().next().unwrap();
    (state.to_owned(), line.to_owned())
}

#[test]
fn everything_works_on_a_plain_server() {
    let server = Server::start();
    let report = doctor(&server, &[]).expect(0);
    for name in [
        "lock",
        "renewal",
        "waiting",
        "fair lock",
        "read-write lock",
        "fenced lock",
        "multi-lock",
        "semaphore",
        "expirable semaphore",
        "count-down latch",
        "election",
        "ticket",
        "list and inspect",
        "who holds a lock",
        "clean-up",
        "eviction at",
    ] {
        let (state, line) = check(&report, name);
        assert_eq!(state, "ok", "{line}");
    }
    let (state, line) = check(&report, "replicas");
    assert_eq!(state, "note", "{line}");
    assert!(!report.stdout.contains("unknown version"), "{report:#?}");
    assert!(report.stderr.is_empty(), "{report:#?}");
    let left: Vec<String> = server.command(&["KEYS", "*doctor*"]);
    assert_eq!(left, [""; 0]);
}

#[test]
fn interrupted_check_leaves_no_keys() {
    let server = Server::start();
    let proxy = Proxy::to_server(&server);
    // Otherwise a check ends before the signal arrives.
    proxy.delay(Duration::from_millis(50));
    let mut command = clean_command(&["doctor"]);
    command.env("REDLATCH_URL", proxy.url());
    let doctor = Running::start(command);
    let keys = |what: &str| server.command::<Vec<String>>(&["KEYS", what]);
    until("it has made a semaphore", || {
        !keys("*doctor*:semaphore*").is_empty()
    });
    doctor.signal(Signal::INT);
    let finished = doctor.finish();
    assert_eq!(keys("*doctor*"), [""; 0]);
    finished.expect(130);
}

#[test]
fn replicas_confirm_acquisitions() {
    let settings = ["--repl-diskless-sync-delay", "0"];
    let master = Server::start_with(&settings);
    let follow = format!("127.0.0.1 {}", master.port());
    let _replica = Server::start_with(&[&settings[..], &["--replicaof", &follow]].concat());
    until("in sync", || master.replicas_in_sync() == 1);
    let (state, line) = check(&doctor(&master, &[]).expect(0), "replicas");
    assert_eq!(state, "ok", "{line}");
    let _: () = master.command(&["ACL", "SETUSER", "default", "-wait"]);
    let (state, line) = check(&doctor(&master, &[]).expect(1), "replicas");
    assert_eq!(state, "degraded", "{line}");
    assert!(line.contains("wait"), "{line}");
}

/// A failover needs most sentinels, and a replica.
#[test]
fn sentinels_and_replicas_that_are_missing_are_named() {
    let mut servers = Sentinels::start_with(SentinelPlan {
        replicas: 1,
        sentinels: 4,
        quorum: 3,
        ..SentinelPlan::default()
    });
    let doctor = |url: &str| {
        let mut command = clean_command(&["doctor"]);
        command.env("REDLATCH_URL", url);
        finish(command)
    };
    let master = format!("master 127.0.0.1:{}", servers.servers()[0].port());
    let report = doctor(&servers.url()).expect(0);
    let (state, line) = check(&report, "sentinels");
    assert_eq!(state, "ok", "{line}");
    assert!(
        line.ends_with(&format!("4 of 4 answer and agree on {master}")),
        "{line}"
    );
    assert_eq!(check(&report, "replicas").0, "ok");

    let ports: Vec<u16> = servers.sentinels().iter().map(Server::port).collect();
    servers.kill_sentinel(0);
    let secret = ["ACL", "SETUSER", "default", "resetpass", ">secret"];
    let _: () = servers.sentinels()[1].command(&secret);
    let liar = fake_sentinel(1);
    let other = format!("127.0.0.1:{liar}/mymaster");
    let with_liar = servers.url().replace("/mymaster", &format!(",{other}"));
    let report = doctor(&with_liar).expect(1);
    let (state, line) = check(&report, "sentinels");
    assert_eq!(state, "degraded", "{line}");
    for expected in [
        format!("2 of 5 answer and agree on {master}; "),
        format!("127.0.0.1:{}: ", ports[0]),
        format!("127.0.0.1:{}: ", ports[1]),
        format!("127.0.0.1:{liar} names 127.0.0.1:1"),
    ] {
        assert!(line.contains(&expected), "{expected} is not in {line}");
    }
    for port in &ports[2..] {
        assert!(!line.contains(&port.to_string()), "{line}");
    }
    assert_eq!(check(&report, "replicas").0, "ok");

    servers.kill(1);
    until("the replica is gone", || {
        servers.servers()[0].replicas_in_sync() == 0
    });
    let report = doctor(&servers.url()).expect(1);
    let (state, line) = check(&report, "replicas");
    assert_eq!(state, "degraded", "{line}");
    assert!(report.stdout.contains("--replicas 1"), "{report:#?}");
}

#[test]
fn server_that_deletes_locks_is_reported() {
    let server = Server::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]);
    let report = doctor(&server, &[]).expect(1);
    let (state, line) = check(&report, "eviction at");
    assert_eq!(state, "degraded", "{line}");
    assert!(
        report
            .stdout
            .contains("change: maxmemory-policy noeviction")
    );
    let report = doctor(&server, &["--json"]).expect(1);
    let report: Value = serde_json::from_str(&report.stdout).unwrap();
    assert!(report["servers"][0]["round_trip_us"].as_u64().is_some());
    let checks = report["checks"].as_array().unwrap();
    let degraded = |check: &&Value| check["state"] == "degraded";
    let names: Vec<_> = checks
        .iter()
        .filter(degraded)
        .map(|check| &check["check"])
        .collect();
    assert_eq!(names.len(), 1, "{names:?}");
    assert!(
        names[0]
            .as_str()
            .unwrap()
            .starts_with("eviction at 127.0.0.1:")
    );
}

/// A check that is refused neither hides the others nor leaves keys behind.
#[test]
fn refused_commands_are_named() {
    let server = Server::start();
    let refuse = ["-scan", "-role", "-info", "-time", "-hscan"];
    let _: () = server.command(&[&["ACL", "SETUSER", "default"], &refuse[..]].concat());
    let report = doctor(&server, &[]).expect(1);
    assert_eq!(check(&report, "lock").0, "ok");
    let (state, line) = check(&report, "list and inspect");
    assert_eq!(state, "failed", "{line}");
    assert!(line.contains("scan"), "{line}");
    assert_eq!(check(&report, "settings of").0, "note");
    assert_eq!(check(&report, "replicas").0, "degraded");
    assert!(line.contains("docs/security.md"), "{line}");

    let _: () = server.command(&["ACL", "SETUSER", "default", "-evalsha"]);
    let report = doctor(&server, &[]).expect(69);
    let (state, line) = check(&report, "lock");
    assert_eq!(state, "failed", "{line}");
    assert!(line.contains("evalsha"), "{line}");
    let left: Vec<String> = server.command(&["KEYS", "*"]);
    assert_eq!(left, [""; 0]);
}

/// The server need not write it in time: a renewal would be late on a busy machine.
const APPEND_ONLY: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "no"];

/// A server that reads its append-only file as a user without rights loses what scripts wrote.
#[test]
fn default_user_without_rights_is_reported() {
    let rules = include_str!("../../../docs/security.md").lines();
    let documented = rules.filter(|line| line.starts_with("user default off "));
    let documented: Vec<&str> = documented.collect();
    for (default, is_kept) in [("user default off", false), (documented[0], true)] {
        let admin = [
            "--user", "admin", "on", ">s3cret", "~*", "&*", "+@all", "--user",
        ];
        let default: Vec<&str> = default.split(' ').skip(1).collect();
        let server = Server::start_with(&[&APPEND_ONLY[..], &admin, &default].concat());
        let mut command = clean_command(&["doctor", "--user", "admin"]);
        command.env("REDLATCH_URL", server.url());
        command.env("REDLATCH_PASSWORD", "s3cret");
        let report = finish(command).expect(i32::from(!is_kept));
        assert_eq!(
            !report.stdout.contains("restarts of"),
            is_kept,
            "{report:#?}"
        );
        if !is_kept {
            assert_eq!(check(&report, "restarts of").0, "degraded");
            assert!(
                report
                    .stdout
                    .contains(&format!("change: {}", documented[0])),
                "{report:#?}"
            );
        }
    }
}

/// The least that docs/security.md lists is enough. In a cluster the names are in several slots.
#[test]
fn documented_rights_are_enough_and_a_cluster_works() {
    // It may not look up the default user.
    let server = Server::start_with(&APPEND_ONLY);
    let rules = include_str!("../../../docs/security.md");
    let rules = rules.lines().find(|line| line.starts_with("user app on "));
    let rules = rules.unwrap().replace("app:", "doctor:");
    let mut rules: Vec<&str> = rules.split_whitespace().skip(2).collect();
    rules[1] = ">s3cret";
    let _: () = server.command(&[&["ACL", "SETUSER", "app"], &rules[..]].concat());
    let mut command = clean_command(&["doctor", "--prefix", "doctor:", "--user", "app"]);
    command.env("REDLATCH_URL", server.url());
    command.env("REDLATCH_PASSWORD", "s3cret");
    let report = finish(command);
    let failed = |line: &str| line.starts_with("failed");
    assert!(!report.stdout.lines().any(failed), "{report:#?}");
    assert!(!report.stdout.contains("restarts of"), "{report:#?}");
    report.expect(1);
    let denied: Vec<HashMap<String, String>> = server.command(&["ACL", "LOG"]);
    let denied: HashSet<&str> = denied.iter().map(|entry| &*entry["object"]).collect();
    assert!(denied.contains("acl|getuser"), "{denied:?}");
    assert!(!denied.contains("ping"), "{denied:?}");

    let mut command = clean_command(&["doctor"]);
    command.env("REDLATCH_URL", shared_cluster().url());
    let report = finish(command);
    let bad = |line: &&str| line.starts_with("failed") || line.starts_with("degraded");
    let bad: Vec<&str> = report.stdout.lines().filter(bad).collect();
    assert_eq!(bad, [""; 0]);
    report.expect(0);
}

#[test]
fn unreachable_store_is_a_failure() {
    let mut server = Server::start();
    server.kill();
    doctor(&server, &[]).expect(69).assert_stderr("127.0.0.1");
}
