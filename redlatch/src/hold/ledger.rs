//! The ledger of an owner's hold: which of its changes the store has answered, and what must still be settled.
//!
//! 1. Each change gets a number: an attempt to acquire when it is about to be sent, the removal of a guard, a loss at a
//!    limit and the end of a wait when they happen, a release when it was sent and will not be answered any more.
//! 2. A release sends the count after all changes so far, so its answer acknowledges all of them.
//! 3. The answer to an attempt acknowledges only that attempt, and only if all earlier changes are acknowledged: the
//!    outcome of an unacknowledged change may differ from what the answer implies.
//! 4. While a change is not acknowledged, the store may keep another count than this client. Before the next
//!    acquisition, a release must then be answered. If an attempt may still be in flight, the release is sent behind it.
//!
//! Invariant: once all changes are acknowledged and the hold is not lost, the store has the count of this client, and no
//! step that is still in flight changes it. The exception is a grant that is expected. `exploration` checks that in all
//! orders of steps, answers and broken connections.
//!
//! Must not happen: a release whose caller has left frees the next acquisition of the same owner. That release is a
//! change, so the next acquisition waits for another release, which the store answers after it.

use tokio::time::Instant;

/// See the [module](self). The first change has the number 2; 0 means none.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Ledger {
    latest: u64,
    acknowledged: u64,
    /// The latest attempt, until it is answered.
    open_attempt: u64,
    /// The latest change when the store last confirmed a full release.
    released_at: u64,
    /// Whether a full release was sent and not answered. It may have been applied, so the next one may find nothing.
    maybe_released: bool,
    /// The latest change when settling in the background was last abandoned.
    abandoned_at: u64,
    /// The number of the latest step and the end of its lease, if that step is an attempt which was answered that the
    /// object is not available. The store may grant the object to it later.
    expected_grant: Option<(i64, Instant)>,
}

impl Ledger {
    pub(crate) fn new() -> Ledger {
        Ledger {
            latest: 1,
            acknowledged: 1,
            open_attempt: 0,
            released_at: 0,
            maybe_released: false,
            abandoned_at: 0,
            expected_grant: None,
        }
    }

    /// Returns the ledger of a hold that replaces a lost one of the same owner. Its first step is a release, because the
    /// store may still have the lost hold; behind an attempt of that hold which may be in flight.
    pub(super) fn after_loss(lost: &Ledger) -> Ledger {
        let latest = 1;
        Ledger {
            acknowledged: 0,
            open_attempt: if lost.open_attempt > 0 { latest } else { 0 },
            ..Ledger::new()
        }
    }

    /// Returns the number of the latest change.
    pub(crate) fn latest(&self) -> u64 {
        self.latest
    }

    fn add(&mut self) -> u64 {
        self.latest += 1;
        self.latest
    }

    /// Records the removal of a guard. Returns its number.
    pub(super) fn guard_removed(&mut self) -> u64 {
        self.add()
    }

    /// Records that a request waits no longer of which the store may know. Returns the number of this change.
    pub(crate) fn waiter_left(&mut self) -> u64 {
        self.add()
    }

    /// Records that the hold was lost although the store may keep it.
    pub(super) fn lost_at_limit(&mut self) {
        self.add();
    }

    /// Records that an attempt is about to be sent: from now on a release may be needed. Returns its number.
    pub(crate) fn begin_attempt(&mut self) -> u64 {
        self.expected_grant = None;
        self.open_attempt = self.add();
        self.open_attempt
    }

    /// Acknowledges one change, if all earlier ones are acknowledged.
    fn acknowledge(&mut self, change: u64) {
        if self.acknowledged + 1 == change {
            self.acknowledged = change;
        }
    }

    /// Records that the store keeps what a removed guard had, on purpose.
    pub(crate) fn kept_in_store(&mut self, removal: u64) {
        self.acknowledge(removal);
    }

    /// Records that this attempt was answered, or was never sent.
    pub(super) fn attempt_answered(&mut self, attempt: u64) {
        self.acknowledge(attempt);
        if self.open_attempt == attempt {
            self.open_attempt = 0;
        }
    }

    /// Returns whether this attempt is the latest change, so that no later one may have undone it.
    pub(super) fn is_latest_attempt(&self, attempt: u64) -> bool {
        self.open_attempt == attempt && self.latest == attempt
    }

