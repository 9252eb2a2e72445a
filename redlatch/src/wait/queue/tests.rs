use super::*;
use crate::hold::QueueKind;
use crate::test_prelude::SECOND;

use QueueKind::{Exclusive, Shared};

const MILLI: Duration = Duration::from_millis(1);
/// The queues of an object and a clock. Each waiter is woken by its number.
struct World {
    queues: Queues<u64, u32, char>,
    now: Instant,
    is_subscribed: bool,
    share: Share,
}

impl World {
    fn new() -> World {
        World {
            queues: Queues::new(),
            now: Instant::now(),
            is_subscribed: true,
            share: Share::Whole,
        }
    }

    /// Adds a waiter whose request the store has answered.
    fn add(&mut self, kind: QueueKind, served_by: ServedBy<char>) -> u64 {
        self.queues.queue(kind).record_answer();
        self.queues.join(kind, self.share, served_by, self.now)
    }

    fn join(&mut self, kind: QueueKind) -> u64 {
        self.add(kind, ServedBy::RequestsOnly)
    }

    fn taker(&mut self) -> u64 {
        self.add(Exclusive, ServedBy::Offers)
    }

    fn claimable(&mut self, claim: char) -> u64 {
        self.add(Exclusive, ServedBy::Claim(claim.into()))
    }

    /// Puts the waiter to sleep, if it sleeps.
    fn sleep(&mut self, kind: QueueKind, number: u64, sleeps: bool) {
        let sleeper = self.queues.queue(kind).sleeper(number);
        *sleeper.expect("a waiter") = sleeps.then_some(number);
    }

    fn turn(&mut self, kind: QueueKind, number: u64) -> Turn {
        let turn = self.queues.turn(kind, number, self.now, self.is_subscribed);
        self.sleep(kind, number, matches!(turn, Turn::Sleep));
        turn
    }

    /// Returns what the first waiter does.
    fn next(&mut self, number: u64) -> Next<u32> {
        let next = self.queues.exclusive().next(self.now);
        self.sleep(Exclusive, number, matches!(next, Next::Sleep(_)));
        next
    }

    fn becomes_first(&mut self, number: u64) {
        assert!(matches!(self.turn(Exclusive, number), Turn::First { .. }));
    }

    /// Makes a waiter the first, and has the store refuse its request for a minute.
    fn be_refused(&mut self, number: u64) {
        self.becomes_first(number);
        self.yields(number);
    }

    /// Has the store refuse the request that the waiter sends.
    fn answer(&mut self, number: u64) {
        self.queues.exclusive().request_started(self.now);
        self.queues.answered(Exclusive, Some(LastContact::Answered));
        let due = Some(self.now + 60 * SECOND);
        self.queues.exclusive().refused(due);
        assert!(self.sleeps(number));
    }

    fn sleeps(&mut self, number: u64) -> bool {
        let queue = self.queues.exclusive();
        match queue.first.is_some() && queue.foremost() == Some(number) {
            true => matches!(self.next(number), Next::Sleep(_)),
            false => matches!(self.turn(Exclusive, number), Turn::Sleep),
        }
    }

    /// Lets so many other clients go first.
    fn yield_to(&mut self, others: usize) {
        let queue = self.queues.exclusive();
        queue.yield_to(Yields::counted(others), || 0.5);
    }

    fn leave(&mut self, number: u64) -> Option<u64> {
        self.queues.leave(Exclusive, number).wake
    }

    /// Offers the whole object, or permits. Returns the waiter that is woken; `Err` if no waiter
    /// takes it.
    fn offer(&mut self, offer: u32) -> Result<Option<u64>, ()> {
        if !self.queues.takes_offer(self.share) {
            return Err(());
        }
        let (wake, outdated) = self.queues.exclusive().offer(offer, self.share, self.now);
        assert_eq!(outdated, Vec::<u32>::new());
        Ok(wake)
    }

    /// Has the first waiter take this offer and leave. Returns the waiter that is woken.
    fn take(&mut self, number: u64, offer: u32, until: Option<Instant>) -> Option<u64> {
        let next = self.next(number);
        assert!(
            matches!(next, Next::Take(taken) if taken == offer),
            "{next:?}"
        );
        self.queues.exclusive().took(until);
        self.leave(number)
    }

