//! Waiting on a stopped clock, with requests whose answers are scripted.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use redlatch_testkit::Log;

use super::*;
use crate::background::Background;
use crate::background::Counted;
use crate::hold::QueueKind;
use crate::lease::{Expiry, Lease, WaitLimit};
use crate::name::{KeyLayout, ObjectKeys};
use crate::store::embedded::Embedded;
use crate::store::{Store, Subscriber as _};
use crate::test_prelude::SECOND;

type Answer = Result<Outcome<u32>>;

/// A request that records after how many seconds it was sent, and whether it subscribed.
pub(super) struct Scripted {
    begun: Instant,
    answers: VecDeque<Answer>,
    sent: Arc<Mutex<Vec<(u64, bool)>>>,
    progress: Arc<Progress>,
    pub(super) channel: Box<str>,
    pub(super) object: Box<str>,
    pub(super) kind: QueueKind,
    keeps: Option<Duration>,
    pause: Option<Duration>,
    shares_outcome: bool,
    takes_offers: bool,
    /// Whether a release may claim it.
    pub(super) can_be_claimed: bool,
    /// The message that grants the object.
    granted: Option<i64>,
    /// Whether it sends the subscriptions.
    subscribes: bool,
    /// Whether a message arrives while each request is in flight.
    is_overtaken: bool,
    doubts: usize,
    /// After how many seconds of waiting the holder was reported.
    reports: Arc<Mutex<Vec<u64>>>,
    /// Called instead of registering the wait.
    on_register: Option<Arc<dyn Fn() + Send + Sync>>,
    queues: WaitQueues,
}

fn outage() -> Answer {
    Err(Error::ResponseTimeout { after: SECOND })
}

fn wait(seconds: u32) -> Answer {
    Ok(Outcome::Wait(Expiry::In(SECOND * seconds)))
}

pub(super) fn queues() -> WaitQueues {
    queues_of(&Embedded::new(), Background::default())
}

pub(super) fn queues_of(store: &Embedded, background: Background) -> WaitQueues {
    let channels = Arc::<ChannelMap>::default();
    let store = Store::Embedded(store.connect(channels.clone()));
    WaitQueues::new(channels, store.into(), background, 10 * SECOND)
}

/// Creates a request that gets these answers, and never another one.
pub(super) fn scripted(queues: &WaitQueues, answers: impl IntoIterator<Item = Answer>) -> Scripted {
    Scripted {
        begun: Instant::now(),
        answers: answers.into_iter().collect(),
        sent: Arc::default(),
        progress: Arc::default(),
        channel: "channel".into(),
        object: "object".into(),
        kind: QueueKind::Exclusive,
        keeps: None,
        pause: None,
        shares_outcome: true,
        takes_offers: false,
        can_be_claimed: false,
        granted: None,
        subscribes: true,
        is_overtaken: false,
        doubts: 0,
        reports: Arc::default(),
        on_register: None,
        queues: queues.clone(),
    }
}

impl Request for Scripted {
    type Acquired = u32;

    fn place(&self) -> Place<'_> {
        Place {
            queue: self.kind,
            takes_offers: self.takes_offers,
            fails_alone: !self.shares_outcome,
            ..Place::new(&self.channel, &self.object)
        }
    }

    async fn send(&mut self, subscribe: bool) -> Answer {
        let after = self.begun.elapsed().as_secs();
        self.sent.lock().unwrap().push((after, subscribe));
        if self.is_overtaken {
            self.queues.wake(&self.channel);
        }
        let Some(answer) = self.answers.pop_front() else {
            return std::future::pending().await;
        };
        match &answer {
            Ok(_) => {
                self.progress.record_answer();
                if subscribe && self.subscribes {
                    self.queues.channels.confirm(&self.channel);
                }
            }
            Err(error) => self.progress.record_failure(Instant::now(), error.clone()),
        }
        answer
    }

    fn progress(&self) -> &Progress {
        &self.progress
    }

    fn excludes_waiters_for(&self) -> Option<Duration> {
        self.keeps
    }

    fn claim(&self) -> Option<Claim> {
        let (hold, lease) = (Arc::new(()), Lease::WATCHDOG);
        self.can_be_claimed.then_some(Claim { hold, lease })
    }

    fn check_acquired(&mut self) {
        self.doubts += 1;
    }

    /// An offer is the end of the lease.
    fn take(&mut self, offer: Offer, now: Instant) -> Option<(u32, Option<Instant>)> {
        let end = offer.downcast::<Instant>().unwrap();
        (*end > now).then_some((7, Some(*end)))
    }

    async fn accept(&mut self, message: i64) -> Option<u32> {
        assert_ne!(message, 0, "no message");
        self.granted.take_if(|number| *number == message)?;
        Some(8)
    }

    fn reporter(&self) -> impl FnOnce(Instant) -> Boxed<'static, ()> + Send + 'static {
        let reports = self.reports.clone();
        move |since| {
            Box::pin(async move { reports.lock().unwrap().push(since.elapsed().as_secs()) })
        }
    }

    fn registrar(&self) -> impl FnOnce(Instant) -> Option<RegisteredWait> + Send + 'static {
        let on_register = self.on_register.clone();
        move |_| {
            on_register?();
            None
        }
    }

    fn pause(&mut self) -> Option<Duration> {
        self.pause
    }
}

