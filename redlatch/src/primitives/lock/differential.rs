//! Holds the two writings of the lock together: the same random steps through the rules and through
//! a real server must give equal replies and leave equal state behind, messages included.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};
use redlatch_testkit::{shared, unique};

use super::rules::{Acquire, Force, Inspect, LOCK, Release, Seen};
use crate::hold::Kind;
use crate::lease::Lease;
use crate::name::Place;
use crate::step::{Args, Outcome, Script, Step};
use crate::store::embedded::{Attached, Embedded};
use crate::store::redis::Redis;
use crate::store::{Ear, Lane, Sent};

/// Random histories; each is a server's worth of round trips.
const HISTORIES: u32 = 2000;

/// Leases are this far apart, so that real time passing under the test cannot be mistaken for a
/// difference.
const APART: Duration = Duration::from_secs(100_000);

#[derive(Debug, Clone)]
enum Move {
    Acquire { owner: u8, count: u32, lease: u64 },
    Release { owner: u8, keep: u32, lease: u64 },
    Renew { owner: u8, lease: u64 },
    Expire,
    Force,
    Inspect,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let (owner, count, lease) = (0..3u8, 1..4u32, 1..4u64);
    let one = prop_oneof![
        4 => (owner.clone(), count, lease.clone())
            .prop_map(|(owner, count, lease)| Move::Acquire { owner, count, lease }),
        3 => (owner.clone(), 0..3u32, 0..4u64)
            .prop_map(|(owner, keep, lease)| Move::Release { owner, keep, lease }),
        2 => (owner, lease).prop_map(|(owner, lease)| Move::Renew { owner, lease }),
        1 => Just(Move::Expire),
        1 => Just(Move::Force),
        1 => Just(Move::Inspect),
    ];
    prop::collection::vec(one, 1..25)
}

/// Counts what it hears.
#[derive(Default)]
struct Count(AtomicU32);

impl Ear for Count {
    fn heard(&self, _: &str) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn interrupted(&self) {}
}

/// One name on both sides.
struct Both {
    place: Place,
    redis: Redis,
    redis_ear: Arc<Count>,
    space: Embedded,
    attached: Attached,
    space_ear: Arc<Count>,
}

/// The visible state under a name, times cut to whole [`APART`]s.
type State = (BTreeMap<String, u32>, Option<u64>);

impl Both {
    async fn step<S: Step>(&self, step: &S) -> (S::Reply, S::Reply) {
        let redis = self
            .redis
            .run(step, Lane::First, None, &Sent::default())
            .await
            .unwrap();
        let space = self.attached.run(step).unwrap();
        (redis.reply, space.reply)
    }

    async fn play(&self, one: &Move) {
        let name = |owner: &u8| format!("client:{owner}");
        let lease = |n: &u64| Lease::new(APART * u32::try_from(*n).unwrap()).unwrap();
        match one {
            Move::Acquire {
                owner,
                count,
                lease: n,
            } => {
                let step = Acquire {
                    place: &self.place,
                    owner: &name(owner),
                    count: *count,
                    lease: lease(n),
                };
                let (redis, space) = self.step(&step).await;
                assert_eq!(rounded(&redis), rounded(&space));
            }
            Move::Release {
                owner,
                keep,
                lease: n,
            } => {
                let step = Release {
                    place: &self.place,
                    owner: &name(owner),
                    keep: *keep,
                    lease: (*n > 0).then(|| lease(n)),
                };
                let (redis, space) = self.step(&step).await;
                assert_eq!(redis, space);
            }
            Move::Renew { owner, lease: n } => {
                let step = RenewOne {
                    place: &self.place,
                    owner: name(owner),
                    lease: lease(n),
                };
                let (redis, space) = self.step(&step).await;
                assert_eq!(redis, space);
            }
            Move::Expire => {
                // What both do by themselves when a lease has ended.
                let _: i64 = shared().ask(&["DEL", self.place.key()]);
                self.space
                    .with_space(|space| space.remove(self.place.key()));
            }
            Move::Force => {
                let (redis, space) = self.step(&Force { place: &self.place }).await;
                assert_eq!(redis, space);
            }
            Move::Inspect => {
                let keys = [self.place.key()];
                let (redis, space) = self.step(&Inspect { keys: &keys }).await;
                let seen = |mut all: Vec<Seen>| {
                    if let Some(Seen::Held(holder)) = all.first_mut() {
                        holder.remaining = holder.remaining.map(cut);
                    }
                    all
                };
                assert_eq!(seen(redis), seen(space));
            }
        }
    }

