//! Explores all sequences of steps on an expirable semaphore: no permit is lost or duplicated.

use std::hash::{Hash as _, Hasher};
use std::sync::Arc;

use tokio::time::Instant;

use super::Permits;
use super::permit_id::{PermitId, join_ids};
use super::rules::{self, ReleaseMode};
use crate::hold::{Hold, HoldKind as _};
use crate::keyspace::DumpedValue;
use crate::metrics::KindMetrics;
use crate::owner::Owner;
use crate::step::Outcome;
use crate::step::exploration::{Model, State, Verdict, World, ensure, explore, hash_end, ticks};

const OWNERS: u8 = 3;
/// Number of permits.
const PERMITS: u32 = 3;
/// Maximum number of permits that an owner acquires.
const MAX_PER_OWNER: u8 = 2;
const DEADLINES: &str = "{name}:timeout";

/// Until when each owner may rely on each of its permits.
#[derive(Clone)]
struct Ends([[Option<Instant>; MAX_PER_OWNER as usize]; OWNERS as usize]);

#[derive(Debug, Clone, Copy)]
enum Step {
    Set {
        if_absent: bool,
    },
    Acquire {
        owner: u8,
        n: u8,
        ticks: u8,
        /// Whether it sets the number of permits if none are set.
        sets: bool,
    },
    Release {
        owner: u8,
        n: u8,
    },
    Renew {
        owner: u8,
        n: u8,
        ticks: u8,
    },
    UpdateLease {
        owner: u8,
        ticks: u8,
    },
    Forget {
        owner: u8,
    },
}

fn id(owner: u8, n: u8) -> PermitId {
    let mut bytes = [0; PermitId::BYTES];
    (bytes[0], bytes[1]) = (owner, n);
    PermitId::from_bytes(bytes)
}

fn ids(owner: u8, n: u8) -> String {
    join_ids(&Vec::from_iter((0..n).map(|n| id(owner, n))))
}

impl Ends {
    fn live(&self, now: Instant) -> usize {
        let ends = self.0.iter().flatten();
        ends.filter(|end| end.is_some_and(|end| end > now)).count()
    }
}

impl Model for Ends {
    type Step = Step;
    type Reply = usize;

    fn steps(&self) -> Vec<Step> {
        let mut steps = vec![
            Step::Set { if_absent: true },
            Step::Set { if_absent: false },
        ];
        for owner in 0..OWNERS {
            for ticks in 1..=2 {
                for n in 1..=MAX_PER_OWNER {
                    for sets in [false, true] {
                        steps.push(Step::Acquire {
                            owner,
                            n,
                            ticks,
                            sets,
                        });
                    }
                    steps.push(Step::Renew { owner, n, ticks });
                }
                steps.push(Step::UpdateLease { owner, ticks });
            }
            steps.extend((1..=MAX_PER_OWNER).map(|n| Step::Release { owner, n }));
            steps.push(Step::Forget { owner });
        }
        steps
    }

