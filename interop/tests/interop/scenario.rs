//! Scenarios: steps that run with each library, and record after each step the answers, data and messages in
//! Redis.
//!
//! A scenario is text with one step on each line. `1 lock fair NAME -1 LEASE` is a command for worker 1; worker `0` sends
//! a Redis command directly to the server. `NAME`, `LEASE` and the like are placeholders, `OWNER2` is the owner of
//! worker 2 as written in Redis, and `$0` is the first acquired permit, `$1` the next. Options follow the step,
//! separated by `|`:
//!
//! - `waits`: do not wait for the answer; a later step `2 answers` does;
//! - `then 2`: worker 2, which waits, gets its answer now;
//! - `subscribed`: wait until the worker has subscribed, and has retried once more;
//! - `queue N`: wait until the queue of a fair lock has this length.
//!
//! Indented lines after a step list the differences: `Redisson: …` exists only on Redisson's side, `redlatch: …` only
//! on redlatch's. `Redisson 3: …` and `redlatch 3: …` apply only to the comparison with the late 3.x version, `… 4:
//! …` to that with the newest, `… 3.16: …` to that with the old one. Everything else is equal. `#` begins a comment
//! line.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::OnceLock;

use redis::Value as Raw;
use redlatch_interop::{Library, Peer, Pending, Worker};
use redlatch_testkit::{Monitor, Server, unique};
use serde_json::Value;

use crate::peers::until;

/// Lease of both sides, in ms.
const LEASE: u64 = 600_000;
/// The watchdogs' lease, and the wait time of fair locks.
const SETTINGS: [&str; 2] = ["watchdog=60000", "fair-wait=300000"];
/// All times are rounded to a multiple of this, in ms.
const UNIT: i64 = 30_000;

/// Dates from this on mean no end: Redisson's permit without end, in ms from now.
const NEVER: i64 = 100_000_000_000_000;

/// The answers, data and messages after each step, in lines.
type Recorded = Vec<Vec<String>>;

/// Runs a scenario with the newest Redisson, a late 3.x version and 3.16, and compares each with redlatch.
#[track_caller]
pub(crate) fn compare(scenario: &str) {
    compare_with(
        &[Library::Redisson, Library::Redisson3, Library::Redisson316],
        scenario,
    );
}

/// The same without Redisson 3.16, for features that it lacks.
#[track_caller]
pub(crate) fn compare_except_3_16(scenario: &str) {
    compare_with(&[Library::Redisson, Library::Redisson3], scenario);
}

/// The same with the newest Redisson only, for features that the late 3.x lacks.
#[track_caller]
pub(crate) fn compare_newest(scenario: &str) {
    compare_with(&[Library::Redisson], scenario);
}

#[track_caller]
fn compare_with(versions: &[Library], text: &str) {
    let steps = parse_steps(text);
    let ours = run(Library::Redlatch, &steps);
    for &version in versions {
        let theirs = run(version, &steps);
        let (mut expected, mut found) = (String::new(), String::new());
        for (step, (theirs, ours)) in steps.iter().zip(theirs.iter().zip(&ours)) {
            let mut differences = step.differences(version);
            differences.sort();
            write_step(&mut expected, step, &differences);
            let mut differences = Vec::new();
            differences.extend(without(theirs, ours).map(|line| format!("Redisson: {line}")));
            differences.extend(without(ours, theirs).map(|line| format!("redlatch: {line}")));
            differences.sort();
            write_step(&mut found, step, &differences);
        }
        assert!(
            expected == found,
            "the differences from Redisson {} are:\n{found}\nand should be:\n{expected}",
            version.version(),
        );
    }
}

fn write_step(text: &mut String, step: &Step<'_>, differences: &[String]) {
    let _ = writeln!(text, "        {}", step.line);
    for difference in differences {
        let _ = writeln!(text, "            {difference}");
    }
}

/// Returns the lines that are in `lines`, but not, or not as often, in `others`; both are sorted.
fn without<'a>(lines: &'a [String], others: &[String]) -> impl Iterator<Item = &'a String> {
    let mut others = others.to_vec();
    lines.iter().filter(
        move |&line| match others.iter().position(|other| other == line) {
            Some(found) => {
                others.remove(found);
                false
            }
            None => true,
        },
    )
}

struct Step<'a> {
    line: &'a str,
    worker: u64,
    command: &'a str,
    then: Vec<&'a str>,
    differences: Vec<&'a str>,
}

