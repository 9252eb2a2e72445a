//! Explores the rules: all sequences of steps of a few owners on one name, breadth first.
//!
//! 1. The queue begins with the empty store. From each state every step is taken, and time passes by one
//!    [`TICK`].
//! 2. Each step is taken a second time. That must change nothing and give the same reply, if the model
//!    says that the step may be repeated.
//! 3. The model knows from the replies what each owner may rely on. It reports a violation if a reply or a
//!    state contradicts that.
//! 4. States are compared relative to the present: a lease is what remains of it, a fencing token its
//!    distance from the latest. So most state spaces close. A state is known by its 64-bit hash.
//! 5. The first violation ends the exploration. Because the search is breadth first, the sequence of
//!    steps printed with it is a shortest one.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt::Debug;
use std::hash::{BuildHasherDefault, DefaultHasher, Hash as _, Hasher};
use std::time::Duration;

use tokio::time::Instant;

use crate::lease::Lease;
use crate::primitives::twin::setting;
use crate::space::{Dumped, Space};

mod locks;

pub(crate) use locks::{Granted, Locks, Observed, Party};

/// The unit of time.
pub(crate) const TICK: Duration = Duration::from_secs(1);

/// How many states are seen at most, unless `REDLATCH_STATES` says otherwise.
const STATES: u64 = 1000;

/// A description of what was violated.
pub(crate) type Verdict<T = ()> = std::result::Result<T, String>;

/// All keys, each with its value and its remaining milliseconds (-1: it never expires).
pub(crate) type State = BTreeMap<String, (Dumped, i64)>;

/// A store and its clock.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) space: Space,
    pub(crate) now: Instant,
}

impl World {
    pub(crate) fn state(&mut self) -> State {
        self.space.dump(self.now)
    }
}

/// What owners do with the objects of one primitive, and what they rely on.
pub(crate) trait Model: Clone {
    type Step: Copy + Debug;
    type Reply: Debug + PartialEq;

    /// How long ago a date that has passed still matters, in ticks.
    const PAST: i64 = 0;

    /// All steps, whether or not they make sense in this state.
    fn steps(&self) -> Vec<Self::Step>;

    /// Takes a step, checks what it did and notes what its owner may rely on now. `None`: the step cannot be
    /// taken in this state.
    fn take(&mut self, step: Self::Step, world: &mut World) -> Verdict<Option<Self::Reply>>;

    /// Whether a step may be answered with `second` when it is repeated. `None` as long as it must not
    /// be repeated.
    fn repeated(step: Self::Step, first: &Self::Reply, second: &Self::Reply) -> Option<bool>;

    /// Checks a state.
    fn check(&self, state: &State, world: &mut World) -> Verdict;

    /// Hashes what the owners rely on.
    fn hash(&self, now: Instant, hasher: &mut impl Hasher);

    /// The key of a fencing token, and the latest one.
    fn token(&self) -> (&str, i64) {
        ("", 0)
    }

    /// Whether a repeated step may change one state to another one that differs from it.
    fn may_tidy(&self, before: &State, after: &State) -> bool {
        let _ = (before, after);
        false
    }
}

/// How far an exploration came.
#[derive(Debug)]
pub(crate) struct Explored {
    /// Whether these are all states that can be reached.
    pub(crate) closed: bool,
}

/// A [`Model::Step`], or time passes.
#[derive(Debug, Clone, Copy)]
enum Move<S> {
    Take(S),
    Pass,
}

/// The hash of each state, with that of the state before it and the number of the step between them.
type Seen = HashMap<u64, (u64, u16), BuildHasherDefault<DefaultHasher>>;

/// Explores all sequences of steps.
///
/// # Panics
///
/// With the violation and the steps that lead to it.
pub(crate) fn explore<M: Model>(name: &str, first: M) -> Explored {
    let bound = setting("REDLATCH_STATES", STATES);
    let begun = std::time::Instant::now();
    let steps = first.steps().into_iter().map(Move::Take);
    let steps: Vec<_> = steps.chain([Move::Pass]).collect();
    let mut world = World {
        space: Space::default(),
        now: Instant::now(),
    };
    // Dates count from here.
    world.space.date(world.now);
    let root = hash(&first, &mut world);
    let mut seen = Seen::default();
    seen.insert(root, (root, 0));
    let mut queue = VecDeque::from([(root, 0, first, world)]);
    let (mut transitions, mut depth) = (0u64, 0);
    while let Some((id, length, model, world)) = queue.pop_front() {
        if seen.len() as u64 >= bound {
            queue.push_front((id, length, model, world));
            break;
        }
        depth = length;
        for (number, step) in (0..).zip(&steps) {
            let (mut model, mut world) = (model.clone(), world.clone());
            let next = follow(*step, &mut model, &mut world);
            let next = next.and_then(|next| {
                let Some(next) = next else { return Ok(None) };
                transitions += 1;
                if seen.contains_key(&next) {
                    return Ok(None);
                }
                let state = world.state();
                model.check(&state, &mut world)?;
                Ok(Some(next))
            });
            match next {
                Ok(Some(next)) => {
                    seen.insert(next, (id, number));
                    queue.push_back((next, length + 1, model, world));
                }
                Ok(None) => {}
                Err(violation) => {
                    let path = path(&seen, root, id).into_iter().chain([number]);
                    let path: Vec<_> = path.map(|step| &steps[usize::from(step)]).collect();
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
        begun.elapsed().as_secs_f64()
    );
    Explored { closed }
}

/// Takes a step, twice if it can be repeated. The hash of the state after it.
fn follow<M: Model>(step: Move<M::Step>, model: &mut M, world: &mut World) -> Verdict<Option<u64>> {
    let step = match step {
        Move::Take(step) => step,
        Move::Pass => {
            world.now += TICK;
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
        if hash(&model, &mut world) != next && !model.may_tidy(&before.state(), &world.state()) {
            let state = world.state();
            return Err(format!("the repetition changes the state to {state:#?}"));
        }
    }
    Ok(Some(next))
}

fn hash<M: Model>(model: &M, world: &mut World) -> u64 {
    let mut hasher = DefaultHasher::new();
    let past = M::PAST * TICK.as_millis() as i64;
    let World { space, now } = world;
    space.hash_at(*now, past, model.token(), &mut hasher);
    model.hash(*now, &mut hasher);
    hasher.finish()
}

/// The steps that lead to a state.
fn path(seen: &Seen, root: u64, mut id: u64) -> Vec<u16> {
    let mut path = Vec::new();
    while id != root {
        let (before, step) = seen[&id];
        path.push(step);
        id = before;
    }
    path.reverse();
    path
}

/// A lease of so many ticks.
pub(crate) fn ticks(n: u8) -> Lease {
    Lease::new(TICK * n.into()).unwrap()
}

/// Hashes the end of something an owner relies on; an end in the past hashes as none.
pub(crate) fn hash_end(end: Option<Instant>, now: Instant, hasher: &mut impl Hasher) {
    let left = end.map(|end| end.saturating_duration_since(now));
    left.filter(|left| !left.is_zero()).hash(hasher);
}

/// An error with this text unless `holds`.
pub(crate) fn ensure(holds: bool, violation: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(violation()) }
}
