//! Each example prints the output that it promises, without a server and with one.

mod cleanup;
mod quickstart;

use std::collections::BTreeSet;
use std::process::Output;
use std::time::Instant;

use crate::common::example;
use crate::common::prelude::*;

/// Runs an example in each of its three ways.
fn run_everywhere(name: &str, check: impl Fn(&str)) {
    run_everywhere_with(name, &[Server::start()], check);
}

/// Runs an example in each of its three ways, with as many servers as given.
fn run_everywhere_with(name: &str, servers: &[Server], check: impl Fn(&str)) {
    let urls: Vec<String> = servers.iter().map(Server::url).collect();
    check(&output(name, &[], None));
    for (args, url) in [(&urls[..], None), (&[], Some(urls.join(" ")))] {
        let before: Vec<u64> = servers
            .iter()
            .map(|server| server.calls("evalsha:"))
            .collect();
        check(&output(name, args, url));
        for (server, before) in servers.iter().zip(before) {
            assert!(server.calls("evalsha:") > before, "not on the server");
        }
    }
}

/// Returns the output of an example, which must succeed.
fn output(name: &str, args: &[String], url: Option<String>) -> String {
    let mut example = example(name);
    example.args(args).env_remove("REDLATCH_URL");
    if let Some(url) = url {
        example.env("REDLATCH_URL", url);
    }
    let Output {
        status,
        stdout,
        stderr,
    } = example.output().unwrap();
    let out = String::from_utf8(stdout).unwrap();
    let err = String::from_utf8(stderr).unwrap();
    assert!(status.success() && err.is_empty(), "{out}\n{err}");
    out
}

/// Returns the number that follows `before`.
#[track_caller]
fn number(out: &str, before: &str) -> u64 {
    let behind = out.split_once(before).expect(out).1;
    let digits = behind.split(|c: char| !c.is_ascii_digit()).next();
    digits.and_then(|digits| digits.parse().ok()).expect(out)
}

fn last(out: &str) -> &str {
    out.lines().last().expect("it says something")
}

/// Every example is run by a test.
#[test]
fn every_example_is_tested() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
    let here = include_str!("mod.rs");
    for file in std::fs::read_dir(folder).unwrap() {
        let file = file.unwrap().file_name().into_string().unwrap();
        let Some(name) = file.strip_suffix(".rs") else {
            continue;
        };
        let is_run = here.contains(&format!("(\"{name}\", "));
        assert!(name == "quickstart" || is_run, "{name}");
    }
}

#[test]
fn cache_rebuild() {
    run_everywhere("cache_rebuild", |out| {
        assert!(last(out).ends_with("read half-built: never"), "{out}");
        assert!(number(out, "rebuilt ") > 0, "{out}");
        let together = number(out, "readers, up to ");
        assert!(together > 1, "no readers shared: {out}");
    });
}

#[test]
fn downloads() {
    run_everywhere("downloads", |out| {
        assert_eq!(out.matches(": downloading (").count(), 12, "{out}");
        let most = number(last(out), "12 files, at most ");
        assert!((1..=3).contains(&most), "{out}");
    });
}

#[test]
fn fair_turns() {
    run_everywhere("fair_turns", |out| {
        let mut printed = out.lines().filter_map(|line| line.strip_prefix("printed "));
        for round in [1, 2] {
            for name in ["Ada", "Ben", "Cleo", "Dan"] {
                let document = format!("{name}'s document {round}");
                assert_eq!(printed.next(), Some(&*document), "{out}");
            }
        }
        assert_eq!(printed.next(), None, "{out}");
        assert!(out.contains("a waiter gave up; 8 wait\n"), "{out}");
        let expected = "all were printed in the order in which they were sent";
        assert_eq!(last(out), expected);
    });
}

#[test]
fn fleet_limit() {
    run_everywhere("fleet_limit", |out| {
        assert!(
            out.contains("and crashed.\n2 of 3 permits are free.\n"),
            "{out}"
        );
        assert!(
            out.contains("All 3 permits are available again.\n"),
            "{out}"
        );
        let most = number(last(out), "jobs done, at most ");
        assert!((1..=3).contains(&most), "{out}");
    });
}

