//! Tests that no name, owner, label, note, argument or variable controls the terminal or changes how
//! the text around it is shown, in any output of any command.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use redlatch::{Client, Owner};
use redlatch_testkit::{Server, unique};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::*;

/// A window title by OSC, further control characters, and characters that are invisible or change
/// directions.
const HOSTILE: &str = "\u{1b}]0;x\u{7}\u{7f}\u{85}\u{9b}\u{ad}\u{61c}\u{180e}\u{200b}\u{200d}\u{200e}\u{200f}\u{2028}\u{2029}\
    \u{202a}\u{202e}\u{2060}\u{2066}\u{2067}\u{2068}\u{2069}\u{206f}\u{feff}\u{fff9}\u{1d173}\u{e0001}\u{e0041}end";

/// Returns the first character in the text, apart from line ends, that could control how it is
/// shown: control characters, the category Cf of Unicode 14, and the separators of lines and
/// paragraphs.
fn raw(text: &str) -> Option<char> {
    const FORMAT: [(u32, u32); 21] = [
        (0xad, 0xad),
        (0x600, 0x605),
        (0x61c, 0x61c),
        (0x6dd, 0x6dd),
        (0x70f, 0x70f),
        (0x890, 0x891),
        (0x8e2, 0x8e2),
        (0x180e, 0x180e),
        (0x200b, 0x200f),
        (0x2028, 0x202e),
        (0x2060, 0x2064),
        (0x2066, 0x206f),
        (0xfeff, 0xfeff),
        (0xfff9, 0xfffb),
        (0x110bd, 0x110bd),
        (0x110cd, 0x110cd),
        (0x13430, 0x13438),
        (0x1bca0, 0x1bca3),
        (0x1d173, 0x1d17a),
        (0xe0001, 0xe0001),
        (0xe0020, 0xe007f),
    ];
    let is_format = |c: char| {
        let in_range = |(first, last): &(u32, u32)| (*first..=*last).contains(&u32::from(c));
        FORMAT.iter().any(in_range)
    };
    let is_raw = |c: &char| *c != '\n' && (c.is_control() || is_format(*c));
    text.chars().find(is_raw)
}

#[track_caller]
fn assert_printable(finished: &Finished) {
    for text in [&finished.stdout, &finished.stderr] {
        let found = raw(text);
        assert!(found.is_none(), "{found:?} in {finished:#?}");
    }
}

/// Runs a command to its end. Its output must be printable.
#[track_caller]
fn run(command: Command) -> Finished {
    let finished = finish(command);
    assert_printable(&finished);
    finished
}

/// Returns the objects of a JSON output.
#[track_caller]
fn objects(text: &str) -> Vec<Value> {
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
    text.lines().map(parse).collect()
}

/// Messages as text and in JSON, and the log.
const MESSAGES: [(&str, &str); 3] = [("text", "warn"), ("json", "warn"), ("text", "trace")];

