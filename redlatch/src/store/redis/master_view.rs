//! Decides which server is the master, from the replies of the sentinels, and when to query them
//! again.
//!
//! 1. The address that most sentinels name counts. Of two addresses with equally many, the one with
//!    the later failover counts, because some sentinels learn of a failover before others. Of three
//!    or more, none counts: one is neither the old nor the new master, and it is unknown which.
//! 2. An answer with an earlier epoch than that of the known master is outdated: the sentinels that
//!    gave it have missed a failover. It is ignored for [`EARLIER_EPOCH_IGNORED_FOR`], and for as
//!    long as the known master works unless most of all sentinels give it. (Sentinels that were set
//!    up again begin with an earlier epoch.)
//! 3. A message of a sentinel is received only once, and the query behind it may fail, be late, or
//!    reach sentinels that have not learned of the failover yet. So a query is never the only one:
//!    after each reason the sentinels are queried at once and then again and again, after pauses
//!    that grow to
//!    [`REFRESH_INTERVAL`] and are random, so that clients do not query together. Whether a query
//!    succeeds makes no difference.
//! 4. A failed step or a broken connection is a weaker reason than a message: it begins such a
//!    series of queries only if the last one has ended and nothing failed since. So the load stays
//!    low in an outage.
//! 5. While a connection to a sentinel is broken, its messages are lost, and a query connects it again.
//!    So there is one soon after each such end, later if connections break again and again.
//! 6. While the latest query has named no master, or one that answers as a replica, a connection that
//!    needs one does not wait for the next query: it asks for one, after pauses that grow to
//!    [`LONGEST_WITHOUT_MASTER`].

use std::collections::BTreeMap;
use std::mem::take;
use std::time::Duration;

use tokio::time::Instant;

use super::endpoint::Endpoint;
use super::refresh_task::MIN_REFRESH_INTERVAL;
use crate::backoff::Backoff;

/// Longest interval at which the sentinels are queried without a reason.
pub(super) const REFRESH_INTERVAL: Duration = Duration::from_secs(5);

/// Longest interval while the sentinels name no master and a connection needs one.
const LONGEST_WITHOUT_MASTER: Duration = Duration::from_millis(500);

/// How long answers with an earlier epoch are ignored. Sentinels tell each other of a failover
/// every two seconds.
const EARLIER_EPOCH_IGNORED_FOR: Duration = Duration::from_secs(10);

/// What a client knows about the master.
#[derive(Debug)]
pub(super) struct MasterView {
    /// Number of sentinels, whether they answer or not.
    sentinels: usize,
    known: Option<KnownMaster>,
    /// Since when all answers have had an earlier epoch.
    outdated_since: Option<Instant>,
    /// Number of queries since the last reason to query.
    queries: u32,
    /// Whether something failed since the last query.
    suspected: bool,
    /// How many queries in a row have named no master, or a replica, and when a connection that needs
    /// a master may ask for the next.
    undecided: Option<(u32, Instant)>,
    /// Whether the known master has answered as a replica since the latest query.
    is_replica: bool,
    /// Whether a connection to a sentinel has broken since the latest query began.
    disconnected: bool,
    /// Before how many queries in a row, until that one, a connection had broken.
    disconnects: u32,
    /// When the latest query ended.
    queried_at: Option<Instant>,
    next_query: Instant,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct KnownMaster {
    endpoint: Endpoint,
    epoch: u64,
    /// Whether most of all sentinels have named it.
    by_majority: bool,
}

/// One sentinel's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SentinelReply {
    pub(super) endpoint: Endpoint,
    /// Increases with every failover.
    pub(super) epoch: u64,
}

/// What the replies to a query mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// No server is named, or too many are.
    Undecided,
    /// This is the master, as far as is known. No connection leads elsewhere.
    Master(Endpoint),
    /// This server has replaced the known master.
    FailedOver(Endpoint),
}

impl MasterView {
    pub(super) fn new(sentinels: usize, now: Instant) -> MasterView {
        MasterView {
            sentinels,
            known: None,
            outdated_since: None,
            queries: 0,
            suspected: false,
            undecided: None,
            is_replica: false,
            disconnected: false,
            disconnects: 0,
            queried_at: None,
            next_query: now,
        }
    }

    /// Returns the known master.
    pub(super) fn master(&self) -> Option<&Endpoint> {
        self.known.as_ref().map(|known| &known.endpoint)
    }