    /// Records that a release is about to be sent: a grant before it is not valid any more.
    pub(super) fn begin_release(&mut self) {
        self.expected_grant = None;
    }

    /// Records the answer to a release that was sent when `latest` was the latest change. `fully`: the answer confirmed
    /// that nothing is held any more.
    pub(super) fn release_answered(&mut self, latest: u64, fully: bool) {
        self.acknowledged = self.acknowledged.max(latest);
        self.maybe_released = false;
        if fully {
            self.released_at = latest;
        }
        if self.open_attempt <= latest {
            self.open_attempt = 0;
        }
    }

    /// Records that a release with this count was sent and will not be answered any more. The store may apply it at any
    /// later time, even if there was nothing left to release.
    pub(crate) fn release_unanswered(&mut self, keep: u32) {
        self.add();
        self.maybe_released |= keep == 0;
    }

    /// Records that settling in the background was abandoned: the hold is lost, or the store was unreachable for so long that
    /// the lease must have ended.
    pub(crate) fn settling_abandoned(&mut self) {
        self.abandoned_at = self.latest;
    }

    /// Returns whether the store has answered this change, or a release behind it.
    pub(crate) fn has_acknowledged(&self, change: u64) -> bool {
        self.acknowledged >= change
    }

    /// Returns whether the store has answered all changes: it has the count of this client.
    pub(crate) fn is_settled(&self) -> bool {
        self.has_acknowledged(self.latest)
    }

    /// Returns whether an attempt may still be in flight.
    pub(crate) fn has_attempt_in_flight(&self) -> bool {
        self.open_attempt > 0
    }

    /// Returns whether the last reference must settle before the hold is dropped.
    pub(crate) fn must_be_settled(&self) -> bool {
        self.acknowledged.max(self.abandoned_at) < self.latest
    }

    /// Returns the latest change when the store last confirmed a full release.
    pub(crate) fn released_at(&self) -> u64 {
        self.released_at
    }

    /// Returns whether an earlier full release may have been applied without an answer.
    pub(crate) fn maybe_released(&self) -> bool {
        self.maybe_released
    }

    /// Records that the latest attempt was answered that the object is not available. From now on the store may grant it
    /// the object, and publishes its number then. `end`: the lease, counted from when it was sent.
    pub(crate) fn expect_grant(&mut self, number: i64, end: Instant) {
        self.expected_grant = (number != 0).then_some((number, end));
    }

    /// Returns when the hold ends that the store has granted to the attempt with this number. `None` if that is not the
    /// latest step.
    pub(crate) fn take_expected_grant(&mut self, number: i64) -> Option<Instant> {
        let is_expected = |&mut (expected, _): &mut (i64, Instant)| expected == number;
        self.expected_grant.take_if(is_expected).map(|(_, end)| end)
    }
}

