//! Tests of what the command prints, and where: `show`, `ls` and `unlock`, messages, and closed pipes.

use redlatch_testkit::{shared, unique};
use serde_json::Value;

use crate::support::*;

fn stdout(args: &[&str]) -> String {
    let finished = finish(redlatch(shared(), args)).expect(0);
    assert_eq!(finished.stderr, "");
    finished.stdout
}

fn json(args: &[&str]) -> Vec<Value> {
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
    stdout(args).lines().map(parse).collect()
}

/// Returns the cells of a table, which are separated by at least two spaces.
fn cells(table: &str) -> Vec<Vec<&str>> {
    let row = |line| {
        str::split(line, "  ")
            .map(str::trim)
            .filter(|cell| !cell.is_empty())
    };
    table.lines().map(|line| row(line).collect()).collect()
}

#[test]
fn show_prints_the_holder() {
    let name = unique("show");
    // Nothing renews it meanwhile.
    let holder = hold(shared(), &["--lease", "1h"], &name);
    let owner = owner(shared(), &name);

    let table = stdout(&["show", &name]);
    let rows = cells(&table);
    assert_eq!(rows[0], ["NAME", "KIND", "OWNER", "HOLDS", "REMAINING"]);
    assert_eq!(rows[1][..4], [&name, "lock", &owner, "1"]);
    assert!(rows[1][4].ends_with('s'), "{table}");
    // After a second there is a line about the client.
    assert!(
        rows[2..].iter().all(|row| row[0].starts_with("held by ")),
        "{table}"
    );

    let shown = json(&["show", "--json", &name]);
    let [object] = &shown[..] else {
        panic!("{shown:?}")
    };
    assert_eq!(object["name"], name);
    assert_eq!(object["kind"], "lock");
    assert_eq!(object["held"], true);
    assert_eq!(object["owner"], owner);
    assert_eq!(object["holds"], 1);
    let remaining = object["remaining_ms"].as_u64().unwrap();
    assert!(remaining <= 3_600_000, "{object}");

    let () = shared().command(&["PERSIST", &name]);
    assert_eq!(
        json(&["show", "--json", &name])[0]["remaining_ms"],
        Value::Null
    );
    assert_eq!(cells(&stdout(&["show", &name]))[1][4], "forever");
    let () = shared().command(&["PEXPIRE", &name, "3600000"]);
    holder.release();
}

#[test]
fn tables_fit_the_terminal() {
    let name = unique("a-name-of-some-length");
    let holder = hold(shared(), &["--fenced"], &name);
    let binary = env!("CARGO_BIN_EXE_redlatch");
    let line = format!("stty cols 80 rows 24; '{binary}' show {name}");
    let table = at_a_terminal(&line).finish().expect(0).stdout;
    for line in table.lines() {
        assert!(line.trim_end().chars().count() <= 80, "{table}");
    }
    let owner = owner(shared(), &name);
    let (_, number) = owner.split_once(':').unwrap();
    assert!(table.contains(&owner[..8]), "{table}");
    let end = &number[number.len().saturating_sub(6)..];
    assert!(table.contains(&format!("{end} ")), "{table}");
    holder.release();
}

#[test]
fn quiet_leaves_out_and_verbose_adds_messages() {
    let name = unique("output");
    let run = |option| {
        finish(redlatch(
            shared(),
            &["run", "-n", option, &name, "--", "true"],
        ))
    };
    let verbose = run("--verbose").expect(0).stderr;
    assert!(
        verbose.contains(&format!("{name}: acquired by ")),
        "{verbose}"
    );
    assert!(
        verbose.contains(&format!("{name}: released\n")),
        "{verbose}"
    );
    assert_eq!(run("--quiet").expect(0).stderr, "");
    let holder = hold(shared(), &[], &name);
    assert_eq!(run("--quiet").expect(75).stderr, "");
    holder.release();
}

#[test]
fn show_prints_that_a_lock_is_free() {
    let name = unique("free");
    assert_eq!(
        cells(&stdout(&["show", &name]))[1],
        [&name, "-", "(free)", "0", "-"]
    );
    let shown = stdout(&["show", "--json", &name]);
    let wanted = format!(
        r#"{{"name":"{name}","kind":null,"held":false,"owner":null,"holds":0,"remaining_ms":null}}"#
    );
    assert_eq!(shown, wanted + "\n");
}

#[test]
fn quiet_show_prints_nothing_and_exits_with_1_if_free() {
    let held = |name: &str, code| {
        for args in [["-q", "show", name], ["show", name, "--quiet"]] {
            let finished = finish(redlatch(shared(), &args)).expect(code);
            assert_eq!(finished.stdout, "");
            assert_eq!(finished.stderr, "");
        }
    };
    for (options, while_held, after) in [
        (&[][..], 0, 1),
        (&["--fair"], 0, 1),
        (&["--read"], 0, 1),
        (&["--write"], 0, 1),
        (&["--permits", "1"], 0, 1),
        (&["--permits", "2"], 1, 1),
    ] {
        let name = unique("quiet");
        held(&name, 1);
        let holder = hold(shared(), options, &name);
        held(&name, while_held);
        holder.release();
        held(&name, after);
    }
    // A latch, and a semaphore with and without a permit.
    let name = unique("number");
    for (value, code) in [("3", 1), ("1", 1), ("0", 0)] {
        let () = shared().command(&["SET", &name, value]);
        held(&name, code);
    }
    let () = shared().command(&["SET", &name, "text"]);
    finish(redlatch(shared(), &["show", "-q", &name]))
        .expect(65)
        .assert_stderr("another kind");
    let mut command = clean_command(&["show", "-q", &name]);
    command.env("REDLATCH_URL", "redis://127.0.0.1:1");
    finish(command)
        .expect(69)
        .assert_stderr("cannot be reached");
}