impl Step<'_> {
    /// Returns the listed differences that apply to this version.
    fn differences(&self, library: Library) -> Vec<String> {
        let version = match library {
            Library::Redisson3 => "3",
            Library::Redisson316 => "3.16",
            _ => "4",
        };
        let of_version = |line: &&str| {
            let (side, rest) = line.split_once(": ")?;
            match side.split_once(' ') {
                None => Some((*line).to_owned()),
                Some((side, only)) => (only == version).then(|| format!("{side}: {rest}")),
            }
        };
        self.differences.iter().filter_map(of_version).collect()
    }
}

fn parse_steps(text: &str) -> Vec<Step<'_>> {
    let mut steps: Vec<Step<'_>> = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if line.starts_with("Redisson") || line.starts_with("redlatch") {
            let step = steps.last_mut().expect("a step before a difference");
            step.differences.push(line);
            continue;
        }
        let mut parts = line.split(" | ");
        let (worker, command) = parts
            .next()
            .and_then(|step| step.split_once(' '))
            .unwrap_or_else(|| panic!("{line:?} is WORKER COMMAND"));
        steps.push(Step {
            line,
            worker: worker.parse().expect("a worker"),
            command,
            then: parts.collect(),
            differences: Vec::new(),
        });
    }
    steps
}

