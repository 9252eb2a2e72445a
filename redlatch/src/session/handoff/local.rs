//! Passes a hold from one request of this client to the next without releasing it in the store (lock
//! cohorting: Dice, Marathe, Shavit, PPoPP 2012).
//!
//! 1. The last guard of a hold is released while another request of this client waits. If the hold
//!    may pass on ([`HoldState::local_handoff`](crate::hold::HoldState::local_handoff)), it stays in the
//!    store as it is, and is offered to the first waiter of the queue.
//! 2. The waiter takes the offer instead of sending a request. It returns a guard of the same hold,
//!    under the owner that the store knows, in a hold period of its own.
//! 3. An offer is released in the background if no waiter takes it within 10 ms, or all have left.
//! 4. Beside the handoffs, the store is asked whether it still has the hold, and whether other
//!    clients wait or ask for it. When others wait, or the answer is late, the hold is released to
//!    all.
//! 5. After a section that is longer than the last answer counts (10 ms, or twice the time that it took), it is not known
//!    whether other clients wait, so the release asks before the handoff.
//!    As each release did, it then reports a loss, and lets a client go first that has asked for the hold.
//! 6. The store is asked out of turn, so that no release waits for the answer. So "not held" only
//!    puts the hold in doubt ([`HoldState::doubt`](crate::hold::HoldState::doubt)), and a check in
//!    turn decides.
//!
//! Invariant: the hold has one guard, or one offer, or a release that asks, at any time, and no
//! request for its owner is in flight. What must not happen, and what prevents it:
//!
//! - *Two guards of one hold.* The released guard was the only one, the registry counts no other
//!   reference, and only the first waiter empties the place of the offer.
//! - *A caller re-enters a hold that has passed on.* A hold passes on only if its owner is
//!   anonymous (mutant `named-owner-handed-over`). No request can name such an owner. A request of
//!   a guard (`reenter`, `reenter_read`) counts as a reference to the hold.
//! - *A task reads beside the task to which the write hold of its owner has passed.* A writer does
//!   not pass on while the registry counts a reference to the read side of its owner.
//! - *A hold passes on that the store has lost.* The watchdog renews it, no renewal has failed, and
//!   at least half of its lease is left. After a message on its channel it is neither offered nor
//!   taken. A message during the acquisition is mostly that of the release before: the store is
//!   asked at once. Mutants `lost-hold-handed-over`, `offer-taken-after-release`.
//! - *An answer out of turn ends the hold of a ticket*, which the guard has become meanwhile. Point
//!   6 prevents it. Tests: `turn_tests`.
//! - *Other clients starve.* `hold/fairness` has the bounds. Mutant `other-clients-not-counted`.
//!
//! Permits pass on in the same way (`counters/semaphore/held`). What cannot pass on in the client
//! may do so in the store (`in_store`). `ClientBuilder::local_hand_over(false)` turns all of this off.

use std::sync::Arc;

use tokio::time::{Instant, timeout};

use super::super::{HoldRef, Session, Terms};
use crate::background::Counted;
use crate::error::{Loss, Result};
use crate::hold::{
    CHECK_LIMIT, Chain, Hold, HoldLimits, NoHandoff, OtherClients, Renewed, Share, fair_waiters,
    requests,
};
use crate::keyspace::{FoundKey, Holds};
use crate::name::ObjectKeys;
use crate::step::{Step, args, script};
use crate::sync::Mutex;
use crate::wait::Offer;

/// What passes from request to request until it is released to all: a hold, or permits without an owner.
pub(crate) trait HasChain: Clone + Send + Sync + 'static {
    /// Accesses the chain.
    fn access<T>(&self, access: impl FnOnce(&mut Chain) -> T) -> T;

    /// Returns the hold, if it is one.
    fn hold(&self) -> Option<&Arc<Hold>>;
}

impl HasChain for Arc<Hold> {
    fn access<T>(&self, access: impl FnOnce(&mut Chain) -> T) -> T {
        access(&mut self.state().period.chain)
    }

    fn hold(&self) -> Option<&Arc<Hold>> {
        Some(self)
    }
}

