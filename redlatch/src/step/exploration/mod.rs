//! Model checker for the rules: explores all sequences of steps of a few owners on one name, breadth first.
//!
//! 1. The search starts with the empty store. From each state it takes every step, and it also lets one
//!    [`TICK`] pass.
//! 2. If a step may be repeated, it is taken a second time. The repetition must return a reply that the model
//!    accepts, and must change nothing but what the model allows ([`Model::may_clean_up`]).
//! 3. The model derives from the replies what each owner may rely on. It reports a violation if a reply or a
//!    state contradicts that.
//! 4. States are compared relative to the present: a lease by its remaining time, a fencing token by its
//!    distance from the latest. So most models have finitely many states. A state is identified by
//!    its 64-bit hash.
//! 5. The first violation ends the exploration. Because the search is breadth first, the sequence of steps
//!    printed with it is a shortest one.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt::Debug;
use std::hash::{BuildHasherDefault, DefaultHasher, Hash as _, Hasher};
use std::time::Duration;

use tokio::time::Instant;

use crate::keyspace::{DumpedValue, Keyspace};
use crate::lease::Lease;
use crate::step::differential::env_number;

pub(crate) mod events;
mod locks;

pub(crate) use locks::{Granted, Locks, Observed, Party};

/// The unit in which time passes.
pub(crate) const TICK: Duration = Duration::from_secs(1);

/// Maximum number of states, unless `REDLATCH_STATES` is set.
const MAX_STATES: u64 = 1000;

/// `Ok`, or the description of a violation.
pub(crate) type Verdict<T = ()> = std::result::Result<T, String>;

/// All keys, each with its value and its remaining milliseconds (-1: it never expires).
pub(crate) type State = BTreeMap<String, (DumpedValue, i64)>;

/// A store and its clock.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) keyspace: Keyspace,
    pub(crate) now: Instant,
}

impl World {
    pub(crate) fn state(&mut self) -> State {
        self.keyspace.dump()
    }

    fn advance(&mut self) {
        self.now += TICK;
        self.keyspace.now = self.now;
    }
}

/// The steps of owners on the objects of one primitive, and what the owners rely on.
pub(crate) trait Model: Clone {
    type Step: Copy + Debug;
    type Reply: Debug + PartialEq;

    /// How many ticks a timestamp in the past still matters: timestamps that passed longer ago count as equal.
    const PAST: i64 = 0;

    /// Returns all steps, including those that cannot be taken in this state.
    fn steps(&self) -> Vec<Self::Step>;

    /// Takes a step, checks its effect and records what its owner may rely on now. `None`: the step cannot be
    /// taken in this state.
    fn take(&mut self, step: Self::Step, world: &mut World) -> Verdict<Option<Self::Reply>>;

    /// Returns whether a repeated step may be answered with `second`. `None` if the step must not be repeated.
    fn repeated(step: Self::Step, first: &Self::Reply, second: &Self::Reply) -> Option<bool>;

    /// Checks a state.
    fn check(&self, state: &State, world: &mut World) -> Verdict;

    /// Hashes what the owners may rely on.
    fn hash(&self, now: Instant, hasher: &mut impl Hasher);

    /// Returns the key of the fencing token, and the latest token, relative to which tokens are hashed.
    fn token(&self) -> (&str, i64) {
        ("", 0)
    }

    /// Returns whether a repeated step may change the state in this way, for example by dropping dead waiters.
    fn may_clean_up(&self, before: &State, after: &State) -> bool {
        let _ = (before, after);
        false
    }
}

/// The result of an exploration.
#[derive(Debug)]
pub(crate) struct Explored {
    /// Whether all reachable states were explored.
    pub(crate) closed: bool,
}

/// A [`Model::Step`], or the passing of time.
#[derive(Debug, Clone, Copy)]
enum Move<S> {
    Take(S),
    Advance,
}

/// The hash of each state, with the hash of its predecessor and the number of the step between them.
type Seen = HashMap<u64, (u64, u16), BuildHasherDefault<DefaultHasher>>;