#[test]
fn hostile_objects_are_escaped_in_every_output() {
    let server = Server::start();
    let name = |kind: &str| format!("{}{HOSTILE}", unique(kind));
    let [held, free, deleted] = ["held", "free", "deleted"].map(name);
    let options = ["--label", HOSTILE, "--note", HOSTILE];
    let kinds: [&[&str]; 7] = [
        &[],
        &["--fair"],
        &["--fenced"],
        &["--read"],
        &["--write"],
        &["--permits", "1"],
        &["--spin"],
    ];
    let mut running = vec![hold(&server, &options, &held)];
    let mut names = vec![held.clone(), free.clone()];
    for kind in kinds {
        let name = name(&format!("kind{}", kind.concat()));
        running.push(hold(&server, &[&options, kind].concat(), &name));
        let args = [&["run"], &options[..], kind, &[&name, "--", "true"]].concat();
        running.push(Running::start(redlatch(&server, &args)));
        names.push(name);
    }
    // As other programs may write them.
    let foreign = format!("{}\nline", name("foreign"));
    let owner = format!("{HOSTILE}\nline:1");
    let () = server.command(&["HSET", &foreign, &owner, "1"]);
    let latch = name("latch");
    let set = run(redlatch(&server, &["latch", &latch, "set", "3"]));
    assert_eq!(set.expect(0).stdout, "3\n");
    let text = name("text");
    let () = server.command(&["SET", &text, "text"]);
    names.extend([foreign.clone(), latch.clone()]);
    until("holder and waiter are registered", || {
        let why = run(redlatch(&server, &["why", "--json", &held])).stdout;
        why.contains("\"label\":\"")
    });
    let queued = &names[3];
    until("the waiter is in the queue", || {
        let shown = run(redlatch(&server, &["show", queued])).stdout;
        shown.contains("waiter 1: ")
    });

    let listed = run(redlatch(&server, &["ls", "--json"])).expect(0).stdout;
    let listed = objects(&listed);
    for name in names.iter().filter(|name| **name != free) {
        let is_listed = listed.iter().any(|object| object["name"] == **name);
        assert!(is_listed, "{name:?} in {listed:#?}");
    }
    let shown = run(redlatch(&server, &["show", "--json", &held])).expect(0);
    let shown = &objects(&shown.stdout)[0];
    assert_eq!(shown["name"], held);
    assert_eq!(shown["registered"]["label"], HOSTILE);
    assert_eq!(shown["registered"]["note"], HOSTILE);
    let is_foreign = |object: &&Value| object["name"] == *foreign;
    assert_eq!(listed.iter().find(is_foreign).unwrap()["owner"], owner);
    let table = run(redlatch(&server, &["ls", "--wide"])).expect(0).stdout;
    assert_eq!(table.lines().count(), 1 + server_rows(&listed), "{table}");

    let ticket = {
        let printed = run(redlatch(
            &server,
            &["lock", "--lease", "1h", &name("ticket")],
        ));
        printed.expect(0).stdout.trim().to_owned()
    };
    for (format, log) in MESSAGES {
        let with_format = |args: &[&str]| {
            let mut command = redlatch(&server, args);
            command.env("REDLATCH_LOG_FORMAT", format);
            command.env("REDLATCH_LOG", log);
            let stderr = run(command).stderr;
            if format == "json" {
                objects(&stderr);
            }
        };
        let pattern = format!("*{HOSTILE}*");
        for args in [
            &["ls", &pattern][..],
            &["ls", "--json", &pattern],
            &["deadlocks"],
            &["deadlocks", "--json"],
            &["renew", "--ticket", &ticket],
            &["-v", "run", &free, "--", "true"],
            &["run", "--once-per", "1d", &free, "--", "true"],
            &["run", "-n", &held, &free, "--", "true"],
            &["run", "--wait", "1ms", &held, "--", "true"],
            &["run", "-n", &latch, "--", "true"],
            &["run", "-n", &text, "--", "true"],
            &["run", "-n", &free, "--", HOSTILE],
            &["lock", "-n", &held],
            &["elect", &name("elect"), "--", "true"],
            &["elect", &text, "--", "true"],
            &["latch", &latch, "set", "3"],
            &["latch", &latch, "wait", "--limit", "1ms"],
            &["latch", &held, "wait"],
            &["token", &latch],
            &["token", &names[4], "delete"],
            &["unlock", "--force", &latch],
            &["unlock", "--force", &free],
            &["unlock", &held],
        ] {
            with_format(args);
        }
        for name in &names {
            for args in [
                ["show", name].as_slice(),
                &["show", "--json", name],
                &["why", name],
                &["why", "--json", name],
            ] {
                with_format(args);
            }
        }
    }
    let unlock = ["-v", "unlock", "--ticket", &ticket];
    run(redlatch(&server, &unlock)).expect(0);

    let asked = hold(&server, &[], &free);
    let ask = ["unlock", "--ask", "--wait", "1m", &free];
    run(redlatch(&server, &ask)).expect(0);
    assert_printable(&asked.finish().expect(143));
    let lost = running.remove(0);
    let forced = run(redlatch(&server, &["unlock", "--force", &held])).expect(0);
    assert!(forced.stdout.ends_with(": unlocked\n"), "{forced:#?}");
    assert_printable(&lost.finish().expect(74));
    let holder = hold(&server, &["--watchdog", "6s"], &deleted);
    let () = server.command(&["DEL", &deleted]);
    assert_printable(&holder.finish().expect(74));
}