impl HasChain for Arc<Mutex<Chain>> {
    fn access<T>(&self, access: impl FnOnce(&mut Chain) -> T) -> T {
        access(&mut self.lock())
    }

    fn hold(&self) -> Option<&Arc<Hold>> {
        None
    }
}

/// A hold between a released guard and the request that takes it over. Dropping it releases the hold in the
/// background.
pub(crate) struct LocalHandoff {
    /// `None` when a request has taken it.
    hold_ref: Option<HoldRef>,
    terms: Terms,
}

impl LocalHandoff {
    /// Offers the hold of a guard to a request that waits, and then takes the reference.
    /// `released_at`: when the release began.
    pub(crate) fn offer(
        hold_ref: &HoldRef,
        terms: Terms,
        released_at: Instant,
        now: Instant,
    ) -> Result<(), NoHandoff> {
        let (session, hold) = (&hold_ref.session, &hold_ref.hold);
        session.offer(
            &hold.object,
            hold.kind.share(),
            hold,
            now,
            |may_check_first| {
                if !hold_ref.is_only_one() {
                    return Err(NoHandoff::Release);
                }
                let lease = terms.lease.duration();
                let asks = hold.state_at(|| now).local_handoff(
                    lease,
                    may_check_first,
                    released_at,
                    now,
                )?;
                let hold_ref = Some(hold_ref.take());
                Ok((Box::new(LocalHandoff { hold_ref, terms }), asks))
            },
        )
    }

    /// Asks the store whether other clients wait, and then offers the hold. If the store does not
    /// answer soon, or there is no runtime with timers, the hold has to be released.
    pub(crate) async fn offer_after_check(
        hold_ref: &HoldRef,
        terms: Terms,
        released_at: Instant,
    ) -> Result<(), NoHandoff> {
        crate::runtime::current().map_err(|_| NoHandoff::Release)?;
        let HoldRef { session, hold, .. } = hold_ref;
        let asking = session.check_handoff(&hold.object, hold);
        let _ = timeout(CHECK_LIMIT, asking).await;
        LocalHandoff::offer(hold_ref, terms, released_at, Instant::now())
    }

    /// The same in the background, for a dropped guard, whose reference it takes. Releases the hold if it is not offered.
    pub(crate) fn offer_in_background(hold_ref: &HoldRef, terms: Terms) {
        let background = hold_ref.session.background.clone();
        let running = background.begin(&hold_ref.hold.object);
        let released_at = Instant::now();
        let mut dropped = LocalHandoff {
            hold_ref: Some(hold_ref.take()),
            terms,
        };
        background.spawn_begun(running, async move {
            if let Some(hold_ref) = &dropped.hold_ref
                && LocalHandoff::offer_after_check(hold_ref, terms, released_at)
                    .await
                    .is_ok()
            {
                drop(dropped.hold_ref.take());
            }
        });
    }

    /// Accepts the hold, with the limits of the request, unless it has been lost or is in doubt, its owner was asked to release
    /// it, or it is another share of the object.
    pub(crate) fn accept(
        self: Box<Self>,
        share: Share,
        limits: Option<&HoldLimits>,
        now: Instant,
    ) -> Option<Box<LocalHandoff>> {
        let HoldRef { session, hold, .. } = self.hold_ref.as_ref()?;
        let (is_available, is_registered) = {
            let mut state = hold.state_at(|| now);
            state.taken_over(self.terms.lease.duration(), now);
            let is_held = state.held_period().is_some();
            let is_certain = !state.period.is_asked() && !state.needs_check();
            (is_held && is_certain, state.watchdog.registered)
        };
        if hold.kind.share() != share || !is_available {
            return None;
        }
        if is_registered {
            // Its entry is about the earlier request.
            session.watchdog.unwatch(hold);
        }
        limits.inspect(|limits| hold.start_limits(limits));
        // The watchdog's task may have ended with the runtime of an earlier guard.
        session.watchdog.watch_granted(hold, now, now);
        tracing::debug!(lock = hold.object.full_name(), owner = %hold.field, "handed over");
        Some(self)
    }

