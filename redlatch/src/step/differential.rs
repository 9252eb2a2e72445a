//! Differential test harness for the two implementations of each step: its Lua script, which a
//! server runs, and its Rust rule, which the embedded keyspace runs. The same random steps must
//! return equal replies, and leave equal state and messages, on both.
//!
//! 1. A history is a random sequence of moves. A move is a step, or an outside event: time passes,
//!    or another program changes a key. A history starts with an empty server and an empty
//!    keyspace.
//! 2. Each move is applied to the server and to the keyspace. If it is a step, its replies are
//!    compared.
//! 3. After each move the harness also runs the inspection step for listings, dumps both sides, and
//!    compares keys, values, expiry and published messages.
//! 4. Some steps first run with each of their calls refused: see [`refusals`](super::refusals).
//! 5. To advance time, the harness moves the keyspace's clock forward, and reduces all expiry times
//!    and timestamps on the server. Times are compared in multiples of [`TIME_UNIT`].

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::panic::Location;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, IntoConnectionInfo as _, ProtocolVersion, PushInfo, PushKind};
use redlatch_testkit::Server;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::refusals::{Coverage, Dump, Run, refusing_source};
use crate::error::{Error, Result};
use crate::hold::{Handoff, HandoffParams, Hold, HoldKind, ReleaseParams, Renewed, To};
use crate::keyspace::{DumpedValue, Keyspace, Message};
use crate::lease::{Expiry, Lease};
use crate::locks::Holder;
use crate::locks::fenced::token;
use crate::metrics::KindMetrics;
use crate::name::{CandidateKeys, GROUP_END};
use crate::observe::inspect::{ObjectState, inspect_names};
use crate::owner::{Owner, OwnerId};
use crate::session::WaiterCounts;
use crate::step::{Arg, Outcome, PublishMode, ScriptReply, Step};
use crate::watchdog::renew_holds;

/// Number of random histories per primitive and test run. Each test run has a new seed, unless
/// REDLATCH_SEED is set.
const HISTORIES: u32 = 600;

/// Leases are multiples of this, so that real time that passes during the test does not count as a
/// difference.
pub(crate) const TIME_UNIT: Duration = Duration::from_secs(100_000);

/// The field of a hash that stands in the keyspace for a text that is no number. Keyspaces have no
/// such texts.
const FOREIGN_TEXT: &str = "text of another program";

/// Timestamps above this, in milliseconds, mean never.
const NEVER_MS: i64 = 900_000_000_000_000;

/// Times to live above this, in milliseconds, count as equal.
const FAR_MS: i64 = 1_000_000_000_000;

/// Returns a lease of `multiple` times [`TIME_UNIT`].
pub(crate) fn lease(multiple: u32) -> Lease {
    Lease::new(TIME_UNIT * multiple).unwrap()
}

/// Returns `multiple` times [`TIME_UNIT`], plus 1 % of the unit. Without the extra 1 %, a key could
/// expire between reading one side and reading the other.
pub(crate) fn time(multiple: u32) -> Duration {
    TIME_UNIT * multiple + TIME_UNIT / 100
}

/// Returns a hold of the owner `client:{owner}`.
pub(crate) fn hold<K: HoldKind + 'static>(owner: u8, kind: K) -> Hold {
    hold_with(kind.object().field(format!("client:{owner}")), kind)
}

/// Returns a hold with this field in the store.
pub(crate) fn hold_with<K: HoldKind + 'static>(field: String, kind: K) -> Hold {
    Hold::new(Owner::new(), field, Arc::new(kind), KindMetrics::default())
}

/// Returns a number from the environment, or `default` if it is not set.
pub(crate) fn env_number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text}")),
        Err(_) => default,
    }
}

/// Runs random histories on a server and a keyspace, and compares both after each move.
///
/// `run_move` applies one move through the methods of [`Differential`]. The moves must reach each
/// call of the scripts in the directory of the caller.
#[track_caller]
pub(crate) fn assert_equivalent<M, F>(moves: impl Strategy<Value = M>, run_move: F)
where
    M: Debug + Clone,
    F: AsyncFnMut(&mut Differential, &M),
{
    assert_equivalent_times(1, moves, run_move);
}

/// The same with this many times the usual number of histories, for rare cases.
#[track_caller]
pub(crate) fn assert_equivalent_times<M, F>(
    times: u32,
    moves: impl Strategy<Value = M>,
    run_move: F,
) where
    M: Debug + Clone,
    F: AsyncFnMut(&mut Differential, &M),
{
    let caller = Path::new(Location::caller().file());
    let histories = prop::collection::vec(moves, 1..25);
    let coverage = assert_equivalent_histories(histories, times * HISTORIES, run_move);
    let directory = caller.parent().expect("a directory");
    // The path is relative to the workspace.
    coverage.assert_complete(
        &Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("..")
            .join(directory),
    );
}

