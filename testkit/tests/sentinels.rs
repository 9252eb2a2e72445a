//! A master, its replicas and their sentinels.

use redlatch_testkit::Sentinels;

#[test]
fn another_master_is_chosen_when_it_was_killed() {
    let mut sentinels = Sentinels::start();
    let old = sentinels.master();
    // On one connection: only what it wrote is waited for.
    let written: (String, usize) = redis::pipe()
        .set("key", "value")
        .cmd("WAIT")
        .arg(&[2, 0])
        .query(&mut sentinels.servers()[old].connection())
        .expect("a master");
    assert_eq!(written.1, 2);

    sentinels.kill(old);
    let new = sentinels.await_new_master(old);
    assert_eq!(sentinels.ask::<String>(new, &["GET", "key"]), "value");

    sentinels.restart(old);
    sentinels.await_whole();
    assert_eq!(sentinels.master(), new);
    assert_eq!(sentinels.ask::<String>(old, &["GET", "key"]), "value");
}

#[test]
fn another_master_is_chosen_when_told_to() {
    let mut sentinels = Sentinels::start();
    sentinels.kill_sentinel(0);
    let new = sentinels.fail_over();
    assert_ne!(new, 0);
    sentinels.restart_sentinel(0);
    sentinels.await_whole();
    assert_eq!(sentinels.master(), new);
}