    /// Returns the hold.
    pub(crate) fn hold(&self) -> Option<&Arc<Hold>> {
        Some(&self.hold_ref.as_ref()?.hold)
    }

    /// Passes the hold to a guard.
    pub(crate) fn into_hold_ref(mut self) -> Option<HoldRef> {
        self.hold_ref.take()
    }
}

impl Drop for LocalHandoff {
    fn drop(&mut self) {
        if let Some(hold_ref) = self.hold_ref.take() {
            hold_ref.remove_guard(self.terms);
            hold_ref.settle_removed_guard(self.terms);
        }
    }
}

impl Session {
    /// Offers what a guard has to a request that waits. `offer` is called if there is one, with whether a release may ask first,
    /// and may refuse. It also returns whether to ask the store beside the handoff.
    pub(crate) fn offer<C: HasChain>(
        self: &Arc<Self>,
        object: &Arc<ObjectKeys>,
        share: Share,
        chain: &C,
        now: Instant,
        offer: impl FnOnce(bool) -> Result<(Offer, bool), NoHandoff>,
    ) -> Result<(), NoHandoff> {
        let mut refusal = NoHandoff::Release;
        let mut checks = false;
        let offered = self.waiting.offer(object, share, now, |is_crowded| {
            let may_check_first =
                share == Share::Whole && self.store.counts_subscribers() && !is_crowded;
            let (offer, also_checks) = offer(may_check_first)
                .map_err(|refused| refusal = refused)
                .ok()?;
            checks = also_checks;
            Some(Counted::new(offer, self.background.begin(object)))
        });
        // Not started by the request that takes over: it would have the hold 30 µs later.
        if checks {
            let (session, checked, chain) = (self.clone(), object.clone(), chain.clone());
            let check = async move { session.check_handoff(&checked, &chain).await };
            self.background.spawn_check(object, check);
        }
        if offered { Ok(()) } else { Err(refusal) }
    }

    /// Asks the store whether it still has what passes on, and whether other clients wait for the object.
    pub(in super::super) async fn check_handoff(&self, object: &ObjectKeys, chain: &impl HasChain) {
        let asked_at = Instant::now();
        let own = u64::from(self.waiting.channels.is_subscribed(object.channel()));
        let waiting = self.check_hold(object, chain.hold()).await;
        let others = match waiting.filter(|_| self.store.counts_subscribers()) {
            // They cannot be counted.
            None => Some(OtherClients::default()),
            Some(waiting) => {
                let count = waiting.subscribers.saturating_sub(own) + waiting.queued;
                let in_queue = waiting.queued > 0;
                let count = usize::try_from(count).unwrap_or(usize::MAX);
                (count > 0).then_some(OtherClients { count, in_queue })
            }
        };
        chain.access(|chain| chain.answered(asked_at, others, Instant::now()));
    }

    /// Asks the store whether the owner still has the hold. If not, it is lost, and the local waiters ask for the object
    /// themselves. Returns how many wait for it, if there was an answer. `None` also for permits without an owner whose
    /// semaphore does not exist any more.
    pub(in super::super) async fn check_hold(
        &self,
        object: &ObjectKeys,
        hold: Option<&Arc<Hold>>,
    ) -> Option<WaiterCounts> {
        let step = check_handoff(object, hold.map(Arc::as_ref));
        let Some(hold) = hold else {
            let (exists, waiting) = self.check(object, &step).await.ok()?;
            return exists.then_some(waiting);
        };
        let granted_in = hold.state().period.granted_in;
        let mut answer = self.check(object, &step).await;
        // Out of turn, this only puts the hold in doubt: a step of the owner that is in flight may have put another in its
        // place. So the hold does not pass on, and is checked again behind that step.
        if matches!(answer, Ok((false, _))) && hold.state().doubt(granted_in) {
            let turn = hold.turn().await;
            // Else it was released meanwhile, and that release has woken the waiters.
            if hold.state().doubt(granted_in) {
                let suspicion = hold.state().watchdog.latest_suspicion();
                answer = match turn {
                    Ok(mut turn) => {
                        let in_turn = self.check(object, &step).await;
                        turn.record_result(&in_turn);
                        if matches!(in_turn, Ok((false, _))) && hold.mark_lost(Loss::NotHeld) {
                            self.watchdog.watch(hold);
                            self.watchdog.report_missing(hold);
                            self.waiting.wake(object.channel());
                        }
                        if matches!(in_turn, Ok((true, _))) {
                            hold.watchdog_state(|state| state.refuted(suspicion));
                        }
                        in_turn
                    }
                    Err(error) => Err(error),
                };
            }
        }
        if answer.is_err() {
            // The watchdog checks it as soon as the store answers again.
            self.watchdog.suspect(hold);
        }
        Some(answer.ok()?.1)
    }