#[test]
fn names_in_messages_cannot_control_the_terminal() {
    let name = unique("message") + "\x1b[2J";
    let held = finish(redlatch(shared(), &["run", "-v", &name, "--", "true"])).expect(0);
    assert!(held.stderr.contains("\\u{1b}[2J: acquired"), "{held:#?}");
    assert!(!held.stderr.contains('\x1b'), "{held:#?}");
    finish(redlatch(shared(), &["show", "-q", &name])).expect(1);
    let () = shared().command(&["SET", &name, "text"]);
    for args in [
        &["show", "-q", &name][..],
        &["unlock", "--force", &name],
        &["latch", &name, "wait"],
        &["token", &name],
        &["run", "-n", &name, "--", "true"],
    ] {
        let finished = finish(redlatch(shared(), args)).expect(65);
        assert!(!finished.stderr.contains('\x1b'), "{finished:#?}");
    }
}

#[test]
fn ls_lists_matching_names() {
    let prefix = unique("ls");
    let names = ["a", "b", "ü ✓"].map(|end| format!("{prefix}:{end}"));
    let holders = names.each_ref().map(|name| hold(shared(), &[], name));
    let () = shared().command(&["HSET", &format!("{prefix}:no-lock"), "field", "value"]);
    let pattern = format!("{prefix}:*");

    let table = stdout(&["ls", &pattern]);
    let listed: Vec<_> = cells(&table)
        .into_iter()
        .map(|row| row[0].to_owned())
        .collect();
    assert_eq!(listed[0], "NAME");
    assert_eq!(listed[1..], names);
    let widths: Vec<_> = table.lines().map(|line| line.chars().count()).collect();
    assert!(widths.iter().all(|width| *width == widths[0]), "{table}");

    let objects = json(&["ls", "--json", &pattern]);
    for (object, name) in objects.iter().zip(&names) {
        assert_eq!(object["name"], *name);
        assert_eq!(object["owner"], owner(shared(), name));
        assert_eq!(object["held"], true);
    }
    assert_eq!(objects.len(), 3);

    assert_eq!(json(&["ls", "--json", &format!("{prefix}:[ab]")]).len(), 2);
    let all = json(&["ls", "--json"]);
    assert!(
        all.iter().any(|object| object["name"] == names[0]),
        "{all:?}"
    );

    holders.into_iter().for_each(Running::release);
    assert_eq!(stdout(&["ls", "--json", &pattern]), "");
    assert_eq!(cells(&stdout(&["ls", &pattern])).len(), 1);
}

#[test]
fn text_from_the_store_cannot_control_the_terminal() {
    let name = unique("escape") + "\x1b[2J\n";
    let () = shared().command(&["HSET", &name, "\x1bc:1", "1"]);
    let pattern = name.replace("\x1b[2J\n", "*");
    let table = stdout(&["ls", &pattern]);
    assert!(!table.contains('\x1b'), "{table:?}");
    assert_eq!(table.lines().count(), 2, "{table:?}");
    assert_eq!(json(&["ls", "--json", &pattern])[0]["name"], name);
}

#[test]
fn unlock_prints_whether_it_unlocked() {
    let name = unique("unlock");
    let unlock = ["unlock", "--force", &name];
    assert_eq!(stdout(&unlock), format!("{name}: was not locked\n"));
    let holder = hold(shared(), &["--watchdog", "6s"], &name);
    assert_eq!(stdout(&unlock), format!("{name}: unlocked\n"));
    holder.finish().expect(74);
}

#[test]
fn unlock_requires_force_and_explains_why() {
    let name = unique("force");
    let holder = hold(shared(), &[], &name);
    let refused = finish(redlatch(shared(), &["unlock", &name])).expect(2);
    let refused = refused.assert_stderr("to confirm, use --force");
    refused.assert_stderr("unlocking takes the lock from a holder that may still be working");
    assert!(is_held(shared(), &name));
    holder.release();
}

#[test]
fn closed_output_pipe_is_no_error() {
    let name = unique("pipe");
    let holder = hold(shared(), &[], &name);
    for args in [
        &["ls"][..],
        &["ls", "--json"],
        &["show", &name],
        &["--help"],
        &["run", "--help"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = redlatch(shared(), args);
        command.stdout(writer);
        command.stderr(std::process::Stdio::piped());
        let finished = Running::start_with_own_stdio(command).finish().expect(0);
        assert_eq!(finished.stderr, "");
    }
    holder.release();
}
