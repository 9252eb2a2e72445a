//! When a hold or permits may pass on in the client, when the store has to be asked, and when other clients go first. All
//! constants of that are here.
//!
//! 1. A *chain* begins when the store grants a hold or permits, and ends when they are released to the store. Meanwhile they
//!    pass from one request of the client to the next.
//! 2. After 64 handoffs, or 5 ms, the store is asked whether other clients wait. It counts those that subscribe to the channel
//!    of the object, and those in the queue of a fair lock with the same key. If there are any, the chain ends. An answer
//!    counts for 10 ms; if it took more than 5 ms, because the server is far away or the client is busy, for twice that time,
//!    at most 100 ms, and the next question is asked in time. If none counts, as after each section that is longer, the release
//!    of a lock asks first.
//! 3. Then the local waiters let as many clients go first as were counted, for 1 ms each, up to five. If none of these uses that
//!    time, they get twice as long after the next chain, up to 16 ms, because they may be far away. If that was in vain, too,
//!    they may not wait any more: then none goes first for 32 releases, and for a second each time is short again. So a client
//!    that only subscribes costs at most 31 ms of a second, and 1 ms of 32 releases. Releases that do not ask let as many go
//!    first as were counted last.
//! 4. Requests that leave no trace in the store cannot be counted: `try_lock`, spin locks, RedLocks, and clients of Redisson
//!    that subscribe at a replica. For them each chain ends after 50 to 150 ms, and then the local waiters *pause* for 2 to
//!    5 ms. Both times are random, so no request with a period of its own misses the pause again and again. A chain of long
//!    sections lasts eight handoffs, but not longer than two seconds. Only locks have such chains: permits are released
//!    after sections of 10 ms.
//!
//! The pause costs about 4 % of the time, and only of chains: clients without local waiters, and sections of two seconds, have
//! none. With sections of up to 10 ms, a request that is sent at any time therefore finds the object free with a probability
//! of 1 in 30 at least. One that is sent ten times a second has its turn after three seconds on average, and after 14 with a
//! probability of 99 %. With longer sections the object is free as rarely as if each was released: of 200 ms, 1 in 500. A
//! request that starts with the message of the release has its turn after the first chain.
//!
//! An owner in a fair queue also gets the object from the store, because releases do not look at the queue:
//! [`HoldKind::serve_queue`](super::HoldKind::serve_queue).

use std::time::Duration;

use tokio::time::Instant;

/// How long handoffs continue after the answer that no other client waits. If answers take long, twice as long as those take:
/// else each release would wait for one.
const ALONE_FOR: Duration = Duration::from_millis(10);

/// The client asks the store again after this many handoffs, or when half of that time is left; earlier if an answer takes longer.
const HANDOFFS_PER_ANSWER: u32 = 64;

/// How long a chain lasts at most: random between the two.
const CHAIN: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(150)];

/// How many handoffs a chain lasts at least, if its sections are so long that there would be fewer.
const LONG_CHAIN_HANDOFFS: u32 = 8;

/// How long a chain of these lasts at most.
const LONG_CHAIN: Duration = Duration::from_secs(2);

/// How long the local waiters pause after a chain that lasted so long: random between the two.
const PAUSE: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(5)];

/// How long the first waiter lets each of the other clients go first that were counted. Otherwise the client that runs
/// already, or to which the server writes first, would win most races.
const YIELDED_FOR: Duration = Duration::from_millis(1);

/// To how many other clients the first waiter yields.
const MAX_YIELDED_TO: usize = 5;

/// How long the first waiter lets other clients go first at most, after shorter times were in vain: the message of the release
/// and the request of a client that is far away need one round trip.
const LONGEST_YIELD: Duration = Duration::from_millis(16);

/// For how many releases no client goes first, after even the longest time was in vain: clients that subscribe may not wait any more.
const SKIPPED_YIELDS: usize = 32;

/// How long no yield is lengthened after that.
const SHORT_YIELDS_FOR: Duration = Duration::from_secs(1);

/// How long a release waits for an answer before it frees the object.
pub(crate) const CHECK_LIMIT: Duration = Duration::from_millis(100);