    async fn check(
        &self,
        object: &ObjectKeys,
        step: &Step<'_, (bool, WaiterCounts)>,
    ) -> Result<(bool, WaiterCounts)> {
        let answer = self.store.run_urgent(step).await;
        if let Err(error) = &answer {
            let lock = object.full_name();
            tracing::debug!(lock, %error, "a hold that is passed on could not be checked");
        }
        answer
    }
}

impl HoldRef {
    /// Checks in the background whether the store still has the hold that was just acquired.
    pub(crate) fn check_hold_in_background(&self) {
        let (session, hold) = (self.session.clone(), self.hold.clone());
        let check = async move {
            session.check_hold(&hold.object, Some(&hold)).await;
        };
        let background = &self.session.background;
        background.spawn_check(&self.hold.object, check);
    }
}

/// How many wait for an object, as far as the store knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaiterCounts {
    /// Number of connections that subscribe to its channel, plus one if another client asks for it.
    pub(crate) subscribers: u64,
    /// Number of owners in the queue of a fair lock with the same key.
    pub(crate) queued: u64,
}

/// Returns whether the owner has the hold, and how many wait for the object. Of permits without an owner, returns whether the
/// semaphore exists.
pub(crate) fn check_handoff<'a>(
    object: &'a ObjectKeys,
    hold: Option<&'a Hold>,
) -> Step<'a, (bool, WaiterCounts)> {
    let key = hold.map_or(object.key(), |hold| hold.kind.renewal(hold).key);
    let mut args = args![object.channel()];
    match hold.map(|hold| (&*hold.field, hold.kind.share())) {
        Some((field, Share::Whole)) => args.extend(args!["lock", field, object.requests_key()]),
        Some((field, Share::Permits(_))) => {
            args.extend(args!["permits", field, object.requests_key()]);
        }
        None => {}
    }
    Step::new(
        script!(batchable(1, 4) "../../hold/fair_waiters.lua", "check_handoff.lua"),
        [key],
        args,
        move |reply| {
            let [is_held, subscribers, queued] = reply.array()?;
            let waiting = WaiterCounts {
                subscribers: subscribers.integer()?.try_into().unwrap_or(0),
                queued: queued.integer()?.try_into().unwrap_or(0),
            };
            Ok((is_held.flag()?, waiting))
        },
        move |keyspace| {
            let (is_held, is_asked) = match hold {
                Some(hold) if hold.kind.share() == Share::Whole => {
                    let holds = keyspace.find::<Holds>(hold.object.key())?;
                    let is_held =
                        |holds: FoundKey<'_, Holds>| holds.value.counts.contains_key(&*hold.field);
                    let is_held = holds.is_some_and(is_held);
                    (is_held, requests::find(keyspace, hold) != Renewed::Held)
                }
                Some(hold) => {
                    let renewed = hold.kind.renew(keyspace, hold, None)?;
                    (renewed.is_held(), matches!(renewed, Renewed::Asked { .. }))
                }
                None => (keyspace.exists(object.key()), false),
            };
            let subscribers = keyspace.subscriber_count(object.channel());
            let waiting = WaiterCounts {
                subscribers: subscribers as u64 + u64::from(is_asked),
                queued: fair_waiters::count(keyspace, object) as u64,
            };
            Ok((is_held, waiting))
        },
    )
}