    fn message(&mut self, message: i64) -> [Option<u64>; 2] {
        self.queues.message(message, self.now)
    }

    fn has_contact(&self, kind: QueueKind, since: Instant) -> bool {
        let last = self.queues.contact_since(kind, since);
        matches!(last, Some(LastContact::Answered))
    }

    /// Returns how many milliseconds other clients go first before the request of a waiter that is
    /// woken.
    fn yields(&mut self, number: u64) -> u128 {
        let begun = self.now;
        while let Next::Sleep(until) = self.next(number) {
            self.now = until.expect("it is woken");
        }
        self.answer(number);
        (self.now - begun).as_millis()
    }
}

#[test]
fn first_waiter_asks_and_again_when_woken_or_due() {
    let mut world = World::new();
    let [first, second] = [world.taker(), world.taker()];
    assert!(world.sleeps(second));
    world.be_refused(first);
    let until = Some(world.now + 60 * SECOND);
    let next = world.next(first);
    assert!(matches!(next, Next::Sleep(at) if at == until), "{next:?}");
    for wake in [
        |world: &mut World| world.message(0),
        |world: &mut World| world.queues.disconnected(world.now),
        |world: &mut World| {
            world.now += 61 * SECOND;
            [Some(1), None]
        },
    ] {
        assert_eq!(wake(&mut world), [Some(first), None]);
        assert!(matches!(world.next(first), Next::Send { message: 0, .. }));
        world.answer(first);
    }
    // After a message during the request, the waiter asks again.
    assert_eq!(world.message(7), [Some(first), None]);
    assert!(matches!(world.next(first), Next::Send { message: 7, .. }));
    assert_eq!(world.message(8), [None, None], "it is awake");
    world.message(9);
    world.queues.exclusive().refused(None);
    assert!(
        matches!(world.next(first), Next::Send { message: 9, .. }),
        "the latest one"
    );
    world.queues.exclusive().refused(None);
    let next = world.next(first);
    assert!(matches!(next, Next::Sleep(None)), "{next:?}");
}

/// Behind one that acquires the object, the next waiter sends nothing until its lease ends, or a
/// message arrives.
#[test]
fn next_waiter_relies_on_the_one_before() {
    let minute = 60 * SECOND;
    for (case, relies) in [
        ("", true),
        ("message", false),
        ("late", false),
        ("not subscribed", false),
        ("not excluded", false),
        ("another share", false),
        ("left", false),
    ] {
        let mut world = World::new();
        let first = world.taker();
        if case == "another share" {
            world.share = Share::Permits(1);
        }
        let second = world.taker();
        assert!(world.sleeps(second));
        world.be_refused(first);
        let until = (case != "not excluded").then_some(world.now + minute);
        if case != "left" {
            let acquired = world.queues.exclusive().acquired(until);
            assert_eq!(acquired, (None, false));
        }
        assert_eq!(world.leave(first), Some(second));
        match case {
            "message" => assert_eq!(world.message(0), [None, None]),
            "late" => world.now += minute + ROUNDING,
            "not subscribed" => world.is_subscribed = false,
            _ => {}
        }
        let turn = world.turn(Exclusive, second);
        assert!(
            matches!(turn, Turn::First { relies: does } if does == relies),
            "{case}: {turn:?}"
        );
        let next = world.next(second);
        match relies {
            true => assert!(
                matches!(next, Next::Sleep(Some(at)) if at == world.now + minute + ROUNDING)
            ),
            false => assert!(matches!(next, Next::Send { .. }), "{case}: {next:?}"),
        }
    }
}

#[test]
fn all_but_the_first_fail_together() {
    let mut world = World::new();
    let [first, second, third] = [(); 3].map(|()| world.join(Exclusive));
    let reader = world.join(Shared);
    assert!(world.sleeps(second) && world.sleeps(third));
    world.be_refused(first);
    let error = Error::ResponseTimeout { after: SECOND };
    let since = world.now;
    assert!(matches!(world.turn(Shared, reader), Turn::First { .. }));
    assert_eq!(world.queues.fail_all(), [second, third]);
    // An answer has arrived since.
    assert!(world.sleeps(second));
    let failed = || {
        Some(LastContact::Failed {
            since,
            error: error.clone(),
        })
    };
    world.queues.answered(Exclusive, failed());
    assert_eq!(world.queues.fail_all(), [second]);
    for number in [second, third] {
        let turn = world.turn(Exclusive, number);
        assert!(
            matches!(turn, Turn::Fail { since: at, .. } if at == since),
            "{turn:?}"
        );
    }
    let late = world.join(Exclusive);
    assert!(world.sleeps(late) && world.sleeps(first));
    for number in [second, third, late, first] {
        assert!(world.queues.contact_since(Exclusive, since).is_some());
        world.leave(number);
    }
    assert!(matches!(
        world.queues.contact_since(Shared, since),
        Some(LastContact::Failed { .. })
    ));
    world.queues.leave(Shared, reader);
    assert!(world.queues.contact_since(Shared, since).is_none());
}

