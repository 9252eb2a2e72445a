//! Tests of the cluster: its slots, its nodes and their failovers.

use std::thread;

use redlatch_testkit::{Cluster, ClusterPlan, FailoverMode};

const KEY: &str = "key";

/// Starts the smallest number of masters that can vote.
fn without_replicas() -> Cluster {
    Cluster::start_with(ClusterPlan {
        replicas: 0,
        ..ClusterPlan::default()
    })
}

#[test]
fn replica_replaces_killed_master() {
    let mut cluster = Cluster::start();
    let master = cluster.master_of_key(KEY);
    let replica = cluster.replica_of(master);
    // On one connection, because WAIT covers only the writes of its own connection.
    let written: (String, usize) = redis::pipe()
        .set(KEY, "value")
        .cmd("WAIT")
        .arg(&[1, 0])
        .query(&mut cluster.nodes()[master].connection())
        .expect("a master");
    assert_eq!(written.1, 1);

    cluster.kill(master);
    assert_eq!(cluster.await_master_change(KEY, master), replica);
    assert_eq!(cluster.command::<String>(replica, &["GET", KEY]), "value");

    cluster.restart(master);
    cluster.await_healthy();
    assert_eq!(cluster.master_of_key(KEY), replica);
    assert_eq!(cluster.replica_of(replica), master);
}

#[test]
fn replica_takes_over_on_command() {
    let take_over = |how| {
        let cluster = Cluster::start();
        let master = cluster.master_of_key(KEY);
        let replica = cluster.replica_of(master);
        cluster.fail_over(replica, how);
        assert_eq!(cluster.master_of_key(KEY), replica, "{how:?}");
        cluster.await_healthy();
        assert_eq!(cluster.replica_of(replica), master, "{how:?}");
    };
    thread::scope(|scope| {
        for how in [
            FailoverMode::Graceful,
            FailoverMode::Force,
            FailoverMode::Takeover,
        ] {
            scope.spawn(move || take_over(how));
        }
    });
}

#[test]
fn slot_moves_with_its_keys() {
    let cluster = Cluster::start_with(ClusterPlan {
        replicas: 0,
        args: &["--requirepass", "secret", "--masterauth", "secret"],
        ..ClusterPlan::default()
    });
    let slot = cluster.slot_of(KEY);
    let from = cluster.master_of_key(KEY);
    let to = (from + 1) % 3;
    let keys: Vec<String> = (0..250).map(|n| format!("{{{KEY}}}{n}")).collect();
    for key in &keys {
        let () = cluster.command(from, &["SET", key, "value"]);
    }

    cluster.begin_moving(slot, to);
    let refused = cluster.nodes()[from].try_command::<()>(&["GET", KEY]);
    let refused = refused.expect_err("the key is not here").to_string();
    assert!(refused.to_lowercase().contains("ask"), "{refused}");
    cluster.move_key(&keys[0], to);
    let () = cluster.command(from, &["GET", &keys[1]]);
    let refused = cluster.nodes()[from].try_command::<()>(&["GET", &keys[0]]);
    assert!(refused.is_err(), "the key has moved");
    cluster.move_keys(slot, to);
    assert_eq!(cluster.master_of_key(KEY), from);
    cluster.finish_moving(slot, to);

    assert_eq!(cluster.master_of_key(KEY), to);
    for key in &keys {
        assert_eq!(cluster.command::<String>(to, &["GET", key]), "value");
    }
    cluster.move_slot(slot, from);
    assert_eq!(cluster.master_of_key(KEY), from);
    assert_eq!(cluster.command::<String>(from, &["GET", &keys[0]]), "value");
    cluster.await_healthy();
}

#[test]
fn nodes_join_and_leave() {
    let mut cluster = without_replicas();
    let master = cluster.master_of_key(KEY);
    let () = cluster.command(master, &["SET", KEY, "value"]);
    assert_eq!(cluster.add_node(), 3);
    cluster.move_slot(cluster.slot_of(KEY), 3);
    cluster.remove_node(master);
    assert_eq!(cluster.nodes().len(), 3);
    // Nodes after the removed one have moved up.
    assert_eq!(cluster.master_of_key(KEY), 2);
    assert_eq!(cluster.command::<String>(2, &["GET", KEY]), "value");
}

#[test]
#[cfg(target_os = "linux")]
fn nodes_can_have_separate_addresses() {
    let cluster = Cluster::start_with(ClusterPlan {
        separate_addresses: true,
        ..ClusterPlan::default()
    });
    let master = cluster.master_of_key(KEY);
    let replica = cluster.nodes()[cluster.replica_of(master)].address();
    assert_ne!(cluster.nodes()[master].address(), replica);
    let known: String = cluster.command(master, &["CLUSTER", "NODES"]);
    assert!(known.contains(&format!(" {replica}:")), "{known}");
    let links: String = cluster.command(master, &["CLIENT", "LIST", "TYPE", "replica"]);
    assert!(links.contains(&format!(" addr={replica}:")), "{links}");
}
