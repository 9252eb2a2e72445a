//! Client tracking, as observed on a real server.

use super::*;

/// Returns a server, a connection with tracking, and another one.
fn tracked() -> (TestServer, ConnectionId, ConnectionId) {
    let mut test = TestServer::new();
    let (id, other) = (test.connect(), test.connect());
    assert_eq!(test.run(id, "CLIENT TRACKING ON OPTIN NOLOOP"), "+OK");
    (test, id, other)
}

/// Runs a command on another connection. Returns the invalidations to the one with tracking.
fn invalidations(
    test: &mut TestServer,
    id: ConnectionId,
    other: ConnectionId,
    line: &str,
) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let outputs = test.send(other, &words).unwrap();
    sent(&outputs, id)
}

#[test]
fn change_of_a_tracked_key_is_reported_once() {
    let (mut test, id, other) = tracked();
    test.run(id, "CLIENT CACHING YES");
    test.run(id, "GET k");
    test.run(id, "GET not-wanted");
    assert_eq!(invalidations(&mut test, id, other, "SET not-wanted 1"), "");
    assert_eq!(
        invalidations(&mut test, id, other, "SET k 1"),
        ">2 $10 invalidate *1 $1 k"
    );
    assert_eq!(invalidations(&mut test, id, other, "SET k 2"), "");
    assert_eq!(
        invalidations(&mut test, id, other, "FLUSHALL"),
        ">2 $10 invalidate _"
    );
}

#[test]
fn own_change_is_not_reported_and_cancels_earlier_reads() {
    let (mut test, id, other) = tracked();
    test.run(id, "CLIENT CACHING YES");
    test.run(id, "GET k");
    assert_eq!(test.run(id, "SET k 1"), "+OK");
    assert_eq!(invalidations(&mut test, id, other, "SET k 2"), "");
    // Without NOLOOP it is invalidated, after the reply.
    test.run(other, "CLIENT TRACKING ON");
    test.run(other, "GET k");
    assert_eq!(
        test.run(other, "SET k 3"),
        "+OK | >2 $10 invalidate *1 $1 k"
    );
}

#[test]
fn script_reads_all_its_keys_and_must_read_after_its_last_write() {
    let (mut test, id, other) = tracked();
    let wanted = |test: &mut TestServer, source: &str| {
        test.run(id, "CLIENT CACHING YES");
        test.eval(id, source, &["h"]);
        invalidations(test, id, other, "HSET h by other")
    };
    let invalidation_of_h = ">2 $10 invalidate *1 $1 h";
    assert_eq!(
        wanted(
            &mut test,
            "redis.call('HSET', 'h', 'f', 1) return redis.call('HGET', 'h', 'f')"
        ),
        invalidation_of_h
    );
    assert_eq!(
        wanted(
            &mut test,
            "redis.call('HGET', 'h', 'f') redis.call('HSET', 'h', 'f', 1)"
        ),
        ""
    );
    assert_eq!(
        wanted(&mut test, "return redis.call('EXISTS', 'other')"),
        invalidation_of_h
    );
    assert_eq!(wanted(&mut test, "return 1"), "");
}

#[test]
fn expiry_is_reported() {
    let (mut test, id, other) = tracked();
    test.run(other, "SET k v PX 100");
    test.run(id, "CLIENT CACHING YES");
    test.run(id, "GET k");
    test.now += 101;
    let now = test.now();
    let outputs = test.server.delete_expired(now);
    assert_eq!(sent(&outputs, id), ">2 $10 invalidate *1 $1 k");
}