async fn sleep(seconds: u32) {
    tokio::time::sleep(SECOND * seconds).await;
}

#[tokio::test(start_paused = true)]
async fn first_waiter_subscribes_and_retries_at_lease_end() {
    let queues = queues();
    let mut one = scripted(&queues, [wait(10), wait(10), wait(5), Ok(Outcome::Done(1))]);
    assert_eq!(queues.acquire(&mut one, true).await.unwrap(), Some(1));
    let sent = one.sent.lock().unwrap().clone();
    assert_eq!(sent, [(0, false), (0, true), (10, false), (15, false)]);
}

/// The message is mostly of an earlier release. If the object was released since, the check wakes the next waiter.
#[tokio::test(start_paused = true)]
async fn acquisition_with_message_in_flight_is_checked() {
    for (takes_offers, is_overtaken, doubts, next) in [
        (true, false, 0, 60),
        (true, true, 1, 60),
        // Its queue does not know whether the object can be passed on, so the next waiter asks at once.
        (false, true, 0, 0),
    ] {
        let queues = queues();
        let mut one = scripted(&queues, [wait(60), Ok(Outcome::Done(1))]);
        (one.keeps, one.takes_offers) = (Some(60 * SECOND), takes_offers);
        one.is_overtaken = is_overtaken;
        assert_eq!(queues.acquire(&mut one, true).await.unwrap(), Some(1));
        assert_eq!(one.doubts, doubts);
        let waiter = queues.join(&scripted(&queues, []), true);
        queues.channels.confirm("channel");
        drop(waiter);
        let mut two = scripted(&queues, [Ok(Outcome::Done(2))]);
        assert_eq!(queues.acquire(&mut two, true).await.unwrap(), Some(2));
        assert_eq!(two.sent.lock().unwrap()[0].0, next);
    }
}

#[tokio::test(start_paused = true)]
async fn message_makes_first_waiter_retry() {
    let queues = queues();
    let mut one = scripted(
        &queues,
        [wait(60), wait(60), wait(60), Ok(Outcome::Done(1))],
    );
    let sent = one.sent.clone();
    let call = async {
        sleep(3).await;
        queues.wake("another channel");
        sleep(1).await;
        queues.wake("channel");
        sleep(2).await;
        queues.wake("channel");
    };
    let _ = tokio::join!(queues.acquire(&mut one, true), call);
    assert_eq!(sent.lock().unwrap()[2..], [(4, false), (6, false)]);
}

#[tokio::test(start_paused = true)]
async fn waiter_for_endless_hold_retries_on_message() {
    let queues = queues();
    let for_ever = || Ok(Outcome::Wait(Expiry::Never));
    let mut one = scripted(&queues, [for_ever(), for_ever(), Ok(Outcome::Done(1))]);
    let sent = one.sent.clone();
    let call = async {
        sleep(3600).await;
        queues.wake("channel");
    };
    let _ = tokio::join!(queues.acquire(&mut one, true), call);
    assert_eq!(sent.lock().unwrap()[2..], [(3600, false)]);
}

#[tokio::test(start_paused = true)]
async fn request_without_wait_is_sent_once_and_leaves_no_queue() {
    let queues = queues();
    let mut one = scripted(&queues, [wait(10)]);
    assert_eq!(queues.acquire(&mut one, false).await.unwrap(), None);
    assert_eq!(*one.sent.lock().unwrap(), [(0, false)]);
    assert!(!queues.channels.has_queue("channel", "object"));
}

#[tokio::test(start_paused = true)]
async fn polling_attempt_does_not_subscribe() {
    let queues = queues();
    let answers = [wait(60), wait(60), wait(60), Ok(Outcome::Done(1))];
    let mut one = scripted(&queues, answers);
    one.pause = Some(2 * SECOND);
    assert_eq!(queues.acquire(&mut one, true).await.unwrap(), Some(1));
    let sent = one.sent.lock().unwrap().clone();
    assert_eq!(sent, [(0, false), (0, false), (2, false), (4, false)]);
    assert_eq!(queues.channels.subscriptions(), 0);
}

