//! A master, its replicas and their sentinels.

use redlatch_testkit::Sentinels;

#[test]
fn another_master_is_chosen_when_it_was_killed() {
    let t = std::time::Instant::now();
    let mut sentinels = Sentinels::start();
    eprintln!("start {:?}", t.elapsed());
    let old = sentinels.master();
    assert_eq!(old, 0);
    let () = sentinels.ask(old, &["SET", "key", "value"]);
    let copies: usize = sentinels.ask(old, &["WAIT", "2", "0"]);
    assert_eq!(copies, 2);

    let t = std::time::Instant::now();
    sentinels.kill(old);
    let new = sentinels.await_new_master(old);
    eprintln!("kill {:?}", t.elapsed());
    assert_ne!(new, old);
    assert_eq!(sentinels.ask::<String>(new, &["GET", "key"]), "value");

    let t = std::time::Instant::now();
    sentinels.restart(old);
    sentinels.await_whole();
    eprintln!("whole {:?}", t.elapsed());
    assert_eq!(sentinels.master(), new);
    assert_eq!(sentinels.ask::<String>(old, &["GET", "key"]), "value");
    let t = std::time::Instant::now();
    sentinels.fail_over();
    eprintln!("fail_over {:?}", t.elapsed());
    sentinels.await_whole();
    eprintln!("whole {:?}", t.elapsed());
    let t = std::time::Instant::now();
    drop(sentinels);
    eprintln!("drop {:?}", t.elapsed());
}
