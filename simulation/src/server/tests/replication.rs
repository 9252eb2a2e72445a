use super::super::{Effect, Snapshot};
use super::*;

const REPLICA: (&str, u16) = ("127.0.0.1", 7001);

/// Returns a master with a replica, and a connection to each.
fn pair() -> (TestServer, ConnectionId, TestServer, ConnectionId) {
    let (mut master, mut replica) = (TestServer::new(), TestServer::new());
    let (id, at_replica) = (master.connect(), replica.connect());
    master.run(id, "SET before 1");
    let data = master.server.attach_replica(REPLICA.0, REPLICA.1);
    replica
        .server
        .become_replica("127.0.0.1", 7000, data)
        .unwrap();
    (master, id, replica, at_replica)
}

/// Brings the replica up to date.
fn replicate(master: &mut TestServer, replica: &mut TestServer) {
    for effects in master.server.take_effects() {
        let now = replica.now();
        replica.server.apply(&effects, now);
    }
}

#[test]
fn replica_applies_changes_of_the_master() {
    let (mut master, id, mut replica, at_replica) = pair();
    assert_eq!(replica.run(at_replica, "GET before"), "$1 1");
    master.run(id, "HSET h a 1");
    master.run(id, "RPUSH l x y");
    master.run(id, "ZADD z 5 m");
    master.run(id, "SET k v PX 100");
    master.run(id, "DEL before");
    assert_eq!(replica.run(at_replica, "KEYS *"), "*1 $6 before");
    replicate(&mut master, &mut replica);
    assert_eq!(master.server.snapshot(), replica.server.snapshot());
    master.run(id, "FLUSHALL");
    master.run(id, "SET after 1");
    replicate(&mut master, &mut replica);
    assert_eq!(master.server.snapshot(), replica.server.snapshot());
    assert_eq!(master.run(id, "ROLE").matches("127.0.0.1").count(), 1);
    assert!(
        replica
            .run(at_replica, "ROLE")
            .starts_with("*5 $5 slave $9 127.0.0.1 :7000 $9 connected")
    );
}

#[test]
fn script_is_one_record() {
    let (mut master, id, ..) = pair();
    let source = "redis.call('SET', KEYS[1], 1) redis.call('PUBLISH', 'c', 'm') redis.call('SET', KEYS[2], 2)
                  redis.call('INCR', KEYS[1]) return redis.call('GET', KEYS[1])";
    assert_eq!(master.eval(id, source, &["a", "b"]), "$1 2");
    let records = master.server.take_effects();
    let [record] = records.as_slice() else {
        panic!("{records:?}");
    };
    assert_eq!(record.changes.len(), 3);
    assert!(matches!(record.changes[2], Effect::Published { .. }));
    assert_eq!(record.offset, master.server.offset());
}

#[test]
fn replica_delivers_messages_of_the_master() {
    let (mut master, id, mut replica, at_replica) = pair();
    replica.run(at_replica, "SUBSCRIBE c");
    master.run(id, "PUBLISH c hello");
    let effects = master.server.take_effects();
    let outputs = replica.server.apply(&effects[0], Duration::ZERO);
    assert_eq!(sent(&outputs, at_replica), ">3 $7 message $1 c $5 hello");
}

#[test]
fn replica_refuses_writes_and_leaves_expiry_to_the_master() {
    let (mut master, id, mut replica, at_replica) = pair();
    master.run(id, "SET k v PX 100");
    replicate(&mut master, &mut replica);
    let refusal = "-READONLY You can't write against a read only replica.";
    assert_eq!(replica.run(at_replica, "SET k w"), refusal);
    let source = "return redis.call('DEL', KEYS[1])";
    assert!(
        replica
            .eval(at_replica, source, &["k"])
            .starts_with(refusal)
    );
    replica.now += 101;
    assert_eq!(replica.run(at_replica, "GET k"), "_");
    // By the master's clock the key has not expired.
    replica.now -= 50;
    assert_eq!(replica.run(at_replica, "GET k"), "$1 v");
    master.now += 101;
    assert_eq!(master.run(id, "GET k"), "_");
    replicate(&mut master, &mut replica);
    assert_eq!(replica.run(at_replica, "GET k"), "_");
    replica.server.become_master();
    assert_eq!(replica.run(at_replica, "SET k w"), "+OK");
}

#[test]
fn wait_returns_when_enough_replicas_acknowledge() {
    let (mut master, id, _, _) = pair();
    assert_eq!(
        master.run(id, "WAIT 0 0"),
        ":1",
        "the replica began with this"
    );
    master.run(id, "SET k v");
    let offset = master.server.offset();
    // Commands behind it wait, too.
    let bytes = [command(&["WAIT", "1", "1000"]), command(&["GET", "k"])].concat();
    let now = master.now();
    assert_eq!(master.server.receive(id, &bytes, now), Ok(Vec::new()));
    let late = now + Duration::from_millis(1000);
    assert_eq!(master.server.next_deadline(), Some(late));
    let outputs = master
        .server
        .acknowledge(REPLICA.0, REPLICA.1, offset - 1, now);
    assert_eq!(outputs, Ok(Vec::new()));
    let outputs = master.server.acknowledge(REPLICA.0, REPLICA.1, offset, now);
    assert_eq!(sent(&outputs.unwrap(), id), ":1 | $1 v");
    assert_eq!(master.server.next_deadline(), None);
}

#[test]
fn wait_ends_in_time() {
    let (mut master, id, _, _) = pair();
    master.run(id, "SET k v");
    assert_eq!(master.run(id, "WAIT 1 1000"), "");
    master.now += 999;
    let now = master.now();
    assert_eq!(master.server.advance(now), Ok(Vec::new()));
    let now = now + Duration::from_millis(1);
    assert_eq!(sent(&master.server.advance(now).unwrap(), id), ":0");
}

#[test]
fn deposed_master_refuses_blocked_wait() {
    let (mut master, id, _, _) = pair();
    master.run(id, "SET k v");
    assert_eq!(master.run(id, "WAIT 1 0"), "");
    let outputs = master
        .server
        .become_replica("127.0.0.1", 7001, Snapshot::default());
    let outputs = sent(&outputs.unwrap(), id);
    assert!(
        outputs.starts_with("-UNBLOCKED") && outputs.ends_with("closed"),
        "{outputs}"
    );
    assert_eq!(master.server.connections(), 0);
}

#[test]
fn server_loads_a_snapshot_of_another() {
    let (mut master, id, _, _) = pair();
    master.run(id, "SET k v PX 100");
    let mut restarted = TestServer::new();
    restarted.server.load(master.server.snapshot());
    let id = restarted.connect();
    assert_eq!(restarted.run(id, "PTTL k"), ":100");
}
