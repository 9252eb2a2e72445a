use std::time::Duration;

use super::*;

#[test]
fn key_is_visible_up_to_its_date_and_never_after() {
    let mut test = TestServer::new();
    let id = test.connect();
    assert_eq!(test.run(id, "SET k v PX 100"), "+OK");
    test.now += 100;
    assert_eq!(test.run(id, "GET k"), "$1 v");
    assert_eq!(test.run(id, "PTTL k"), ":0");
    test.now += 1;
    for (command, answer) in [
        ("DBSIZE", ":0"),
        ("KEYS *", "*0"),
        ("SCAN 0", "*2 $1 0 *0"),
        ("EXISTS k", ":0"),
        ("PTTL k", ":-2"),
        ("TYPE k", "+none"),
        ("DEL k", ":0"),
        ("GET k", "_"),
    ] {
        assert_eq!(test.run(id, command), answer, "{command}");
    }
}

#[test]
fn expired_value_is_not_continued() {
    let mut test = TestServer::new();
    let id = test.connect();
    test.run(id, "HSET h a 1 b 2");
    test.run(id, "SET n 5 PX 100");
    assert_eq!(test.run(id, "PEXPIRE h 100"), ":1");
    test.now += 101;
    assert_eq!(test.run(id, "HSET h c 3"), ":1");
    assert_eq!(test.run(id, "HLEN h"), ":1");
    assert_eq!(test.run(id, "PTTL h"), ":-1");
    assert_eq!(test.run(id, "INCR n"), ":1");
    assert_eq!(test.run(id, "PTTL n"), ":-1");
}

#[test]
fn dates_are_exact() {
    let mut test = TestServer::new();
    let id = test.connect();
    test.run(id, "SET k v PX 1500");
    assert_eq!(test.run(id, "PEXPIRETIME k"), ":1001500");
    assert_eq!(test.run(id, "TTL k"), ":2", "rounded up from the half");
    test.now += 1;
    assert_eq!(test.run(id, "TTL k"), ":1");
    assert_eq!(test.run(id, "PEXPIRE k 1000 GT"), ":0");
    assert_eq!(test.run(id, "PEXPIRE k 1000 LT"), ":1");
    assert_eq!(test.run(id, "PTTL k"), ":1000");
    assert_eq!(test.run(id, "SET k w KEEPTTL"), "+OK");
    assert_eq!(test.run(id, "PTTL k"), ":1000");
    assert_eq!(test.run(id, "PEXPIREAT k 1000001"), ":1", "now is too late");
    assert_eq!(test.run(id, "EXISTS k"), ":0");
}

#[test]
fn time_is_constant_in_a_script() {
    let mut test = TestServer::new();
    let id = test.connect();
    let source = "local one = redis.call('TIME') redis.call('SET', KEYS[1], 'v', 'PX', 1)
                  local other = redis.call('TIME')
                  return { one[1], one[2], other[2], redis.call('PTTL', KEYS[1]) }";
    let now = Duration::from_micros(1_700_000_000_123_456);
    let outputs = test
        .server
        .receive(id, &command(&["EVAL", source, "1", "k"]), now);
    let answer = sent(&outputs.unwrap(), id);
    assert_eq!(answer, "*4 $10 1700000000 $6 123456 $6 123456 :1");
}

#[test]
fn delete_expired_removes_expired_keys() {
    let mut test = TestServer::new();
    let id = test.connect();
    test.run(id, "SET k v PX 100");
    test.run(id, "SET j v PX 200");
    test.server
        .delete_expired(Duration::from_millis(test.now + 101));
    // The clock is set back: deleted keys stay deleted.
    assert_eq!(test.run(id, "KEYS *"), "*1 $1 j");
}

/// A client counts a reader's lease from before the server does, so its hold lasts in the millisecond in which the key shows
/// 0 ms. Another reader's release must not free the lock for a writer then.
#[test]
fn reader_is_alive_in_the_last_millisecond_of_its_lease() {
    const RELEASE: &str = concat!(
        include_str!("../../../../redlatch/src/locks/read_write/readers.lua"),
        include_str!("../../../../redlatch/src/locks/read_write/read_release.lua"),
    );
    const RENEW: &str = concat!(
        include_str!("../../../../redlatch/src/locks/read_write/readers.lua"),
        include_str!("../../../../redlatch/src/locks/read_write/read_renew.lua"),
    );
    for (passed, alive) in [(99, true), (100, true), (101, false)] {
        let mut test = TestServer::new();
        let id = test.connect();
        test.run(id, "HSET {name} mode read id:1 1 id:2 1");
        test.run(id, "PEXPIRE {name} 200");
        test.run(id, "SET {name}:id:1:rwlock_timeout:1 1 PX 100");
        test.run(id, "SET {name}:id:2:rwlock_timeout:1 1 PX 200");
        test.now += passed;
        let renew = [
            "EVAL",
            RENEW,
            "1",
            "{name}",
            "0",
            "id:1",
            "{name}:id:1:rwlock_timeout",
            "channel",
        ];
        assert_eq!(
            test.run_args(id, &renew),
            format!("*1 :{}", u8::from(alive))
        );
        let release = [
            "EVAL", RELEASE, "1", "{name}", "id:2", "channel", "0", "0", "{name}:",
        ];
        assert_eq!(test.run_args(id, &release), ":1");
        assert_eq!(
            test.run(id, "EXISTS {name}"),
            format!(":{}", u8::from(alive)),
            "{passed}"
        );
    }
}