    fn take(&mut self, step: Step, world: &mut World) -> Verdict<Option<usize>> {
        let kind = Arc::new(Permits::new("", "name"));
        let keys = kind.keys.clone();
        let (keyspace, now) = (&mut world.keyspace, world.now);
        let error = |error: crate::Error| error.to_string();
        let reply = match step {
            Step::Set { if_absent } => {
                let permits = PERMITS;
                let set = rules::set(&keys, permits, if_absent);
                set.apply(keyspace).map_err(error)?.into()
            }
            Step::Acquire {
                owner,
                n,
                ticks: t,
                sets,
            } => {
                let (ids, lease) = (&ids(owner, n), ticks(t));
                let acquire = rules::acquire(&keys, ids, lease, if sets { PERMITS } else { 0 });
                let acquire = acquire;
                let outcome = acquire.apply(keyspace).map_err(error)?;
                if outcome == Some(Outcome::ACQUIRED) {
                    let end = Some(now + ticks(t).duration());
                    let ends = &mut self.0[usize::from(owner)];
                    for known in &mut ends[..n.into()] {
                        *known = (*known).max(end);
                    }
                }
                let live = self.live(now);
                ensure(live <= PERMITS as usize, || {
                    format!("{live} permits are acquired")
                })?;
                (outcome == Some(Outcome::ACQUIRED)).into()
            }
            Step::Release { owner, n } => {
                let (ids, mode) = (&ids(owner, n), ReleaseMode::Held);
                let release = rules::release(&keys, ids, mode, None);
                let ends = &mut self.0[usize::from(owner)][..n.into()];
                let known = ends.iter().flatten().filter(|end| **end > now).count();
                ends.fill(None);
                let released = release.apply(keyspace).map_err(error)?;
                ensure(released >= known, || {
                    format!("{released} released instead of {known}")
                })?;
                released
            }
            Step::Renew { owner, n, ticks: t } => {
                let ids = ids(owner, n);
                let hold = Hold::new(Owner::new(), ids, kind.clone(), KindMetrics::default());
                let renewed = kind.renew(keyspace, &hold, Some(ticks(t)));
                let renewed = renewed.map_err(error)?.is_held();
                let ends = &mut self.0[usize::from(owner)][..n.into()];
                let is_known = ends.iter().all(|end| end.is_some_and(|end| end > now));
                ensure(renewed || !is_known, || {
                    "a permit that is acquired is not renewed".to_owned()
                })?;
                if renewed {
                    let end = Some(now + ticks(t).duration());
                    for known in ends {
                        *known = known.map(|_| end).unwrap_or_default().max(*known);
                    }
                }
                renewed.into()
            }
            Step::UpdateLease { owner, ticks: t } => {
                let (id, lease) = (&id(owner, 0).to_string(), ticks(t));
                let update = rules::update_lease(&keys, id, lease);
                let updated = update.apply(keyspace).map_err(error)?;
                let known = &mut self.0[usize::from(owner)][0];
                let is_known = known.is_some_and(|end| end > now);
                ensure(updated || !is_known, || {
                    "a permit that is acquired has no lease to be updated".to_owned()
                })?;
                if is_known {
                    *known = Some(now + ticks(t).duration());
                }
                updated.into()
            }
            Step::Forget { owner } => {
                let known = &mut self.0[usize::from(owner)];
                if known.iter().flatten().all(|end| *end <= now) {
                    return Ok(None);
                }
                known.fill(None);
                0
            }
        };
        world.keyspace.take_published();
        Ok(Some(reply))
    }

    fn repeated(step: Step, first: &usize, second: &usize) -> Option<bool> {
        match step {
            Step::Forget { .. } => None,
            // The first one released or set them.
            Step::Release { .. } | Step::Set { if_absent: true } => Some(*second == 0),
            _ => Some(first == second),
        }
    }

    fn check(&self, state: &State, world: &mut World) -> Verdict {
        let available = match state.get("name") {
            Some((DumpedValue::Text(number), -1)) => number.parse().unwrap_or(-1),
            None => {
                return ensure(state.is_empty(), || "permits of nothing".to_owned());
            }
            _ => -1,
        };
        let empty = Default::default();
        let timestamps = match state.get(DEADLINES) {
            Some((DumpedValue::Timestamps(timestamps), -1)) => timestamps,
            None => &empty,
            _ => return Err("the deadlines expire".to_owned()),
        };
        let sum = available + i64::try_from(timestamps.len()).unwrap();
        ensure(available >= 0 && sum == i64::from(PERMITS), || {
            format!("{available} permits and {} acquired ones", timestamps.len())
        })?;
        ensure(state.len() <= 2, || "another key".to_owned())?;
        for owner in 0..OWNERS {
            for n in 0..MAX_PER_OWNER {
                let known = self.0[usize::from(owner)][usize::from(n)];
                let left = known.map_or(0, |end| {
                    end.saturating_duration_since(world.now).as_millis() as i64
                });
                let timestamp = timestamps.get(&id(owner, n).to_string()).copied();
                ensure(left == 0 || timestamp >= Some(left), || {
                    format!(
                        "owner {owner} relies on permit {n} for {left} ms, which has {timestamp:?}"
                    )
                })?;
            }
        }
        Ok(())
    }

    fn hash(&self, now: Instant, hasher: &mut impl Hasher) {
        for end in self.0.iter().flatten() {
            hash_end(*end, now, hasher);
        }
        OWNERS.hash(hasher);
    }
}

#[test]
fn exploration_of_expirable_semaphore() {
    explore("expirable semaphore", Ends(Default::default()));
}
