//! The model of all locks: owners acquire, re-enter, renew, release, give up, disconnect and lose
//! answers.

use std::hash::{Hash as _, Hasher};
use std::rc::Rc;
use std::time::Duration;

use tokio::time::Instant;

use super::{Model, State, TICK, Verdict, World, ensure, hash_end, ticks};
use crate::error::Result;
use crate::hold::{AcquireParams, Hold, HoldKind, ReleaseParams};
use crate::lease::Lease;
use crate::locks::Holder;
use crate::name::{owner_of, permits_of};
use crate::step::Outcome;
use crate::step::differential::hold_with;

type Acquire = dyn Fn(&mut World, AcquireParams<'_>) -> Result<Outcome>;
type Inspect = dyn Fn(&mut World) -> Result<Vec<Holder>>;

/// An owner that may hold one side of a lock.
pub(crate) struct Party {
    pub(crate) owner: u8,
    pub(crate) hold: Hold,
    /// Whether it excludes all other owners; otherwise only those that exclude it.
    exclusive: bool,
    acquire: Box<Acquire>,
    inspect: Box<Inspect>,
}

impl Party {
    pub(crate) fn new<K: HoldKind + Clone>(owner: u8, kind: K, exclusive: bool) -> Party {
        let field = kind.object().field(format!("client:{owner}"));
        Party::with_field(owner, kind, exclusive, field)
    }

    /// The same with this field in the store.
    pub(crate) fn with_field<K: HoldKind + Clone>(
        owner: u8,
        kind: K,
        exclusive: bool,
        field: String,
    ) -> Party {
        let inspected = kind.clone();
        Party {
            owner,
            hold: hold_with(field, kind.clone()),
            exclusive,
            acquire: Box::new(move |world, params| {
                let acquire = kind.acquire(params);
                acquire.apply(&mut world.keyspace)
            }),
            inspect: Box::new(move |world| {
                let inspect = inspected.inspect();
                inspect.apply(&mut world.keyspace)
            }),
        }
    }

    /// The channel whose subscribers tell the store that this waiter is connected.
    fn channel(&self) -> Option<&str> {
        self.hold.waiter_channel.as_deref()
    }

    fn excludes(&self, other: &Party) -> bool {
        let is_same = self.hold.object.identity() == other.hold.object.identity();
        is_same && self.owner != other.owner && (self.exclusive || other.exclusive)
    }
}

/// What a party may rely on.
#[derive(Debug, Clone, Default)]
struct KnownHold {
    count: u32,
    end: Option<Instant>,
    /// It requested the lock, and has neither acquired it nor given up since.
    waits: bool,
    /// If it waits and accepts a grant: the end of its lease, counted from its latest request.
    announced: Option<Instant>,
}

impl KnownHold {
    fn holds(&self, now: Instant) -> bool {
        self.end.is_some_and(|end| end > now)
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Step {
    Acquire {
        party: usize,
        count: u32,
        ticks: u8,
        waits: bool,
    },
    /// With `keep` 0 it also gives up waiting.
    Release {
        party: usize,
        keep: u32,
        ticks: u8,
    },
    Renew {
        party: usize,
        ticks: u8,
    },
    /// The owner no longer relies on its hold, but does not release it: an answer was lost, or the
    /// process died and another one has the same id.
    Forget {
        party: usize,
    },
    /// The connection of a waiter breaks.
    Disconnect {
        party: usize,
    },
}

#[derive(Debug, PartialEq)]
pub(crate) enum Reply {
    Acquired(std::result::Result<Outcome, String>),
    Held(bool),
    Nothing,
}

/// The effect of a step, for checks of one primitive.
pub(crate) struct Granted<'a> {
    pub(crate) party: &'a Party,
    /// Whether the step acquired a lock that the party did not hold before.
    pub(crate) acquired: bool,
    /// The fields of other parties to which the step granted the lock, in order.
    pub(crate) granted: &'a [&'a str],
    pub(crate) before: &'a State,
    pub(crate) after: &'a State,
}

/// A state, for checks of one primitive.
pub(crate) struct Observed<'a> {
    pub(crate) state: &'a State,
    /// The fields of the waiting owners.
    pub(crate) waiting: Vec<&'a str>,
    /// The present, as a timestamp.
    pub(crate) now: i64,
}

