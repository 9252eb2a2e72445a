//! The count-down latch.

use redlatch_testkit::unique;

use crate::both_ways;
use crate::peers::{assert_nothing_left, until_subscribed};

both_ways! {
    fn waiters_of_both_sides_return_when_it_opens(pair: &Pair) {
        let name = unique("latch");
        let channel = format!("redisson_countdownlatch__channel__{{{name}}}");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("set-count {name} 3")));
        assert!(!b.run_bool(&format!("set-count {name} 7")));
        let waiting = [pair.a, pair.b, pair.b]
            .map(|peer| peer.new_worker().send(&format!("await {name} -1")));
        until_subscribed(pair.server, &channel, 2);
        assert!(a.run_bool(&format!("count-down {name}")));
        assert!(b.run_bool(&format!("count-down {name}")));
        for worker in [a, b] {
            assert_eq!(worker.run_number(&format!("count {name}")), 1);
            assert!(!worker.run_bool(&format!("await {name} 50")));
        }
        assert!(waiting.iter().all(|waits| waits.is_pending()));
        assert!(b.run_bool(&format!("count-down {name}")));
        for waits in waiting {
            assert_eq!(waits.value(), true);
        }
        for worker in [a, b] {
            assert_eq!(worker.run_number(&format!("count {name}")), 0);
            assert!(worker.run_bool(&format!("await {name} -1")));
            assert!(worker.run_bool(&format!("await {name} 0")));
        }
        assert_nothing_left(pair.server, &name);
    }

    fn it_is_used_again(pair: &Pair) {
        let name = unique("again");
        let channel = format!("redisson_countdownlatch__channel__{{{name}}}");
        for (sets, opens) in [(pair.a, pair.b), (pair.b, pair.a)] {
            let (sets, opens) = (sets.new_worker(), opens.new_worker());
            assert!(sets.run_bool(&format!("set-count {name} 1")));
            let waits = opens.send(&format!("await {name} -1"));
            until_subscribed(pair.server, &channel, 1);
            assert!(waits.is_pending());
            assert!(sets.run_bool(&format!("count-down {name}")));
            assert_eq!(waits.value(), true);
        }
        assert_nothing_left(pair.server, &name);
    }

    fn deleting_it_wakes_the_other_sides_waiters(pair: &Pair) {
        let name = unique("deleted");
        let channel = format!("redisson_countdownlatch__channel__{{{name}}}");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("set-count {name} 5")));
        let waits = b.send(&format!("await {name} -1"));
        until_subscribed(pair.server, &channel, 1);
        assert!(a.run_bool(&format!("delete-latch {name}")));
        assert!(!a.run_bool(&format!("delete-latch {name}")));
        assert_eq!(waits.value(), true);
    }
}