#[test]
fn waiter_registers_after_a_second_and_again_when_reminded() {
    let mut world = World::new();
    let [first, second] = [(); 2].map(|()| world.join(Exclusive));
    world.be_refused(first);
    assert!(world.sleeps(second));
    let remind = |world: &mut World| world.queues.remind_all(world.now);
    assert!(remind(&mut world).is_empty());
    world.now += SECOND;
    for done in [false, true] {
        assert_eq!(remind(&mut world), [second]);
        assert!(matches!(world.turn(Exclusive, second), Turn::Register));
        world.queues.exclusive().registered(second, done);
        assert!(world.sleeps(second));
    }
    assert!(remind(&mut world).is_empty());
}

#[test]
fn other_clients_go_first_that_have_waited_longer() {
    let mut world = World::new();
    let waiter = world.claimable('a');
    world.be_refused(waiter);
    for (others, delays) in [(3, [3, 2, 1, 0]), (100, [5, 4, 3, 2]), (0, [0; 4])] {
        world.yield_to(others);
        for expected in delays {
            // First that of the client's own release. That of a write lock publishes another one,
            // which does not count.
            world.message(1);
            world.message(0);
            assert_eq!(world.yields(waiter), expected);
        }
    }
    // Permits publish their number.
    let mut world = World::new();
    world.share = Share::Permits(1);
    let waiter = world.taker();
    world.be_refused(waiter);
    world.yield_to(2);
    for expected in [2, 1, 0] {
        world.message(7);
        assert_eq!(world.yields(waiter), expected);
    }
    // A queue without waiters lets no client go first.
    world.leave(waiter);
    world.yield_to(2);
    let waiter = world.taker();
    world.be_refused(waiter);
    world.message(7);
    assert_eq!(world.yields(waiter), 0);
}

/// Other clients go first for longer the next time, unless a release of theirs arrived, or the store
/// has refused the request.
#[test]
fn others_go_first_for_longer_if_it_was_in_vain() {
    for (share, [before, released, refused], expected) in [
        (Share::Whole, [false, false, false], 4),
        (Share::Whole, [false, true, false], 2),
        (Share::Whole, [false, false, true], 2),
        (Share::Whole, [true, false, false], 8),
        (Share::Whole, [true, true, false], 2),
        (Share::Whole, [true, false, true], 2),
        (Share::Permits(1), [false, false, false], 2),
    ] {
        let mut world = World::new();
        world.share = share;
        let mut first = world.taker();
        world.be_refused(first);
        for (released, refused) in [(false, false), (released, refused)]
            .into_iter()
            .skip(usize::from(!before))
        {
            let second = world.taker();
            world.yield_to(2);
            // That of the client's own release.
            world.message(0);
            assert!(world.sleeps(first));
            world.now += MILLI;
            if released {
                world.message(0);
            }
            world.now += 3 * MILLI;
            assert!(matches!(world.next(first), Next::Send { .. }));
            if refused {
                world.answer(first);
            }
            world.queues.exclusive().acquired(None);
            world.leave(first);
            world.be_refused(second);
            first = second;
        }
        world.yield_to(2);
        world.message(0);
        assert_eq!(world.yields(first), expected);
    }
}

