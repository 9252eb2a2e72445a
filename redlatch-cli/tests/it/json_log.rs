//! Tests of `--log-format json`: each line on standard error is an object.

use redlatch_testkit::{shared, unique};
use serde_json::Value;

use crate::support::*;

fn objects(stderr: &str) -> Vec<Value> {
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
    let objects: Vec<Value> = stderr.lines().map(parse).collect();
    for object in &objects {
        for key in ["timestamp", "level", "message", "target"] {
            assert!(object[key].is_string(), "{key} in {object}");
        }
    }
    objects
}

#[track_caller]
fn find<'a>(objects: &'a [Value], message: &str) -> &'a Value {
    let is_wanted = |object: &&Value| object["message"].as_str().unwrap().contains(message);
    let found = objects.iter().find(is_wanted);
    found.unwrap_or_else(|| panic!("{message:?} in {objects:#?}"))
}

#[test]
fn messages_and_log_events_are_objects() {
    let name = unique("json") + "\"quoted";
    let run = [
        "run",
        "-v",
        "--log-format",
        "json",
        &name,
        "--",
        "no-such-command-anywhere",
    ];
    let finished = finish(redlatch(shared(), &run)).expect(127);
    let printed = objects(&finished.stderr);
    assert_eq!(find(&printed, "acquired by")["level"], "INFO");
    assert_eq!(find(&printed, "released")["level"], "INFO");
    // From the process that was to become CMD.
    let not_found = find(&printed, "no-such-command-anywhere: not found");
    assert_eq!(not_found["level"], "ERROR");
    assert_eq!(printed.len(), 3, "{printed:#?}");

    let mut traced = redlatch(shared(), &["run", &name, "--", "true"]);
    traced.env("REDLATCH_LOG_FORMAT", "json");
    traced.env("REDLATCH_LOG", "redlatch=debug");
    let printed = objects(&finish(traced).expect(0).stderr);
    let released = find(&printed, "released");
    assert_eq!(released["lock"], name);
    assert_eq!(released["level"], "DEBUG");
    assert_eq!(find(&printed, "acquired")["span"]["lock"], name);
}

#[test]
fn output_of_cmd_and_standard_output_stay_as_they_are() {
    let script = "echo out; echo err >&2";
    let args = [
        "--log-format=json",
        "run",
        &unique("plain"),
        "--",
        "sh",
        "-c",
        script,
    ];
    let finished = finish(redlatch(shared(), &args)).expect(0);
    assert_eq!(finished.stdout, "out\n");
    assert_eq!(finished.stderr, "err\n");
    let help = finish(clean_command(&["--log-format", "json", "--help"])).expect(0);
    assert!(help.stdout.contains("Usage: "), "{help:#?}");
    assert_eq!(help.stderr, "");
}

#[test]
fn lost_lock_is_an_error_object() {
    let name = unique("json-lost");
    let holder = hold(
        shared(),
        &["--log-format", "json", "--watchdog", "6s"],
        &name,
    );
    let () = shared().command(&["DEL", &name]);
    let lost = objects(&holder.finish().expect(74).stderr);
    assert_eq!(find(&lost, "lost: ")["level"], "ERROR");
}

#[test]
fn wrong_usage_is_one_object_without_passwords() {
    for args in [
        &["--log-format", "json", "walk"][..],
        &["--log-format=json"],
        &["ls", "--log-format", "json", "redis://:s3cret@h", "b"],
        &["--config", "/no/such/file", "--log-format", "json", "ls"],
    ] {
        let finished = finish(clean_command(args)).expect(2);
        let printed = objects(&finished.stderr);
        assert_eq!(printed.len(), 1, "{finished:#?}");
        assert_eq!(printed[0]["level"], "ERROR");
        assert!(!finished.stderr.contains("s3cret"), "{finished:#?}");
    }
    let mut by_variable = clean_command(&["run", "n", "true"]);
    by_variable.env("REDLATCH_LOG_FORMAT", "json");
    let printed = objects(&finish(by_variable).expect(2).stderr);
    find(&printed, "CMD comes after --");
    let warned = finish(clean_command(&[
        "--log-format",
        "json",
        "--url",
        "redis://:s3cret@127.0.0.1:1",
        "ls",
    ]));
    let printed = objects(&warned.expect(69).stderr);
    assert_eq!(
        find(&printed, "every user of this machine")["level"],
        "WARN"
    );
}