fn run(library: Library, steps: &[Step<'_>]) -> Recorded {
    let mut run = Run::new(library);
    steps.iter().map(|step| run.run(step)).collect()
}

/// One run of a scenario with one library, under a unique name.
struct Run {
    name: String,
    workers: Vec<(Worker<'static>, String)>,
    monitors: Vec<Monitor>,
    /// Output of the monitors since the last check.
    received: [Vec<Vec<String>>; 3],
    permits: Vec<String>,
    waiting: BTreeMap<u64, Pending>,
}

impl Run {
    fn new(library: Library) -> Run {
        let peer = peer(library);
        let workers = [(); 4].map(|()| peer.new_worker());
        Run {
            name: unlike_others("scenario"),
            workers: workers.map(|worker| (worker, worker.owner())).into(),
            monitors: servers().iter().map(Monitor::start).collect(),
            received: Default::default(),
            permits: Vec::new(),
            waiting: BTreeMap::new(),
        }
    }

    /// Runs a step. Returns the answers, data and messages after it.
    fn run(&mut self, step: &Step<'_>) -> Vec<String> {
        let mut recorded = Vec::new();
        match step.command {
            _ if step.worker == 0 => {
                self.run_redis_command(&self.fill_in(step.command));
            }
            "answers" => recorded.push(self.answers(step.worker)),
            command => {
                let command = self.fill_in(command);
                let worker = self.workers[step.worker as usize - 1].0;
                self.waiting.insert(step.worker, worker.send(&command));
                if !step.then.contains(&"waits") {
                    recorded.push(self.answers(step.worker));
                }
            }
        }
        for then in &step.then {
            let then = self.fill_in(then);
            match then.split_once(' ') {
                None if then == "waits" => {}
                None if then == "subscribed" => {
                    until(step.line, || self.has_subscribed_and_retried())
                }
                Some(("then", worker)) => {
                    recorded.push(self.answers(worker.parse().expect("a worker")));
                }
                Some(("queue", length)) => {
                    let queue = format!("redisson_lock_queue:{{{}}}", self.name);
                    let wanted: i64 = length.parse().expect("a length");
                    until(step.line, || {
                        servers()[0].command::<i64>(&["LLEN", &queue]) == wanted
                    });
                }
                _ => panic!("unknown step {then:?}"),
            }
        }
        for server in 0..servers().len() {
            self.record_state(server, &mut recorded);
        }
        recorded.sort();
        recorded
    }

    /// Returns a worker's answer; records permits.
    fn answers(&mut self, worker: u64) -> String {
        let pending = self.waiting.remove(&worker).expect("a waiting request");
        let answer = match pending.answer().result {
            Err(error) => {
                // Shown if the test fails.
                eprintln!("{worker} answers the error {error}");
                "an error".to_owned()
            }
            Ok(Value::Array(ids)) => {
                let ids = ids.iter().filter_map(Value::as_str).map(str::to_owned);
                self.permits.extend(ids.clone());
                format!(
                    "{:?}",
                    ids.map(|id| self.with_placeholders(&id))
                        .collect::<Vec<_>>()
                )
            }
            Ok(value) => value.to_string(),
        };
        format!("{worker} answers {answer}")
    }

    /// Runs a Redis command; permits are raw bytes there.
    fn run_redis_command(&self, command: &str) {
        let mut cmd = redis::Cmd::new();
        for word in command.split(' ') {
            match self.permits.iter().any(|id| id == word) {
                true => cmd.arg(raw(word)),
                false => cmd.arg(word),
            };
        }
        let done: redis::RedisResult<Raw> = cmd.query(&mut servers()[0].connection());
        assert!(done.is_ok(), "{command}: {done:?}");
    }

    /// Replaces the placeholders of a step with the values of this run.
    fn fill_in(&self, text: &str) -> String {
        let mut text = text
            .replace("NAME", &self.name)
            .replace("LEASE", &LEASE.to_string());
        for (number, (_, owner)) in self.workers.iter().enumerate() {
            text = text.replace(&format!("OWNER{}", number + 1), owner);
        }
        for (number, id) in self.permits.iter().enumerate() {
            text = text.replace(&format!("${number}"), id);
        }
        text
    }

    /// The reverse: replaces the values of this run with placeholders.
    fn with_placeholders(&self, text: &str) -> String {
        let mut text = text.replace(&self.name, "NAME");
        // The last first: their numbers may start with those of the first.
        for (place, (_, owner)) in self.workers.iter().enumerate().rev() {
            // Each server has a client of its own, but the number is the same.
            let (client, number) = owner.split_once(':').expect("CLIENT:NUMBER");
            let numbered = format!(":{number}");
            let numbered = text.match_indices(&numbered);
            let found = numbered.filter_map(|(at, _)| text.get(at.checked_sub(client.len())?..at));
            let clients: Vec<String> = found.map(str::to_owned).collect();
            for client in clients
                .into_iter()
                .filter(|client| client.split('-').count() == 5)
            {
                text = text.replace(
                    &format!("{client}:{number}"),
                    &format!("OWNER{}", place + 1),
                );
            }
        }
        for (number, id) in self.permits.iter().enumerate() {
            text = text.replace(id, &format!("PERMIT{number}"));
        }
        text
    }

    fn raw_with_placeholders(&self, bytes: &[u8]) -> String {
        let hex = bytes.iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        });
        match std::str::from_utf8(bytes) {
            Ok(text) if !self.permits.contains(&hex) => self.with_placeholders(text),
            _ => self.with_placeholders(&hex),
        }
    }

    /// Records all keys and messages of this run on one server.
    fn record_state(&mut self, number: usize, recorded: &mut Vec<String>) {
        let server = &servers()[number];
        let at = match number {
            0 => String::new(),
            number => format!("@{number}"),
        };
        for (channel, payloads) in self.messages(number) {
            recorded.push(format!(
                "{} receives {}{at}",
                self.with_placeholders(&channel),
                payloads.join(", ")
            ));
        }
        let keys: Vec<String> = server.command(&["KEYS", &format!("*{}*", self.name)]);
        for key in keys {
            // Redisson detects a repeated release by these keys, for some seconds. No other client reads them.
            if key.starts_with("redisson_unlock_latch:") {
                continue;
            }
            let kind: String = server.command(&["TYPE", &key]);
            let left: i64 = server.command(&["PTTL", &key]);
            let named = format!("{}{at}", self.with_placeholders(&key));
            let shown = |bytes: &Vec<u8>| self.raw_with_placeholders(bytes);
            recorded.push(format!("{named} is a {kind} {}", for_ms(left)));
            match kind.as_str() {
                "string" => {
                    let value: Vec<u8> = server.command(&["GET", &key]);
                    recorded.push(format!("{named} = {}", shown(&value)));
                }
                "hash" => {
                    let fields: Vec<(Vec<u8>, Vec<u8>)> = server.command(&["HGETALL", &key]);
                    for (field, value) in fields {
                        let (field, value) = (shown(&field), shown(&value));
                        recorded.push(match value.parse::<i64>() {
                            Ok(date) if field.ends_with(":expire_time") => {
                                format!("{named} {field} {}", in_ms(date - now(server)))
                            }
                            _ => format!("{named} {field} = {value}"),
                        });
                    }
                }
                "list" => {
                    let entries: Vec<Vec<u8>> = server.command(&["LRANGE", &key, "0", "-1"]);
                    for (place, entry) in entries.iter().enumerate() {
                        recorded.push(format!("{named} [{place}] = {}", shown(entry)));
                    }
                }
                "zset" => {
                    let members: Vec<(Vec<u8>, f64)> =
                        server.command(&["ZRANGE", &key, "0", "-1", "WITHSCORES"]);
                    let now = now(server);
                    for (member, date) in members {
                        let left = date as i64 - now;
                        recorded.push(format!("{named} {} {}", shown(&member), in_ms(left)));
                    }
                }
                // The key expired after it was listed.
                "none" => drop(recorded.pop()),
                other => panic!("{named} is a {other}"),
            }
        }
    }

    /// Reads all commands that one server has run up to now.
    fn read_commands(&mut self, number: usize) {
        let end = unlike_others("end");
        let _: String = servers()[number].command(&["ECHO", &end]);
        let commands = self.monitors[number].until(&end);
        self.received[number].extend(commands.into_iter().map(|command| command.text()));
    }

    /// Returns whether, in this step, a waiter has subscribed and then retried: from then on it sleeps.
    fn has_subscribed_and_retried(&mut self) -> bool {
        self.read_commands(0);
        let of_this = |words: &&Vec<String>| words.iter().any(|word| word.contains(&self.name));
        let mut received = self.received[0].iter().filter(of_this);
        received.any(|words| words[0] == "subscribe") && received.next().is_some()
    }

    /// Returns the messages published since the last check, by channel.
    fn messages(&mut self, number: usize) -> BTreeMap<String, Vec<String>> {
        self.read_commands(number);
        let mut messages = BTreeMap::<_, Vec<String>>::new();
        for words in std::mem::take(&mut self.received[number]) {
            if let [command, channel, payload] = &words[..]
                && command == "publish"
                && channel.contains(&self.name)
            {
                let payloads = messages.entry(channel.clone()).or_default();
                payloads.push(payload.clone());
            }
        }
        messages
    }
}