#[test]
fn waiter_with_offer_does_not_let_others_go_first() {
    let mut world = World::new();
    let waiter = world.taker();
    world.be_refused(waiter);
    world.yield_to(3);
    assert_eq!(world.offer(1), Ok(Some(waiter)));
    assert!(matches!(world.next(waiter), Next::Take(1)));
    // An offer ends the time of the other clients, a message does not.
    let [first, second] = [false, true].map(|is_offer| {
        let mut world = World::new();
        world.share = Share::Permits(1);
        let waiter = world.taker();
        world.be_refused(waiter);
        world.yield_to(3);
        world.message(7);
        assert!(world.sleeps(waiter));
        match is_offer {
            true => assert_eq!(world.offer(1), Ok(Some(waiter))),
            false => assert_eq!(world.message(7), [Some(waiter), None]),
        }
        world.next(waiter)
    });
    assert!(
        matches!((&first, &second), (Next::Sleep(_), Next::Take(1))),
        "{first:?} {second:?}"
    );
}

#[test]
fn request_that_joins_after_message_has_no_answer_until_store_answers() {
    let mut world = World::new();
    let waiter = world.join(Exclusive);
    world.becomes_first(waiter);
    let before = world.now;
    world.now += MILLI;
    world.message(0);
    let after = world.now;
    assert!(world.has_contact(Exclusive, before) && !world.has_contact(Exclusive, after));
    assert!(matches!(world.next(waiter), Next::Send { .. }));
    world.queues.exclusive().request_started(world.now);
    assert!(!world.has_contact(Exclusive, after));
    world.now += MILLI;
    world.message(0);
    let during = world.now;
    world
        .queues
        .answered(Exclusive, Some(LastContact::Answered));
    assert!(world.has_contact(Exclusive, after) && !world.has_contact(Exclusive, during));
    world.queues.exclusive().refused(None);
    assert!(matches!(world.next(waiter), Next::Send { .. }));
    world.answer(waiter);
    assert!(world.has_contact(Exclusive, during));
    // This client's own release, whose message has not arrived.
    world.now += MILLI;
    world.queues.released(world.now);
    assert!(!world.has_contact(Exclusive, world.now) && world.has_contact(Exclusive, during));
}

/// That readers hold the object is no answer to a reader.
#[test]
fn answer_to_one_queue_does_not_count_for_the_other() {
    let mut world = World::new();
    let writer = world.join(Exclusive);
    world.be_refused(writer);
    let during = world.now;
    let reader = world
        .queues
        .join(Shared, Share::Whole, ServedBy::RequestsOnly, during);
    assert!(!world.has_contact(Shared, during));
    world.queues.answered(Shared, None);
    assert!(!world.has_contact(Shared, during));
    world.queues.answered(Shared, Some(LastContact::Answered));
    assert!(world.has_contact(Shared, during));
    world.queues.leave(Shared, reader);
    world
        .queues
        .join(Shared, Share::Whole, ServedBy::RequestsOnly, world.now);
    assert!(!world.has_contact(Shared, during), "all readers had left");
    assert!(world.has_contact(Exclusive, during));
}

#[test]
fn offer_is_refused_unless_all_waiters_take_it() {
    let mut world = World::new();
    assert_eq!(world.offer(0), Err(()), "no waiter");
    let [first, second] = [world.taker(), world.taker()];
    assert_eq!(world.offer(0), Ok(None), "it does not sleep yet");
    for kind in [Exclusive, Shared] {
        let other = world.join(kind);
        assert_eq!(world.offer(1), Err(()), "one that takes none");
        world.queues.leave(kind, other);
    }
    world.share = Share::Permits(1);
    let other = world.taker();
    world.share = Share::Whole;
    assert_eq!(world.offer(1), Err(()), "one that takes others");
    world.leave(other);
    // The store has granted the second one since, so the first is lost.
    let (wake, outdated) = world.queues.exclusive().offer(1, Share::Whole, world.now);
    assert_eq!((wake, outdated), (None, vec![0]));
    world.share = Share::Permits(1);
    assert_eq!(world.offer(2), Err(()));
    world.share = Share::Whole;
    world.becomes_first(first);
    assert!(matches!(world.next(first), Next::Take(1)));
    // It did not use it.
    assert!(matches!(world.next(first), Next::Send { .. }));
    world.answer(first);
    assert_eq!(world.offer(2), Ok(Some(first)));
    let until = Some(world.now + SECOND);
    assert_eq!(world.take(first, 2, until), None, "it is awake");
    assert_eq!(world.leave(second), None);
    assert_eq!(world.offer(3), Err(()), "all have left");
}

