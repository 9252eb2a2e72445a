//! The examples leave no data on a server, and report errors in clear words.

use std::process::Output;

use crate::common::example;
use crate::common::prelude::*;

/// All examples that run on one server.
const ON_ONE_SERVER: [&str; 10] = [
    "cache_rebuild",
    "downloads",
    "fair_turns",
    "fenced_writes",
    "fleet_limit",
    "http_service",
    "leader",
    "quickstart",
    "start_barrier",
    "transfer",
];

fn run(name: &str, args: &[&str], url: Option<&str>) -> Output {
    let mut example = example(name);
    example.args(args);
    if let Some(url) = url {
        example.env("REDLATCH_URL", url);
    }
    example.output().unwrap()
}

#[track_caller]
fn assert_well(output: &Output) {
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && err.is_empty(), "{output:#?}");
}

/// Asserts that the example failed with a single readable line.
#[track_caller]
fn assert_refused(name: &str, output: &Output, said: &str) {
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{output:#?}");
    assert!(err.starts_with(&format!("{name}: ")), "{err}");
    assert!(err.contains(said), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
}

#[test]
fn examples_leave_and_overwrite_nothing() {
    let server = Server::start();
    // Data that a shop could have on a server on which a user tries out the examples.
    let theirs = [
        "transfer:balance:0",
        "transfer:balance:1",
        "transfer:balance:2",
        "example:mirror",
        "example:workers-ready",
    ];
    for key in theirs {
        let () = server.command(&["SET", key, "17"]);
    }
    for name in ON_ONE_SERVER {
        assert_well(&run(name, &[&server.url()], None));
        for key in theirs {
            assert_eq!(server.command::<String>(&["GET", key]), "17", "{name}");
        }
        let mut keys: Vec<String> = server.command(&["KEYS", "*"]);
        keys.retain(|key| !theirs.contains(&key.as_str()));
        assert_eq!(keys, [""; 0], "{name}");
    }
}

#[test]
fn missing_server_is_reported() {
    let mut server = Server::start();
    server.kill();
    for name in ON_ONE_SERVER {
        for (args, url) in [(&[&*server.url()][..], None), (&[], Some(&*server.url()))] {
            let output = run(name, args, url);
            assert_refused(name, &output, "check that it is running");
        }
    }
}

#[test]
fn redlock_example_requires_three_servers() {
    let servers = [Server::start(), Server::start(), Server::start()];
    let urls = servers.each_ref().map(Server::url);
    let urls = urls.each_ref().map(String::as_str);
    for few in [&urls[..1], &urls[..2]] {
        let said = "three or more servers";
        assert_refused("redlock", &run("redlock", few, None), said);
        let output = run("redlock", &[], Some(&few.join(" ")));
        assert_refused("redlock", &output, said);
    }
    assert_well(&run("redlock", &urls, None));
    assert_well(&run("redlock", &[], Some(&urls.join(" "))));
    for server in &servers {
        assert_eq!(server.command::<Vec<String>>(&["KEYS", "*"]), [""; 0]);
    }
}