    /// Returns when to query the sentinels next.
    pub(super) fn next_query(&self) -> Instant {
        self.next_query
    }

    /// Handles a message of a sentinel: the sentinels are to be queried at once.
    pub(super) fn on_message(&mut self, now: Instant) {
        self.queries = 0;
        self.next_query = self.next_query.min(self.earliest_query(now));
    }

    fn earliest_query(&self, now: Instant) -> Instant {
        let earliest = self.queried_at.map(|at| at + MIN_REFRESH_INTERVAL);
        earliest.map_or(now, |earliest| earliest.max(now))
    }

    /// Handles that the known master has answered as a replica: another server has taken its place, or will.
    pub(super) fn on_replica(&mut self, now: Instant) {
        self.is_replica = true;
        let earliest = self.earliest_query(now);
        self.undecided.get_or_insert((0, earliest));
    }

    /// Handles that a connection needs the master.
    pub(super) fn on_needed(&mut self) {
        if let Some((_, due)) = self.undecided {
            self.next_query = self.next_query.min(due);
        }
    }

    /// Handles a sign that another server may have become the master.
    pub(super) fn on_suspicion(&mut self, now: Instant) {
        let was_quiet = !self.suspected && self.queries > QUERIES_IN_SERIES;
        if was_quiet {
            self.on_message(now);
        }
        self.suspected = true;
    }

    /// Handles the end of a connection to a sentinel.
    pub(super) fn on_disconnect(&mut self, now: Instant) {
        self.on_suspicion(now);
        self.disconnected = true;
        self.query_after_disconnect(now);
    }

    fn query_after_disconnect(&mut self, now: Instant) {
        let due = now + pauses().pause(self.disconnects);
        self.next_query = self.next_query.min(due.max(self.earliest_query(now)));
    }

    /// Handles that a query begins. It connects again.
    pub(super) fn on_query(&mut self) {
        self.disconnects = match take(&mut self.disconnected) {
            true => self.disconnects.saturating_add(1),
            false => 0,
        };
    }

    /// Handles the replies to a query. `works`: there is a connection to the known master.
    pub(super) fn on_replies<'a>(
        &mut self,
        replies: impl Iterator<Item = &'a SentinelReply>,
        works: bool,
        now: Instant,
    ) -> Verdict {
        let verdict = self.decide(replies, works, now);
        let retries = Backoff::exponential(MIN_REFRESH_INTERVAL, 2.0, LONGEST_WITHOUT_MASTER);
        let was_replica = take(&mut self.is_replica);
        self.undecided = match &verdict {
            Verdict::Master(_) if !was_replica => None,
            Verdict::FailedOver(_) => None,
            Verdict::Master(_) | Verdict::Undecided => {
                let earlier = self.undecided.map_or(0, |(queries, _)| queries);
                Some((earlier.saturating_add(1), now + retries.pause(earlier)))
            }
        };
        // The last pause is repeated while something fails.
        let last = QUERIES_IN_SERIES + u32::from(!self.suspected);
        self.next_query = now + pauses().pause(self.queries);
        self.queries = (self.queries + 1).min(last);
        self.suspected = false;
        self.queried_at = Some(now);
        if self.disconnected {
            // While the query ran: it may have been answered on that connection before.
            self.query_after_disconnect(now);
        }
        verdict
    }

    fn decide<'a>(
        &mut self,
        replies: impl Iterator<Item = &'a SentinelReply>,
        works: bool,
        now: Instant,
    ) -> Verdict {
        let Some((SentinelReply { endpoint, epoch }, votes)) = most_voted(replies) else {
            return Verdict::Undecided;
        };
        let mut by_majority = votes * 2 > self.sentinels;
        if let Some(known) = &self.known {
            // A failover has a later epoch. Of the same epoch, there is another address only at a
            // sentinel of other servers.
            let is_other = epoch == known.epoch && endpoint != known.endpoint && !by_majority;
            let is_outdated = is_other && known.by_majority
                || epoch < known.epoch && (known.by_majority || !by_majority);
            if is_outdated {
                let since = *self.outdated_since.get_or_insert(now);
                if now < since + EARLIER_EPOCH_IGNORED_FOR || works && !by_majority {
                    return Verdict::Master(known.endpoint.clone());
                }
            }
            by_majority |=
                known.by_majority && (&known.endpoint, known.epoch) == (&endpoint, epoch);
        }
        self.outdated_since = None;
        let failed_over = self.master().is_some_and(|known| *known != endpoint);
        self.known = Some(KnownMaster {
            endpoint: endpoint.clone(),
            epoch,
            by_majority,
        });
        match failed_over {
            true => Verdict::FailedOver(endpoint),
            false => Verdict::Master(endpoint),
        }
    }
}