#[test]
fn fenced_writes() {
    run_everywhere("fenced_writes", |out| {
        assert!(out.contains("the keeper takes it, and busy's line is gone"));
        assert!(out.contains("its guard is valid: false"));
        let last = out.lines().last().unwrap();
        let expected = "busy's line is there: without tokens false, with tokens true";
        assert_eq!(last, expected);
    });
}

#[test]
fn http_service() {
    run_everywhere("http_service", |out| {
        let lines: Vec<&str> = out.lines().collect();
        let expected = [
            "pay order 7: 409 retry-after: 1",
            "pay order 7: 200 paid",
            "refund order 7: 200 refunded",
            "refund order 7: 200 was refunded before",
            "order 7 was paid once and refunded once",
        ];
        // The responses to the refunds may arrive in another order.
        assert_eq!(lines.len(), 7, "{out}");
        assert_eq!(lines[..3], [expected[0], expected[0], expected[1]], "{out}");
        assert_eq!(BTreeSet::from_iter(lines), BTreeSet::from(expected));
        assert_eq!(out.matches(expected[2]).count(), 1, "{out}");
    });
}

#[test]
fn leader() {
    run_everywhere("leader", |out| {
        for name in ["first", "second", "third"] {
            assert_eq!(out.matches(&format!("{name}: leads\n")).count(), 1, "{out}");
        }
        assert!(out.contains("first: dies\n"), "{out}");
        let last = out.lines().last().unwrap();
        assert!(last.starts_with("3 leaders, one at a time;"), "{last}");
    });
}

#[test]
fn redlock() {
    let servers = [Server::start(), Server::start(), Server::start()];
    let reports = |out: &str| {
        assert_eq!(out.matches(" wrote report ").count(), 12, "{out}");
        assert_eq!(last(out), "12 reports, one at a time");
    };
    run_everywhere_with("redlock", &servers, reports);
    // One of the servers goes down, as the example describes: before any client can acquire the
    // lock.
    let urls: Vec<String> = servers.iter().map(Server::url).collect();
    let [mut down, others @ ..] = servers;
    for server in &others {
        let _: i64 = server.command(&["HSET", "redlock:report", "somebody:1", "1"]);
        let _: i64 = server.command(&["PEXPIRE", "redlock:report", "60000"]);
    }
    std::thread::scope(|scope| {
        let telling = scope.spawn(|| output("redlock", &urls, None));
        let begun = Instant::now();
        // Once all four clients have asked this server for the lock, they have connected to all
        // servers.
        let asking = || {
            let clients: String = down.command(&["CLIENT", "LIST"]);
            clients.matches(" cmd=eval").count()
        };
        while asking() < 4 {
            assert!(
                begun.elapsed() < LONG && !telling.is_finished(),
                "do not ask"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        down.kill();
        for server in &others {
            let _: i64 = server.command(&["DEL", "redlock:report"]);
        }
        let out = telling.join().unwrap();
        reports(&out);
        assert_eq!(out.matches("from 2 servers").count(), 12, "{out}");
    });
}

#[test]
fn start_barrier() {
    run_everywhere("start_barrier", |out| {
        // In any order.
        for worker in 1..=5 {
            let ready = format!("worker {worker} is ready, ");
            let left = format!(" is ready, {} to go\n", 5 - worker);
            assert!(out.contains(&ready) && out.contains(&left), "{out}");
        }
        assert!(last(out).starts_with("5 workers started within "), "{out}");
    });
}

#[test]
fn transfer() {
    run_everywhere("transfer", |out| {
        let balances: u64 = (0..3)
            .map(|account| number(out, &format!("account {account}: ")))
            .sum();
        assert_eq!(balances, 3000, "{out}");
        assert_eq!(last(out), "180 transfers, sum 3000 of 3000");
    });
}
