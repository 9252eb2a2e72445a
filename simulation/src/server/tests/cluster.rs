use super::super::{ClusterView, Node, SLOTS, SlotRange, slot};
use super::*;

fn node(name: &str, port: u16) -> Node {
    Node {
        id: name.repeat(40),
        host: "127.0.0.1".into(),
        port,
    }
}

/// Returns one node's view of a cluster of two nodes: `a` has the lower half of the slots.
fn view(me: &str) -> ClusterView {
    let range = |first, last, master| SlotRange {
        first,
        last,
        master,
        replicas: Vec::new(),
    };
    ClusterView {
        me: me.repeat(40),
        epoch: 3,
        is_ok: true,
        is_hidden: false,
        slots: vec![
            range(0, SLOTS / 2 - 1, node("a", 7000)),
            range(SLOTS / 2, SLOTS - 1, node("b", 7001)),
        ],
        migrating: Default::default(),
        importing: Default::default(),
    }
}

#[test]
fn slots_are_those_of_the_specification() {
    for (key, expected) in [
        ("123456789", 0x31c3),
        ("foo", 12182),
        ("{b}1", 3300),
        ("{b}{a}", 3300),
        ("b", 3300),
        ("{user1000}.following", slot(b"user1000")),
    ] {
        assert_eq!(slot(key.as_bytes()), expected, "{key}");
        assert_eq!(
            slot(key.as_bytes()),
            redlatch_testkit::slot_of(key.as_bytes()),
            "{key}"
        );
    }
    assert_ne!(slot(b"{}a"), slot(b"{}b"));
}

#[test]
fn node_redirects_clients_to_the_master_of_the_slot() {
    let mut test = TestServer::new();
    test.server.set_cluster(view("a"));
    let id = test.server.connect();
    let hello = test.run(id, "HELLO 3");
    assert!(hello.contains("$4 mode $7 cluster"), "{hello}");
    // b: 3300, a: 15495
    assert_eq!(test.run(id, "SET b 1"), "+OK");
    assert_eq!(test.run(id, "SET a 1"), "-MOVED 15495 127.0.0.1:7001");
    assert_eq!(
        test.run(id, "EXISTS a b"),
        "-CROSSSLOT Keys in request don't hash to the same slot"
    );
    assert_eq!(test.run(id, "SPUBLISH a m"), "-MOVED 15495 127.0.0.1:7001");
    assert_eq!(test.run(id, "PUBLISH a m"), ":0");
    assert_eq!(
        test.server.take_broadcasts(),
        [(b"a".to_vec(), b"m".to_vec())]
    );
    assert_eq!(
        test.eval(id, "return redis.call('GET', KEYS[1])", &["a"]),
        "-MOVED 15495 127.0.0.1:7001"
    );
    let refusal = "-ERR Script attempted to access a non local key in a cluster node";
    assert!(
        test.eval(id, "return redis.call('GET', 'a')", &["b"])
            .starts_with(refusal)
    );
    let slots = test.run(id, "CLUSTER SLOTS");
    assert!(
        slots.starts_with("*2 *3 :0 :8191 *4 $9 127.0.0.1 :7000 $40 aaaa"),
        "{slots}"
    );
    test.server.set_cluster(ClusterView {
        slots: Vec::new(),
        ..view("a")
    });
    assert_eq!(test.run(id, "GET b"), "-CLUSTERDOWN Hash slot not served");
    test.server.set_cluster(ClusterView {
        is_ok: false,
        ..view("a")
    });
    assert_eq!(test.run(id, "GET b"), "-CLUSTERDOWN The cluster is down");
}

