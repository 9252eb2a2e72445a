//! URLs, names and cluster answers: every part of an address is understood or refused.

// Names

mod names {
    use redlatch::{Client, Error};
    use redlatch_testkit::{shared_cluster, unique};

    use super::super::common::{self, Stand, soon};
    use crate::on_store;

    crate::on_every_store! {
        a_name_whose_braces_enclose_no_hash_tag_is_refused_by_every_kind,
    }

    /// Its keys, or its channel, would lie in different slots of a cluster. Refused on every store, so that a
    /// program that works on one server works in a cluster.
    async fn a_name_whose_braces_enclose_no_hash_tag_is_refused_by_every_kind(stand: Stand) {
        let client = stand.client().await;
        for braces in ["}b", "{b", "{}b", "}{", "{}{b}"] {
            let name = unique("braces") + braces;
            let sides = client.read_write_lock(&name);
            for error in [
                client.lock(&name).try_lock().await.err(),
                client.spin_lock(&name).try_lock().await.err(),
                client.fair_lock(&name).try_lock().await.err(),
                client.fenced_lock(&name).try_lock().await.err(),
                sides.read().try_lock().await.err(),
                sides.write().try_lock().await.err(),
                client.semaphore(&name).try_set_permits(1).await.err(),
                client.semaphore(&name).try_acquire().await.err(),
                client.expirable_semaphore(&name).try_acquire().await.err(),
                client.count_down_latch(&name).try_set_count(1).await.err(),
                client.count_down_latch(&name).wait().await.err(),
                client.lock(&name).force_unlock().await.err(),
                client.inspect(&name).await.err(),
            ] {
                let error = error.unwrap();
                assert!(matches!(error, Error::InvalidName { .. }), "{error}");
                let said = error.to_string();
                assert!(said.contains("hash tag, as in \"{order}:7\""), "{said}");
            }
        }
    }

    /// What other programs keep in a cluster under such names does not keep it from being listed.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_key_that_cannot_be_a_name_here_does_not_end_a_listing() {
        let cluster = shared_cluster();
        let client = Client::connect(&cluster.url()).await.unwrap();
        let shared = unique("listed");
        for foreign in [format!("{shared}}}b"), format!("{shared}{{b")] {
            let owner = cluster.owner_of(&foreign);
            let () = cluster.ask(owner, &["HSET", &foreign, "c:1", "1"]);
        }
        let lock = client.lock(&format!("{shared}:mine"));
        let _guard = lock.lock().await.unwrap();
        let mut listing = client.list(&format!("{shared}*"));
        let mut names = Vec::new();
        while let Some(found) = soon("listed", listing.next()).await.unwrap() {
            names.push(found.name);
        }
        assert_eq!(names, [lock.name()]);
    }
}