/// How many releases do not ask whether other clients wait, after the store has said so. Sections that are longer than
/// [`ALONE_FOR`] would need one more command each.
const CROWDED_RELEASES: u8 = 8;

/// Returns the time at this fraction between two times.
fn between([shortest, longest]: [Duration; 2], fraction: f64) -> Duration {
    shortest + (longest - shortest).mul_f64(fraction)
}

/// Other clients that wait, as far as the store knows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct OtherClients {
    /// How many subscribe or wait in the queue.
    pub(crate) count: usize,
    /// Whether owners wait in the queue of a fair lock with the same key.
    pub(crate) in_queue: bool,
}

/// Which other clients go first after a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Yields {
    pub(crate) to: OtherClients,
    /// Whether no answer of the store counts, so that as many wait as before.
    pub(crate) unasked: bool,
    /// Whether there is a pause for clients that are not counted.
    pub(crate) pauses: bool,
}

#[cfg(test)]
impl Yields {
    /// Lets so many clients go first.
    pub(crate) fn counted(count: usize) -> Yields {
        let in_queue = false;
        Yields {
            to: OtherClients { count, in_queue },
            ..Yields::default()
        }
    }
}

/// How long the requests of one client may pass a hold or permits on, so that other clients get their turn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chain {
    /// When the store granted them.
    granted_at: Instant,
    /// How long the chain lasts at most. `None` before the first handoff.
    longest: Option<Duration>,
    /// When the question was asked that was answered last; until then, when the store granted them.
    asked_at: Instant,
    /// When it was answered.
    answered_at: Instant,
    handoffs_since_check: u32,
    /// Number of handoffs since the store granted them.
    handoffs: u32,
    /// Whether the store is being asked.
    is_checking: bool,
    /// The other clients that wait, or may wait. `None`: there are none.
    others: Option<OtherClients>,
}

/// How a handoff has to ask the store whether another client waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Checks {
    No,
    Beside,
    First,
}

/// Why there is no handoff.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoHandoff {
    /// The store has to be asked first whether another client waits.
    CheckFirst,
    Release,
}

impl Chain {
    pub(crate) fn new(granted_at: Instant) -> Chain {
        Chain {
            granted_at,
            longest: None,
            asked_at: granted_at,
            answered_at: granted_at,
            handoffs_since_check: 0,
            handoffs: 0,
            is_checking: false,
            others: None,
        }
    }

    /// Counts a handoff in the client, if it is allowed. Returns whether to ask the store now whether another client waits: see
    /// [`Chain::answered`]. `may_check_first`: whether the release may ask the store first. `released_at`: when the release began; an
    /// answer to its own question counts however long it took. `random`: returns a fraction.
    pub(crate) fn local_handoff(
        &mut self,
        may_check_first: bool,
        released_at: Instant,
        random: impl FnOnce() -> f64,
    ) -> Result<bool, NoHandoff> {
        let (next, checks) = self.next(released_at, random).ok_or(NoHandoff::Release)?;
        match checks {
            Checks::First if may_check_first => return Err(NoHandoff::CheckFirst),
            Checks::First => return Err(NoHandoff::Release),
            Checks::Beside | Checks::No => *self = next,
        }
        let checks = checks == Checks::Beside && !self.is_checking;
        self.is_checking |= checks;
        Ok(checks)
    }

    /// Counts a handoff in the store, if it is allowed. Returns the chain for the next owner, and whether the step asks the
    /// store if another client waits. `can_count`: whether the store knows that.
    pub(crate) fn store_handoff(
        &mut self,
        can_count: bool,
        now: Instant,
        random: impl FnOnce() -> f64,
    ) -> Option<(Chain, bool)> {
        let (mut next, checks) = self.next(now, random)?;
        next.is_checking = false;
        let checks = match checks {
            Checks::First if !can_count => return None,
            checks => can_count && checks != Checks::No,
        };
        Some((next, checks))
    }

