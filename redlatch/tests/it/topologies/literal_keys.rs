//! Proxies that accept a script only if each of its calls names its key as `KEYS[n]` (Alibaba Cloud does).

use redlatch::Result;

use crate::common::imitations::Imitation;
use crate::common::prelude::*;

/// What such a proxy says.
const REFUSAL: &str = "ERR bad lua script for redis cluster, all the keys that the script uses should be passed using the KEYS array, \
     and KEYS should not be in expression";

/// Returns whether each call names its key as `KEYS[n]`, or has none.
fn has_literal_keys(script: &str) -> bool {
    let lines = script
        .lines()
        .filter(|line| !line.trim_start().starts_with("--"));
    let script: String = lines.collect();
    let calls = script.split("call('").skip(1);
    let is_literal = |call: &str| {
        let (command, args) = call.split_once('\'').unwrap();
        let key = args.trim_start_matches([',', ' ']);
        let number = key
            .strip_prefix("KEYS[")
            .and_then(|key| key.split_once(']'));
        let is_number = number.is_some_and(|(number, _)| number.parse::<u32>().is_ok());
        is_number || ["TIME", "PUBLISH", "PUBSUB"].contains(&command)
    };
    calls.into_iter().all(is_literal)
}

/// Feared most: a proxy accepts the script that acquires, and neither renewals nor releases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_acquired_that_could_not_be_renewed_or_released() {
    let server = Server::start();
    let proxy = Imitation {
        refuses_script: Some(|script| (!has_literal_keys(script)).then_some(REFUSAL)),
        ..Imitation::default()
    };
    let client = Client::connect(&proxy.start(&server).await).await.unwrap();
    let direct = Client::connect(&server.url()).await.unwrap();
    assert!(direct.semaphore("s").try_set_permits(1).await.unwrap());
    let permits = direct.expirable_semaphore("e");
    assert!(permits.try_set_permits(1).await.unwrap());
    direct.flush().await;
    let keys = || {
        let mut keys: Vec<String> = server.command(&["KEYS", "*"]);
        keys.retain(|key| !key.starts_with("redlatch_client:"));
        keys.sort();
        keys
    };
    let before = keys();
    fn refusal<T>(result: Result<T>) -> Option<Error> {
        result.err()
    }
    let multi = MultiLock::new(["m1", "m2"].map(|name| client.lock(name)));
    let read_write = client.read_write_lock("rw");
    let refusals = [
        refusal(client.lock("lock").try_lock().await),
        refusal(client.lock("lock").lock().await),
        refusal(client.fair_lock("fair").try_lock().await),
        refusal(client.fenced_lock("fenced").try_lock().await),
        refusal(client.spin_lock("spin").try_lock().await),
        refusal(client.group_lock("group", "value").try_lock().await),
        refusal(read_write.read().try_lock().await),
        refusal(read_write.write().try_lock().await),
        refusal(client.semaphore("s").try_acquire().await),
        refusal(client.expirable_semaphore("e").try_acquire().await),
        refusal(multi.try_lock().await),
        refusal(client.once("once", "slot").begin().await),
        refusal(client.election("election").campaign("value").await),
    ];
    for (number, refusal) in refusals.iter().enumerate() {
        let Some(Error::Refused { reason, .. }) = refusal else {
            panic!("{number}: {refusal:?}");
        };
        assert!(reason.contains(REFUSAL), "{number}: {reason}");
        let is_explained = reason.contains("connect to a server without this proxy");
        assert!(is_explained, "{number}: {reason}");
    }
    assert_eq!(keys(), before);
}