    fn state_on_server(&self, connection: &mut redis::Connection) -> State {
        let (counts, left): (BTreeMap<String, u32>, i64) = redis::pipe()
            .cmd("HGETALL")
            .arg(self.place.key())
            .cmd("PTTL")
            .arg(self.place.key())
            .query(connection)
            .unwrap();
        let left = u64::try_from(left).ok().map(Duration::from_millis);
        (counts, left.map(|left| cut(left).as_secs()))
    }

    fn state_in_space(&self) -> State {
        let now = tokio::time::Instant::now();
        self.space
            .with_space(|space| match space.holds(self.place.key(), now) {
                Some(holds) => {
                    let left = cut(holds.remaining(now)).as_secs();
                    (holds.counts.clone(), Some(left))
                }
                None => (BTreeMap::new(), None),
            })
    }
}

/// To the nearest lease that the test uses.
fn cut(left: Duration) -> Duration {
    let apart = APART.as_secs();
    Duration::from_secs((left.as_secs() + apart / 2) / apart * apart)
}

fn rounded(outcome: &Outcome) -> Outcome {
    match outcome {
        Outcome::Done => Outcome::Done,
        Outcome::Wait(left) => Outcome::Wait(cut(*left)),
    }
}

/// One renewal, as the watchdog's batches have it.
struct RenewOne<'a> {
    place: &'a Place,
    owner: String,
    lease: Lease,
}

impl Step for RenewOne<'_> {
    type Reply = bool;

    fn script(&self) -> &'static Script {
        LOCK.renew_script()
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.key())
    }

    fn args(&self, args: &mut Args<'_>) {
        args.number(self.lease.millis());
        args.text(&self.owner);
    }

    fn reply(&self, raw: redis::Value) -> crate::Result<bool> {
        Ok(raw == redis::Value::Array(vec![redis::Value::Int(1)]))
    }

    fn apply(
        &self,
        space: &mut crate::space::Space,
        now: tokio::time::Instant,
    ) -> crate::Result<bool> {
        Ok(LOCK.renew(space, self.place, &self.owner, self.lease, now))
    }
}

async fn both() -> Both {
    let place = Place::lock("", &unique("differential"));
    let (redis_ear, space_ear) = (Arc::new(Count::default()), Arc::new(Count::default()));
    let (connect, answer) = (Duration::from_secs(30), Duration::from_secs(30));
    let redis = Redis::connect(&shared().url(), connect, answer, redis_ear.clone())
        .await
        .unwrap();
    let space = Embedded::new();
    let attached = space.attach(space_ear.clone());
    attached.subscribe(place.channel());
    let keys = [place.key()];
    let look = Inspect { keys: &keys };
    redis
        .run(&look, Lane::First, Some(place.channel()), &Sent::default())
        .await
        .unwrap();
    Both {
        place,
        redis,
        redis_ear,
        space,
        attached,
        space_ear,
    }
}

#[test]
fn lua_and_rules_agree() {
    let seed = match std::env::var("REDLATCH_SEED") {
        Ok(seed) => seed.parse().expect("REDLATCH_SEED is a number"),
        Err(_) => u64::from(std::process::id()) ^ 0x5eed,
    };
    println!("REDLATCH_SEED={seed}");
    let mut runner = TestRunner::new(ProptestConfig {
        cases: HISTORIES,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let both = runtime.block_on(both());
    let connection = std::cell::RefCell::new(shared().connection());
    let outcome = runner.run(&moves(), |history| {
        runtime.block_on(async {
            both.play(&Move::Expire).await;
            for one in &history {
                both.play(one).await;
                assert_eq!(
                    both.state_on_server(&mut connection.borrow_mut()),
                    both.state_in_space(),
                    "after {one:?}"
                );
                assert_eq!(
                    both.redis_ear.0.load(Ordering::SeqCst),
                    both.space_ear.0.load(Ordering::SeqCst),
                    "messages after {one:?}"
                );
            }
        });
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("REDLATCH_SEED={seed}: {failure}");
    }
}
