use super::*;
use crate::Embedded;
use crate::background::Background;
use crate::name::KeyLayout;
use crate::wait::WaitQueues;
use crate::wait::tests::{queues, queues_of, scripted};
use crate::wait::waiter::Waiter;

const LINGER: Duration = Duration::from_secs(10);

fn join(queues: &WaitQueues, object: &str) -> Waiter {
    let mut attempt = scripted(queues, []);
    (attempt.channel, attempt.object) = ("c".into(), object.into());
    queues.join(&attempt, true)
}

/// Returns the number of objects with queues on the channel `c`.
fn objects(queues: &WaitQueues) -> usize {
    queues.sizes()[1].1
}

/// In a cluster this may be the end of an earlier subscription, at another node.
#[test]
fn ended_subscription_may_have_to_be_ended_again() {
    let entry = ChannelEntry::new("c".into(), Metrics::default().subscription());
    let subscription = entry.subscription.clone();
    *subscription.state.lock() = Subscribed;
    let channels = ChannelMap::default();
    channels.entries.lock().insert("c".into(), entry);
    channels.on_unsubscribed("c");
    assert!(subscription.may_be_subscribed());
    *subscription.state.lock() = NotSubscribed;
    channels.on_unsubscribed("c");
    assert!(!subscription.may_be_subscribed());
}

#[test]
fn subscription_being_ended_is_not_used() {
    let entry = ChannelEntry::new("c".into(), Metrics::default().subscription());
    let subscription = entry.subscription;
    *subscription.state.lock() = Subscribed;
    subscription.begin_ending();
    assert!(subscription.may_be_subscribed() && !subscription.is_subscribed());
}

#[test]
fn channel_is_removed_unless_waiter_joins() {
    let channels = ChannelMap::default();
    channels.find_or_add("c", |entry| entry.waiters = 1);
    channels.closed("c");
    assert!(!channels.is_empty());
    channels.find("c", |entry| entry.waiters = 0);
    channels.closed("c");
    assert!(channels.is_empty());
}

#[tokio::test(start_paused = true)]
async fn subscription_is_sent_until_confirmed_and_again_after_its_end() {
    let queues = queues();
    let is_subscribed = || queues.channels.is_subscribed("c");
    let waiter = join(&queues, "object");
    assert!(!is_subscribed());
    assert!(waiter.subscription.begin() && waiter.subscription.begin());
    assert!(!is_subscribed());
    queues.channels.confirm(waiter.channel());
    assert!(!waiter.subscription.begin());
    assert!(is_subscribed() && !queues.channels.is_subscribed("another"));
    queues.channels.on_unsubscribed("c");
    // The answer to a request without a subscription confirms none.
    queues.channels.confirm(waiter.channel());
    assert!(!is_subscribed() && waiter.subscription.begin());
}

/// Feared most: the request relies on the subscription of another one, which is not there yet, and
/// misses a message.
#[tokio::test(start_paused = true)]
async fn answer_from_before_the_end_of_a_subscription_does_not_confirm_the_next_one() {
    let queues = queues();
    let is_subscribed = || queues.channels.is_subscribed("c");
    let [first, second] = [(); 2].map(|()| join(&queues, "object"));
    assert!(first.subscription.begin());
    let ends = queues.channels.subscription_ends("c");
    queues.channels.on_unsubscribed("c");
    assert!(second.subscription.begin());
    queues.channels.on_subscribed("c", ends);
    assert!(!is_subscribed() && first.subscription.begin());
    queues.channels.confirm("c");
    assert!(is_subscribed());
}

/// A waiter that joins and leaves within the linger time restarts it, with the same task.
#[tokio::test(start_paused = true)]
async fn linger_time_starts_after_last_waiter() {
    let queues = queues();
    for _ in 0..3 {
        let waiter = join(&queues, "object");
        waiter.subscription.begin();
        queues.channels.confirm(waiter.channel());
        drop(waiter);
        tokio::time::sleep(LINGER / 2).await;
        let tasks = tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks();
        assert_eq!((queues.channels.subscriptions(), tasks), (1, 1));
    }
    tokio::time::sleep(LINGER / 2 - Duration::from_millis(10)).await;
    assert_eq!(queues.channels.subscriptions(), 1);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(queues.channels.subscriptions(), 0);
    assert!(queues.channels.entries.lock().is_empty());
}

/// A client may outlive the runtimes of its requests.
#[test]
fn subscription_ends_although_the_runtime_of_its_last_waiter_has_ended() {
    let background = Background::default();
    let queues = queues_of(&Embedded::new(), background.clone());
    let staying = background.runtime_for_test();
    for leaves_before in [true, false] {
        let ending = background.runtime_for_test();
        ending.block_on(async {
            let waiter = join(&queues, "object");
            waiter.subscription.begin();
            queues.channels.confirm(waiter.channel());
            let waiting = async move {
                let _waiter = waiter;
                std::future::pending::<()>().await;
            };
            match leaves_before {
                true => drop(waiting),
                false => drop(tokio::spawn(waiting)),
            }
            tokio::task::yield_now().await;
        });
        drop(ending);
        assert_eq!(queues.channels.subscriptions(), 1);
        staying.block_on(async { tokio::time::sleep(2 * LINGER).await });
        assert_eq!(queues.channels.subscriptions(), 0, "{leaves_before}");
        assert!(queues.channels.entries.lock().is_empty());
    }
}

/// The values of a group share a channel.
#[tokio::test(start_paused = true)]
async fn objects_without_waiters_go_while_the_channel_has_waiters() {
    let queues = queues();
    let _waits = [join(&queues, "a"), join(&queues, "z")];
    for value in 0..1000 {
        let waiter = join(&queues, &format!("value {value}"));
        assert_eq!(objects(&queues), 3 + value.min(MAX_IDLE));
        drop(waiter);
    }
    // The latest keep what they know.
    let is_known = |value| queues.channels.has_queue("c", &format!("value {value}"));
    assert!(is_known(999) && is_known(1000 - MAX_IDLE) && !is_known(999 - MAX_IDLE));
    // Each waiter makes its object the latest.
    let again = join(&queues, &format!("value {}", 1000 - MAX_IDLE));
    drop((again, join(&queues, "another")));
    assert!(is_known(1000 - MAX_IDLE) && !is_known(1001 - MAX_IDLE));
    let [first, last] = ["a", "z"].map(|object| queues.channels.has_queue("c", object));
    assert!(first && last);
}

/// The release that has claimed its waiter may still take effect.
#[tokio::test(start_paused = true)]
async fn object_with_transfer_in_flight_stays() {
    let queues = queues();
    let object = ObjectKeys::new(KeyLayout::Lock, "", "a");
    let channel = object.channel();
    let join = |key: &str| {
        let mut attempt = scripted(&queues, []);
        (attempt.channel, attempt.object) = (channel.into(), key.into());
        attempt.can_be_claimed = true;
        queues.join(&attempt, true)
    };
    let _waits = join("waits");
    let waiter = join(object.key());
    let mut claimed = queues.claim_first(&object).unwrap();
    claimed.request_started();
    drop(waiter);
    let idle = || (0..2 * MAX_IDLE).for_each(|value| drop(join(&value.to_string())));
    idle();
    assert!(queues.channels.has_queue(channel, object.key()));
    drop(claimed);
    idle();
    assert!(!queues.channels.has_queue(channel, object.key()));
    assert_eq!(objects(&queues), 1 + MAX_IDLE);
}