    /// Returns the chain after a handoff, and how it has to ask. `None`: other clients must get their turn.
    fn next(&mut self, now: Instant, random: impl FnOnce() -> f64) -> Option<(Chain, Checks)> {
        self.longest.get_or_insert_with(|| between(CHAIN, random()));
        if self.others.is_some() || self.is_over(now) {
            return None;
        }
        let next = Chain {
            handoffs_since_check: self.handoffs_since_check + 1,
            handoffs: self.handoffs.saturating_add(1),
            ..*self
        };
        let left = self.alone_until().saturating_duration_since(now);
        let asks_before = (self.alone_for() / 2).max(self.answer_took() * 3 / 2);
        let checks = if left.is_zero() {
            Checks::First
        } else if next.handoffs_since_check >= HANDOFFS_PER_ANSWER || left <= asks_before {
            Checks::Beside
        } else {
            Checks::No
        };
        Some((next, checks))
    }

    /// Returns how often the hold or the permits have passed on since the store granted them.
    pub(crate) fn handoffs(&self) -> u32 {
        self.handoffs
    }

    /// Returns when the store granted them.
    pub(crate) fn granted_at(&self) -> Instant {
        self.granted_at
    }

    /// Returns whether the chain has lasted as long as it may.
    fn is_over(&self, now: Instant) -> bool {
        let lasted = now.saturating_duration_since(self.granted_at);
        let longest = match self.handoffs {
            LONG_CHAIN_HANDOFFS.. => self.longest,
            _ => Some(LONG_CHAIN),
        };
        longest.is_some_and(|longest| lasted >= longest)
    }

    /// Records the answer to the question that a handoff or a release asked at this time. `None`: no other client waits. An
    /// answer to an earlier question than the last one changes nothing.
    pub(crate) fn answered(
        &mut self,
        asked_at: Instant,
        others: Option<OtherClients>,
        now: Instant,
    ) {
        self.is_checking = false;
        if asked_at >= self.asked_at {
            self.others = others;
            (self.asked_at, self.answered_at) = (asked_at, now);
            self.handoffs_since_check = 0;
        }
    }

    /// Returns how long the store took for the last answer.
    fn answer_took(&self) -> Duration {
        self.answered_at.saturating_duration_since(self.asked_at)
    }

    /// Returns how long the last answer counts.
    fn alone_for(&self) -> Duration {
        (self.answer_took() * 2).clamp(ALONE_FOR, CHECK_LIMIT)
    }

    /// Returns until when the last answer counts.
    fn alone_until(&self) -> Instant {
        self.answered_at + self.alone_for()
    }

    /// Returns which clients go first if the chain ends now.
    pub(crate) fn yields(&self, now: Instant) -> Yields {
        let to = self.others.unwrap_or_default();
        Yields {
            to,
            unasked: self.others.is_none() && now >= self.alone_until(),
            pauses: to.in_queue || self.handoffs > 0 && self.is_over(now),
        }
    }
}

/// How long the first waiter of a queue lets other clients go first, before it requests the object again.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Yielding {
    /// How many counted clients go first. One less after each release, because one of them has had its turn then.
    clients: usize,
    /// How often [`Yielding::released`] lets none go first.
    skipped: usize,
    /// How often their time was doubled.
    doublings: u32,
    /// The latest time that counted clients had: when it began, and how long it was.
    latest: Option<(Instant, Duration)>,
    /// When the latest of the longest times began that was in vain.
    gave_up_at: Option<Instant>,
    /// How many releases do not ask whether other clients wait, because they do.
    crowded: u8,
    /// How many waited when the store said so.
    others: usize,
    pause: Option<Pause>,
}

/// A pause for clients that are not counted.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum Pause {
    /// It begins when the first waiter is woken, by the message of the release.
    Next(Duration),
    Until(Instant),
}

impl Yielding {
    /// Records that a chain of this client ends with a release. `of_permits`: others may wait although none did when these
    /// permits were acquired.
    pub(crate) fn released(
        &mut self,
        yields: Yields,
        of_permits: bool,
        random: impl FnOnce() -> f64,
    ) {
        let mut others = yields.to.count;
        if others > 0 {
            (self.crowded, self.others) = (CROWDED_RELEASES, others);
        } else if self.crowded > 0 {
            self.crowded -= 1;
            if yields.unasked && !of_permits {
                others = self.others;
            }
        }
        self.clients = match (others, self.skipped) {
            (0, _) if of_permits => self.clients,
            // One more for the message of the release itself.
            (others @ 1.., 0) => others.min(MAX_YIELDED_TO) + 1,
            _ => 0,
        };
        self.skipped = self.skipped.saturating_sub(1);
        if yields.pauses {
            self.pause = Some(Pause::Next(between(PAUSE, random())));
        }
    }

