//! Tests with sentinels and on a cluster, configured only by the URL.

use redlatch_testkit::{
    SentinelPlan, Sentinels, Server, TlsPlan, shared_cluster, shared_sentinels, unique,
};

use crate::support::*;

/// CMD keeps running during a failover; a waiter is served after it.
#[test]
fn cmd_keeps_running_during_failover() {
    let mut sentinels = Sentinels::start();
    let name = unique("failover");
    let run = |script: &str| {
        let options = ["run", "--response-timeout", "1m", "--watchdog", "30s"];
        let mut command =
            clean_command(&[&options[..], &[&name, "--", "sh", "-c", script]].concat());
        command.env("REDLATCH_URL", sentinels.url());
        Running::start(command)
    };
    let mut holder = run("echo begun; cat; echo over");
    holder.until_stdout("begun");
    let waiter = run("echo mine");
    let channel = format!("redisson_lock__channel:{{{name}}}");
    let master = sentinels.master();
    let until_subscribed = |sentinels: &Sentinels, master| {
        until(
            "the waiter is subscribed, and the holder for requests",
            || {
                let (_, subscribers): (String, i64) =
                    sentinels.command(master, &["PUBSUB", "NUMSUB", &channel]);
                subscribers == 2
            },
        );
    };
    until_subscribed(&sentinels, master);
    sentinels.kill(master);
    let master = sentinels.await_new_master(master);
    until_subscribed(&sentinels, master);
    holder.close_stdin();
    let held = holder.finish().expect(0);
    assert_eq!(held.stdout, "begun\nover\n", "{held:#?}");
    let waited = waiter.finish().expect(0);
    assert_eq!(waited.stdout, "mine\n", "{waited:#?}");
}

/// The sentinels and the master speak only TLS.
#[test]
fn sentinels_with_tls() {
    let sentinels = Sentinels::start_with(SentinelPlan {
        replicas: 0,
        sentinels: 1,
        quorum: 1,
        tls: Some(TlsPlan::default()),
        ..SentinelPlan::default()
    });
    let temp_dir = TempDir::new();
    let ca = temp_dir.path("ca");
    std::fs::write(&ca, sentinels.ca().unwrap().pem()).unwrap();
    let run = |options: &[&str]| {
        let mut command =
            clean_command(&[&["run", "-n"], options, &[&unique("tls"), "--", "true"]].concat());
        command.env("REDLATCH_URL", sentinels.url());
        finish(command)
    };
    // On a busy machine the only sentinel may not answer in time.
    let in_time = |options: &[&str]| {
        let mut answered = None;
        until("the sentinel answers", || {
            answered = Some(run(options)).filter(|run| !run.stderr.contains("no answer within"));
            answered.is_some()
        });
        answered.expect("an answer")
    };
    in_time(&["--tls-ca", &ca]).expect(0);
    in_time(&[]).expect(69).assert_stderr("tls_ca");
}

/// The options differ for the servers and for the sentinels, which have users of their own.
#[test]
fn refused_login_names_the_options_for_its_server() {
    let run = |user: &str, password: &str| {
        let mut command = clean_command(&["run", "--wait", "1m", &unique("login"), "--", "true"]);
        command.env("REDLATCH_URL", shared_sentinels().url());
        command.envs([(user, "nobody"), (password, "x")]);
        finish(command).expect(69)
    };
    run("REDLATCH_SENTINEL_USERNAME", "REDLATCH_SENTINEL_PASSWORD")
        .assert_stderr("refused the login")
        .assert_stderr("--sentinel-password-file");
    let refused = run("REDLATCH_USERNAME", "REDLATCH_PASSWORD").assert_stderr("--password-file");
    assert!(!refused.stderr.contains("--sentinel"), "{refused:#?}");
}

/// It is no outage, whose end a command would wait for.
#[test]
fn unknown_name_of_the_master_is_refused() {
    let url = shared_sentinels().url();
    let (sentinels, _) = url.rsplit_once('/').unwrap();
    let mut command = clean_command(&["run", &unique("unknown"), "--", "true"]);
    command.env("REDLATCH_URL", format!("{sentinels}/nobody"));
    let message = "no sentinel knows a master called \"nobody\"";
    finish(command).expect(69).assert_stderr(message);
}

/// Without the required replicas no lock is granted, and the reason is printed.
#[test]
fn missing_replicas_are_reported() {
    let server = Server::start();
    let name = unique("no-replicas");
    // At the wait limit, mostly the replicas of a repeated attempt are awaited.
    for option in ["--no-wait", "--outage-limit=1s", "--wait=4s"] {
        let args = ["run", "--replicas", "1", option, &name, "--", "true"];
        let ended = finish(redlatch(&server, &args)).expect(69);
        let last = ended.stderr.lines().last().unwrap();
        assert!(last.contains("0 of 1 required replicas"), "{ended:#?}");
        assert!(last.contains("`--replicas`"), "{ended:#?}");
        assert!(!ended.stderr.contains("held by"), "{ended:#?}");
    }
    assert!(!is_held(&server, &name));
    let args = ["run", "--replicas", "some", &name, "--", "true"];
    finish(redlatch(&server, &args))
        .expect(2)
        .assert_stderr("all, majority, off or a number");
    let args = ["run", "--replicas", "off", &name, "--", "true"];
    finish(redlatch(&server, &args)).expect(0);
}

/// Names in several slots are held together, shown and listed.
#[test]
fn cluster_is_one_store() {
    let tag = unique("several");
    let names: Vec<String> = (0..8).map(|i| format!("{tag}:{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let on_cluster = |args: &[&str]| {
        let mut command = clean_command(args);
        command.env("REDLATCH_URL", shared_cluster().url());
        command
    };
    let script = ["--", "sh", "-c", "echo $$; exec cat"];
    let holder = Running::start(on_cluster(&[&["run"], &names[..], &script].concat()));
    holder.until_stdout("\n");
    let listed = finish(on_cluster(&["ls", &format!("{tag}:*")]))
        .expect(0)
        .stdout;
    for name in &names {
        assert_eq!(listed.matches(name).count(), 1, "{name} in {listed}");
    }
    finish(on_cluster(&["run", "--no-wait", names[3], "--", "true"])).expect(75);
    finish(on_cluster(&["latch", names[0], "wait"])).expect(65);
    holder.release();
    let listed = finish(on_cluster(&["ls", &format!("{tag}:*")]))
        .expect(0)
        .stdout;
    assert!(!listed.contains(&tag), "{listed}");
}