/// Returns a name that is no prefix of another one.
fn unlike_others(what: &str) -> String {
    unique(what) + "."
}

fn now(server: &Server) -> i64 {
    let (seconds, micros): (i64, i64) = server.command(&["TIME"]);
    seconds * 1000 + micros / 1000
}

/// Returns the 16 bytes of a permit's id.
fn raw(id: &str) -> Vec<u8> {
    let pairs = (0..id.len()).step_by(2).map(|at| &id[at..at + 2]);
    let bytes = pairs.map(|pair| u8::from_str_radix(pair, 16).expect("hex digits"));
    bytes.collect()
}

fn for_ms(left: i64) -> String {
    match left {
        -1 => "for ever".to_owned(),
        left => format!("for {} s", rounded(left)),
    }
}

fn in_ms(left: i64) -> String {
    match left {
        NEVER.. => "never ends".to_owned(),
        ..0 => "has ended".to_owned(),
        left => format!("ends in {} s", rounded(left)),
    }
}

fn rounded(ms: i64) -> i64 {
    (ms + UNIT / 2).div_euclid(UNIT) * (UNIT / 1000)
}

/// Returns the servers of the scenarios, which other tests do not use.
fn servers() -> &'static [Server; 3] {
    static SERVERS: OnceLock<[Server; 3]> = OnceLock::new();
    SERVERS.get_or_init(|| [(); 3].map(|()| Server::start()))
}

/// Returns a peer for one run. redlatch's is new: a client that finds one of its locks missing checks all others, and such a check
/// may fall into any step of another scenario. Redisson's are shared, because a JVM starts slowly.
fn peer(library: Library) -> &'static Peer {
    static PEERS: [OnceLock<Peer>; Library::COUNT] = [const { OnceLock::new() }; Library::COUNT];
    if library != Library::Redlatch {
        let start = || crate::peers::start_on(library, &SETTINGS, servers());
        return PEERS[library as usize].get_or_init(start);
    }
    let mut settings = SETTINGS.to_vec();
    // A release that passes a lock on publishes no message, and whether it does depends on the waiter's progress.
    settings.push("hand-over=off");
    // A hold that is a second old is checked, and a check that finds a deleted lock wakes its waiters: in which step that is,
    // depends on how fast the machine is.
    settings.push("tracking=off");
    Box::leak(Box::new(crate::peers::start_on(
        library,
        &settings,
        servers(),
    )))
}