/// Locks of one kind under one name.
#[derive(Clone)]
pub(crate) struct Locks {
    setting: Rc<Setting>,
    known_holds: Vec<KnownHold>,
    /// The latest fencing token.
    latest: u64,
}

/// The immutable part.
struct Setting {
    parties: Vec<Party>,
    steps: Vec<Step>,
    token: String,
    /// Whether tokens follow the clock.
    by_clock: bool,
    may_clean_up: fn(&State, &State) -> bool,
    /// Whether a key must expire; `None`: the key must not exist.
    expires: fn(&str) -> Option<bool>,
    check: fn(&Observed<'_>) -> Verdict,
    granted: Option<fn(&Granted<'_>) -> Verdict>,
    /// Whether the waiters accept grants, except for the first party.
    accepts_grants: bool,
}

impl Locks {
    /// `waits`: whether the store remembers waiters.
    pub(crate) fn new(
        parties: Vec<Party>,
        waits: bool,
        expires: fn(&str) -> Option<bool>,
    ) -> Locks {
        let mut steps = Vec::new();
        for (party, known) in parties.iter().enumerate() {
            for ticks in 1..=2 {
                let requests = [(1, true), (1, false), (2, true)];
                let requests = requests.into_iter().filter(|request| waits || request.1);
                steps.extend(requests.map(|(count, waits)| Step::Acquire {
                    party,
                    count,
                    ticks,
                    waits,
                }));
                steps.push(Step::Renew { party, ticks });
            }
            let releases = [(0, 0), (1, 0), (1, 2)];
            steps.extend(releases.map(|(keep, ticks)| Step::Release { party, keep, ticks }));
            steps.push(Step::Forget { party });
            if known.channel().is_some() {
                steps.push(Step::Disconnect { party });
            }
        }
        Locks {
            known_holds: vec![KnownHold::default(); parties.len()],
            latest: 0,
            setting: Rc::new(Setting {
                parties,
                steps,
                token: String::new(),
                by_clock: false,
                may_clean_up: |_, _| false,
                expires,
                check: |_| Ok(()),
                granted: None,
                accepts_grants: false,
            }),
        }
    }

    fn set(self, change: impl FnOnce(&mut Setting)) -> Locks {
        let mut setting = Rc::into_inner(self.setting).expect("not shared yet");
        change(&mut setting);
        Locks {
            setting: Rc::new(setting),
            ..self
        }
    }

    /// Sets the key of the fencing token.
    pub(crate) fn with_token(self, key: &str) -> Locks {
        self.set(|setting| setting.token = key.to_owned())
    }

    /// Makes the fencing tokens follow the clock.
    pub(crate) fn by_clock(self) -> Locks {
        self.set(|setting| setting.by_clock = true)
    }

    /// See [`Model::may_clean_up`].
    pub(crate) fn with_clean_up(self, may_clean_up: fn(&State, &State) -> bool) -> Locks {
        self.set(|setting| setting.may_clean_up = may_clean_up)
    }

    /// Adds a check of each state.
    pub(crate) fn with_check(self, check: fn(&Observed<'_>) -> Verdict) -> Locks {
        self.set(|setting| setting.check = check)
    }

    /// Adds a check after each step.
    pub(crate) fn with_granted(self, granted: fn(&Granted<'_>) -> Verdict) -> Locks {
        self.set(|setting| setting.granted = Some(granted))
    }

    /// Makes the waiters accept grants, except for the first party.
    pub(crate) fn with_grants(self) -> Locks {
        self.set(|setting| setting.accepts_grants = true)
    }

    /// Returns the holder of each party's side, according to the store.
    fn holders(&self, world: &mut World) -> Verdict<Vec<Option<Holder>>> {
        let parties = self.setting.parties.iter();
        let holder = |party: &Party| {
            let holders = (party.inspect)(world).map_err(|error| error.to_string())?;
            let owner = owner_of(&party.hold.field);
            Ok(holders.into_iter().find(|holder| holder.owner == owner))
        };
        parties.map(holder).collect()
    }

    fn acquire(
        &mut self,
        number: usize,
        (count, lease, waits): (u32, Lease, bool),
        held: Option<&Holder>,
        world: &mut World,
    ) -> Verdict<std::result::Result<Outcome, String>> {
        let setting = self.setting.clone();
        let (party, now) = (&setting.parties[number], world.now);
        if waits && let Some(channel) = party.channel() {
            world.keyspace.set_subscriber_count(channel, 1);
        }
        // The first party accepts no grants, as Redisson's clients.
        let announces = setting.accepts_grants && waits && count == 1 && number > 0;
        let request_number = i64::from(announces);
        let params = AcquireParams {
            hold: &party.hold,
            count,
            lease,
            waits,
            request_number,
        };
        let has_token = world.keyspace.exists(&setting.token);
        let outcome = (party.acquire)(world, params).map_err(|error| error.to_string());
        let known_hold = &self.known_holds[number];
        match outcome {
            Ok(Outcome::Done(token)) => {
                let is_excluded = |(other, known_hold): (&Party, &KnownHold)| {
                    party.excludes(other) && known_hold.holds(now)
                };
                let mut others = setting.parties.iter().zip(&self.known_holds);
                let excluded = others.position(is_excluded);
                ensure(excluded.is_none(), || {
                    format!("acquired while party {excluded:?} holds it")
                })?;
                ensure(count == 1 || held.is_some(), || {
                    "re-entered, and nothing was held".to_owned()
                })?;
                let clock = setting.by_clock.then(|| world.keyspace.clock_micros());
                let clock = clock.and_then(|clock| u64::try_from(clock).ok());
                // A repeated acquisition returns the token of the first one.
                let expected = match held {
                    Some(held) if held.holds == count && has_token => self.latest,
                    _ => (self.latest + 1).max(clock.unwrap_or(0)),
                };
                ensure(setting.token.is_empty() || token == expected, || {
                    format!("token {token} instead of {expected}")
                })?;
                self.latest = expected;
                let end = now + lease.duration();
                if let Some(channel) = party.channel() {
                    world.keyspace.set_subscriber_count(channel, 0);
                }
                let known_hold = &mut self.known_holds[number];
                *known_hold = KnownHold {
                    count,
                    end: known_hold.end.max(Some(end)),
                    waits: false,
                    announced: None,
                };
            }
            Ok(Outcome::Wait(_)) => {
                ensure(!known_hold.holds(now), || {
                    "a holder was answered with a wait".to_owned()
                })?;
                let known_hold = &mut self.known_holds[number];
                known_hold.waits |= waits && count == 1;
                if waits && count == 1 {
                    known_hold.announced = announces.then(|| now + lease.duration());
                }
            }
            Err(_) => {}
        }
        Ok(outcome)
    }
}

impl Locks {
    /// Returns the parties to which the step granted the lock, as its messages tell them. From now
    /// on they rely on their holds.
    fn granted(&mut self, world: &mut World) -> Verdict<Vec<usize>> {
        let published = world.keyspace.take_published();
        let mut granted = Vec::new();
        for message in published.iter().filter(|message| message.payload > 0) {
            granted.extend(self.receiver(&message.channel, world)?);
        }
        Ok(granted)
    }

    /// Returns the party that receives a grant on this channel.
    fn receiver(&mut self, channel: &str, world: &mut World) -> Verdict<Option<usize>> {
        let setting = self.setting.clone();
        let is_receiver = |party: &Party| party.channel() == Some(channel);
        let granted = setting.parties.iter().position(is_receiver);
        let granted = granted.filter(|_| setting.accepts_grants);
        let Some(granted) = granted else {
            return Ok(None);
        };
        let mut others = setting.parties.iter().zip(&self.known_holds);
        let holder = others.position(|(other, known_hold)| {
            setting.parties[granted].excludes(other) && known_hold.holds(world.now)
        });
        ensure(holder.is_none(), || {
            format!("granted to party {granted} while party {holder:?} holds it")
        })?;
        ensure(self.known_holds[granted].announced.is_some(), || {
            format!("granted to party {granted}, which has announced nothing")
        })?;
        world.keyspace.set_subscriber_count(channel, 0);
        let known_hold = &mut self.known_holds[granted];
        *known_hold = KnownHold {
            count: 1,
            end: known_hold.announced,
            ..KnownHold::default()
        };
        Ok(Some(granted))
    }
}

impl Model for Locks {
    type Step = Step;
    type Reply = Reply;

    const PAST: i64 = 4;

    fn steps(&self) -> Vec<Step> {
        self.setting.steps.clone()
    }

    fn take(&mut self, step: Step, world: &mut World) -> Verdict<Option<Reply>> {
        let (Step::Acquire { party, .. }
        | Step::Release { party, .. }
        | Step::Renew { party, .. }
        | Step::Forget { party }
        | Step::Disconnect { party }) = step;
        let setting = self.setting.clone();
        let hold = &setting.parties[party].hold;
        let before = setting.granted.map(|_| world.state());
        let now = world.now;
        let known_hold = &self.known_holds[party];
        if let Step::Acquire { count, .. } = step
            && known_hold.holds(now)
            && count < known_hold.count
        {
            // No owner requests fewer holds than it has.
            return Ok(None);
        }
        let holders = self.holders(world)?;
        let held = holders[party].as_ref();
        let known_hold = &mut self.known_holds[party];
        let error = |error: crate::Error| error.to_string();
        let reply = match step {
            Step::Acquire {
                count,
                ticks: n,
                waits,
                ..
            } => {
                let request = (count, ticks(n), waits);
                Reply::Acquired(self.acquire(party, request, held, world)?)
            }
            Step::Release { keep, ticks: n, .. } => {
                let lease = (n > 0).then(|| ticks(n));
                let release = hold.kind.release(ReleaseParams { hold, keep, lease });
                let was_held = release.apply(&mut world.keyspace).map_err(error)?;
                ensure(was_held == held.is_some(), || {
                    format!("released: {was_held}, held: {held:?}")
                })?;
                if keep == 0 {
                    *known_hold = KnownHold::default();
                    if let Some(channel) = setting.parties[party].channel() {
                        world.keyspace.set_subscriber_count(channel, 0);
                    }
                } else if was_held && known_hold.holds(now) {
                    known_hold.count = keep.min(known_hold.count);
                    let end = lease.map(|lease| now + lease.duration());
                    known_hold.end = known_hold.end.max(end);
                }
                Reply::Held(was_held)
            }
            Step::Renew { ticks: n, .. } => {
                let keyspace = &mut world.keyspace;
                let renewed = hold.kind.renew(keyspace, hold, Some(ticks(n)));
                let renewed = renewed.map_err(error)?.is_held();
                ensure(renewed == held.is_some(), || {
                    format!("renewed: {renewed}, held: {held:?}")
                })?;
                if renewed && known_hold.holds(now) {
                    known_hold.end = known_hold.end.max(Some(now + ticks(n).duration()));
                }
                Reply::Held(renewed)
            }
            Step::Forget { .. } => {
                if !known_hold.holds(now) {
                    return Ok(None);
                }
                known_hold.end = None;
                Reply::Nothing
            }
            Step::Disconnect { .. } => {
                let channel = hold.waiter_channel.as_deref();
                let Some(channel) =
                    channel.filter(|channel| world.keyspace.subscriber_count(channel) > 0)
                else {
                    return Ok(None);
                };
                world.keyspace.set_subscriber_count(channel, 0);
                Reply::Nothing
            }
        };
        let granted_to = self.granted(world)?;
        // A step must not change the holds of other owners. If it failed, or if the hold to release
        // or renew is not held, it must change nothing.
        let after = self.holders(world)?;
        let is_refused = match &reply {
            Reply::Acquired(Ok(Outcome::Done(_))) => false,
            Reply::Acquired(_) => true,
            Reply::Held(held) => !held,
            Reply::Nothing => false,
        };
        let owner = setting.parties[party].owner;
        for (i, other) in setting.parties.iter().enumerate() {
            let is_unchanged = holders[i] == after[i] || granted_to.contains(&i);
            ensure(
                is_unchanged || (other.owner == owner && !is_refused),
                || {
                    let (before, after) = (&holders[i], &after[i]);
                    format!("{step:?} changes the hold of party {i} from {before:?} to {after:?}")
                },
            )?;
        }
        if let (Some(granted), Some(before)) = (setting.granted, before) {
            let acquired = holders[party].is_none() && after[party].is_some();
            let fields = granted_to
                .iter()
                .map(|&to| &*setting.parties[to].hold.field);
            let fields: Vec<_> = fields.collect();
            granted(&Granted {
                party: &setting.parties[party],
                acquired,
                granted: &fields,
                before: &before,
                after: &world.state(),
            })?;
        }
        Ok(Some(reply))
    }

    fn repeated(step: Step, first: &Reply, second: &Reply) -> Option<bool> {
        let is_release = matches!(step, Step::Release { keep: 0, .. });
        match (step, first, second) {
            (Step::Forget { .. } | Step::Disconnect { .. }, ..) => None,
            // The first one released it.
            (_, Reply::Held(_), Reply::Held(false)) if is_release => Some(true),
            // The first one may have dropped the dead waiters before a head that is kept. Each waiter in between retries a bit later.
            (
                _,
                Reply::Acquired(Ok(Outcome::Wait(one))),
                Reply::Acquired(Ok(Outcome::Wait(other))),
            ) => {
                let [one, other] = [one, other].map(|wait| wait.duration());
                let is_near = |(one, other): (Duration, Duration)| one.abs_diff(other) < TICK / 10;
                Some(one == other || one.zip(other).is_some_and(is_near))
            }
            _ => Some(first == second),
        }
    }

    fn check(&self, state: &State, world: &mut World) -> Verdict {
        let setting = &self.setting;
        let holders = self.holders(world)?;
        let parties = || setting.parties.iter().zip(&holders).zip(&self.known_holds);
        for ((party, holder), known_hold) in parties() {
            if holder.is_some() {
                let excludes = |other: &Party| party.excludes(other);
                let mut others = parties().filter(|((other, _), _)| excludes(other));
                ensure(others.all(|((_, other), _)| other.is_none()), || {
                    format!("the lock has these holders: {holders:?}")
                })?;
            }
            if known_hold.holds(world.now) {
                let is_kept = |holder: &Holder| {
                    let end = holder.remaining.duration().map(|left| world.now + left);
                    let holds = known_hold.count * permits_of(&party.hold.field);
                    holder.holds == holds && end >= known_hold.end
                };
                ensure(holder.as_ref().is_some_and(is_kept), || {
                    format!("the store has {holder:?}, the owner relies on {known_hold:?}")
                })?;
            }
        }
        for (key, (_, left)) in state {
            let expected = (setting.expires)(key);
            ensure(expected == Some(*left >= 0), || {
                format!("the key {key} expires in {left} ms (-1: never)")
            })?;
        }
        let waiting = parties().filter(|(_, known_hold)| known_hold.waits);
        let waiting = waiting.map(|((party, _), _)| &*party.hold.field).collect();
        let now = world.keyspace.now_ms();
        (setting.check)(&Observed {
            state,
            waiting,
            now,
        })
    }

    fn hash(&self, now: Instant, hasher: &mut impl Hasher) {
        for known_hold in &self.known_holds {
            hash_end(known_hold.end, now, hasher);
            let count = if known_hold.holds(now) {
                known_hold.count
            } else {
                0
            };
            (count, known_hold.waits).hash(hasher);
            hash_end(known_hold.announced, now, hasher);
        }
    }

    fn token(&self) -> (&str, i64) {
        let latest = i64::try_from(self.latest).unwrap_or(i64::MAX);
        (&self.setting.token, latest)
    }

    fn may_clean_up(&self, before: &State, after: &State) -> bool {
        (self.setting.may_clean_up)(before, after)
    }
}