/// After a release, and while a request is in flight, the store decides which owner holds the
/// object.
#[test]
fn offer_of_an_object_that_may_have_been_released_does_not_count() {
    let mut world = World::new();
    let waiter = world.taker();
    world.be_refused(waiter);
    assert_eq!(world.offer(1), Ok(Some(waiter)));
    world.message(0);
    assert!(matches!(world.next(waiter), Next::Drop(1)));
    assert_eq!(world.offer(2), Err(()), "released");
    assert!(matches!(world.next(waiter), Next::Send { .. }));
    assert_eq!(world.offer(2), Err(()), "in flight");
    world.answer(waiter);
    assert_eq!(world.offer(2), Ok(Some(waiter)), "answered");
    // It has acquired the object itself.
    world.message(0);
    world
        .queues
        .answered(Exclusive, Some(LastContact::Answered));
    let acquired = world.queues.exclusive().acquired(None);
    assert_eq!(acquired, (Some(2), true), "a message arrived meanwhile");
    let acquired = world.queues.exclusive().acquired(None);
    assert_eq!(acquired, (None, false));
    // The connection broke: only the request of the next waiter makes sure that there is one.
    world.queues.disconnected(world.now);
    let acquired = world.queues.exclusive().acquired(None);
    assert_eq!(acquired, (None, false));
    assert!(matches!(world.next(waiter), Next::Send { .. }));
}

/// One whose request is in flight may need none.
#[test]
fn permits_are_offered_once_to_each_waiter() {
    let mut world = World::new();
    world.share = Share::Permits(1);
    let first = world.taker();
    world.becomes_first(first);
    assert!(matches!(world.next(first), Next::Send { .. }));
    assert_eq!(world.offer(1), Err(()));
    let second = world.taker();
    assert_eq!(world.offer(1), Ok(None));
    assert_eq!(world.offer(2), Err(()));
    world.answer_with_offer(first, 1);
    assert_eq!(world.offer(2), Ok(None), "others may have been released");
    assert_eq!(world.take(first, 2, None), None);
    assert_eq!(world.offer(3), Ok(None));
    world.becomes_first(second);
    assert!(matches!(world.next(second), Next::Take(3)));
}

impl World {
    /// The store refuses the request, and there is an offer.
    fn answer_with_offer(&mut self, number: u64, offer: u32) {
        self.message(7);
        self.queues.exclusive().refused(None);
        let next = self.next(number);
        assert!(
            matches!(next, Next::Take(taken) if taken == offer),
            "{next:?}"
        );
    }
}

#[test]
fn offers_are_dropped_after_10_ms_and_when_all_have_left() {
    let mut world = World::new();
    world.share = Share::Permits(1);
    let [first, second] = [world.taker(), world.taker()];
    world.be_refused(first);
    let begun = world.now;
    assert!(world.offer(1).is_ok());
    world.now += 6 * MILLI;
    assert!(world.offer(2).is_ok());
    for (millis, expired) in [(10, 1), (16, 2)] {
        let (at, queue) = (begun + millis * MILLI, world.queues.exclusive());
        assert_eq!(queue.next_expiry(), Some(at));
        assert_eq!(queue.expired_offers(at - MILLI), Vec::<u32>::new());
        assert_eq!(queue.expired_offers(at), [expired]);
        assert!(queue.next_expiry() != Some(at));
    }
    assert_eq!(world.queues.exclusive().next_expiry(), None);
    assert!(world.offer(3).is_ok());
    world.leave(first);
    assert!(world.queues.exclusive().next_expiry().is_some());
    world.leave(second);
    assert_eq!(world.queues.exclusive().next_expiry(), None);
    world.taker();
    assert_eq!(world.queues.exclusive().take_offers(), Vec::<u32>::new());
}

