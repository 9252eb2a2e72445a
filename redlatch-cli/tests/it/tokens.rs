//! Tests of `redlatch token`: the fencing token of a lock is shown, advanced and deleted.

use redlatch_testkit::{shared, unique};

use crate::support::*;

fn token(name: &str, command: &[&str]) -> Finished {
    finish(redlatch(shared(), &[&["token", name], command].concat()))
}

fn next_token(name: &str) -> String {
    let script = "echo $REDLATCH_FENCING_TOKEN";
    let args = ["run", "--fenced", name, "--", "sh", "-c", script];
    finish(redlatch(shared(), &args)).expect(0).stdout
}

#[test]
fn token_is_advanced_after_lost_data() {
    let name = unique("token");
    assert_eq!(token(&name, &[]).expect(0).stdout, "0\n");
    assert_eq!(token(&name, &["advance", "0"]).expect(0).stdout, "0\n");
    assert_eq!(next_token(&name), "1\n");
    assert_eq!(
        token(&name, &["advance", "7000"]).expect(0).stdout,
        "7000\n"
    );
    assert_eq!(next_token(&name), "7001\n");
    assert_eq!(token(&name, &["advance", "3"]).expect(0).stdout, "7001\n");
    assert_eq!(token(&name, &[]).expect(0).stdout, "7001\n");
    for number in ["9223372036854775807", "-1", "x"] {
        token(&name, &["advance", number])
            .expect(2)
            .assert_stderr(number);
    }
}

/// Greater after lost data, and the key expires.
#[test]
fn tokens_follow_the_clock() {
    let name = unique("token");
    let next = |command: &[&str]| {
        let script = "echo $REDLATCH_FENCING_TOKEN";
        let args = [command, &["--fenced", "--clock-tokens", &name]].concat();
        let args = match command {
            ["run"] => [&args[..], &["--", "sh", "-c", script]].concat(),
            _ => args,
        };
        let stdout = finish(redlatch(shared(), &args)).expect(0).stdout;
        stdout.trim().to_owned()
    };
    let key = format!("redisson_lock_token:{{{name}}}");
    let first: u64 = next(&["run"]).parse().unwrap();
    assert!((1 << 50..1 << 53).contains(&first), "{first}");
    assert!(shared().command::<i64>(&["PTTL", &key]) > 0);
    assert_eq!(shared().command::<i64>(&["DEL", &key]), 1);
    let second: u64 = next(&["run"]).parse().unwrap();
    assert!(second > first);
    next(&["lock", "--lease", "30s"]);
    let third: u64 = token(&name, &[]).expect(0).stdout.trim().parse().unwrap();
    assert!(third > second);
    finish(redlatch(
        shared(),
        &["run", "--clock-tokens", &name, "true"],
    ))
    .expect(2)
    .assert_stderr("--fenced");
}

#[test]
fn token_of_a_held_lock_is_not_deleted() {
    let name = unique("token");
    let held = hold(shared(), &["--fenced"], &name);
    token(&name, &["delete"])
        .expect(75)
        .assert_stderr("the lock is held");
    assert_eq!(token(&name, &[]).expect(0).stdout, "1\n");
    held.release();
    token(&name, &["delete"]).expect(0);
    let key = format!("redisson_lock_token:{{{name}}}");
    assert_eq!(shared().command::<i64>(&["EXISTS", &key]), 0);
    assert_eq!(next_token(&name), "1\n");
}

/// The epochs of an election are tokens of its lock, also if the store has lost all keys of the election.
#[test]
fn token_of_an_election_is_its_epoch() {
    let name = unique("token");
    let next_epoch = || {
        let args = ["elect", &name, "--", "sh", "-c", "echo $REDLATCH_EPOCH"];
        finish(redlatch(shared(), &args)).expect(0).stdout
    };
    let advanced = token(&name, &["advance", "100"]).expect(0);
    assert_eq!(advanced.stdout, "100\n");
    assert_eq!(next_epoch(), "101\n");
    assert_eq!(token(&name, &[]).expect(0).stdout, "101\n");
    let script = "echo $REDLATCH_EPOCH; exec cat";
    let args = ["elect", &name, "--", "sh", "-c", script];
    let leader = Running::start(redlatch(shared(), &args));
    leader.until_stdout("102\n");
    token(&name, &["delete"])
        .expect(75)
        .assert_stderr("the lock is held");
    let shown = finish(redlatch(shared(), &["show", &name])).expect(0);
    assert!(shown.stdout.contains("token 102"), "{shown:#?}");
    leader.release();
    token(&name, &["delete"]).expect(0);
    let keys: Vec<String> = shared().command(&["KEYS", &format!("*{name}*")]);
    assert_eq!(keys, [""; 0]);
    assert_eq!(next_epoch(), "1\n");
}

#[test]
fn token_is_refused_for_another_kind() {
    let name = unique("token");
    let _: String = shared().command(&["SET", &name, "3"]);
    for command in [&["advance", "5"][..], &["delete"], &[]] {
        token(&name, command).expect(65).assert_stderr("not a lock");
    }
}

/// After lost data, one command advances the tokens of all names that a resource has seen.
#[test]
fn tokens_of_a_file_are_advanced() {
    let names = [unique("token"), format!("{} with spaces", unique("token"))];
    let temp_dir = TempDir::new();
    let file = temp_dir.path("tokens");
    let text = format!("{} 7000\n \n{}\t42\r\n", names[0], names[1]);
    std::fs::write(&file, text).unwrap();
    let advance = |file: &str| finish(redlatch(shared(), &["token", "--from-file", file]));
    for _ in 0..2 {
        let lines = format!("{} 7000\n{} 42\n", names[0], names[1]);
        assert_eq!(advance(&file).expect(0).stdout, lines);
    }
    assert_eq!(next_token(&names[0]), "7001\n");
    assert_eq!(next_token(&names[1]), "43\n");

    // White space is part of a name.
    let spaced = format!(" {} ", unique("token"));
    std::fs::write(&file, format!("{spaced}\t5\n")).unwrap();
    assert_eq!(advance(&file).expect(0).stdout, format!("{spaced} 5\n"));
    assert_eq!(next_token(&spaced), "6\n");

    let other = unique("token");
    let text = format!("{other} 5\nnothing\n{other} -1\n{other}  6\n{other} 9223372036854775808\n");
    std::fs::write(&file, text).unwrap();
    let refused = advance(&file).expect(2);
    for line in ["line 2", "line 3", "line 4", "line 5"] {
        assert!(refused.stderr.contains(line), "{refused:#?}");
    }
    assert_eq!(token(&other, &[]).expect(0).stdout, "0\n");
    advance("/no/such/file")
        .expect(71)
        .assert_stderr("/no/such/file");
    finish(redlatch(shared(), &["token"])).expect(2);
    finish(redlatch(shared(), &["token", "--from-file", &file, &other])).expect(2);
}