/// Explores all sequences of steps.
///
/// # Panics
///
/// Panics with the violation and the steps that lead to it.
pub(crate) fn explore<M: Model>(name: &str, first: M) -> Explored {
    let max_states = env_number("REDLATCH_STATES", MAX_STATES);
    let started = std::time::Instant::now();
    let steps = first.steps().into_iter().map(Move::Take);
    let steps: Vec<_> = steps.chain([Move::Advance]).collect();
    let now = Instant::now();
    let keyspace = Keyspace::new(now);
    let mut world = World { keyspace, now };
    // Sets the origin of the keyspace's timestamps.
    world.keyspace.now_ms();
    let root = hash(&first, &mut world);
    let mut seen = Seen::default();
    seen.insert(root, (root, 0));
    // The queue has hashes only, because a state takes kilobytes: its steps are taken again.
    let mut queue = VecDeque::from([root]);
    let mut trail = Trail(vec![(root, first, world)]);
    let (mut transitions, mut depth) = (0u64, 0);
    while (seen.len() as u64) < max_states
        && let Some(id) = queue.pop_front()
    {
        depth = trail.lead_to(id, &seen, &steps);
        for (number, step) in (0..).zip(&steps) {
            let (mut model, mut world) = trail.end();
            let hash = take_and_repeat(*step, &mut model, &mut world);
            let unseen = hash.and_then(|next| {
                let Some(next) = next else { return Ok(None) };
                transitions += 1;
                if seen.contains_key(&next) {
                    return Ok(None);
                }
                let state = world.state();
                model.check(&state, &mut world)?;
                Ok(Some(next))
            });
            match unseen {
                Ok(Some(next)) => {
                    seen.insert(next, (id, number));
                    queue.push_back(next);
                }
                Ok(None) => {}
                Err(violation) => {
                    let path = path(&seen, root, id).into_iter().map(|(_, step)| step);
                    let path: Vec<_> = path
                        .chain([number])
                        .map(|step| &steps[usize::from(step)])
                        .collect();
                    let state = world.state();
                    panic!("{name}: {violation}\nafter {path:#?}\nwith {state:#?}");
                }
            }
        }
    }
    let closed = queue.is_empty();
    let end = if closed { "closed" } else { "not closed" };
    println!(
        "{name}: {} states, {transitions} transitions, {end} at depth {depth}, {:.1} s",
        seen.len(),
        started.elapsed().as_secs_f64()
    );
    Explored { closed }
}

/// The states on the way to one state, each with its hash, the first one first.
struct Trail<M>(Vec<(u64, M, World)>);

impl<M: Model> Trail<M> {
    /// Leads to the state with this hash, which was reached before. Returns the number of steps.
    fn lead_to(&mut self, id: u64, seen: &Seen, steps: &[Move<M::Step>]) -> usize {
        let path = path(seen, self.0[0].0, id);
        let common = self.0[1..].iter().zip(&path);
        let common = common.take_while(|(state, step)| state.0 == step.0).count();
        self.0.truncate(1 + common);
        for &(id, number) in &path[common..] {
            let (mut model, mut world) = self.end();
            let taken = match steps[usize::from(number)] {
                Move::Take(step) => model.take(step, &mut world).is_ok(),
                Move::Advance => {
                    world.advance();
                    true
                }
            };
            assert!(taken, "a step was taken before");
            self.0.push((id, model, world));
        }
        path.len()
    }

    /// Returns the state to which it leads.
    fn end(&self) -> (M, World) {
        let (_, model, world) = &self.0[self.0.len() - 1];
        (model.clone(), world.clone())
    }
}

/// Takes a step, twice if it may be repeated. Returns the hash of the state after the first time; `None` if the
/// step cannot be taken.
fn take_and_repeat<M: Model>(
    step: Move<M::Step>,
    model: &mut M,
    world: &mut World,
) -> Verdict<Option<u64>> {
    let step = match step {
        Move::Take(step) => step,
        Move::Advance => {
            world.advance();
            return Ok(Some(hash(model, world)));
        }
    };
    let Some(reply) = model.take(step, world)? else {
        return Ok(None);
    };
    let next = hash(model, world);
    if M::repeated(step, &reply, &reply).is_some() {
        let before = world;
        let (mut model, mut world) = (model.clone(), before.clone());
        let Some(second) = model.take(step, &mut world)? else {
            return Err("a step that was taken cannot be repeated".to_owned());
        };
        if M::repeated(step, &reply, &second) != Some(true) {
            return Err(format!("answered {reply:?}, and {second:?} when repeated"));
        }
        if hash(&model, &mut world) != next && !model.may_clean_up(&before.state(), &world.state())
        {
            let state = world.state();
            return Err(format!("the repetition changes the state to {state:#?}"));
        }
    }
    Ok(Some(next))
}

fn hash<M: Model>(model: &M, world: &mut World) -> u64 {
    let mut hasher = DefaultHasher::new();
    let past = M::PAST * TICK.as_millis() as i64;
    world.keyspace.hash(past, model.token(), &mut hasher);
    model.hash(world.now, &mut hasher);
    hasher.finish()
}

/// Returns the steps that lead to a state: their numbers, with the hashes of the states after them.
fn path(seen: &Seen, root: u64, mut id: u64) -> Vec<(u64, u16)> {
    let mut path = Vec::new();
    while id != root {
        let (before, step) = seen[&id];
        path.push((id, step));
        id = before;
    }
    path.reverse();
    path
}

/// Returns a lease of `n` ticks.
pub(crate) fn ticks(n: u8) -> Lease {
    Lease::new(TICK * n.into()).unwrap()
}

/// Hashes the time left until `end`. An end in the past hashes like `None`.
pub(crate) fn hash_end(end: Option<Instant>, now: Instant, hasher: &mut impl Hasher) {
    let left = end.map(|end| end.saturating_duration_since(now));
    left.filter(|left| !left.is_zero()).hash(hasher);
}

/// Returns an error with this text unless `holds`.
pub(crate) fn ensure(holds: bool, violation: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(violation()) }
}
