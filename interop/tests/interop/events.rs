//! Events: a watch sees what Redisson does.

use std::time::Duration;

use redlatch::Client;
use redlatch::inspect::{Change, Event, HeldBy, Watch};
use redlatch_testkit::unique;

use crate::each_kind;
use crate::kinds::WaitDetector;
use crate::locks::is_acquired;
use crate::peers::LEASE;

/// Returns the next change.
async fn next(watch: &mut Watch) -> Change {
    let event = tokio::time::timeout(Duration::from_secs(60), watch.next()).await;
    match event.expect("an event").unwrap() {
        Event::Changed { change, .. } => change,
        other => panic!("{other:?}"),
    }
}

/// Returns the next change that is not about a waiter, of which only fair locks have any.
async fn next_of_holders(watch: &mut Watch) -> Change {
    loop {
        match next(watch).await {
            Change::Waiting(_) | Change::GaveUp(_) => {}
            change => return change,
        }
    }
}

fn is_owner(by: &HeldBy, field: &str) -> bool {
    let owner = by.owner().map(|owner| owner.as_str());
    owner == Some(field.strip_suffix(":write").unwrap_or(field))
}

each_kind! {
    fn watch_sees_both_sides(pair: &Pair, kind: Kind) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("watched");
        let on = kind.on(&name);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = Client::connect(&pair.server.url()).await.unwrap();
            let mut watch = client.watch(&name);
            assert_eq!(watch.next().await.unwrap(), Event::Synchronized);
            assert!(is_acquired(&a.run(&format!("lock {on} -1 {LEASE}"))));
            let acquired = next_of_holders(&mut watch).await;
            assert!(matches!(&acquired, Change::Acquired(by) if is_owner(by, &kind.field(a))), "{acquired:?}");
            let detector = WaitDetector::new(pair.server, kind, &name, b);
            let waits = b.send(&format!("lock {on} -1 {LEASE}"));
            detector.until_waiting();
            assert!(a.run_bool(&format!("unlock {on}")));
            let released = next_of_holders(&mut watch).await;
            assert!(matches!(&released, Change::Released(by) if is_owner(by, &kind.field(a))), "{released:?}");
            assert!(is_acquired(&detector.woken(waits)));
            let acquired = next_of_holders(&mut watch).await;
            assert!(matches!(&acquired, Change::Acquired(by) if is_owner(by, &kind.field(b))), "{acquired:?}");
            assert!(b.run_bool(&format!("unlock {on}")));
            let released = next_of_holders(&mut watch).await;
            assert!(matches!(&released, Change::Released(by) if is_owner(by, &kind.field(b))), "{released:?}");
        });
    }

    @not_3_16
}