#[cfg(test)]
mod exploration;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_prelude::SECOND;

    /// A ledger whose first attempt the store has acknowledged.
    fn acquired() -> Ledger {
        let mut ledger = Ledger::new();
        let attempt = ledger.begin_attempt();
        ledger.attempt_answered(attempt);
        ledger
    }

    /// What each step leaves open: settled, attempt in flight, must be settled.
    #[test]
    fn open_changes_after_each_step() {
        type Step = fn(&mut Ledger);
        let attempt: Step = |ledger| _ = ledger.begin_attempt();
        let answered: Step = |ledger| ledger.attempt_answered(ledger.open_attempt);
        let removed: Step = |ledger| _ = ledger.guard_removed();
        let released: Step = |ledger| ledger.release_answered(ledger.latest, true);
        let left: Step = |ledger| ledger.release_unanswered(0);
        let abandoned: Step = Ledger::settling_abandoned;
        let limit: Step = Ledger::lost_at_limit;
        let kept: Step = |ledger| {
            let removal = ledger.guard_removed();
            ledger.kept_in_store(removal);
        };
        let cases: [(&str, &[Step], [bool; 3]); 13] = [
            ("nothing", &[], [true, false, false]),
            ("attempt in flight", &[attempt], [false, true, true]),
            ("answered", &[attempt, answered], [true, false, false]),
            ("removed guard", &[removed], [false, false, true]),
            // The removed guard may have left a hold in the store: the answer to the attempt does not show that.
            (
                "answer after a removed guard",
                &[removed, attempt, answered],
                [false, false, true],
            ),
            (
                "two attempts, the latest answered",
                &[attempt, attempt, answered],
                [false, false, true],
            ),
            (
                "release",
                &[removed, attempt, released],
                [true, false, false],
            ),
            ("unanswered release", &[left], [false, false, true]),
            (
                "attempt behind it",
                &[left, attempt, answered],
                [false, false, true],
            ),
            ("abandoned", &[removed, abandoned], [false, false, false]),
            ("lost at a limit", &[limit], [false, false, true]),
            ("left in the store", &[kept], [true, false, false]),
            // The store may still execute the attempt.
            (
                "left behind an attempt",
                &[attempt, kept],
                [false, true, true],
            ),
        ];
        for (name, steps, expected) in cases {
            let mut ledger = acquired();
            steps.iter().for_each(|step| step(&mut ledger));
            let open = [
                ledger.is_settled(),
                ledger.has_attempt_in_flight(),
                ledger.must_be_settled(),
            ];
            assert_eq!(open, expected, "{name}");
        }
        let mut ledger = acquired();
        [removed, abandoned, attempt]
            .iter()
            .for_each(|step| step(&mut ledger));
        assert!(
            ledger.must_be_settled(),
            "a later change has to be settled again"
        );
    }

    #[test]
    fn answer_to_earlier_attempt_leaves_latest_open() {
        let mut ledger = acquired();
        let [first, second] = [(); 2].map(|()| ledger.begin_attempt());
        assert_eq!((second, ledger.latest()), (first + 1, second));
        ledger.attempt_answered(first);
        assert!(!ledger.is_settled() && ledger.has_attempt_in_flight());
        assert!(ledger.is_latest_attempt(second) && !ledger.is_latest_attempt(first));
    }

    #[test]
    fn release_acknowledges_only_earlier_changes() {
        let mut ledger = acquired();
        let removed = ledger.guard_removed();
        let attempt = ledger.begin_attempt();
        ledger.release_answered(removed, false);
        assert!(!ledger.is_settled() && ledger.has_attempt_in_flight());
        assert_eq!(ledger.released_at(), 0);
        // With everything before it acknowledged, its own answer is enough.
        ledger.attempt_answered(attempt);
        assert!(ledger.is_settled());
        // A late answer takes nothing back.
        ledger.release_answered(removed, true);
        assert!(ledger.is_settled());
        assert_eq!(ledger.released_at(), removed);
    }

    #[test]
    fn unanswered_full_release_may_have_been_applied() {
        for keep in [0, 1] {
            let mut ledger = acquired();
            ledger.release_unanswered(keep);
            assert_eq!(ledger.maybe_released(), keep == 0);
            ledger.release_unanswered(1);
            assert_eq!(ledger.maybe_released(), keep == 0);
            ledger.release_answered(ledger.latest(), false);
            assert!(!ledger.maybe_released() && !ledger.must_be_settled());
        }
    }

    #[test]
    fn hold_after_a_loss_begins_with_a_release() {
        let mut lost = acquired();
        let later = Ledger::after_loss(&lost);
        assert!(!later.is_settled() && !later.has_attempt_in_flight());
        lost.begin_attempt();
        let mut later = Ledger::after_loss(&lost);
        assert!(
            later.has_attempt_in_flight(),
            "the release is sent behind it"
        );
        later.release_answered(later.latest(), true);
        assert!(later.is_settled() && !later.has_attempt_in_flight());
    }

    /// Every step that is sent after the attempt may change what the store has granted to it.
    #[test]
    fn grant_is_expected_only_for_latest_step() {
        let now = Instant::now();
        let mut ledger = acquired();
        let expect = |ledger: &mut Ledger| ledger.expect_grant(7, now + SECOND);
        expect(&mut ledger);
        assert_eq!(ledger.take_expected_grant(6), None);
        assert_eq!(ledger.take_expected_grant(7), Some(now + SECOND));
        assert_eq!(ledger.take_expected_grant(7), None);
        for later_step in [
            |ledger: &mut Ledger, _: Instant| _ = ledger.begin_attempt(),
            |ledger: &mut Ledger, _: Instant| ledger.begin_release(),
            |ledger: &mut Ledger, end: Instant| ledger.expect_grant(0, end),
        ] {
            expect(&mut ledger);
            later_step(&mut ledger, now);
            assert_eq!(ledger.take_expected_grant(7), None);
            assert_eq!(ledger.take_expected_grant(0), None);
        }
    }
}