#[test]
fn first_waiter_is_claimed_if_all_can_be_and_no_request_is_in_flight() {
    let mut world = World::new();
    for kind in [Exclusive, Shared] {
        let first = world.claimable('a');
        let other = world.join(kind);
        assert_eq!(world.queues.claim_first(), None);
        world.leave(first);
        world.queues.leave(kind, other);
    }
    let [first, second] = [world.claimable('a'), world.claimable('b')];
    world.becomes_first(first);
    assert!(matches!(world.next(first), Next::Send { .. }));
    world.queues.exclusive().request_started(world.now);
    assert_eq!(world.queues.claim_first(), None, "in flight");
    world.answer(first);
    assert_eq!(world.queues.claim_first(), Some('a'));
    assert_eq!(world.queues.claim_first(), None, "its claim is taken");
    assert_eq!(
        world.offer(1),
        Err(()),
        "it takes the place of an owner only"
    );
    world.queues.exclusive().handoff_ended(None);
    assert!(world.has_contact(Exclusive, world.now), "nothing was sent");
    world.queues.exclusive().handoff_started(world.now);
    let sent_at = Some(world.now);
    assert!(!world.has_contact(Exclusive, world.now));
    // Without an answer, the object may have been released.
    world.queues.exclusive().handoff_ended(sent_at);
    assert!(matches!(world.next(first), Next::Send { .. }));
    world.answer(first);
    world.queues.exclusive().handoff_started(world.now);
    assert!(world.sleeps(second));
    let transferred = world.queues.exclusive().handed_off(sent_at, 1, world.now);
    assert_eq!(transferred, (Some(first), vec![]));
    let until = Some(world.now + SECOND);
    assert_eq!(world.take(first, 1, until), Some(second));
    assert_eq!(world.queues.claim_first(), Some('b'));
    world.queues.exclusive().handoff_started(world.now);
    assert_eq!(world.leave(second), None);
    let transferred = world.queues.exclusive().handed_off(sent_at, 2, world.now);
    assert_eq!(transferred, (None, vec![2]), "all have left");
    // It is released: the next waiter asks.
    assert!(!world.queues.exclusive().has_handoff_in_flight());
    let next = world.claimable('c');
    assert_eq!(world.queues.claim_first(), None);
    world.be_refused(next);
    assert_eq!(world.queues.claim_first(), Some('c'));
}

/// The transfer may release the object before it is answered. Neither the answer to another request
/// nor the departure of all waiters changes that.
#[test]
fn no_answer_is_current_while_transfer_is_in_flight() {
    for all_leave in [false, true] {
        let mut world = World::new();
        let mut waiter = world.claimable('a');
        world.be_refused(waiter);
        assert_eq!(world.queues.claim_first(), Some('a'));
        world.queues.exclusive().handoff_started(world.now);
        let sent_at = world.now;
        assert!(world.queues.exclusive().has_handoff_in_flight());
        if all_leave {
            world.leave(waiter);
            waiter = world.claimable('b');
            world.becomes_first(waiter);
            assert!(matches!(world.next(waiter), Next::Send { .. }));
        }
        world.answer(waiter);
        assert!(!world.has_contact(Exclusive, world.now));
        assert_eq!(world.queues.claim_first(), None);
        // The end of another one changes nothing.
        world
            .queues
            .exclusive()
            .handoff_ended(Some(sent_at + MILLI));
        assert!(world.queues.exclusive().has_handoff_in_flight() && world.sleeps(waiter));
        world.queues.exclusive().handoff_ended(Some(sent_at));
        assert!(!world.queues.exclusive().has_handoff_in_flight());
        assert!(matches!(world.next(waiter), Next::Send { .. }));
    }
}

/// What a message has put in doubt stays so until the store answers: the request may fail, be
/// canceled, or never be sent.
#[test]
fn offer_is_refused_until_the_store_answers_after_a_message() {
    for case in ["canceled", "in flight", "failed", "failed, others wait"] {
        let mut world = World::new();
        let first = world.taker();
        world.be_refused(first);
        world.message(0);
        if case == "canceled" {
            world.yield_to(2);
            assert!(world.sleeps(first), "others go first");
        } else {
            assert!(matches!(world.next(first), Next::Send { .. }));
            world.queues.exclusive().request_started(world.now);
        }
        let _other = (case == "failed, others wait").then(|| world.taker());
        if case.starts_with("failed") {
            let (since, error) = (world.now, Error::ResponseTimeout { after: SECOND });
            let failed = LastContact::Failed { since, error };
            world.queues.answered(Exclusive, Some(failed));
        }
        world.leave(first);
        let next = world.taker();
        assert_eq!(world.offer(1), Err(()), "{case}");
        if let Some(other) = _other {
            world.leave(other);
        }
        world.be_refused(next);
        assert!(world.offer(1).is_ok(), "{case}");
    }
}
