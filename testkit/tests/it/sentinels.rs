//! Tests of a master, its replicas and their sentinels.

use redlatch_testkit::{SentinelPlan, Sentinels};

#[test]
fn killed_master_is_replaced() {
    let mut sentinels = Sentinels::start();
    let old = sentinels.master();
    // On one connection, because WAIT covers only the writes of its own connection.
    let written: (String, usize) = redis::pipe()
        .set("key", "value")
        .cmd("WAIT")
        .arg(&[2, 0])
        .query(&mut sentinels.servers()[old].connection())
        .expect("a master");
    assert_eq!(written.1, 2);

    sentinels.kill(old);
    let new = sentinels.await_new_master(old);
    assert_eq!(sentinels.command::<String>(new, &["GET", "key"]), "value");

    sentinels.restart(old);
    sentinels.await_healthy();
    assert_eq!(sentinels.master(), new);
    assert_eq!(sentinels.command::<String>(old, &["GET", "key"]), "value");
}

#[test]
fn master_is_replaced_on_command() {
    let mut sentinels = Sentinels::start();
    sentinels.kill_sentinel(0);
    let new = sentinels.fail_over();
    assert_ne!(new, 0);
    sentinels.restart_sentinel(0);
    sentinels.await_healthy();
    assert_eq!(sentinels.master(), new);
}

#[test]
fn frozen_master_is_replaced_with_passwords() {
    let sentinels = Sentinels::start_with(SentinelPlan {
        server_args: &["--requirepass", "of servers", "--masterauth", "of servers"],
        sentinel_lines: &[
            "requirepass guards",
            "sentinel sentinel-pass guards",
            r#"sentinel auth-pass mymaster "of servers""#,
        ],
        ..SentinelPlan::default()
    });
    let old = sentinels.master();
    sentinels.freeze(old);
    let new = sentinels.await_new_master(old);
    sentinels.thaw(old);
    sentinels.await_healthy();
    assert_eq!(sentinels.master(), new);

    let guard = &sentinels.sentinels()[0];
    assert!(guard.clients() > 0);
    assert_eq!(guard.info("sentinel_masters"), "1");
    guard.cut_all();
}

#[test]
#[cfg(target_os = "linux")]
fn servers_and_sentinels_can_have_separate_addresses() {
    let sentinels = Sentinels::start_with(SentinelPlan {
        separate_addresses: true,
        ..SentinelPlan::default()
    });
    let links: String = sentinels.command(sentinels.master(), &["CLIENT", "LIST"]);
    let replicas = sentinels.servers()[1..].iter();
    for other in replicas.chain(sentinels.sentinels()) {
        let link = format!(" addr={}:", other.address());
        assert!(links.contains(&link), "{link} is not in\n{links}");
    }
}