    /// Returns whether other clients waited lately.
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded > 0
    }

    /// Records a message of a release.
    pub(crate) fn message(&mut self) {
        self.clients = self.clients.saturating_sub(1);
    }

    /// Returns until when others go first, and whether clients are among them that were counted. `None`: there are none.
    pub(crate) fn until(&mut self, now: Instant) -> Option<(Instant, bool)> {
        if let Some(Pause::Next(pause)) = self.pause {
            self.pause = Some(Pause::Until(now + pause));
        }
        let pause = match self.pause {
            Some(Pause::Until(end)) if end > now => end,
            _ => now,
        };
        let clients = u32::try_from(self.clients).unwrap_or(u32::MAX);
        let yielded = YIELDED_FOR.saturating_mul(clients << self.doublings);
        let yielded = yielded.min(LONGEST_YIELD);
        if clients > 0 {
            self.latest = Some((now, yielded));
        }
        let end = pause.max(now + yielded);
        (end > now).then_some((end, clients > 0))
    }

    /// Records that no counted client has used its time.
    pub(crate) fn in_vain(&mut self) {
        self.clients = 0;
        let Some((began_at, length)) = self.latest else {
            return;
        };
        let lengthens = |gave_up_at| began_at >= gave_up_at + SHORT_YIELDS_FOR;
        let lengthens = self.gave_up_at.is_none_or(lengthens);
        if lengthens && length < LONGEST_YIELD {
            self.doublings += 1;
            return;
        }
        if lengthens {
            self.gave_up_at = Some(began_at);
        }
        self.doublings = 0;
        self.skipped = SKIPPED_YIELDS;
    }

    /// Records that a counted client has used its time.
    pub(crate) fn used(&mut self) {
        self.doublings = 0;
        self.gave_up_at = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    fn others(count: usize, in_queue: bool) -> Option<OtherClients> {
        Some(OtherClients { count, in_queue })
    }

    /// Returns whether the store has to be asked beside the next handoff. `None`: there is none.
    fn asks(chain: &mut Chain, now: Instant) -> Option<bool> {
        chain.local_handoff(false, now, || 0.5).ok()
    }

    /// After 64 handoffs or 5 ms, and then not again until the answer.
    #[test]
    fn store_is_asked_regularly_whether_other_clients_wait() {
        let mut now = Instant::now();
        let mut chain = Chain::new(now);
        for _ in 0..2 {
            for handoff in 1..100 {
                assert_eq!(asks(&mut chain, now), Some(handoff == 64));
            }
            now += MILLI;
            chain.answered(now, None, now);
        }
        for passed in [4, 5, 6, 9] {
            let answer = asks(&mut chain, now + passed * MILLI);
            assert_eq!(answer, Some(passed == 5));
        }
        // The time counts from the answer.
        now += 8 * MILLI;
        chain.answered(now - 3 * MILLI, None, now);
        assert_eq!(asks(&mut chain, now + 4 * MILLI), Some(false));
        assert_eq!(asks(&mut chain, now + 5 * MILLI), Some(true));
        assert_eq!(asks(&mut chain, now + 10 * MILLI), None, "not answered");
    }

    /// Sections of a millisecond pass on while answers take longer than those count that are soon there. A release that had to
    /// ask first each time would wait for the answer after each section.
    #[test]
    fn late_answers_count_longer() {
        for (trip, least) in [(1, 99), (4, 99), (8, 90), (20, 80), (40, 60), (90, 10)] {
            let trip = trip * MILLI;
            let begin = Instant::now();
            let mut chain = Chain::new(begin);
            let (mut now, mut asked_at, mut handoffs) = (begin, None, 0);
            while now < begin + 20 * trip.max(ALONE_FOR) {
                now += MILLI;
                if let Some(at) = asked_at.filter(|at| *at + trip <= now) {
                    chain.answered(at, None, at + trip);
                    asked_at = None;
                }
                match chain.local_handoff(true, now, || 0.5) {
                    Ok(asks) => {
                        handoffs += 1;
                        asked_at = asks.then_some(now).or(asked_at);
                    }
                    Err(NoHandoff::CheckFirst) => {
                        let released_at = now;
                        now += trip;
                        chain.answered(released_at, None, now);
                        asked_at = None;
                        handoffs += 1;
                        let handed_off = chain.local_handoff(true, released_at, || 0.5);
                        assert_eq!(handed_off, Ok(false));
                    }
                    Err(NoHandoff::Release) => {
                        (chain, asked_at) = (Chain::new(now), None);
                        handoffs += 1;
                    }
                }
            }
            let sections = (now - begin).div_duration_f64(MILLI);
            let percent = f64::from(handoffs) * 100.0 / sections;
            assert!(percent >= f64::from(least), "{trip:?}: {percent:.0} %");
        }
    }

    /// An answer that took very long says nothing about now.
    #[test]
    fn answer_counts_for_at_most_the_time_that_a_release_waits() {
        let now = Instant::now();
        let mut chain = Chain::new(now);
        chain.answered(now, None, now + 10 * CHECK_LIMIT);
        let end = now + 11 * CHECK_LIMIT;
        assert!(!chain.yields(end - MILLI).unasked && chain.yields(end).unasked);
    }

    /// A release asks if no answer is newer than 10 ms, and its own answer counts however long it takes.
    #[test]
    fn release_asks_after_long_section() {
        let begin = Instant::now();
        let mut chain = Chain::new(begin);
        assert_eq!(asks(&mut chain, begin + 9 * MILLI), Some(true));
        let released_at = begin + 10 * MILLI;
        let [asks, releases] = [true, false].map(|can_ask| {
            let handed_off = chain.local_handoff(can_ask, released_at, || 0.0);
            handed_off.unwrap_err()
        });
        assert_eq!(
            (asks, releases),
            (NoHandoff::CheckFirst, NoHandoff::Release)
        );
        chain.answered(released_at, None, released_at + MILLI);
        let handed_off = chain.local_handoff(true, released_at, || 0.0);
        assert_eq!(handed_off, Ok(false));
        // The next section. The question beside the first handoff is answered later than that of this release.
        let released_at = begin + 30 * MILLI;
        chain.answered(released_at, others(1, false), released_at);
        chain.answered(begin + 9 * MILLI, None, released_at);
        let handed_off = chain.local_handoff(true, released_at, || 0.0);
        assert_eq!(handed_off, Err(NoHandoff::Release));
    }

    /// The chain ends by its time, or if no answer can be had, and asks as often as needed.
    #[test]
    fn store_handoffs_end_by_time_or_if_the_store_cannot_be_asked() {
        let now = Instant::now();
        for (can_ask, fraction, longest, section) in [
            (true, 0.0, CHAIN[0], ALONE_FOR / 4),
            (true, 0.5, (CHAIN[0] + CHAIN[1]) / 2, ALONE_FOR / 4),
            (true, 1.0, CHAIN[1], ALONE_FOR),
            (true, 0.0, 8 * 2 * ALONE_FOR, 2 * ALONE_FOR),
            (true, 1.0, 8 * CHAIN[1], CHAIN[1]),
            (true, 0.0, LONG_CHAIN, LONG_CHAIN / 4),
            (false, 1.0, ALONE_FOR, ALONE_FOR / 4),
        ] {
            let mut chain = Chain::new(now);
            let (mut elapsed, mut asked) = (Duration::ZERO, 0);
            while let Some((next, asks)) = chain.store_handoff(can_ask, now + elapsed, || fraction)
            {
                chain = next;
                if asks {
                    chain.answered(now + elapsed, None, now + elapsed);
                    asked += 1;
                }
                elapsed += section;
            }
            assert_eq!(elapsed, longest);
            let expected = longest.div_duration_f64(section.max(ALONE_FOR / 2)) as u32 - 1;
            assert_eq!(asked, expected * u32::from(can_ask));
            assert_eq!(chain.yields(now + elapsed).pauses, can_ask);
        }
        let mut chain = Chain::new(now);
        for handoffs in 1..=2 * HANDOFFS_PER_ANSWER {
            let (next, asks) = chain.store_handoff(true, now, || 0.0).unwrap();
            chain = next;
            assert_eq!(asks, handoffs % HANDOFFS_PER_ANSWER == 0);
            if asks {
                chain.answered(now, None, now);
            }
        }
        chain.answered(now, others(1, false), now);
        assert!(chain.store_handoff(true, now, || 0.0).is_none());
    }

    #[test]
    fn local_handoffs_end_by_time() {
        let now = Instant::now();
        for (fraction, longest) in [(0.0, 50), (0.5, 100), (1.0, 150)] {
            let mut chain = Chain::new(now);
            for passed in 0..longest {
                let at = now + passed * MILLI;
                assert!(
                    chain.local_handoff(true, at, || fraction).is_ok(),
                    "{passed}"
                );
                assert!(!chain.yields(at).pauses);
                chain.answered(at, None, at);
            }
            let end = now + longest * MILLI;
            assert_eq!(
                chain.local_handoff(true, end, || fraction),
                Err(NoHandoff::Release)
            );
            assert!(chain.yields(end).pauses);
        }
    }

    /// A section that is longer than a chain has passed nothing on.
    #[test]
    fn only_what_has_passed_on_pauses() {
        let now = Instant::now();
        let mut chain = Chain::new(now);
        let end = now + LONG_CHAIN;
        assert_eq!(
            chain.local_handoff(true, end, || 0.0),
            Err(NoHandoff::Release)
        );
        let yields = chain.yields(end);
        assert_eq!(yields.to, OtherClients::default());
        assert!(yields.unasked && !yields.pauses);
    }

    #[test]
    fn counted_clients_go_first() {
        let now = Instant::now();
        for (answer, to, pauses) in [
            (None, OtherClients::default(), false),
            // They cannot be counted.
            (others(0, false), OtherClients::default(), false),
            (others(2, false), others(2, false).unwrap(), false),
            (others(2, true), others(2, true).unwrap(), true),
        ] {
            let mut chain = Chain::new(now);
            asks(&mut chain, now);
            chain.answered(now, answer, now);
            let expected = Yields {
                to,
                pauses,
                unasked: false,
            };
            assert_eq!(chain.yields(now), expected);
            assert_eq!(asks(&mut chain, now).is_some(), answer.is_none());
        }
    }

    /// Until when others go first, in milliseconds from the first message on, which is that of the release itself, after each
    /// further message.
    #[test]
    fn others_go_first_for_a_few_milliseconds() {
        let yields = |count, pauses| Yields {
            pauses,
            ..Yields::counted(count)
        };
        let until =
            |millis: u64, counted| (millis > 0).then_some((Duration::from_millis(millis), counted));
        for (yields, fraction, expected) in [
            (yields(0, false), 0.5, [until(0, false); 3]),
            (
                yields(2, false),
                0.5,
                [until(2, true), until(1, true), until(0, false)],
            ),
            (
                yields(100, false),
                0.5,
                [until(5, true), until(4, true), until(3, true)],
            ),
            // The pause ends at its time, however many messages arrive.
            (yields(0, true), 0.0, [until(2, false); 3]),
            (yields(0, true), 1.0, [until(5, false); 3]),
            (
                yields(3, true),
                0.0,
                [until(3, true), until(2, true), until(2, true)],
            ),
        ] {
            let (mut yielding, now) = (Yielding::default(), Instant::now());
            yielding.released(yields, false, || fraction);
            for expected in expected {
                yielding.message();
                let until = yielding.until(now);
                let until = until.map(|(end, counted)| (end - now, counted));
                assert_eq!(until, expected, "{yields:?}");
            }
            let later = now + PAUSE[1];
            while yielding.clients > 0 {
                yielding.message();
            }
            assert_eq!(yielding.until(later), None);
        }
    }

    /// Returns for how many milliseconds others go first after the message of a release.
    fn yielded(yielding: &mut Yielding, yields: Yields, now: Instant) -> u128 {
        yielding.released(yields, false, || 0.0);
        yielding.message();
        let until = yielding.until(now);
        until.map_or(0, |(end, _)| (end - now).as_millis())
    }

    #[test]
    fn counted_clients_have_longer_after_it_was_in_vain() {
        for (count, times) in [
            (1, &[1, 2, 4, 8, 16][..]),
            (3, &[3, 6, 12, 16]),
            (9, &[5, 10, 16]),
        ] {
            let (mut yielding, mut now) = (Yielding::default(), Instant::now());
            let yields = Yields::counted(count);
            for _ in 0..3 {
                for &expected in times {
                    assert_eq!(yielded(&mut yielding, yields, now), expected);
                    yielding.in_vain();
                }
                // All are too short, and for a second no longer ones are tried.
                for _ in 0..3 {
                    for _ in 0..SKIPPED_YIELDS {
                        assert_eq!(yielded(&mut yielding, yields, now), 0);
                    }
                    assert_eq!(yielded(&mut yielding, yields, now), times[0]);
                    yielding.in_vain();
                    now += SHORT_YIELDS_FOR / 4;
                }
                now += SHORT_YIELDS_FOR / 4;
                for _ in 0..SKIPPED_YIELDS {
                    assert_eq!(yielded(&mut yielding, yields, now), 0);
                }
            }
        }
    }

    #[test]
    fn counted_clients_have_short_times_again_after_they_used_them() {
        let (mut yielding, now) = (Yielding::default(), Instant::now());
        let yields = Yields::counted(1);
        for in_vain in [2, 5, 1, 4, 5, 5] {
            for doublings in 0..in_vain {
                assert_eq!(yielded(&mut yielding, yields, now), 1 << doublings);
                yielding.in_vain();
            }
            yielding.used();
            while yielding.skipped > 0 {
                yielding.released(yields, false, || 0.0);
            }
        }
    }

    /// Those that subscribe may not wait any more. A pause is not for them.
    #[test]
    fn clients_that_are_not_counted_go_first_after_it_was_in_vain_for_counted_ones() {
        let (mut yielding, now) = (Yielding::default(), Instant::now());
        for _ in [1, 2, 4, 8, 16] {
            yielded(&mut yielding, Yields::counted(1), now);
            yielding.in_vain();
        }
        for pauses in [false, true] {
            let yields = Yields {
                pauses,
                ..Yields::counted(1)
            };
            yielding.released(yields, false, || 0.0);
            let expected = pauses.then_some((now + PAUSE[0], false));
            assert_eq!(yielding.until(now), expected);
        }
    }

    /// As many as before, because they are not counted at each release.
    #[test]
    fn others_go_first_while_releases_do_not_ask() {
        let (mut yielding, now) = (Yielding::default(), Instant::now());
        let unasked = Yields {
            unasked: true,
            ..Yields::default()
        };
        assert_eq!(yielded(&mut yielding, unasked, now), 0);
        for _ in 0..2 {
            assert_eq!(yielded(&mut yielding, Yields::counted(2), now), 2);
            for _ in 0..CROWDED_RELEASES {
                assert_eq!(yielded(&mut yielding, unasked, now), 2);
            }
            assert_eq!(yielded(&mut yielding, unasked, now), 0);
        }
        yielded(&mut yielding, Yields::counted(2), now);
        let alone = Yields::default();
        assert_eq!(yielded(&mut yielding, alone, now), 0, "they were asked for");
    }

    /// A client whose sections are long would ask in vain after each.
    #[test]
    fn no_release_asks_for_a_while_after_other_clients_waited() {
        let mut yielding = Yielding::default();
        assert!(!yielding.is_crowded());
        for _ in 0..2 {
            yielding.released(Yields::counted(1), false, || 0.0);
            for _ in 0..CROWDED_RELEASES {
                assert!(yielding.is_crowded());
                yielding.released(Yields::default(), false, || 0.0);
            }
            assert!(!yielding.is_crowded());
        }
    }

    #[test]
    fn permits_that_were_acquired_alone_do_not_end_the_turns_of_others() {
        for of_permits in [false, true] {
            let (mut yielding, now) = (Yielding::default(), Instant::now());
            yielding.released(Yields::counted(2), of_permits, || 0.0);
            yielding.released(Yields::default(), of_permits, || 0.0);
            assert_eq!(yielding.until(now).is_some(), of_permits);
        }
    }
}
