//! The examples tell what they promise to tell, without a server and with one.

use std::path::PathBuf;
use std::process::{Command, Output};

use redlatch_testkit::Server;

/// Cargo has built the examples before it runs all tests; not before it runs only these.
fn example(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let built = own.parent().and_then(|deps| deps.parent()).unwrap();
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let example = built.join("examples").join(file);
    if !example.exists() {
        let profile = match built.file_name().unwrap().to_str().unwrap() {
            "debug" => "dev",
            other => other,
        };
        let status = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--package", "redlatch"])
            .args(["--example", name, "--profile", profile])
            .arg("--target-dir")
            .arg(built.parent().unwrap())
            .status()
            .unwrap();
        assert!(status.success(), "the example does not build");
    }
    example
}

/// Runs an example in each of the three ways.
fn everywhere(name: &str, told: impl Fn(&str)) {
    let server = Server::start();
    let run = |args: &[&str], url: Option<&str>| {
        let mut example = Command::new(example(name));
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
        told(&out);
    };
    run(&[], None);
    run(&[&server.url()], None);
    run(&[], Some(&server.url()));
    let scripts: String = server.ask(&["INFO", "commandstats"]);
    assert!(scripts.contains("cmdstat_evalsha"), "not on the server");
}

#[test]
fn fenced_writes() {
    everywhere("fenced_writes", |out| {
        assert!(out.contains("the keeper takes it, and busy's line is gone"));
        assert!(out.contains("its guard is valid: false"));
        let last = out.lines().last().unwrap();
        assert_eq!(
            last,
            "busy's line is there: without tokens false, with tokens true"
        );
    });
}

#[test]
fn leader() {
    everywhere("leader", |out| {
        for name in ["first", "second", "third"] {
            assert_eq!(out.matches(&format!("{name}: leads\n")).count(), 1, "{out}");
        }
        assert!(out.contains("first: dies\n"), "{out}");
        let last = out.lines().last().unwrap();
        assert!(last.starts_with("3 leaders, one at a time;"), "{last}");
    });
}
