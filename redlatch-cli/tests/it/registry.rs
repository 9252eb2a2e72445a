//! Tests of what the command tells about holders and waiters that have registered: `show`, `ls`, `why`, `deadlocks` and the messages
//! of `run`.

use std::sync::Arc;

use redlatch::Owner;
use redlatch_testkit::{Server, unique};
use serde_json::Value;
use tokio::sync::Barrier;

use crate::support::*;

fn stdout(server: &Server, args: &[&str], code: i32) -> String {
    let finished = finish(redlatch(server, args)).expect(code);
    assert_eq!(finished.stderr, "");
    finished.stdout
}

fn json(server: &Server, args: &[&str], code: i32) -> Value {
    let text = stdout(server, args, code);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn holder_and_waiters_are_named() {
    let server = Server::start();
    let name = unique("named");
    let note = "reindex \u{1b}[31m42";
    let mut holder = hold(&server, &["--label", "report", "--note", note], &name);
    let waiter = Running::start(redlatch(&server, &["run", &name, "--", "true", "--secret"]));
    until("the waiter is known", || {
        stdout(&server, &["why", &name], 0).contains("1 waiter:")
    });
    let why = stdout(&server, &["why", &name], 0);
    let lines: Vec<_> = why.lines().collect();
    assert_eq!(lines[0], format!("{name}: lock"));
    let is_holder = |line: &str| {
        line.starts_with("held by report@")
            && line.contains(" (pid ")
            && line.contains(" since ")
            && line.contains(r#" UTC, "reindex \u{1b}[31m42", lease "#)
            && line.ends_with(" s left")
    };
    assert!(is_holder(lines[1]), "{why}");
    assert!(lines[3].starts_with("  1. true@"), "{why}");
    assert!(
        lines[3].ends_with(r#", "true""#),
        "options are not shown: {why}"
    );
    assert_eq!(lines.len(), 4);

    let shown = stdout(&server, &["show", &name], 0);
    assert!(shown.lines().any(is_holder), "{shown}");
    let narrow = stdout(&server, &["ls"], 0);
    let wide = stdout(&server, &["ls", "--wide"], 0);
    assert!(
        !narrow.contains("report@") && wide.contains("report@"),
        "{wide}"
    );
    assert_eq!(narrow.lines().count(), 2, "the registry is no object");
    let refused = finish(redlatch(&server, &["run", "-n", &name, "--", "true"])).expect(75);
    let message = format!("redlatch: {name}: not acquired: held by report@");
    assert!(refused.stderr.starts_with(&message), "{}", refused.stderr);

    let explained = json(&server, &["why", "--json", &name], 0);
    assert_eq!(explained["held"], true);
    assert_eq!(explained["registered"]["label"], "report");
    assert_eq!(explained["registered"]["note"], note);
    assert!(explained["registered"]["age_ms"].as_u64().unwrap() >= 1000);
    assert_eq!(explained["waiters"][0]["registered"]["program"], "redlatch");

    holder.close_stdin();
    holder.finish().expect(0);
    waiter.finish().expect(0);
    assert_eq!(
        stdout(&server, &["why", &name], 0),
        format!("{name}: free\nno waiters known\n")
    );
    let keys: Vec<String> = server.command(&["KEYS", "*"]);
    assert_eq!(keys, [""; 0], "nothing remains");
}

/// Permits of `run` have leases, and their waiters owners.
#[test]
fn waiter_for_a_permit_is_named() {
    let server = Server::start();
    let name = unique("permit");
    let options = ["--permits", "1"];
    let mut holder = hold(&server, &options, &name);
    let args = [&["run"], &options[..], &[&name, "--", "true"]].concat();
    let waiter = Running::start(redlatch(&server, &args));
    until("the waiter is known", || {
        stdout(&server, &["why", &name], 0).contains("1 waiter:\n  1. true@")
    });
    holder.close_stdin();
    holder.finish().expect(0);
    waiter.finish().expect(0);
}

/// In the store an election is a fair lock with a token.
#[test]
fn election_is_shown_as_one() {
    let server = Server::start();
    let name = unique("elected");
    let mut leader = Running::start(redlatch(&server, &["elect", &name, "--", "cat"]));
    let known = format!("{name}: election\n");
    until("its leader is known", || {
        let why = finish(redlatch(&server, &["why", &name]));
        why.stdout.starts_with(&known)
    });
    for args in [&["show", &name][..], &["ls"]] {
        let shown = stdout(&server, args, 0);
        assert!(shown.contains("  election, token 1  "), "{shown}");
    }
    let shown = json(&server, &["show", "--json", &name], 0);
    assert_eq!(shown["kind"], "fenced lock");
    assert_eq!(shown["registered"]["kind"], "election");
    leader.close_stdin();
    leader.finish().expect(0);
}

#[test]
fn deadlock_is_found() {
    let server = Server::start();
    assert_eq!(stdout(&server, &["deadlocks"], 0), "no deadlock; 0 waits\n");
    let runtime = current_thread_runtime();
    runtime.block_on(async {
        let connect = async |label: &str| {
            let client = redlatch::Client::builder().label(label);
            client.connect(&server.url()).await.unwrap()
        };
        let (one, other) = (connect("transfer").await, connect("report").await);
        // One of them is in the queue of a fair lock.
        let (me, they) = (Owner::new(), Owner::new());
        let _orders = one
            .lock("orders")
            .lock()
            .owner(me)
            .note("transfer 7")
            .await
            .unwrap();
        let _invoices = other
            .fair_lock("invoices")
            .lock()
            .owner(they)
            .await
            .unwrap();
        let (invoices, orders) = (one.fair_lock("invoices"), other.lock("orders"));
        let first = tokio::spawn(async move { invoices.lock().owner(me).await.map(drop) });
        let second = tokio::spawn(async move { orders.lock().owner(they).await.map(drop) });
        let server = server.url();
        let checked = tokio::task::spawn_blocking(move || {
            let deadlocks = |args: &[&str]| {
                let mut command = clean_command(args);
                command.env("REDLATCH_URL", &server);
                finish(command)
            };
            until("it is found", || deadlocks(&["deadlocks"]).code == Some(1));
            let text = deadlocks(&["deadlocks"]).expect(1).stdout;
            println!("{text}");
            let lines: Vec<_> = text.lines().collect();
            assert_eq!((lines.len(), lines[0]), (3, "deadlock 1:"));
            assert!(
                lines[1].starts_with("  transfer@")
                    && lines[1].contains(" waits for invoices, held by report@"),
                "{text}"
            );
            assert!(
                lines[2].starts_with("  report@")
                    && lines[2].contains(" waits for orders, held by transfer@"),
                "{text}"
            );
            let found = deadlocks(&["deadlocks", "--json"]).expect(1).stdout;
            let found: Value = serde_json::from_str(&found).unwrap();
            assert_eq!(found["waits"][0]["name"], "invoices");
            assert_eq!(found["waits"][0]["waiter"]["position"], 1);
            assert_eq!(
                found["waits"][1]["holders"][0]["registered"]["note"],
                "transfer 7"
            );
        });
        checked.await.unwrap();
        first.abort();
        second.abort();
    });
}

/// Each acquisition of the tasks has an owner of its own, so it is not certain that they wait for each other.
#[tokio::test]
async fn possible_deadlock_of_tasks_is_printed() {
    let server = Server::start();
    let client = redlatch::Client::builder().label("app");
    let client = client.connect(&server.url()).await.unwrap();
    let both_hold = Arc::new(Barrier::new(2));
    let tasks = [["a", "b"], ["b", "a"]].map(|names| {
        let [first, second] = names.map(|name| client.lock(name));
        let both_hold = both_hold.clone();
        tokio::spawn(async move {
            let _first = first.lock().await.unwrap();
            both_hold.wait().await;
            second.lock().await.map(drop)
        })
    });
    let checked = tokio::task::spawn_blocking(move || {
        let found = || stdout(&server, &["deadlocks"], 0);
        until("it is found", || found().starts_with("possible"));
        let text = found();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines.len(), lines[0]), (3, "possible deadlock 1:"));
        for line in &lines[1..] {
            assert!(
                line.starts_with("  app@") && line.contains(", held by app@"),
                "{text}"
            );
        }
        let found = json(&server, &["deadlocks", "--json"], 0);
        assert_eq!(found["possible"], true);
        assert_eq!(found["waits"].as_array().unwrap().len(), 2);
    });
    checked.await.unwrap();
    tasks.iter().for_each(|task| task.abort());
}