/// Returns the number of rows of a table.
fn server_rows(objects: &[Value]) -> usize {
    let count = |object: &Value| {
        let of = |key: &str| object[key].as_array().map_or(0, Vec::len);
        of("holders").max(1) + of("queue") + of("permits")
    };
    objects.iter().map(count).sum()
}

#[test]
fn hostile_events_are_escaped() {
    let server = Server::start();
    let name = format!("{}{HOSTILE}", unique("events"));
    let watching = |args: &[&str]| {
        let running = Running::start(redlatch(&server, args));
        until("it watches", || {
            running.stderr().contains("watching") || running.stdout().contains("synchronized")
        });
        running
    };
    let text = watching(&["watch", &format!("*{HOSTILE}")]);
    let json = watching(&["watch", "--json"]);
    let value = ["--value", HOSTILE, &name];
    let leader = [&["elect"], &value[..], &["--", "cat"]].concat();
    let mut leader = Running::start(redlatch(&server, &leader));
    let observers = [
        &["elect", "--observe", &name][..],
        &["elect", "--observe", "--json", &name],
    ];
    let observers = observers.map(|args| Running::start(redlatch(&server, args)));
    observers[0].until_stdout("end\n");
    observers[1].until_stdout("end\"}\n");
    leader.close_stdin();
    assert_printable(&leader.finish().expect(0));
    for watch in [&text, &json] {
        until("the release is reported", || {
            watch.stdout().contains("released")
        });
    }
    for (i, running) in observers.into_iter().chain([text, json]).enumerate() {
        running.signal(Signal::TERM);
        let finished = running.finish().expect(143);
        assert_printable(&finished);
        if i % 2 == 1 {
            let printed = objects(&finished.stdout);
            let has = |key: &str, wanted: &str| printed.iter().any(|object| object[key] == wanted);
            assert!(has("value", HOSTILE) || has("name", &name), "{printed:#?}");
        }
    }
}

#[test]
fn hostile_deadlock_is_escaped() {
    let server = Server::start();
    let [one, other] = ["one", "other"].map(|name| format!("{name}{HOSTILE}"));
    let runtime = current_thread_runtime();
    runtime.block_on(async {
        let client = Client::builder().label(HOSTILE);
        let client = client.connect(&server.url()).await.unwrap();
        let owners = [Owner::new(), Owner::new()];
        let mut guards = Vec::new();
        for (name, owner) in [&one, &other].into_iter().zip(owners) {
            let acquiring = client.lock(name).lock().owner(owner).note(HOSTILE);
            guards.push(acquiring.await.unwrap());
        }
        for (name, owner) in [&other, &one].into_iter().zip(owners) {
            let lock = client.lock(name);
            tokio::spawn(async move { lock.lock().owner(owner).await.map(drop) });
        }
        let checked = tokio::task::spawn_blocking(move || {
            let deadlocks = |args: &[&str]| run(redlatch(&server, args));
            until("it is found", || deadlocks(&["deadlocks"]).code == Some(1));
            let json = deadlocks(&["deadlocks", "--json"]).expect(1);
            let found = objects(&json.stdout);
            let names = [0, 1].map(|i| found[0]["waits"][i]["name"].as_str().unwrap());
            assert!(
                names.contains(&&*one) && names.contains(&&*other),
                "{found:#?}"
            );
        });
        checked.await.unwrap();
    });
}