/// The same with this number of given histories.
pub(crate) fn assert_equivalent_histories<M, F>(
    histories: impl Strategy<Value = Vec<M>>,
    number: u32,
    mut run_move: F,
) -> Coverage
where
    M: Debug + Clone,
    F: AsyncFnMut(&mut Differential, &M),
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let server = Server::start();
    let harness = RefCell::new(runtime.block_on(Differential::new(&server)));
    let run_move = RefCell::new(&mut run_move);
    check_random(number, histories, |history| {
        let (mut harness, mut run_move) = (harness.borrow_mut(), run_move.borrow_mut());
        runtime.block_on(async {
            harness.reset().await;
            for next_move in &history {
                run_move(&mut harness, next_move).await;
                harness.inspect_and_compare(next_move).await;
            }
        });
    });
    harness.into_inner().coverage
}

/// Runs a test with this number of random values. Each run has a new seed, unless REDLATCH_SEED is
/// set.
pub(crate) fn check_random<T: Debug>(
    number: u32,
    values: impl Strategy<Value = T>,
    test: impl Fn(T),
) {
    let seed = env_number("REDLATCH_SEED", u64::from(std::process::id()) ^ 0x5eed);
    println!("REDLATCH_SEED={seed}");
    let mut runner = TestRunner::new(ProptestConfig {
        cases: number,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let outcome = runner.run(&values, |value| {
        test(value);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("REDLATCH_SEED={seed}: {failure}");
    }
}

/// Checks that the histories have reached each event. They are random, so moves must be such that
/// [`HISTORIES`] histories reach each event 25 times on average: then all of a thousand million
/// runs reach it.
pub(crate) fn assert_reached<const N: usize>(events: [u32; N]) {
    println!("reached: {events:?}");
    assert!(!events.contains(&0), "never: {events:?}");
}

/// Checks that each of these cases occurred: [`assert_reached`] for cases that have names.
pub(crate) fn assert_covered(covered: &BTreeMap<&str, u32>, cases: &[&str]) {
    println!("{covered:#?}");
    for case in cases {
        assert!(covered.contains_key(case), "{case}");
    }
}

/// Returns texts where a token or an epoch may be: numbers at the limits of what can be counted,
/// and what is no number.
pub(crate) fn number_texts() -> impl Strategy<Value = String> {
    let numbers = prop_oneof![
        3 => -1..9i64,
        1 => any::<i64>().prop_filter("follows the clock", |number| !is_clock_token(*number)),
        1 => Just(i64::MAX),
        1 => Just(i64::MAX - 1),
        1 => Just(i64::MIN),
        1 => Just((1 << 53) + 1),
    ];
    let others = prop_oneof![
        Just("9223372036854775808"),
        Just("-9223372036854775809"),
        Just("99999999999999999999"),
        Just("-99999999999999999999"),
        Just("007"),
        Just("-0"),
    ];
    prop_oneof![
        4 => numbers.prop_map(|number| number.to_string()),
        1 => others.prop_map(str::to_owned),
    ]
}

/// A handoff from one owner to another.
#[derive(Debug, Clone)]
pub(crate) struct HandoffMove {
    from: u8,
    successor: u8,
    lease: u32,
    pub(crate) to: To,
}

impl HandoffMove {
    /// Returns handoffs to any successor.
    pub(crate) fn any() -> impl Strategy<Value = HandoffMove> {
        prop_oneof![4 => HandoffMove::to_waiter(), 3 => HandoffMove::to_no_waiter()]
    }

    /// Returns handoffs among three owners, as of waiters.
    pub(crate) fn to_waiter() -> impl Strategy<Value = HandoffMove> {
        let own_subscriptions = prop_oneof![Just(None), Just(Some(0)), Just(Some(1))];
        let parts = (0..3u8, 1..3u8, 1..4u32, own_subscriptions);
        parts.prop_map(|(from, next, lease, own_subscriptions)| HandoffMove {
            from,
            successor: (from + next) % 3,
            lease,
            to: To::Waiter { own_subscriptions },
        })
    }

    /// Returns handoffs of three owners to tickets and keepers, one of them the successor of earlier ones.
    pub(crate) fn to_no_waiter() -> impl Strategy<Value = HandoffMove> {
        let to = prop::sample::select(vec![
            To::Ticket,
            To::Adopter,
            To::ReturnedTicket,
            To::Keeper,
        ]);
        let parts = (0..3u8, 0..4u8, 1..4u32, to);
        parts.prop_map(|(from, successor, lease, to)| HandoffMove {
            from,
            successor,
            lease,
            to,
        })
    }
}

/// A server and a keyspace that must never differ.
pub(crate) struct Differential {
    connection: MultiplexedConnection,
    pushes: mpsc::UnboundedReceiver<PushInfo>,
    keyspace: Keyspace,
    /// The server's clock at the latest script.
    server_time: Duration,
    /// The same time as an instant: it moves with the server's clock.
    now: Instant,
    /// The server's clock when the history began.
    started: Duration,
    /// How far the keyspace's clock is ahead of `now`. On the server, expiry times, timestamps and
    /// tokens that follow the clock are reduced instead.
    clock_offset: Duration,
    /// The subscribed channels; `None` means all.
    subscribed: Option<BTreeSet<String>>,
    /// Hashes of the scripts that the server has.
    loaded: BTreeSet<String>,
    /// Number of steps so far.
    steps: u32,
    coverage: Coverage,
}

impl Differential {
    async fn new(server: &Server) -> Differential {
        let info = server.url().as_str().into_connection_info().unwrap();
        let settings = info.redis_settings().clone();
        let info = info.set_redis_settings(settings.set_protocol(ProtocolVersion::RESP3));
        let (push_sender, pushes) = mpsc::unbounded_channel();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(Duration::from_secs(30)))
            .set_response_timeout(Some(Duration::from_secs(30)))
            .set_push_sender(push_sender);
        let client = redis::Client::open(info).unwrap();
        let mut connection = client
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .unwrap();
        connection.psubscribe("*").await.unwrap();
        let now = Instant::now();
        let time = redis::cmd("TIME").query_async(&mut connection).await;
        let server_time = server_time(time.unwrap());
        Differential {
            server_time,
            connection,
            pushes,
            keyspace: Keyspace::new(now),
            now,
            started: server_time,
            clock_offset: Duration::ZERO,
            subscribed: None,
            loaded: BTreeSet::new(),
            steps: 0,
            coverage: Coverage::default(),
        }
    }

    /// Replaces the subscriptions, which begin with all channels, by these channels. For steps
    /// whose result depends on whether a channel has subscribers.
    pub(crate) async fn subscribe_only(&mut self, channels: impl IntoIterator<Item = String>) {
        let channels: BTreeSet<String> = channels.into_iter().collect();
        let previous = match self.subscribed.take() {
            Some(previous) => previous,
            None => {
                self.connection.punsubscribe("*").await.unwrap();
                BTreeSet::new()
            }
        };
        for removed in previous.difference(&channels) {
            self.connection.unsubscribe(removed).await.unwrap();
            self.keyspace.set_subscriber_count(removed, 0);
        }
        for channel in &channels {
            if !previous.contains(channel) {
                self.connection.subscribe(channel).await.unwrap();
            }
            self.keyspace.set_subscriber_count(channel, 1);
        }
        self.subscribed = Some(channels);
    }

    async fn reset(&mut self) {
        self.keyspace = Keyspace::new(self.now);
        self.keyspace.set_clock(self.server_time);
        self.started = self.server_time;
        for channel in self.subscribed.iter().flatten() {
            self.keyspace.set_subscriber_count(channel, 1);
        }
        self.clock_offset = Duration::ZERO;
        self.command(&["FLUSHALL"]).await;
        // Of a history that has failed.
        while self.pushes.try_recv().is_ok() {}
    }

    /// Sets the keyspace's clock to the time of the latest script plus `clock_offset`, and returns
    /// the keyspace.
    fn keyspace_at_now(&mut self) -> &mut Keyspace {
        self.keyspace.now = self.now + self.clock_offset;
        &mut self.keyspace
    }

    /// Runs commands on the server in one round trip. Rules then run at the same time of the
    /// server's clock: some scripts set timestamps a second ahead, and this process may pause for
    /// longer.
    async fn run_commands<const N: usize>(&mut self, cmds: [redis::Cmd; N]) -> [redis::Value; N] {
        let mut pipeline = redis::pipe();
        pipeline.cmd("TIME");
        for cmd in cmds {
            pipeline.add_command(cmd);
        }
        let replies = self.connection.send_packed_commands(&pipeline, 0, N + 1);
        let mut replies = replies.await.unwrap();
        let time = server_time(replies.remove(0));
        self.now += time.saturating_sub(self.server_time);
        self.server_time = time;
        replies.try_into().unwrap()
    }

    /// Runs the step, and `after` it. Returns the replies.
    async fn run_alone<R>(&mut self, step: &Step<'_, R>, after: redis::Cmd) -> [redis::Value; 2] {
        let (script, keys, args) = (step.script(), key_texts(step), arg_texts(step));
        let source = || script.source().to_owned();
        let mut cmd = self.loaded(script.sha(PublishMode::Global), source).await;
        cmd.arg(keys.len()).arg(keys).arg(args);
        self.run_commands([cmd, after]).await
    }

    /// Returns the beginning of the command that runs a script by its hash, and loads the script before the first one: to send
    /// and hash a long script takes longer than to run it.
    async fn loaded(&mut self, sha: &str, source: impl FnOnce() -> String) -> redis::Cmd {
        if self.loaded.insert(sha.to_owned()) {
            self.command(&["SCRIPT", "LOAD", &source()]).await;
        }
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(sha);
        cmd
    }

    /// The same for the step in one script behind the same step for a key of another type, if such
    /// steps can be sent together.
    async fn run_in_batch<R>(
        &mut self,
        step: &Step<'_, R>,
        after: redis::Cmd,
    ) -> [redis::Value; 2] {
        let (keys, args) = (key_texts(step), arg_texts(step));
        let Some(script) = step.script().for_batch(keys.len(), args.len()) else {
            return self.run_alone(step, after).await;
        };
        let other = "text";
        let mut cmd = self.loaded(script.sha(), || script.batch_source()).await;
        cmd.arg(2 * keys.len());
        cmd.arg(vec![other; keys.len()]).arg(&keys);
        cmd.arg(&args).arg(&args);
        let (mut set, mut del) = (redis::cmd("SET"), redis::cmd("DEL"));
        set.arg(other).arg("x");
        del.arg(other);
        let [_, replies, _, after] = self.run_commands([set, cmd, del, after]).await;
        match replies {
            redis::Value::Array(replies) => match <[_; 2]>::try_from(replies).unwrap() {
                [redis::Value::ServerError(_), reply] => [reply, after],
                replies => panic!("the first step found no key of another type: {replies:?}"),
            },
            other => panic!("unexpected replies: {other:?}"),
        }
    }

    /// Runs the step on both sides. Panics if the replies differ. Returns the rule's reply.
    pub(crate) async fn step<R: Comparable>(&mut self, step: &Step<'_, R>) -> Result<R> {
        self.step_and(step, redis::cmd("PING")).await.0
    }

    /// The same, and runs a command after it. Returns the reply to that, too.
    async fn step_and<R: Comparable>(
        &mut self,
        step: &Step<'_, R>,
        after: redis::Cmd,
    ) -> (Result<R>, redis::Value) {
        if self.coverage.wants(step.script()) {
            self.refuse_calls(step).await;
        }
        // Each third one: a history alternates between steps of the primitive and inspections.
        self.steps += 1;
        let [reply, after] = match self.steps.is_multiple_of(3) {
            true => self.run_in_batch(step, after).await,
            false => self.run_alone(step, after).await,
        };
        let server = match reply {
            redis::Value::ServerError(error) => Err(Error::Refused {
                reason: error.to_string(),
            }),
            reply => step.decode(self.not_reduced(script_reply(reply))),
        };
        let rule = step.apply(self.keyspace_at_now());
        let started = self.started;
        let comparable = |reply: &Result<R>| match reply {
            Ok(reply) => Ok(clock_tokens_in_units(&reply.comparable(), started)),
            // WRONGKIND (from the script) and WRONGTYPE (from Redis) count as equal.
            Err(error) => Err(match error {
                Error::Refused { reason } if reason.contains("WRONG") => "wrong kind".to_owned(),
                Error::WrongKind { .. } => "wrong kind".to_owned(),
                Error::Asked { left, .. } => format!("asked {:?}", left.map(in_units)),
                other => other.to_string(),
            }),
        };
        assert_eq!(
            comparable(&server),
            comparable(&rule),
            "replies of the server (left) and the rule (right) differ"
        );
        (rule, after)
    }

    /// Runs the step with each of its calls refused in turn, and checks what that leaves. Then
    /// nothing has changed.
    async fn refuse_calls<R>(&mut self, step: &Step<'_, R>) {
        let source = refusing_source(step.script());
        let cmd = eval(&format!("{DUMP}{source}"), step);
        type RawRun = (String, Vec<u8>, Vec<u8>, usize);
        let (states, runs): (Vec<RawDump>, Vec<RawRun>) =
            cmd.query_async(&mut self.connection).await.unwrap();
        let run = |(command, subject, reply, state): RawRun| Run {
            command,
            subject: String::from_utf8_lossy(&subject).into_owned(),
            reply: String::from_utf8_lossy(&reply).into_owned(),
            state,
        };
        let runs: Vec<Run> = runs.into_iter().map(run).collect();
        let states: Vec<Dump> = states.into_iter().map(decode_dump).collect();
        Coverage::check(step, &states, &runs);
    }

    /// Renews one hold, with the step that the watchdog uses. With `lease_multiple` 0, only checks
    /// the hold. Returns whether it is held.
    pub(crate) async fn renew(&mut self, hold: &Hold, lease_multiple: u32) -> bool {
        let step = renew_holds(
            hold.kind.renewal(hold).script,
            (lease_multiple > 0).then(|| lease(lease_multiple)),
            &[hold],
        );
        self.step(&step).await.unwrap()[0].is_held()
    }

    /// Puts a successor in the place of an owner. `hold`: the hold of an owner.
    pub(crate) async fn handoff(
        &mut self,
        handoff: &HandoffMove,
        hold: impl Fn(u8) -> Hold,
    ) -> Result<Handoff> {
        let (from, successor) = (hold(handoff.from), hold(handoff.successor));
        let params = HandoffParams {
            from: &from,
            successor: &successor.field,
            lease: lease(handoff.lease),
            to: handoff.to,
        };
        let step = successor.kind.handoff(params).expect("a handoff");
        self.step(&step).await
    }

    /// Releases a hold down to `keep`. With `lease_multiple` 0, leaves the lease unchanged.
    pub(crate) async fn release(
        &mut self,
        hold: &Hold,
        keep: u32,
        lease_multiple: u32,
    ) -> Result<bool> {
        let lease = (lease_multiple > 0).then(|| lease(lease_multiple));
        let step = hold.kind.release(ReleaseParams { hold, keep, lease });
        self.step(&step).await
    }

    /// Checks that inspecting the object `name` gives the same result on both sides, and that both
    /// have the same keys and have published the same messages.
    async fn inspect_and_compare(&mut self, last_move: &impl Debug) {
        let names = [CandidateKeys::new("name".into())];
        let mut dump = redis::cmd("EVAL");
        dump.arg(format!("{DUMP}return dump()")).arg(0);
        let (_, server) = self.step_and(&inspect_names(&names), dump).await;
        let server = redis::from_redis_value(server).unwrap();
        self.compare(decode_dump(server), last_move);
    }

    /// Returns what the object `name` is, if there is one. Asks only the rule, because both sides are compared after each move.
    pub(crate) fn look(&mut self) -> Option<ObjectState> {
        let names = [CandidateKeys::new("name".into())];
        let states = inspect_names(&names).apply(self.keyspace_at_now());
        states.ok()?.pop()?.ok()?
    }

    /// Lets time pass on both sides.
    pub(crate) async fn advance(&mut self, time: Duration) {
        self.clock_offset += time;
        let age_script = redis::Script::new(&format!(
            "local function reduced(text)
                local token = string.match(text, '^%d+$') and tonumber(text)
                if token and token >= {MIN_CLOCK_TOKEN} and token < {CLOCK_TOKEN_END} then
                    return string.format('%.0f', token - ARGV[1] * 1000)
                end
                return text
            end
            for _, key in ipairs(redis.call('KEYS', '*')) do
                local left = redis.call('PTTL', key)
                if redis.call('TYPE', key).ok == 'zset' then
                    for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do
                        if tonumber(redis.call('ZSCORE', key, member)) < {NEVER_MS} then
                            redis.call('ZINCRBY', key, -ARGV[1], member)
                        end
                    end
                end
                if redis.call('TYPE', key).ok == 'string' then
                    local text = redis.call('GET', key)
                    redis.call('SET', key, reduced(text), 'KEEPTTL')
                end
                if redis.call('TYPE', key).ok == 'hash' then
                    for _, field in ipairs(redis.call('HKEYS', key)) do
                        if field == 'epoch' then
                            redis.call('HSET', key, field, reduced(redis.call('HGET', key, field)))
                        end
                        local time, text = string.match(redis.call('HGET', key, field), '^(%-?%d+)(.*)$')
                        if time and (string.find(field, '^hold:') or string.find(field, ':expire_time$')
                            or string.find(field, '^run:') or string.find(field, '^end:')
                            or field == 'began' or field == 'ended') then
                            redis.call('HSET', key, field, string.format('%d', time - ARGV[1]) .. text)
                        end
                    end
                end
                if left >= 0 and left <= tonumber(ARGV[1]) then
                    redis.call('DEL', key)
                elseif left >= 0 then
                    redis.call('PEXPIRE', key, left - ARGV[1])
                end
            end",
        ));
        let millis = u64::try_from(time.as_millis()).unwrap();
        let () = age_script
            .arg(millis)
            .invoke_async(&mut self.connection)
            .await
            .unwrap();
    }

    /// Runs a command, whose reply does not matter.
    async fn command(&mut self, words: &[&str]) {
        let mut cmd = redis::cmd(words[0]);
        let running = cmd.arg(&words[1..]).query_async(&mut self.connection);
        let _: redis::Value = running.await.unwrap();
    }

    /// Sets a key to a number, as another program might.
    pub(crate) async fn set_foreign(&mut self, key: &str, number: i64) {
        let reduced = match is_clock_token(number) {
            true => number - self.offset_micros(),
            false => number,
        };
        self.command(&["SET", key, &reduced.to_string()]).await;
        self.keyspace_at_now().set(key, number, None);
    }

    /// Sets a key to the token of a time so many [`TIME_UNIT`]s ahead.
    pub(crate) async fn set_token_ahead(&mut self, key: &str, units: u32) {
        let now = self.keyspace_at_now().clock_micros();
        let ahead = i64::try_from((TIME_UNIT * units).as_micros()).unwrap();
        self.set_foreign(key, now + ahead).await;
    }

    fn offset_micros(&self) -> i64 {
        i64::try_from(self.clock_offset.as_micros()).unwrap()
    }

    /// Returns a reply of the server in which tokens that follow the clock are not reduced: see
    /// [`Differential::clock_offset`].
    fn not_reduced(&self, reply: ScriptReply) -> ScriptReply {
        match reply {
            ScriptReply::List(parts) => {
                let parts = parts.into_iter().map(|part| self.not_reduced(part));
                ScriptReply::List(parts.collect())
            }
            reply => match reply.as_text().and_then(token::parse_number) {
                Some(token) if is_clock_token(token) => {
                    ScriptReply::from(&*(token + self.offset_micros()).to_string())
                }
                _ => reply,
            },
        }
    }

    /// Sets a key to a text, as another program might.
    pub(crate) async fn set_foreign_text(&mut self, key: &str, text: &str) {
        if let Some(number) = token::parse_number(text) {
            return self.set_foreign(key, number).await;
        }
        self.command(&["SET", key, text]).await;
        let stand_in = BTreeMap::from([(FOREIGN_TEXT.to_owned(), text.to_owned())]);
        self.keyspace_at_now().set(key, stand_in, None);
    }

    /// Replaces a key by a hash of texts.
    pub(crate) async fn set_texts(&mut self, key: &str, fields: &[(&str, String)]) {
        let mut set = redis::pipe();
        set.del(key).ignore().hset_multiple(key, fields).ignore();
        let () = set.query_async(&mut self.connection).await.unwrap();
        let fields = fields.iter().cloned();
        let texts: BTreeMap<String, String> = fields
            .map(|(field, text)| (field.to_owned(), text))
            .collect();
        self.keyspace_at_now().set(key, texts, None);
    }

    /// Removes the expiry of a key, as another program might.
    pub(crate) async fn persist(&mut self, key: &str) {
        self.command(&["PERSIST", key]).await;
        self.keyspace_at_now().persist(key);
    }

    /// Deletes a key, as another program or its own expiry might.
    pub(crate) async fn remove(&mut self, key: &str) {
        self.command(&["DEL", key]).await;
        self.keyspace.remove(key);
    }

    fn compare(&mut self, mut server: Dump, last_move: &impl Debug) {
        let mut keyspace = self.keyspace_at_now().dump();
        let now = self.keyspace.now_ms();
        for (value, _) in keyspace.values_mut() {
            if let DumpedValue::Hash(fields) = value {
                if let Some(text) = fields.remove(FOREIGN_TEXT) {
                    *value = DumpedValue::Text(text);
                    continue;
                }
                fields
                    .iter_mut()
                    .for_each(|(field, value)| *value = aged(field, value, now));
            }
        }
        for (side, offset) in [(&mut keyspace, 0), (&mut server, self.offset_micros())] {
            for (value, left) in side.values_mut() {
                *left = ttl_in_units(*left);
                let token = match value {
                    DumpedValue::Text(text) => Some(text),
                    DumpedValue::Hash(fields) => fields.get_mut("epoch"),
                    _ => None,
                };
                if let Some(text) = token
                    && let Some(token) = token::parse_number(text)
                    && is_clock_token(token)
                {
                    *text = clock_tokens_in_units(&(token + offset).to_string(), self.started);
                }
                if let DumpedValue::Timestamps(timestamps) = value {
                    timestamps
                        .values_mut()
                        .for_each(|timestamp| *timestamp = timestamp_in_units(*timestamp));
                }
            }
        }
        assert_eq!(
            server, keyspace,
            "state of the server (left) and the keyspace (right) differs after {last_move:?}"
        );
        // They arrived before the reply to the dump.
        let mut received = Vec::new();
        while let Ok(push) = self.pushes.try_recv() {
            if matches!(push.kind, PushKind::PMessage | PushKind::Message) {
                let mut parts: Vec<String> =
                    redis::from_redis_value(redis::Value::Array(push.data)).unwrap();
                // The channel precedes the message, and the pattern, if any, precedes the channel.
                let payload = parts.pop().unwrap().parse().unwrap();
                let channel = parts.pop().unwrap();
                received.push(Message { channel, payload });
            }
        }
        let mut published = self.keyspace.take_published();
        if let Some(channels) = &self.subscribed {
            published.retain(|message| channels.contains(&message.channel));
        }
        assert_eq!(
            received, published,
            "messages of the server (left) and the keyspace (right) differ after {last_move:?}"
        );
    }
}

/// Defines the function `dump`, which returns the server's time in ms, and all keys.
const DUMP: &str = "
local function dump()
    local all = {}
    for _, key in ipairs(redis.call('KEYS', '*')) do
        local kind = redis.call('TYPE', key).ok
        local value
        if kind == 'hash' then value = redis.call('HGETALL', key)
        elseif kind == 'string' then value = { redis.call('GET', key) }
        elseif kind == 'list' then value = redis.call('LRANGE', key, 0, -1)
        else value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end
        table.insert(all, { key, kind, string.format('%.0f', redis.call('PTTL', key)), value })
    end
    local now = redis.call('TIME')
    return { tostring(math.floor(now[1] * 1000 + now[2] / 1000)), all }
end
";

/// What `dump` returns.
type RawDump = (String, Vec<(Vec<u8>, String, String, Vec<Vec<u8>>)>);

fn decode_dump((now, all): RawDump) -> Dump {
    let now: f64 = now.parse().unwrap();
    let text = |bytes: &Vec<u8>| match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        // Permit ids are binary on a server; the keyspace stores them in hex.
        Err(_) => bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
    };
    let entry = |(key, kind, left, value): (Vec<u8>, String, String, Vec<Vec<u8>>)| {
        let value = match kind.as_str() {
            "hash" => {
                let pairs = value.chunks(2);
                let pair = |pair: &[Vec<u8>]| {
                    let (field, value) = (text(&pair[0]), text(&pair[1]));
                    let value = aged(&field, &value, now as i64);
                    (field, value)
                };
                DumpedValue::Hash(pairs.map(pair).collect())
            }
            "string" => DumpedValue::Text(text(&value[0])),
            "list" => DumpedValue::List(value.iter().map(text).collect()),
            _ => {
                let pairs = value.chunks(2).map(|pair| {
                    let timestamp: f64 = text(&pair[1]).parse().unwrap();
                    (text(&pair[0]), (timestamp - now) as i64)
                });
                DumpedValue::Timestamps(pairs.collect())
            }
        };
        (text(&key), (value, left.parse().unwrap()))
    };
    all.into_iter().map(entry).collect()
}

/// Returns the value of a field of the registry of clients, of a hold in a group, or of the record
/// of a run or of a job, with an age instead of its time. Other values are unchanged.
pub(crate) fn aged(field: &str, value: &str, now: i64) -> String {
    let end = value.find(|c: char| c != '-' && !c.is_ascii_digit());
    let (time, text) = value.split_at(end.unwrap_or(value.len()));
    match time.parse::<i64>() {
        Ok(time)
            if ["hold:", "run:", "end:"]
                .iter()
                .any(|prefix| field.starts_with(prefix))
                || field.ends_with(GROUP_END)
                || matches!(field, "began" | "ended") =>
        {
            format!("{} {text}", timestamp_in_units(now - time))
        }
        _ => value.to_owned(),
    }
}

/// Like [`timestamp_in_units`], for a time to live: -1 means forever.
fn ttl_in_units(millis: i64) -> i64 {
    match millis {
        -1 => -1,
        // Of a token far beyond the clock: only the keyspace's clock advances.
        far if far > FAR_MS => i64::MAX,
        millis => timestamp_in_units(millis),
    }
}

/// Tokens from here to [`CLOCK_TOKEN_END`] follow the clock. The first one is of 2001.
const MIN_CLOCK_TOKEN: i64 = 1_000_000_000_000_000;
const CLOCK_TOKEN_END: i64 = 1 << 53;

fn is_clock_token(token: i64) -> bool {
    (MIN_CLOCK_TOKEN..CLOCK_TOKEN_END).contains(&token)
}

/// Replaces each token in the text that follows the clock by hundredths of a [`TIME_UNIT`] since `started`.
fn clock_tokens_in_units(text: &str, started: Duration) -> String {
    let started = i64::try_from(started.as_micros()).unwrap();
    let unit = (TIME_UNIT / 100).as_micros() as f64;
    let mut units = String::new();
    for part in text.split_inclusive(|c: char| !c.is_ascii_digit()) {
        let digits = part.trim_end_matches(|c: char| !c.is_ascii_digit());
        match digits.parse() {
            Ok(token) if is_clock_token(token) => {
                let since = ((token - started) as f64 / unit).round();
                units += &format!("clock {since}{}", &part[digits.len()..]);
            }
            _ => units += part,
        }
    }
    units
}

/// Returns the time since 1970 in a reply to TIME.
fn server_time(reply: redis::Value) -> Duration {
    let (seconds, micros): (u64, u64) = redis::from_redis_value(reply).unwrap();
    Duration::from_secs(seconds) + Duration::from_micros(micros)
}

/// Converts to the nearest number of [`TIME_UNIT`]s. A timestamp that means never becomes
/// `i64::MAX`.
fn timestamp_in_units(millis: i64) -> i64 {
    let unit = TIME_UNIT.as_millis() as i64;
    match millis {
        never if never > NEVER_MS => i64::MAX,
        millis => (millis as f64 / unit as f64).round() as i64,
    }
}

/// A reply in a form that is equal on both sides although they run at slightly different times.
pub(crate) trait Comparable {
    fn comparable(&self) -> String;
}

impl<T: Comparable> Comparable for Outcome<T> {
    fn comparable(&self) -> String {
        match self {
            Outcome::Done(grant) => format!("done {}", grant.comparable()),
            Outcome::Wait(left) => format!("wait {}", left.comparable()),
        }
    }
}

impl<T: Comparable> Comparable for Option<Outcome<T>> {
    fn comparable(&self) -> String {
        let unset = || "no permits are set".into();
        self.as_ref().map_or_else(unset, Comparable::comparable)
    }
}

impl Comparable for Vec<Holder> {
    fn comparable(&self) -> String {
        let mut holders: Vec<_> = self
            .iter()
            .map(|holder| {
                let left = holder.remaining.comparable();
                format!("{} {} {left}", holder.owner, holder.holds)
            })
            .collect();
        holders.sort_unstable();
        holders.join(", ")
    }
}

impl Comparable for Expiry {
    fn comparable(&self) -> String {
        format!("{:?}", self.duration().map(in_units))
    }
}

fn in_units(left: Duration) -> i64 {
    ttl_in_units(i64::try_from(left.as_millis()).unwrap_or(i64::MAX))
}

impl Comparable for Vec<Renewed> {
    fn comparable(&self) -> String {
        let comparable = |renewed: &Renewed| match renewed {
            Renewed::Asked { limit: Some(limit) } => Expiry::In(*limit).comparable(),
            renewed => format!("{renewed:?}"),
        };
        let all: Vec<_> = self.iter().map(comparable).collect();
        all.join(", ")
    }
}

impl Comparable for Option<Expiry> {
    fn comparable(&self) -> String {
        self.map_or("none".into(), |left| left.comparable())
    }
}

macro_rules! compare_by_debug {
    ($($reply:ty),*) => {
        $(impl Comparable for $reply {
            fn comparable(&self) -> String {
                format!("{self:?}")
            }
        })*
    };
}

compare_by_debug!(
    Handoff,
    Option<OwnerId>,
    (),
    (bool, WaiterCounts),
    bool,
    i64,
    u64,
    u32,
    Option<u64>,
    Option<i64>,
    Vec<String>,
    Vec<u32>
);

fn key_texts<'a, R>(step: &'a Step<'_, R>) -> Vec<&'a str> {
    step.keys().iter().map(|key| &**key).collect()
}

pub(crate) fn arg_texts<R>(step: &Step<'_, R>) -> Vec<String> {
    let text = |arg: &Arg<'_>| match arg {
        Arg::Text(text) => text.to_string(),
        Arg::Number(number) => number.to_string(),
    };
    step.args().iter().map(text).collect()
}

/// Returns the command that runs this script with the keys and arguments of a step.
fn eval<R>(source: &str, step: &Step<'_, R>) -> redis::Cmd {
    let (keys, args) = (key_texts(step), arg_texts(step));
    let mut cmd = redis::cmd("EVAL");
    cmd.arg(source).arg(keys.len()).arg(keys).arg(args);
    cmd
}

/// Returns the reply as the wire decodes it.
fn script_reply(reply: redis::Value) -> ScriptReply {
    match reply {
        redis::Value::Nil => ScriptReply::Nil,
        redis::Value::Int(number) => ScriptReply::Integer(number),
        redis::Value::BulkString(bytes) => ScriptReply::Bytes(bytes),
        redis::Value::Array(list) => {
            ScriptReply::List(list.into_iter().map(script_reply).collect())
        }
        other => panic!("unexpected reply: {other:?}"),
    }
}