/// The winner at 1 s keeps it for 10 s: no waiter sends a request before 11 s, unless a message arrives.
#[tokio::test(start_paused = true)]
async fn next_waiter_sends_nothing_during_winners_lease() {
    for (message, expected) in [(false, 11_u32), (true, 5)] {
        let queues = queues();
        let mut one = scripted(&queues, [wait(1), wait(1), Ok(Outcome::Done(1))]);
        one.keeps = Some(10 * SECOND);
        let mut two = scripted(&queues, [Ok(Outcome::Done(2))]);
        let sent = two.sent.clone();
        let second = async {
            tokio::task::yield_now().await;
            let won = queues.acquire(&mut two, true).await.unwrap();
            assert_eq!(won, Some(2));
        };
        let call = async {
            sleep(5).await;
            if message {
                queues.wake("channel");
            }
        };
        let (first, (), ()) = tokio::join!(queues.acquire(&mut one, true), second, call);
        assert_eq!(first.unwrap(), Some(1));
        assert_eq!(*sent.lock().unwrap(), [(expected.into(), false)]);
        // The remaining lease was truncated to whole milliseconds.
        let over = two.begun.elapsed() - expected * SECOND;
        assert_eq!(over > Duration::ZERO, !message, "{over:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn outage_fails_whole_queue_unless_of_other_store() {
    for together in [true, false] {
        let queues = queues();
        let mut one = scripted(&queues, [wait(1), wait(1), outage()]);
        one.shares_outcome = together;
        let mut two = scripted(&queues, [Ok(Outcome::Done(2))]);
        let (sent, progress) = (two.sent.clone(), two.progress.clone());
        let second = async {
            tokio::task::yield_now().await;
            queues.acquire(&mut two, true).await
        };
        let (first, second) = tokio::join!(queues.acquire(&mut one, true), second);
        assert!(matches!(first, Err(Error::ResponseTimeout { .. })));
        let failed = matches!(second, Err(Error::ResponseTimeout { .. }));
        assert_eq!(failed, together);
        assert_eq!(sent.lock().unwrap().is_empty(), together);
        let knows_outage = matches!(progress.last_contact(), Some(LastContact::Failed { .. }));
        assert_eq!(knows_outage, together);
    }
}

/// Readers do not wait behind a writer, nor do waiters for `a` behind those for `{a}`.
#[tokio::test(start_paused = true)]
async fn queues_and_objects_of_channel_are_independent() {
    let queues = queues();
    let mut one = scripted(&queues, [wait(60), wait(60)]);
    let mut same = scripted(&queues, [wait(60)]);
    let mut reader = scripted(&queues, [wait(60)]);
    reader.kind = QueueKind::Shared;
    let mut other = scripted(&queues, [wait(60), wait(60)]);
    other.object = "another".into();
    let sent = [&same, &reader, &other].map(|one| one.sent.clone());
    let all = async {
        tokio::join!(
            queues.acquire(&mut one, true),
            queues.acquire_through_queue(&mut same),
            queues.acquire_through_queue(&mut reader),
            queues.acquire_through_queue(&mut other),
        )
    };
    assert!(tokio::time::timeout(SECOND, all).await.is_err());
    let counts = sent.map(|sent| sent.lock().unwrap().len());
    assert_eq!(counts, [0, 1, 1]);
    // They share one subscription.
    assert_eq!(queues.channels.subscriptions(), 1);
}

#[tokio::test(start_paused = true)]
async fn subscription_ends_after_linger_time() {
    let queues = queues();
    let wait_for = async |seconds: u32| {
        let mut one = scripted(&queues, [wait(60), wait(60)]);
        let acquiring = queues.acquire(&mut one, true);
        let waited = tokio::time::timeout(SECOND * seconds, acquiring).await;
        assert!(waited.is_err());
    };
    assert!(!queues.channels.has_queue("channel", "object"));
    wait_for(1).await;
    assert_eq!(queues.channels.subscriptions(), 1);
    assert!(queues.channels.has_queue("channel", "object"));
    assert!(
        !queues.channels.has_queue("channel", "another")
            && !queues.channels.has_queue("another", "object")
    );
    sleep(9).await;
    assert_eq!(queues.channels.subscriptions(), 1);
    // Needed once more, for longer than it would have lasted.
    wait_for(15).await;
    sleep(9).await;
    assert_eq!(queues.channels.subscriptions(), 1);
    sleep(2).await;
    assert_eq!(queues.channels.subscriptions(), 0);
    assert!(!queues.channels.has_queue("channel", "object"));
    wait_for(1).await;
    assert_eq!(queues.channels.subscriptions(), 1);
}

/// One request acquires the lock at 1 s and keeps it for 10 s. Another one joins at 5 s and gets no answer
/// until its wait limit.
#[tokio::test(start_paused = true)]
async fn request_joining_after_release_has_no_answer() {
    let nothing: fn(&WaitQueues) = |_| {};
    // Either the message has arrived, or only this client knows as yet.
    let releases: [fn(&WaitQueues); 2] = [
        |queues| queues.wake("channel"),
        |queues| queues.record_release("channel"),
    ];
    for (release, released) in [(nothing, false), (releases[0], true), (releases[1], true)] {
        let queues = queues();
        let mut one = scripted(&queues, [wait(1), wait(1), Ok(Outcome::Done(1))]);
        one.keeps = Some(10 * SECOND);
        queues.acquire(&mut one, true).await.unwrap();
        sleep(4).await;
        release(&queues);
        let mut two = scripted(&queues, []);
        let (progress, limits) = (
            two.progress.clone(),
            RequestLimits::new(WaitLimit::at_most(SECOND), None),
        );
        let second = queues.within(&limits, &progress, &mut two).await;
        assert_eq!(two.sent.lock().unwrap().len(), usize::from(released));
        match second {
            Ok(won) => assert_eq!((won, released), (None, false)),
            Err(error) => assert!(released, "{error}"),
        }
    }
}

/// Another object on the same channel has waiters. Their contacts do not count.
#[tokio::test(start_paused = true)]
async fn queue_of_other_object_at_channel_has_no_answer() {
    let queues = queues();
    let mut one = scripted(&queues, [wait(60), wait(60)]);
    let mut two = scripted(&queues, []);
    two.object = "other".into();
    let limits = RequestLimits::new(WaitLimit::at_most(5 * SECOND), None);
    let progress = two.progress.clone();
    let second = async {
        tokio::task::yield_now().await;
        queues.within(&limits, &progress, &mut two).await
    };
    tokio::select! {
        first = queues.acquire(&mut one, true) => panic!("{first:?}"),
        second = second => assert!(matches!(second, Err(Error::ResponseTimeout { .. })), "{second:?}"),
    }
}

/// A request for several objects may find a queue before it is sent. That queue may be gone when the request joins.
#[tokio::test(start_paused = true)]
async fn request_whose_queue_has_ended_has_no_answer_unless_it_was_refused() {
    let queues = queues();
    let mut earlier = scripted(&queues, [wait(60), wait(60)]);
    let waiting = tokio::time::timeout(SECOND, queues.acquire(&mut earlier, true));
    assert!(waiting.await.is_err() && queues.channels.has_queue("channel", "object"));
    for was_refused in [false, true] {
        // The linger time ends.
        sleep(20).await;
        assert!(!queues.channels.has_queue("channel", "object"));
        let mut one = scripted(&queues, []);
        if was_refused {
            one.progress.record_answer();
        }
        let progress = one.progress.clone();
        let waiting = tokio::time::timeout(SECOND, queues.acquire_through_queue(&mut one));
        assert!(waiting.await.is_err());
        let is_answered = matches!(progress.last_contact(), Some(LastContact::Answered));
        assert_eq!(is_answered, was_refused);
    }
}

/// Returns how a request with these limits ends, and after how many milliseconds.
async fn within(
    wait_limit: WaitLimit,
    outage: Option<Duration>,
    answers: impl IntoIterator<Item = Answer>,
) -> (Result<Option<u32>>, u128) {
    within_at(&queues(), wait_limit, outage, answers).await
}

/// The same with these wait queues.
async fn within_at(
    queues: &WaitQueues,
    wait_limit: WaitLimit,
    outage: Option<Duration>,
    answers: impl IntoIterator<Item = Answer>,
) -> (Result<Option<u32>>, u128) {
    let mut one = scripted(queues, answers);
    let (progress, begun) = (one.progress.clone(), one.begun);
    let limits = RequestLimits::new(wait_limit, outage.map(Expiry::In));
    let done = queues.within(&limits, &progress, &mut one).await;
    (done, begun.elapsed().as_millis())
}

/// A store that answers within 3 s.
fn queues_with_timeout() -> WaitQueues {
    let store = Embedded::new();
    store.set_response_timeout(3 * SECOND);
    queues_of(&store, Background::default())
}

/// Returns how a request to such a store ends that waits without a limit.
async fn within_timeout(
    outage: Option<Duration>,
    answers: impl IntoIterator<Item = Answer>,
) -> (Result<Option<u32>>, u128) {
    within_at(&queues_with_timeout(), WaitLimit::Endless, outage, answers).await
}

fn not_replicated() -> Answer {
    Err(Error::NotReplicated {
        needed: 1,
        in_sync: 0,
        within: 6 * SECOND,
    })
}

/// A request that is refused, waits for `seconds` and then fails like this `failures` times; repeatedly.
fn tries(seconds: u32, failures: usize, failure: fn() -> Answer) -> impl Iterator<Item = Answer> {
    let one = move |_| std::iter::once(wait(seconds)).chain((0..failures).map(move |_| failure()));
    // The first one is refused before it joins the queue, too.
    let first = std::iter::once(wait(seconds));
    first
        .chain((0..10).flat_map(one))
        .chain([Ok(Outcome::Done(1))])
}

#[tokio::test(start_paused = true)]
async fn without_outage_limit_requests_retry_for_response_timeout() {
    let (failed, after) = within_timeout(None, (0..100).map(|_| outage())).await;
    assert!(matches!(failed, Err(Error::ResponseTimeout { .. })));
    assert!((3_000..4_500).contains(&after), "{after}");
    // The store was reached: its replicas have had their time.
    let (failed, after) = within_timeout(None, [not_replicated()]).await;
    assert!(matches!(failed, Err(Error::NotReplicated { .. })) && after == 0);
    // A longer outage limit counts.
    let longer = Some(8 * SECOND);
    let failing = (0..100).map(|_| outage());
    let (failed, after) = within_timeout(longer, failing).await;
    assert!(
        failed.is_err() && (8_000..9_500).contains(&after),
        "{after}"
    );
}

/// Almost all of the time it awaits the replicas of one more attempt, which has no answer then.
#[tokio::test(start_paused = true)]
async fn wait_limit_while_replicas_are_awaited_again_reports_that_too_few_acknowledged() {
    for (answers, replicas) in [(vec![not_replicated()], true), (vec![outage()], false)] {
        let queues = queues();
        let mut one = scripted(&queues, answers);
        let progress = one.progress.clone();
        let limits = RequestLimits::new(WaitLimit::at_most(5 * SECOND), Some(Expiry::Never));
        let acquiring = queues.within(&limits, &progress, &mut one);
        let next_attempt = async {
            sleep(2).await;
            progress.record_answer();
            progress.expect_answer();
        };
        let (done, ()) = tokio::join!(acquiring, next_attempt);
        let error = done.unwrap_err();
        let is_not_replicated = matches!(error, Error::NotReplicated { .. });
        assert_eq!(is_not_replicated, replicas, "{error:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn failures_within_response_timeout_are_one_outage() {
    let limit = Some(5 * SECOND);
    let (failed, after) = within_timeout(limit, tries(2, 1, outage)).await;
    assert!(
        failed.is_err() && (6_000..8_500).contains(&after),
        "{after}"
    );
    let (won, _) = within_timeout(limit, tries(4, 1, outage)).await;
    assert_eq!(won.unwrap(), Some(1));
    // Replicas were waited for, too, and that may take longer than the limit.
    let limit = Some(4 * SECOND);
    let slow = tries(8, 1, not_replicated);
    let (failed, after) = within_timeout(limit, slow).await;
    assert!(
        failed.is_err() && (16_000..17_000).contains(&after),
        "{after}"
    );
    let slower = tries(10, 1, not_replicated);
    let (won, _) = within_timeout(limit, slower).await;
    assert_eq!(won.unwrap(), Some(1));
}

#[tokio::test(start_paused = true)]
async fn each_outage_starts_with_short_pauses() {
    let hour = Some(3600 * SECOND);
    // Eight pauses: at most 50, 100, 200, 400 and 800 ms, then 1 s each, and at least half of that.
    let (won, after) = within_timeout(hour, tries(10, 8, outage)).await;
    assert_eq!(won.unwrap(), Some(1));
    let pauses = after - 100_000;
    assert!((22_750..46_000).contains(&pauses), "{pauses}");
    // One outage with pauses of a second, except for the first five.
    let (won, after) = within_timeout(hour, tries(0, 8, outage)).await;
    assert_eq!(won.unwrap(), Some(1));
    assert!((38_000..77_000).contains(&after), "{after}");
}

#[tokio::test(start_paused = true)]
async fn outage_is_logged_once() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone());
    let limit = Some(60 * SECOND);
    // With only one subscriber, `tracing` would disable an event for good if another test, which has no subscriber, were
    // the first to log it.
    let _other = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
    let _log = tracing::subscriber::set_default(subscriber.finish());
    let queues = queues_with_timeout();
    let fails = async |limit| {
        let failing = [outage(), outage(), Ok(Outcome::Done(1))];
        let (won, _) = within_at(&queues, WaitLimit::Endless, limit, failing).await;
        assert_eq!(won.unwrap(), Some(1));
        let warning = ["WARN", "the store is unavailable", "channel=\"channel\""];
        log.lines(&warning).len()
    };
    assert_eq!(fails(None).await, 0, "no outage limit");
    assert_eq!(fails(limit).await, 1);
    sleep(12).await;
    assert_eq!(fails(limit).await, 1, "not more than 13 s later");
    sleep(14).await;
    assert_eq!(fails(limit).await, 2, "another outage");
    let waits = [wait(2), wait(2), Ok(Outcome::Done(1))];
    let (won, _) = within_at(&queues, WaitLimit::Endless, None, waits).await;
    assert_eq!(won.unwrap(), Some(1));
    let waiting = log.lines(&["TRACE", "waiting", "channel=\"channel\""]);
    assert!(!waiting.is_empty());
}

/// A request that implements only the required methods.
struct Plain(Scripted);

impl Request for Plain {
    type Acquired = u32;

    fn place(&self) -> Place<'_> {
        Place::new(&self.0.channel, &self.0.object)
    }

    async fn send(&mut self, subscribe: bool) -> Answer {
        self.0.send(subscribe).await
    }

    fn progress(&self) -> &Progress {
        self.0.progress()
    }
}

#[tokio::test(start_paused = true)]
async fn waiter_subscribes_and_represents_its_queue_by_default() {
    let queues = queues();
    let mut one = Plain(scripted(&queues, [wait(5), wait(5), outage()]));
    let mut two = Plain(scripted(&queues, []));
    let second = async {
        tokio::task::yield_now().await;
        queues.acquire(&mut two, true).await
    };
    let (first, second) = tokio::join!(queues.acquire(&mut one, true), second);
    assert!(first.is_err() && second.is_err(), "they fail together");
    assert_eq!(
        *one.0.sent.lock().unwrap(),
        [(0, false), (0, true), (5, false)]
    );
    assert_eq!(two.0.begun.elapsed().as_secs(), 5);
}

#[tokio::test(start_paused = true)]
async fn last_contact_decides_at_wait_limit() {
    let limit = || WaitLimit::at_most(5 * SECOND);
    let (answered, after) = within(limit(), None, [wait(60), wait(60)]).await;
    assert_eq!((answered.unwrap(), after / 10), (None, 500));
    let (won, after) = within(limit(), None, [wait(2), wait(2), Ok(Outcome::Done(1))]).await;
    assert_eq!((won.unwrap(), after / 1000), (Some(1), 2));
    let hour = Some(3600 * SECOND);
    let (failed, after) = within(limit(), hour, (0..1000).map(|_| outage())).await;
    assert!(matches!(failed, Err(Error::ResponseTimeout { after }) if after == SECOND));
    assert_eq!(after / 10, 500);
    // Without any contact it waits a moment longer.
    let (unanswered, after) = within(limit(), None, []).await;
    let waited = 5 * SECOND;
    assert!(matches!(unanswered, Err(Error::ResponseTimeout { after }) if after == waited));
    assert_eq!(after / 10, 505);
}

#[tokio::test(start_paused = true)]
async fn waiting_lasts_through_outage_until_limit() {
    let limit = Some(10 * SECOND);
    let (failed, after) = within(WaitLimit::Endless, limit, (0..1000).map(|_| outage())).await;
    assert!(matches!(failed, Err(Error::ResponseTimeout { .. })));
    assert!((10_000..11_500).contains(&after), "{after}");
    let short = (0..4).map(|_| outage()).chain([Ok(Outcome::Done(1))]);
    let (won, _) = within(WaitLimit::Endless, limit, short).await;
    assert_eq!(won.unwrap(), Some(1));
    // Errors that waiting does not fix, and outages without a limit, fail at once.
    let (failed, after) = within(WaitLimit::Endless, None, [outage()]).await;
    assert!(failed.is_err() && after == 0);
    let refused = || Err(Error::AlreadyHeld { name: "a".into() });
    let (failed, after) = within(WaitLimit::Endless, limit, [refused()]).await;
    assert!(failed.is_err() && after == 0);
    let (failed, after) = within(WaitLimit::None, limit, [outage()]).await;
    assert!(failed.is_err() && after == 0);
    let (refused, after) = within(WaitLimit::None, limit, [wait(5)]).await;
    assert_eq!((refused.unwrap(), after), (None, 0));
}

/// One request acquires the lock at 1 s and keeps it for 10 s. The second one relies on that, and the third one
/// waits behind it.
#[tokio::test(start_paused = true)]
async fn request_behind_one_that_relies_on_the_winner_is_answered() {
    let queues = queues();
    let mut one = scripted(&queues, [wait(1), wait(1), Ok(Outcome::Done(1))]);
    one.keeps = Some(10 * SECOND);
    queues.acquire(&mut one, true).await.unwrap();
    let (mut two, mut three) = (scripted(&queues, []), scripted(&queues, []));
    let limits = RequestLimits::new(WaitLimit::at_most(SECOND), None);
    let progress = three.progress.clone();
    let third = async {
        tokio::task::yield_now().await;
        queues.within(&limits, &progress, &mut three).await
    };
    tokio::select! {
        second = queues.acquire(&mut two, true) => panic!("{second:?}"),
        third = third => assert_eq!(third.unwrap(), None),
    }
}

#[tokio::test(start_paused = true)]
async fn queue_without_answers_has_no_contact() {
    let queues = queues();
    let waiter = queues.join(&scripted(&queues, []), true);
    let (contacts, joined) = (waiter.contacts(), Instant::now());
    waiter.request_ended(Some(LastContact::Answered));
    assert!(matches!(
        contacts.contact_since(joined),
        Some(LastContact::Answered)
    ));
    waiter.queue(|queue| queue.request_started(Instant::now()));
    assert!(
        contacts.contact_since(joined).is_none(),
        "not answered since it joined"
    );
    tokio::time::advance(SECOND).await;
    waiter.queue(|queue| queue.request_started(Instant::now()));
    assert!(contacts.contact_since(joined).is_none());
    let earlier = joined - SECOND;
    assert!(matches!(
        contacts.contact_since(earlier),
        Some(LastContact::Answered)
    ));
    waiter.request_ended(Some(LastContact::Answered));
    assert!(matches!(
        contacts.contact_since(joined),
        Some(LastContact::Answered)
    ));
    let error = Error::ResponseTimeout { after: SECOND };
    let since = Instant::now();
    waiter.request_ended(Some(LastContact::Failed { since, error }));
    assert!(
        matches!(contacts.contact_since(joined), Some(LastContact::Failed { since: s, .. }) if s == since)
    );
    drop(waiter);
    assert!(
        contacts.contact_since(Instant::now()).is_none(),
        "all have left"
    );
}

/// The object of [`scripted`] requests that may take an offer of it.
fn object() -> ObjectKeys {
    ObjectKeys::new(KeyLayout::Lock, "", "object")
}

/// Creates a request for `object()` that is refused once, and then waits.
fn taker(queues: &WaitQueues, answers: impl IntoIterator<Item = Answer>) -> Scripted {
    let answers = [wait(60), wait(60)].into_iter().chain(answers);
    let mut one = scripted(queues, answers);
    (one.channel, one.takes_offers) = (object().channel().into(), true);
    one
}

fn offer(queues: &WaitQueues, end: Instant) {
    assert!(
        queues.offer(&object(), Share::Whole, Instant::now(), |_| Some(
            Counted::for_test(Box::new(end))
        ))
    );
}

/// It sends no request for the hold. After an offer, the next waiter sends none before the lease
/// has ended; after a grant, at once.
#[tokio::test(start_paused = true)]
async fn first_waiter_takes_offer_or_grant_instead_of_request() {
    for is_offer in [true, false] {
        let queues = queues();
        let (mut one, mut two) = (taker(&queues, []), taker(&queues, []));
        let begun = one.begun;
        let end = begun + 10 * SECOND;
        one.granted = Some(5);
        two.answers = [Ok(Outcome::Done(2))].into();
        let sent = [one.sent.clone(), two.sent.clone()];
        let second = async {
            tokio::task::yield_now().await;
            let acquired = queues.acquire(&mut two, true).await;
            match is_offer {
                true => assert!(end < Instant::now() && end.elapsed() < SECOND),
                false => assert_eq!(begun.elapsed(), SECOND),
            }
            acquired
        };
        let call = async {
            sleep(1).await;
            match is_offer {
                true => offer(&queues, end),
                false => queues.channels.on_message(object().channel(), "5"),
            }
        };
        let (first, second, ()) = tokio::join!(queues.acquire(&mut one, true), second, call);
        assert_eq!(first.unwrap(), Some(if is_offer { 7 } else { 8 }));
        assert_eq!(second.unwrap(), Some(2));
        let counts = sent.map(|sent| sent.lock().unwrap().len());
        assert_eq!(counts, [2, 1]);
    }
}

/// An offer that cannot be used, and a message that grants nothing, make it send a request.
#[tokio::test(start_paused = true)]
async fn first_waiter_sends_request_if_it_cannot_use_offer_or_message() {
    let queues = queues();
    let mut one = taker(&queues, [wait(60), wait(60), Ok(Outcome::Done(1))]);
    one.granted = Some(5);
    let call = async {
        sleep(1).await;
        offer(&queues, Instant::now());
        sleep(1).await;
        queues.channels.on_message(object().channel(), "6");
        sleep(1).await;
        queues.wake(object().channel());
    };
    let (first, ()) = tokio::join!(queues.acquire(&mut one, true), call);
    assert_eq!(first.unwrap(), Some(1));
    let sent: Vec<_> = one.sent.lock().unwrap().iter().map(|sent| sent.0).collect();
    assert_eq!(sent, [0, 0, 1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn waiter_takes_no_offer_by_default() {
    let queues = queues();
    let mut one = Plain(taker(&queues, []));
    let waiting = tokio::time::timeout(2 * SECOND, queues.acquire(&mut one, true));
    let call = async {
        sleep(1).await;
        assert!(
            !queues.offer(&object(), Share::Whole, Instant::now(), |_| unreachable!(
                "no waiter takes it"
            ))
        );
    };
    assert!(tokio::join!(waiting, call).0.is_err());
}

#[tokio::test(start_paused = true)]
async fn subscription_that_was_not_sent_is_sent_with_next_request() {
    let queues = queues();
    let answers = [wait(1), wait(1), wait(1), Ok(Outcome::Done(1))];
    let mut one = scripted(&queues, answers);
    one.subscribes = false;
    queues.acquire(&mut one, true).await.unwrap();
    let subscribed: Vec<_> = one.sent.lock().unwrap().iter().map(|sent| sent.1).collect();
    assert_eq!(subscribed, [false, true, true, true]);
}

#[tokio::test(start_paused = true)]
async fn holder_is_reported_after_30_s() {
    for (waits, reports) in [(29, vec![]), (40, vec![30])] {
        let queues = queues();
        let mut one = scripted(&queues, [wait(waits), wait(waits), Ok(Outcome::Done(1))]);
        assert_eq!(queues.acquire(&mut one, true).await.unwrap(), Some(1));
        assert_eq!(*one.reports.lock().unwrap(), reports);
    }
}

#[tokio::test(start_paused = true)]
async fn error_that_is_no_outage_ends_request_in_outage() {
    let refused = || Err(Error::AlreadyHeld { name: "a".into() });
    let answers = [outage(), refused(), Ok(Outcome::Done(1))];
    let (failed, _) = within(WaitLimit::Endless, Some(10 * SECOND), answers).await;
    assert!(matches!(failed, Err(Error::AlreadyHeld { .. })));
}

/// A failure while the waiter registers its wait.
#[tokio::test(start_paused = true)]
async fn waiter_misses_no_failure_while_it_registers() {
    let queues = queues();
    let mut second = scripted(&queues, []);
    let first = Arc::new(queues.join(&second, true));
    let failing = first.clone();
    second.on_register = Some(Arc::new(move || {
        let (since, error) = (Instant::now(), outage().unwrap_err());
        failing.request_ended(Some(LastContact::Failed { since, error }));
        failing.fail_all();
    }));
    let remind = async {
        assert!(matches!(first.turn(None).await, Turn::First { .. }));
        sleep(2).await;
        // Without an outage that is a reminder.
        first.fail_all();
    };
    let failed = tokio::time::timeout(3 * SECOND, queues.acquire(&mut second, true));
    let (failed, ()) = tokio::join!(failed, remind);
    assert!(matches!(failed, Ok(Err(Error::ResponseTimeout { .. }))));
}

/// A request that is kept but not polled does not keep an offer.
#[tokio::test(start_paused = true)]
async fn offer_that_is_not_taken_is_dropped_after_10_ms() {
    let queues = queues();
    let object = object();
    let _waiter = queues.join(&taker(&queues, []), true);
    let offered = Arc::new(());
    let offer = |_| {
        let offer: Offer = Box::new(offered.clone());
        Some(Counted::for_test(offer))
    };
    for _ in 0..2 {
        assert!(queues.offer(&object, Share::Whole, Instant::now(), offer));
        tokio::time::sleep(Duration::from_millis(9)).await;
        assert_eq!(Arc::strong_count(&offered), 2);
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert_eq!(Arc::strong_count(&offered), 1);
    }
    assert!(queues.offer(&object, Share::Whole, Instant::now(), offer));
    queues.drop_offers();
    assert_eq!(Arc::strong_count(&offered), 1);
    assert!(!queues.offer(&object, Share::Whole, Instant::now(), |_| None));
}

/// The waiter is in another runtime than the release.
#[test]
fn offer_is_dropped_although_the_runtime_that_made_it_has_ended() {
    let background = Background::default();
    let queues = queues_of(&Embedded::new(), background.clone());
    let [staying, ending] = [(); 2].map(|()| background.runtime_for_test());
    let _waiter = staying.block_on(async { queues.join(&taker(&queues, []), true) });
    let offered = Arc::new(());
    ending.block_on(async {
        let offer: Offer = Box::new(offered.clone());
        let offer = |_| Some(Counted::for_test(offer));
        assert!(queues.offer(&object(), Share::Whole, Instant::now(), offer));
        tokio::task::yield_now().await;
    });
    drop(ending);
    assert_eq!(Arc::strong_count(&offered), 2);
    staying.block_on(async { tokio::time::sleep(SECOND).await });
    assert_eq!(Arc::strong_count(&offered), 1);
}
