//! The count-down latch.

use redlatch_testkit::unique;

use crate::both_ways;
use crate::peers::{nothing_left, until_subscribed};

both_ways! {
    fn waiters_of_both_sides_return_when_it_opens(pair: &Pair) {
        let name = unique("latch");
        let channel = format!("redisson_countdownlatch__channel__{{{name}}}");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("set-count {name} 3")));
        assert!(!b.does(&format!("set-count {name} 7")));
        let waiting = [pair.a, pair.b, pair.b]
            .map(|peer| peer.new_worker().tell(&format!("await {name} -1")));
        until_subscribed(pair.server, &channel, 2);
        assert!(a.does(&format!("count-down {name}")));
        assert!(b.does(&format!("count-down {name}")));
        for worker in [a, b] {
            assert_eq!(worker.number(&format!("count {name}")), 1);
            assert!(!worker.does(&format!("await {name} 50")));
        }
        assert!(waiting.iter().all(|waits| waits.is_under_way()));
        assert!(b.does(&format!("count-down {name}")));
        for waits in waiting {
            assert_eq!(waits.value(), true);
        }
        for worker in [a, b] {
            assert_eq!(worker.number(&format!("count {name}")), 0);
            assert!(worker.does(&format!("await {name} -1")));
            assert!(worker.does(&format!("await {name} 0")));
        }
        nothing_left(pair.server, &name);
    }

    fn it_is_used_again(pair: &Pair) {
        let name = unique("again");
        let channel = format!("redisson_countdownlatch__channel__{{{name}}}");
        for (sets, opens) in [(pair.a, pair.b), (pair.b, pair.a)] {
            let (sets, opens) = (sets.new_worker(), opens.new_worker());
            assert!(sets.does(&format!("set-count {name} 1")));
            let waits = opens.tell(&format!("await {name} -1"));
            until_subscribed(pair.server, &channel, 1);
            assert!(waits.is_under_way());
            assert!(sets.does(&format!("count-down {name}")));
            assert_eq!(waits.value(), true);
        }
        nothing_left(pair.server, &name);
    }

    fn deleting_it_wakes_the_other_sides_waiters(pair: &Pair) {
        let name = unique("deleted");
        let channel = format!("redisson_countdownlatch__channel__{{{name}}}");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("set-count {name} 5")));
        let waits = b.tell(&format!("await {name} -1"));
        until_subscribed(pair.server, &channel, 1);
        assert!(a.does(&format!("delete-latch {name}")));
        assert!(!a.does(&format!("delete-latch {name}")));
        assert_eq!(waits.value(), true);
    }
}