/// Number of queries whose pauses grow: 50 ms, doubled so many times, is more than
/// [`REFRESH_INTERVAL`].
const QUERIES_IN_SERIES: u32 = 7;

/// The pauses between queries of a series, or after connections that break again and again.
fn pauses() -> Backoff {
    Backoff::exponential(MIN_REFRESH_INTERVAL, 2.0, REFRESH_INTERVAL)
}

/// Returns the answer that counts, and the number of sentinels that gave it.
pub(super) fn most_voted<'a>(
    replies: impl Iterator<Item = &'a SentinelReply>,
) -> Option<(SentinelReply, usize)> {
    let mut votes: BTreeMap<&Endpoint, (usize, u64)> = BTreeMap::new();
    for SentinelReply { endpoint, epoch } in replies {
        let (count, latest) = votes.entry(endpoint).or_default();
        *count += 1;
        *latest = (*latest).max(*epoch);
    }
    let most = votes.values().map(|(count, _)| *count).max()?;
    votes.retain(|_, (count, _)| *count == most);
    if votes.len() > 2 {
        return None;
    }
    let latest = votes.into_iter().max_by_key(|(_, (_, epoch))| *epoch);
    latest.map(|(endpoint, (_, epoch))| {
        let endpoint = endpoint.clone();
        (SentinelReply { endpoint, epoch }, most)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    fn at(port: u16) -> Endpoint {
        Endpoint::new("h", port)
    }

    fn reply((port, epoch): (u16, u64)) -> SentinelReply {
        SentinelReply {
            endpoint: at(port),
            epoch,
        }
    }

    fn replies(all: &[(u16, u64)]) -> Vec<SentinelReply> {
        all.iter().copied().map(reply).collect()
    }

    /// Three sentinels, all of which name the server at port 1, with epoch 5.
    fn view(now: Instant) -> MasterView {
        let mut view = MasterView::new(3, now);
        let verdict = answered(&mut view, &[(1, 5), (1, 5), (1, 5)], false, now);
        assert_eq!(verdict, Verdict::Master(at(1)));
        view
    }

    fn answered(view: &mut MasterView, all: &[(u16, u64)], works: bool, now: Instant) -> Verdict {
        view.on_query();
        view.on_replies(replies(all).iter(), works, now)
    }

    #[test]
    fn wrong_sentinel_is_outvoted() {
        let voted = |all: &[(u16, u64)]| most_voted(replies(all).iter());
        assert_eq!(voted(&[(1, 7), (2, 3), (2, 3)]), Some((reply((2, 3)), 2)));
        assert_eq!(voted(&[(1, 3), (2, 4)]), Some((reply((2, 4)), 1)));
        assert_eq!(voted(&[]), None);
        // A failover that only one of two knows, and a wrong sentinel.
        assert_eq!(voted(&[(1, 3), (2, 4), (3, 7)]), None);
    }

    #[test]
    fn earlier_epoch_does_not_replace_working_master() {
        use Verdict::{FailedOver, Master, Undecided};
        // The replies, whether the known master works, the verdict at once, and the verdict on the
        // same replies when they have been given for as long as earlier epochs are ignored.
        type Case<'a> = (&'a [(u16, u64)], bool, Verdict, Verdict);
        let cases: [Case<'_>; 14] = [
            (&[], true, Undecided, Undecided),
            (&[(1, 5)], true, Master(at(1)), Master(at(1))),
            (&[(2, 6)], true, FailedOver(at(2)), Master(at(2))),
            (&[(2, 6), (2, 6)], true, FailedOver(at(2)), Master(at(2))),
            (&[(2, 5), (2, 5)], true, FailedOver(at(2)), Master(at(2))),
            (&[(1, 5), (2, 6), (3, 7)], true, Undecided, Undecided),
            // One sentinel of other servers.
            (&[(2, 5)], true, Master(at(1)), Master(at(1))),
            (&[(2, 5)], false, Master(at(1)), FailedOver(at(2))),
            // One sentinel that missed the failover.
            (&[(2, 4)], true, Master(at(1)), Master(at(1))),
            (&[(2, 4)], false, Master(at(1)), FailedOver(at(2))),
            (&[(1, 5), (2, 4)], true, Master(at(1)), Master(at(1))),
            // Sentinels that were set up again.
            (&[(2, 1), (2, 1)], true, Master(at(1)), FailedOver(at(2))),
            (&[(2, 1), (2, 1)], false, Master(at(1)), FailedOver(at(2))),
            (&[(1, 1), (1, 1)], true, Master(at(1)), Master(at(1))),
        ];
        for (all, works, at_once, later) in cases {
            let now = Instant::now();
            let mut view = view(now);
            let mut verdict = |now| answered(&mut view, all, works, now);
            assert_eq!(verdict(now), at_once, "{all:?}");
            let unchanged = match &at_once {
                Undecided => Undecided,
                Master(endpoint) | FailedOver(endpoint) => Master(endpoint.clone()),
            };
            let end = now + EARLIER_EPOCH_IGNORED_FOR;
            assert_eq!(verdict(end - MILLISECOND), unchanged, "{all:?}");
            assert_eq!(verdict(end), later, "{all:?}");
        }
    }

    #[test]
    fn current_answer_between_outdated_ones_restarts_time() {
        let now = Instant::now();
        let mut view = view(now);
        let (outdated, current): (&[_], &[_]) = (&[(2, 1), (2, 1)], &[(1, 5)]);
        let half = EARLIER_EPOCH_IGNORED_FOR / 2;
        for (n, all) in (0..).zip([outdated, outdated, current, outdated, outdated]) {
            let verdict = answered(&mut view, all, true, now + half * n);
            assert_eq!(verdict, Verdict::Master(at(1)));
        }
    }

    #[test]
    fn majority_replaces_what_a_minority_named() {
        let now = Instant::now();
        let mut view = MasterView::new(3, now);
        let verdict = answered(&mut view, &[(9, 1000)], false, now);
        assert_eq!(verdict, Verdict::Master(at(9)));
        let verdict = answered(&mut view, &[(9, 1000), (1, 5), (1, 5)], true, now);
        assert_eq!(verdict, Verdict::FailedOver(at(1)));
        // A minority that confirms it later takes nothing away from that.
        answered(&mut view, &[(1, 5)], true, now);
        let verdict = answered(&mut view, &[(2, 4), (2, 4)], true, now);
        assert_eq!(verdict, Verdict::Master(at(1)));
    }

    /// Queries at the times that the view asks for, until `end`; returns the pauses.
    fn observed_pauses(view: &mut MasterView, end: Instant, suspicions: bool) -> Vec<Duration> {
        let mut pauses = Vec::new();
        let mut before = view.queried_at.unwrap();
        while view.next_query() < end {
            let now = view.next_query();
            // A failed step just before the query.
            if suspicions {
                view.on_suspicion(now - MILLISECOND);
                assert_eq!(view.next_query(), now, "in a series, and behind it");
            }
            pauses.push(now - before);
            before = now;
            // Whether the query succeeds makes no difference.
            answered(view, &[(1, 5)][pauses.len() % 2..], true, now);
        }
        pauses
    }

    /// A view after a minute in which something failed before each query.
    fn while_steps_fail() -> (MasterView, Instant) {
        let begun = Instant::now();
        let mut view = view(begun);
        let now = begun + Duration::from_secs(60);
        observed_pauses(&mut view, now, true);
        (view, now)
    }

    /// All connections broke while the last query of a series was in flight: nothing else repeats
    /// it.
    #[test]
    fn client_without_master_queries_often() {
        let (mut view, now) = while_steps_fail();
        view.on_suspicion(now);
        answered(&mut view, &[(1, 5), (1, 5)], true, now);
        let mut longest = MIN_REFRESH_INTERVAL;
        for n in 0..20 {
            view.on_suspicion(now);
            answered(&mut view, &[], n % 2 == 0, now);
            assert!(
                view.next_query() > now + LONGEST_WITHOUT_MASTER,
                "no connection needs it"
            );
            view.on_needed();
            let pause = view.next_query() - now;
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?}");
            longest = (longest * 2).min(LONGEST_WITHOUT_MASTER);
        }
        answered(&mut view, &[(1, 5), (1, 5)], false, now);
        view.on_needed();
        assert!(view.next_query() > now + LONGEST_WITHOUT_MASTER);
    }

    /// All connections to the sentinels had broken, so that their message about the failover was lost.
    #[test]
    fn client_whose_master_answers_as_a_replica_queries_often_until_another_is_named() {
        let (mut view, mut now) = while_steps_fail();
        view.on_suspicion(now);
        answered(&mut view, &[(1, 5)], true, now);
        now += MIN_REFRESH_INTERVAL;
        view.on_suspicion(now);
        assert!(view.next_query() > now + LONGEST_WITHOUT_MASTER);
        let mut longest = MIN_REFRESH_INTERVAL;
        for n in 0..10 {
            view.on_replica(now);
            view.on_needed();
            let pause = view.next_query() - now;
            if n == 0 {
                assert_eq!(pause, Duration::ZERO);
            } else {
                assert!(pause >= longest / 2 && pause <= longest, "{pause:?}");
                longest = (longest * 2).min(LONGEST_WITHOUT_MASTER);
            }
            now = view.next_query();
            assert_eq!(
                answered(&mut view, &[(1, 5)], false, now),
                Verdict::Master(at(1))
            );
        }
        view.on_replica(now);
        let verdict = answered(&mut view, &[(2, 6)], false, now);
        assert_eq!(verdict, Verdict::FailedOver(at(2)));
        view.on_needed();
        assert!(view.next_query() > now + LONGEST_WITHOUT_MASTER);
    }

    /// In particular twice within seconds: else a message about a failover after that is lost.
    #[test]
    fn sentinels_are_queried_soon_after_each_broken_connection() {
        let (mut view, mut now) = while_steps_fail();
        let mut longest = MIN_REFRESH_INTERVAL;
        for _ in 0..10 {
            now += MIN_REFRESH_INTERVAL;
            view.on_disconnect(now);
            let pause = view.next_query() - now;
            assert!(pause <= longest, "{pause:?}");
            longest = (longest * 2).min(REFRESH_INTERVAL);
            now = view.next_query();
            answered(&mut view, &[(1, 5), (1, 5)], true, now);
        }
        let repeated = view.next_query() - now;
        assert!(repeated > REFRESH_INTERVAL / 4, "{repeated:?}");
        // Once nothing has broken, the next one counts as the first.
        answered(&mut view, &[(1, 5), (1, 5)], true, now);
        view.on_disconnect(now);
        assert!(view.next_query() <= now + MIN_REFRESH_INTERVAL);
        // Also if it breaks while a query runs, whose answer came before.
        view.on_suspicion(now);
        answered(&mut view, &[(1, 5), (1, 5)], true, now);
        view.on_query();
        view.on_disconnect(now);
        let all = replies(&[(1, 5), (1, 5)]);
        view.on_replies(all.iter(), true, now);
        assert!(view.next_query() <= now + MIN_REFRESH_INTERVAL);
    }

    #[test]
    fn queries_are_repeated_after_growing_pauses() {
        let begun = Instant::now();
        let minute = Duration::from_secs(60);
        let mut view = view(begun);
        let first = observed_pauses(&mut view, begun + minute, false);
        let mut longest = MIN_REFRESH_INTERVAL;
        for pause in &first {
            assert!(*pause >= longest / 2 && *pause <= longest, "{first:?}");
            longest = (longest * 2).min(REFRESH_INTERVAL);
        }
        assert!(first.len() > 15, "{first:?}");
        // A failure after that begins a new series at once.
        let now = view.queried_at.unwrap() + MIN_REFRESH_INTERVAL;
        view.on_suspicion(now);
        assert_eq!(view.next_query(), now);
        answered(&mut view, &[], true, now);
        assert!(view.next_query() <= now + MIN_REFRESH_INTERVAL);
        // While something fails all the time, that one is the only one.
        let failing = observed_pauses(&mut view, now + minute, true);
        let short = failing
            .iter()
            .filter(|pause| **pause < REFRESH_INTERVAL / 2);
        assert!(short.count() <= 7, "{failing:?}");
        // A message begins another one.
        let now = view.queried_at.unwrap() + MIN_REFRESH_INTERVAL;
        view.on_message(now);
        assert_eq!(view.next_query(), now);
        answered(&mut view, &[], true, now);
        assert!(view.next_query() <= now + MIN_REFRESH_INTERVAL);
        // Also one that was received while the query before was in flight.
        view.on_message(now);
        let before = view.next_query();
        view.on_message(now + MILLISECOND);
        assert!(view.next_query() <= before);
        answered(&mut view, &[], true, before);
        assert!(view.next_query() <= before + MIN_REFRESH_INTERVAL);
    }
}