#[test]
fn slot_that_moves_is_served_by_both_nodes() {
    let (mut from, mut to) = (TestServer::new(), TestServer::new());
    let mut leaving = view("a");
    leaving.migrating.insert(3300, node("b", 7001));
    let mut arriving = view("b");
    arriving.importing.insert(3300);
    from.server.set_cluster(leaving);
    to.server.set_cluster(arriving);
    let (id, other) = (from.connect(), to.connect());
    // One slot that stays and one that moves.
    let now = from.now();
    from.server.set_cluster(view("a"));
    from.run(id, "SET {b}stays 1");
    from.run(id, "SET {b}goes 1");
    let mut leaving = view("a");
    leaving.migrating.insert(3300, node("b", 7001));
    from.server.set_cluster(leaving);
    assert_eq!(from.server.keys_in_slot(3300, now).len(), 2);
    let entry = from.server.take_key(b"{b}goes", now).unwrap();
    to.server.put_key(b"{b}goes", entry, now);

    let retry_later = "-TRYAGAIN Multiple keys request during rehashing of slot";
    assert_eq!(from.run(id, "GET {b}stays"), "$1 1");
    assert_eq!(from.run(id, "GET {b}goes"), "-ASK 3300 127.0.0.1:7001");
    assert_eq!(from.run(id, "EXISTS {b}stays {b}goes"), retry_later);
    assert_eq!(
        from.run(id, "EXISTS {b}x {b}goes"),
        "-ASK 3300 127.0.0.1:7001"
    );
    let refusal = "-ERR Script attempted to access a non local key in a cluster node";
    let source = "return redis.call('SET', '{b}new', 1)";
    assert!(from.eval(id, source, &["{b}stays"]).starts_with(refusal));
    assert_eq!(to.run(other, "GET {b}goes"), "-MOVED 3300 127.0.0.1:7000");
    assert_eq!(to.run(other, "ASKING"), "+OK");
    assert_eq!(to.run(other, "GET {b}goes"), "$1 1");
    assert_eq!(
        to.run(other, "GET {b}goes"),
        "-MOVED 3300 127.0.0.1:7000",
        "for one command"
    );
    to.run(other, "ASKING");
    assert_eq!(to.run(other, "EXISTS {b}stays {b}goes"), retry_later);
    to.run(other, "ASKING");
    assert_eq!(to.eval(other, source, &["{b}new"]), "+OK");
}

#[test]
fn subscriptions_end_when_a_node_loses_the_slot() {
    let mut test = TestServer::new();
    test.server.set_cluster(view("a"));
    let id = test.connect();
    assert_eq!(
        test.run(id, "SSUBSCRIBE {b}c"),
        ">3 $10 ssubscribe $4 {b}c :1"
    );
    assert_eq!(
        test.run(id, "SPUBLISH {b}c m"),
        ">3 $8 smessage $4 {b}c $1 m | :1"
    );
    let mut after = view("a");
    after.slots[0].master = node("b", 7001);
    let outputs = test.server.set_cluster(after);
    assert_eq!(sent(&outputs, id), ">3 $12 sunsubscribe $4 {b}c :0");
}

#[test]
fn sentinel_names_the_master_and_publishes_a_change() {
    let mut test = TestServer::new();
    test.server = Server::sentinel(config());
    let id = test.connect();
    test.server.set_master("main", "10.0.0.1", 6379, 0);
    test.run(id, "SUBSCRIBE +switch-master");
    let query = "SENTINEL GET-MASTER-ADDR-BY-NAME main";
    assert_eq!(test.run(id, query), "*2 $8 10.0.0.1 $4 6379");
    assert_eq!(test.run(id, "SENTINEL GET-MASTER-ADDR-BY-NAME other"), "_");
    let outputs = test.server.set_master("main", "10.0.0.2", 6380, 1);
    let message = "main 10.0.0.1 6379 10.0.0.2 6380";
    assert!(sent(&outputs, id).ends_with(message));
    assert_eq!(test.run(id, query), "*2 $8 10.0.0.2 $4 6380");
    assert!(
        test.run(id, "SENTINEL MASTER main")
            .ends_with("$12 config-epoch $1 1")
    );
    assert!(
        test.send(id, &["GET", "k"]).is_err(),
        "a Sentinel has no data"
    );
}
