//! The quickstart example does what it promises to new users.

use std::process::Output;

use crate::common::example;
use crate::common::prelude::*;

/// Runs it with a folder of its own for temporary files, which must be empty in the end.
fn quickstart(args: &[&str]) -> Output {
    let folder = std::env::temp_dir().join(unique("quickstart"));
    std::fs::create_dir(&folder).unwrap();
    let mut quickstart = example("quickstart");
    let output = quickstart.args(args).env("TMPDIR", &folder).output();
    std::fs::remove_dir(&folder).unwrap();
    output.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Asserts that it succeeded, and that its last line is the promised one.
#[track_caller]
fn assert_sold_out(output: &Output) {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    let last = out.lines().last().unwrap();
    let oversold = last.strip_prefix("sold 300 of 300, oversold 0, without the lock oversold ");
    let oversold: u64 = oversold.expect(last).parse().expect(last);
    assert!(oversold > 0, "{last}");
    assert!(err.is_empty(), "{err}");
    assert!(!out.contains(['\r', '\x1b']), "{out}");
}

/// Asserts that it failed with an error that a new user can understand.
#[track_caller]
fn assert_failed(output: &Output, code: i32, saying: &str) {
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{err}");
    assert!(err.contains(saying), "{err}");
    assert!(!err.contains("panicked"), "{err}");
}

#[test]
fn sells_out_without_a_server() {
    assert_sold_out(&quickstart(&[]));
}

#[test]
fn sells_out_in_several_processes_and_leaves_no_key_behind() {
    let server = Server::start();
    assert_sold_out(&quickstart(&["--url", &server.url()]));
    assert_eq!(server.command::<Vec<String>>(&["KEYS", "*"]), [""; 0]);
}

#[test]
fn leaves_no_key_behind_when_it_fails_half_way() {
    let server = Server::start();
    // The user may do all that the sale without a lock needs, but not what the lock needs.
    let rights = "on >secret ~* &* +@all -eval -evalsha";
    let user = [
        &["ACL", "SETUSER", "shop"],
        &rights.split(' ').collect::<Vec<_>>()[..],
    ]
    .concat();
    let () = server.command(&user);
    let url = format!("redis://shop:secret@127.0.0.1:{}", server.port());
    let output = quickstart(&["--url", &url]);
    assert_failed(&output, 1, "a worker process failed");
    assert!(text(&output.stdout).contains("Without a lock they sold"));
    assert_eq!(server.command::<Vec<String>>(&["KEYS", "*"]), [""; 0]);
}

#[test]
fn reports_missing_server() {
    let mut server = Server::start();
    server.kill();
    let output = quickstart(&["--url", &server.url()]);
    assert_failed(&output, 1, "check that it is running");
    assert_failed(&quickstart(&["--url", "nonsense"]), 1, "URL");
}

#[test]
fn prints_help() {
    for wrong in [&["--nonsense"][..], &["--url"], &["surplus"]] {
        assert_failed(&quickstart(wrong), 2, "Usage:");
    }
    let help = quickstart(&["--help"]);
    assert!(help.status.success() && text(&help.stdout).contains("Usage:"));
}
