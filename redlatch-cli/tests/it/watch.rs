//! Tests of `redlatch watch`.

use std::process::Stdio;

use redlatch_testkit::{Server, shared, unique};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::*;

/// Starts a watch, and waits until it has seen all objects.
fn watch(server: &Server, args: &[&str]) -> Running {
    let running = Running::start(redlatch(server, &[&["watch"], args].concat()));
    running.until_stderr("watching ");
    running
}

/// Returns the last four columns of a line: event, name, owner, kind.
fn columns(line: &str) -> Vec<&str> {
    let columns = line.split("  ").map(str::trim);
    columns.filter(|it| !it.is_empty()).skip(1).collect()
}

#[test]
fn watch_prints_a_line_for_each_event() {
    let name = unique("watch");
    let watch = watch(shared(), &[&format!("{name}*")]);
    let holder = hold(shared(), &[], &name);
    let owner = owner(shared(), &name);
    watch.until_stdout("acquired");
    holder.release();
    let text = watch.until_stdout("released");
    let lines: Vec<_> = text.lines().map(columns).collect();
    let expected = ["acquired", "released"].map(|event| vec![event, &name, &owner, "lock"]);
    assert_eq!(lines, expected);
    // An RFC 3339 time.
    assert!(
        text.starts_with("20") && text.contains("Z  acquired"),
        "{text}"
    );
    watch.signal(Signal::INT);
    watch.finish().expect(130);
}

#[test]
fn watch_prints_json() {
    let name = unique("watch-json");
    let args = ["watch", "--json", &format!("{name}*")];
    let holder = hold(shared(), &["--write"], &name);
    let watch = Running::start(redlatch(shared(), &args));
    watch.until_stdout("synchronized");
    holder.release();
    let text = watch.until_stdout("released");
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<Value> = lines.collect();
    let events: Vec<_> = lines.iter().map(|line| &line["event"]).collect();
    assert_eq!(events, ["held", "synchronized", "released"]);
    let released = &lines[2];
    assert_eq!(released["name"], name);
    assert_eq!(released["kind"], "read-write lock");
    assert_eq!(released["side"], "write");
    assert_eq!(released["owner"], lines[0]["owner"]);
    assert!(released["owner"].as_str().unwrap().contains(':'));
    assert!(released["time"].is_string() && released["value"].is_null());
    watch.signal(Signal::TERM);
    let finished = watch.finish().expect(143);
    assert_eq!(finished.stderr, "");
}

#[test]
fn watch_escapes_control_characters() {
    let name = unique("watch-escape");
    let watch = watch(shared(), &[&format!("{name}*")]);
    let evil = format!("{name}\u{1b}[31m");
    let () = shared().command(&["HSET", &evil, "x\u{1b}]0;y\u{7}:1", "1"]);
    let text = watch.until_stdout("acquired");
    assert!(!text.contains('\u{1b}'), "{text}");
    assert!(text.contains(r"\u{1b}[31m"), "{text}");
}

#[test]
fn watch_ends_when_its_reader_has_gone() {
    let mut command = redlatch(shared(), &["watch", &unique("nothing")]);
    let (reader, writer) = std::io::pipe().unwrap();
    command
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(Stdio::piped());
    let watch = Running::start_with_own_stdio(command);
    watch.until_stderr("watching ");
    drop(reader);
    watch.finish().expect(0);
}

#[test]
fn watch_survives_a_restart_of_the_server() {
    let mut server = Server::start();
    let watch = watch(&server, &["a*"]);
    let () = server.command(&["HSET", "a1", "client:1", "1"]);
    watch.until_stdout("acquired");
    server.kill();
    watch.until_stderr("changes are not seen at present");
    server.restart();
    watch.until_stderr("watching again");
    watch.until_stdout("released");
    let () = server.command(&["HSET", "a2", "client:2", "1"]);
    watch.until_stdout("client:2");
    watch.signal(Signal::INT);
    watch.finish().expect(130);
}

#[test]
fn watch_without_a_server_or_permission_is_an_error() {
    let mut server = Server::start();
    let _: String = server.command(&["ACL", "SETUSER", "default", "-client|tracking"]);
    let refused = finish(redlatch(&server, &["watch"])).expect(69);
    refused.assert_stderr("client|tracking");
    server.kill();
    let missing = finish(redlatch(&server, &["watch"])).expect(69);
    missing.assert_stderr("the store cannot be reached");
}
