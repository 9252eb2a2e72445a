//! Client tracking, as observed on a real server.

use super::*;

/// Returns a server, a connection with tracking, and another one.
fn tracked() -> (Stage, ConnectionId, ConnectionId) {
    let mut stage = Stage::new();
    let (id, other) = (stage.connect(), stage.connect());
    assert_eq!(stage.ask(id, "CLIENT TRACKING ON OPTIN NOLOOP"), "+OK");
    (stage, id, other)
}

/// Runs a command on another connection. Returns the invalidations to the one with tracking.
fn told(stage: &mut Stage, id: ConnectionId, other: ConnectionId, line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let outputs = stage.send(other, &words).unwrap();
    sent(&outputs, id)
}

#[test]
fn change_of_a_tracked_key_is_reported_once() {
    let (mut stage, id, other) = tracked();
    stage.ask(id, "CLIENT CACHING YES");
    stage.ask(id, "GET k");
    stage.ask(id, "GET not-wanted");
    assert_eq!(told(&mut stage, id, other, "SET not-wanted 1"), "");
    assert_eq!(
        told(&mut stage, id, other, "SET k 1"),
        ">2 $10 invalidate *1 $1 k"
    );
    assert_eq!(told(&mut stage, id, other, "SET k 2"), "");
    assert_eq!(
        told(&mut stage, id, other, "FLUSHALL"),
        ">2 $10 invalidate _"
    );
}

#[test]
fn own_change_is_not_reported_and_cancels_earlier_reads() {
    let (mut stage, id, other) = tracked();
    stage.ask(id, "CLIENT CACHING YES");
    stage.ask(id, "GET k");
    assert_eq!(stage.ask(id, "SET k 1"), "+OK");
    assert_eq!(told(&mut stage, id, other, "SET k 2"), "");
    // Without NOLOOP it is invalidated, after the reply.
    stage.ask(other, "CLIENT TRACKING ON");
    stage.ask(other, "GET k");
    assert_eq!(
        stage.ask(other, "SET k 3"),
        "+OK | >2 $10 invalidate *1 $1 k"
    );
}

#[test]
fn script_reads_all_its_keys_and_must_read_after_its_last_write() {
    let (mut stage, id, other) = tracked();
    let wanted = |stage: &mut Stage, source: &str| {
        stage.ask(id, "CLIENT CACHING YES");
        stage.eval(id, source, &["h"]);
        told(stage, id, other, "HSET h by other")
    };
    let told_of_h = ">2 $10 invalidate *1 $1 h";
    assert_eq!(
        wanted(
            &mut stage,
            "redis.call('HSET', 'h', 'f', 1) return redis.call('HGET', 'h', 'f')"
        ),
        told_of_h
    );
    assert_eq!(
        wanted(
            &mut stage,
            "redis.call('HGET', 'h', 'f') redis.call('HSET', 'h', 'f', 1)"
        ),
        ""
    );
    assert_eq!(
        wanted(&mut stage, "return redis.call('EXISTS', 'other')"),
        told_of_h
    );
    assert_eq!(wanted(&mut stage, "return 1"), "");
}

#[test]
fn expiry_is_reported() {
    let (mut stage, id, other) = tracked();
    stage.ask(other, "SET k v PX 100");
    stage.ask(id, "CLIENT CACHING YES");
    stage.ask(id, "GET k");
    stage.now += 101;
    let now = stage.now();
    let outputs = stage.server.delete_expired(now);
    assert_eq!(sent(&outputs, id), ">2 $10 invalidate *1 $1 k");
}
