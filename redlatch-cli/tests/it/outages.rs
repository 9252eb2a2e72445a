//! Tests of commands that wait through an outage of the store.

use redlatch_testkit::{Server, unique};
use rustix::process::Signal;

use crate::support::*;

/// Starts a command that waits for a lock that another client holds. Returns once it waits.
fn wait_for(server: &Server, options: &[&str], name: &str) -> Running {
    hold_unregistered(server, name, "3600000");
    let args = [&["run"], options, &[name, "--", "echo", "mine"]].concat();
    let waiter = Running::start(redlatch(server, &args));
    waiter.until_stderr("waiting for");
    waiter
}

#[test]
fn run_waits_through_an_outage_and_reports_it_once() {
    for kind in [&[][..], &["--fair"], &["--wait", "1h"]] {
        let mut server = Server::start();
        let name = unique("outage");
        let options = [kind, &["--response-timeout", "5s"]].concat();
        let waiter = wait_for(&server, &options, &name);
        server.kill();
        waiter.until_stderr("the store is unavailable");
        // The data is lost, so the lock is free.
        server.restart();
        let done = waiter.finish().expect(0);
        assert_eq!(done.stdout, "mine\n", "{done:#?}");
        for message in [
            "the connection to the store was lost",
            "the store is unavailable",
            "the connection to the store was restored",
        ] {
            let times = done.stderr.matches(message).count();
            assert_eq!(times, 1, "{message}: {done:#?}");
        }
        let address = format!("127.0.0.1:{}", server.port());
        assert!(done.stderr.contains(&address), "{done:#?}");
    }
}

#[test]
fn run_waits_through_an_outage_for_a_permit() {
    let mut server = Server::start();
    let name = unique("outage");
    // The watchdog's lease also limits each slice of the wait.
    let options = ["--permits", "1", "--watchdog", "6s"];
    let options = [&options[..], &["--response-timeout", "200ms"]].concat();
    let mut holder = hold(&server, &["--permits", "1", "--kill-after", "0"], &name);
    let args = [&["run"], &options[..], &[&name, "--", "echo", "mine"]].concat();
    let waiter = Running::start(redlatch(&server, &args));
    waiter.until_stderr("waiting for");
    server.kill();
    waiter.until_stderr("waiting for the store");
    server.restart();
    let done = waiter.finish().expect(0);
    assert_eq!(done.stdout, "mine\n", "{done:#?}");
    holder.close_stdin();
}

#[test]
fn outage_limit_ends_the_wait_with_69() {
    let mut server = Server::start();
    let name = unique("outage");
    let options = ["--outage-limit", "1s", "--response-timeout", "200ms"];
    let waiter = wait_for(&server, &options, &name);
    server.kill();
    let done = waiter.finish().expect(69);
    assert_eq!(done.stdout, "", "{done:#?}");
}

#[test]
fn commands_that_wait_start_before_the_store() {
    let mut server = Server::start();
    let name = unique("outage");
    let other = unique("outage");
    server.kill();
    let run = Running::start(redlatch(&server, &["run", &name, "--", "echo", "mine"]));
    let latch = Running::start(redlatch(&server, &["latch", &other, "wait"]));
    let limited = [
        &["run", "--wait", "1s", &name, "--", "echo", "never"][..],
        &["run", "--outage-limit", "1s", &name, "--", "echo", "never"],
        &["latch", &other, "wait", "--for", "1s"],
        &["latch", &other, "wait", "--outage-limit", "1s"],
    ];
    let limited = limited.map(|args| Running::start(redlatch(&server, args)));
    for command in limited {
        command
            .finish()
            .expect(69)
            .assert_stderr("cannot be reached");
    }
    let ended = Running::start(redlatch(&server, &["latch", &other, "wait"]));
    for waiting in [&run, &latch, &ended] {
        waiting.until_stderr("waiting for the store");
    }
    ended.signal(Signal::TERM);
    ended.finish().expect(143);
    server.restart();
    let done = run.finish().expect(0);
    assert_eq!(done.stdout, "mine\n");
    for done in [done, latch.finish().expect(0)] {
        for message in ["waiting for the store", "the store answers again"] {
            let times = done.stderr.matches(message).count();
            assert_eq!(times, 1, "{message}: {done:#?}");
        }
    }
}