#[test]
fn hostile_arguments_and_variables_are_escaped() {
    let with_line = format!("{HOSTILE}\nredlatch: forged");
    for hostile in [HOSTILE, &with_line] {
        let option = format!("--{hostile}");
        let level = format!("redlatch={hostile}");
        for format in ["text", "json"] {
            for args in [
                &[hostile][..],
                &[&option, "ls"],
                &["ls", "a", hostile],
                &["run", &option, "n", "--", "true"],
                &["run", "--wait", hostile, "n", "--", "true"],
                &["run", "-E", hostile, "n", "--", "true"],
                &["--log-format", hostile, "ls"],
                &["--replicas", hostile, "ls"],
                &["--url", hostile, "ls"],
                &["--config", hostile, "ls"],
                &["--password-file", hostile, "ls"],
                &["renew", "--ticket", hostile],
                &["exporter", "--listen", hostile],
                &["completions", hostile],
                &["__exec", hostile],
            ] {
                let mut command = clean_command(args);
                command.env("REDLATCH_LOG_FORMAT", format);
                let refused = run(command).expect(2);
                assert!(
                    !refused.stderr.contains("\nredlatch: forged"),
                    "{refused:#?}"
                );
                if format == "json" && !args.contains(&"--log-format") {
                    assert_eq!(objects(&refused.stderr).len(), 1, "{refused:#?}");
                }
            }
        }
        for variable in [
            "REDLATCH_URL",
            "REDLATCH_USERNAME",
            "REDLATCH_SENTINEL_USERNAME",
            "REDLATCH_TLS_CA",
            "REDLATCH_TLS_CERT",
            "REDLATCH_TLS_KEY",
            "REDLATCH_RESPONSE_TIMEOUT",
            "REDLATCH_REPLICAS",
            "REDLATCH_CONFIG",
            "REDLATCH_LABEL",
            "REDLATCH_TICKET",
            "REDLATCH_LOG_FORMAT",
            "REDLATCH_LOG",
        ] {
            for args in [
                &["--url", "redis://127.0.0.1:1", "ls"][..],
                &["run", "--help"],
                &["renew", "--help"],
            ] {
                let mut command = clean_command(args);
                let value = match variable {
                    "REDLATCH_LOG" => &level,
                    _ => hostile,
                };
                command.env(variable, value);
                run(command);
            }
        }
        let mut renamed = clean_command(&["run", "--no-such-option"]);
        renamed.arg0(hostile);
        run(renamed).expect(2);
    }
}

#[test]
fn hostile_configuration_is_escaped() {
    let dir = TempDir::new();
    let path = dir.path(&format!("{HOSTILE}.toml"));
    for text in [
        format!("\"{}\" = 1", HOSTILE.escape_default()),
        format!("{HOSTILE} = 1"),
        format!("replicas = \"{}\"", HOSTILE.escape_default()),
        format!("url = \"{}\"", HOSTILE.escape_default()),
    ] {
        std::fs::write(&path, text).unwrap();
        for format in ["text", "json"] {
            let args = ["--config", &path, "--log-format", format, "ls"];
            run(clean_command(&args)).expect(2);
        }
    }
}

/// The view controls the terminal itself, so only what it shows is checked.
#[test]
fn hostile_objects_are_escaped_in_the_view() {
    let server = Server::start();
    // Short, so that the columns show it as a whole.
    let hostile = "\u{1b}]0;x\u{7}\u{600}\u{202e}end";
    let name = format!("top{hostile}");
    let holder = hold(&server, &["--note", hostile, "--label", hostile], &name);
    let url = server.url();
    let binary = env!("CARGO_BIN_EXE_redlatch");
    let line = format!("stty cols 200 rows 24; REDLATCH_URL='{url}' '{binary}' top");
    let mut top = at_a_terminal(&line);
    top.until_stdout(r"\u{600}\u{202e}end");
    top.write("q");
    let shown = top.finish().expect(0).stdout;
    let controls = ['\u{1b}', '\r', '\n', '\u{8}', '\u{7}'];
    assert_eq!(raw(&shown.replace(controls, "")), None, "{shown:?}");
    assert!(!shown.contains("\u{1b}]0;x"), "{shown:?}");
    holder.release();
}
