//! What a script leaves behind if a server refuses one of its calls.
//!
//! A script is atomic, but not all or nothing: what it has done before a refused call stays. A server refuses calls
//! that a user may not make (permissions on commands, keys and channels), calls that need memory, and in a cluster keys that the
//! script has not declared while their slot moves. It refuses a call for what it is, so it has also refused the
//! same call earlier in the script.
//!
//! The rules that each script keeps, whatever is refused:
//!
//! 1. A key that it has created expires, unless it never would: counters, tokens, terms, and the queue of a fair lock. So nothing
//!    that can be refused stands between creating a key and giving it an expiry, and if the expiry itself is refused, the
//!    script takes back what it has written.
//! 2. All or nothing: the state means what it meant before, or what it means after the whole step. [`meaning`] is
//!    what counts: owners and what they hold, numbers, permits, terms, records.
//! 3. A script that replies as if nothing had been refused has done everything.
//! 4. While a slot of a cluster moves, its new node has some of the keys, and executes a script that has declared only keys
//!    that are there. A key that the script has not declared may then be missing. Unless the script is marked as one that
//!    finds keys by itself, it leaves the names in its other undeclared keys as they are, or as the whole step leaves them:
//!    a waiter without a timeout has not timed out.
//!
//! What may stay or be missing, because it means nothing by itself, or repairs itself: a token or an epoch that no acquisition
//! has; an expiry that is later, at most that of the whole step; a count of an owner that already holds the lock, because
//! each step of its client sets the count; readers and permits that had expired and are removed; a lock without holders, until it
//! expires; the place of a waiter in a queue, which it gets again when it retries; timeouts of readers, announcements of waiters
//! and requests to release, which expire by themselves. And messages: waiters that are not woken wait until the lease ends.
//!
//! Three steps consist of several, and may stop between them, with an error: a forced release of several readers; a release of a
//! fair lock that grants it; and the undoing of a multi-lock that could not be acquired, after which the client
//! releases each of its locks.
//!
//! One case remains: a user that may create a key, but neither expire nor delete it. Such a user cannot release a lock either.
//!
//! The differential tests run each script on random states. Before some of their steps, the step runs with each of its calls
//! refused, on the state that the history has reached, which is then restored. Each directory with scripts has such a test, which
//! must run each of them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::keyspace::DumpedValue;
use crate::name::is_writer_field;
use crate::step::{Script, Step};

/// The state of a server: each key with its value, and its remaining time to live.
pub(super) type Dump = BTreeMap<String, (DumpedValue, i64)>;

/// Runs `step`, a function around a script, with each of its calls refused in turn. Behind `dump`.
///
/// Returns the different states, the first of which is that before; the step's reply and the number of the state after it; and for
/// each refusal: the command and the key or channel that are refused, '' for any; the reply; the number of the state. Then,
/// unless the script finds keys by itself, the same for each undeclared key that the step misses, with [`ABSENT`] for the
/// command. Most refusals leave the same few states, and to read and compare them is most of the work.
const REFUSE: &str = "
local live, saved = redis, {}
-- With the times of expiry, and not what is left: the attempts take time, in which the keys grow older.
local time = live.call('TIME')
for _, key in ipairs(live.call('KEYS', '*')) do
    local left = live.call('PTTL', key)
    local ends = left < 0 and 0 or time[1] * 1000 + math.floor(time[2] / 1000) + left
    table.insert(saved, { key, ends, live.call('DUMP', key), 'ABSTTL' })
end
local function restore()
    for _, key in ipairs(live.call('KEYS', '*')) do
        live.call('DEL', key)
    end
    for _, entry in ipairs(saved) do
        live.call('RESTORE', unpack(entry))
    end
end

local command, subject, calls
local function refuses(name, args)
    if command ~= '' and name ~= command then
        return false
    end
    local last = (name == 'DEL' or name == 'EXISTS') and #args or 1
    for i = 1, last do
        if subject == '' or args[i] == subject then
            return true
        end
    end
    return subject == ''
end
local function attempt(name, ...)
    local args = { ... }
    table.insert(calls, { name, (name == 'PUBSUB' or name == 'TIME') and '' or args[1] })
    if command and refuses(name, args) then
        return { err = 'NOPERM refused' }
    end
    if name == 'PUBLISH' then
        return live.call('PUBSUB', 'NUMSUB', args[1])[2] + live.call('PUBSUB', 'NUMPAT')
    end
    return live.pcall(name, ...)
end
local shim = { pcall = attempt, error_reply = live.error_reply }
function shim.call(...)
    local reply = attempt(...)
    if type(reply) == 'table' and reply.err then
        error(reply)
    end
    return reply
end
local function text(reply)
    if type(reply) ~= 'table' then
        return tostring(reply)
    elseif reply.err then
        return 'error: ' .. reply.err
    end
    local parts = {}
    for i, part in ipairs(reply) do
        parts[i] = text(part)
    end
    return '{ ' .. table.concat(parts, ' ') .. ' }'
end
local states, numbers = {}, {}
local function number_of(state)
    local packed = cmsgpack.pack(state)
    if not numbers[packed] then
        table.insert(states, state)
        numbers[packed] = #states
    end
    return numbers[packed] - 1
end
local function run()
    calls = {}
    local done, reply = pcall(step, shim)
    if not done and type(reply) ~= 'table' then
        reply = { err = reply }
    end
    local state = number_of(dump())
    restore()
    return { command or '', subject or '', text(reply), state }
end

number_of(dump())
local all, seen = { run() }, {}
local whole = calls
local function refuse(a, b)
    if #all < MAX and not seen[a .. ' ' .. b] and a .. b ~= '' then
        seen[a .. ' ' .. b] = true
        command, subject = a, b
        table.insert(all, run())
    end
end
for _, call in ipairs(whole) do
    local name, key = unpack(call)
    refuse(name, '')
    refuse('', key)
    refuse(name, key)
end
command, subject = nil, ''
for _, key in ipairs(KEYS) do
    seen[key] = true
end
for _, call in ipairs(FINDS_KEYS and {} or whole) do
    local key = call[2]
    if not seen[key] and live.call('DEL', key) == 1 then
        seen[key] = true
        local run_without = run()
        run_without[1], run_without[2] = 'ABSENT', key
        table.insert(all, run_without)
    end
end
return { states, all }
";

/// Stands for a command in the runs in which a key was missing.
const ABSENT: &str = "ABSENT";

/// Of the runs of each script, so many at first are tried with refusals, and then one of so many.
const ALWAYS: u32 = 100;
const SOME: u32 = 50;

/// Limit of the refusals that are tried for one step: a reader may have thousands of keys.
const MAX_REFUSALS: usize = 100;

/// Parts of scripts that release a fair lock and grant it to the next waiter.
const GRANTS: [&str; 2] = ["wake_after_release(channel,", "wake_next(channel"];

/// Returns a script that tries a step with refusals, behind the function `dump`.
pub(super) fn refusing_source(script: &Script) -> String {
    let source = script.source();
    let finds_keys = script.has_undeclared_keys().to_string();
    let refuse = REFUSE.replace("MAX", &MAX_REFUSALS.to_string());
    let refuse = refuse.replace("FINDS_KEYS", &finds_keys);
    format!("local function step(redis)\n{source}\nend\n{refuse}")
}

/// One run of a step.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) command: String,
    pub(super) subject: String,
    pub(super) reply: String,
    /// The number of the state that it leaves.
    pub(super) state: usize,
}

/// The scripts that have been tried with refusals, each with the number of its runs that were considered.
#[derive(Debug, Default)]
pub(crate) struct Coverage(BTreeMap<&'static str, u32>);

impl Coverage {
    /// Returns whether the calls of this run of a script are to be refused: always at first, then in some.
    pub(super) fn wants(&mut self, script: &Script) -> bool {
        let runs = self.0.entry(script.source()).or_default();
        *runs += 1;
        *runs <= ALWAYS || runs.is_multiple_of(SOME)
    }

    /// Checks the rules for a step, whose first run is that in which nothing was refused. The first of the states is that
    /// before it.
    pub(super) fn check<R>(step: &Step<'_, R>, states: &[Dump], runs: &[Run]) {
        let (complete, refused) = runs.split_first().expect("one run at least");
        let source = step.script().source();
        let whole = Whole::new(source, states, complete);
        let before = whole.before;
        for run in refused {
            let checked = match run.command.as_str() {
                ABSENT => whole.check_absent(step.keys(), run),
                _ => whole.check_run(run),
            };
            if let Err(fault) = checked {
                let Run {
                    command, subject, ..
                } = run;
                panic!(
                    "{fault} if `{command} {subject}` is refused\nreply: {}\nbefore: {before:#?}\nafter: {:#?}\ncomplete: {:#?}\nscript:\n{}",
                    run.reply, states[run.state], whole.after, source
                );
            }
        }
    }

    /// Checks that each script of the directory was tried.
    pub(super) fn assert_complete(&self, directory: &Path) {
        for file in scripts_in(directory) {
            let text = std::fs::read_to_string(&file).unwrap();
            let is_tried = self.0.keys().any(|source| source.contains(&text));
            assert!(is_tried, "{file:?} is not run by this test");
        }
    }
}

fn scripts_in(directory: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(directory).unwrap();
    let files = files.map(|file| file.unwrap().path());
    let mut scripts: Vec<PathBuf> = files
        .filter(|file| file.extension().is_some_and(|extension| extension == "lua"))
        .collect();
    scripts.sort();
    scripts
}

/// A step of which nothing was refused, and what its script does.
struct Whole<'a> {
    states: &'a [Dump],
    before: &'a Dump,
    after: &'a Dump,
    reply: &'a str,
    /// What the states mean.
    meanings: Vec<BTreeSet<String>>,
    nothing: BTreeSet<String>,
    all: BTreeSet<String>,
    grants: bool,
    /// The client releases what it may have acquired.
    is_undone_by_client: bool,
    reads_requests: bool,
    reads_queue: bool,
}

impl<'a> Whole<'a> {
    fn new(source: &str, states: &'a [Dump], complete: &'a Run) -> Whole<'a> {
        let meanings: Vec<_> = states.iter().map(meaning).collect();
        Whole {
            states,
            before: &states[0],
            after: &states[complete.state],
            reply: &complete.reply,
            nothing: meanings[0].clone(),
            all: meanings[complete.state].clone(),
            meanings,
            grants: GRANTS.iter().any(|part| source.contains(part)),
            is_undone_by_client: source.contains("undo_scripts"),
            reads_requests: source.contains("ZSCORE"),
            reads_queue: source.contains("fair_waiters"),
        }
    }

    fn check_run(&self, run: &Run) -> Result<(), String> {
        let Whole {
            before,
            after,
            nothing,
            all,
            ..
        } = self;
        for (key, (_, left)) in &self.states[run.state] {
            let expired_before = before.get(key).is_some_and(|(_, left)| *left != -1);
            let is_new = !before.contains_key(key);
            if *left == -1 && (is_new || expired_before) && !never_expires(key, after) {
                return Err(format!("{key} never expires"));
            }
        }
        let now = &self.meanings[run.state];
        let is_partial_release = now.is_superset(all) && now.is_subset(nothing);
        // The lock is released, and not granted to the next waiter.
        let is_free = self.grants && now.is_subset(nothing);
        let is_error = run.reply.starts_with("error");
        // A user that may not read requests to release does what it would do without them.
        let of_requests = run.command == "ZSCORE" || run.subject.starts_with("redlatch_lock_asked");
        if !is_error && self.reads_requests && of_requests {
            return Ok(());
        }
        // A user that may not read the queue of a fair lock passes the lock on as if nobody waited there.
        let of_queue = run.command == "LRANGE" || run.subject.starts_with("redisson_lock_queue");
        if !is_error && self.reads_queue && (of_queue || run.command == "PUBSUB") {
            return Ok(());
        }
        // Where nobody is known to listen, the lock is granted to nobody: the next waiter is woken.
        if !is_error && is_free && run.command == "PUBSUB" {
            return Ok(());
        }
        let is_between = is_partial_release || (is_error && (is_free || self.is_undone_by_client));
        if now != all && now != nothing && !is_between {
            return Err(format!(
                "half of the step was done: {now:#?}, before {nothing:#?}, after the step {all:#?}"
            ));
        }
        if run.reply == self.reply && now != all {
            return Err("the reply is that of the whole step, which was not done".into());
        }
        Ok(())
    }

    /// Checks the undeclared keys after a run in which one of them was missing.
    fn check_absent(&self, declared: &[Cow<'_, str>], run: &Run) -> Result<(), String> {
        fn names<'a>(state: &'a Dump, key: &str) -> Option<Vec<&'a String>> {
            state.get(key).map(|(value, _)| names_in(value))
        }
        let is_other =
            |key: &&String| **key != run.subject && !declared.iter().any(|one| one == *key);
        for key in self.before.keys().filter(is_other) {
            let now = names(&self.states[run.state], key);
            if now != names(self.before, key) && now != names(self.after, key) {
                return Err(format!("{key} is changed"));
            }
        }
        Ok(())
    }
}

/// Returns the fields, members or elements of a value.
fn names_in(value: &DumpedValue) -> Vec<&String> {
    match value {
        DumpedValue::Hash(fields) => fields.keys().collect(),
        DumpedValue::Text(text) => vec![text],
        DumpedValue::List(elements) => elements.iter().collect(),
        DumpedValue::Timestamps(members) => members.keys().collect(),
    }
}

/// Returns whether a key has no expiry by design: the whole step leaves it without one.
fn never_expires(key: &str, complete: &Dump) -> bool {
    complete.get(key).is_some_and(|(_, left)| *left == -1)
}

/// Returns whether a key means nothing by itself, so that it may remain until it expires.
fn is_leftover(key: &str) -> bool {
    key.contains(":rwlock_timeout:")
        || [
            "redlatch_lock_",
            "redlatch_fair_",
            "redlatch_rwlock_",
            "redlatch_client:",
        ]
        .iter()
        .any(|prefix| key.starts_with(prefix))
}

/// Returns what a state means, as facts.
fn meaning(state: &Dump) -> BTreeSet<String> {
    let mut facts = BTreeSet::new();
    for (key, (value, _)) in state {
        let mut fact = |what: &dyn std::fmt::Display| facts.insert(format!("{key}: {what}"));
        match value {
            _ if is_leftover(key) || key.starts_with("redisson_lock_") => {}
            DumpedValue::Hash(fields) if fields.contains_key("mode") => {
                let mut is_held = false;
                for (field, count) in fields {
                    let holds: u32 = count.parse().unwrap_or(0);
                    let reads = || {
                        (1..=holds.min(10_000)).any(|n| {
                            state.contains_key(&format!("{{{key}}}:{field}:rwlock_timeout:{n}"))
                        })
                    };
                    if field != "mode" && (is_writer_field(field) || reads()) {
                        is_held = true;
                        fact(&format!("held by {field}"));
                    }
                }
                if is_held {
                    fact(&format!("mode {}", fields["mode"]));
                }
            }
            DumpedValue::Hash(fields) => {
                for (field, value) in fields {
                    // Counts and ends are those of the owner.
                    if field.contains(":expire_time") || field.contains(":lock_count") {
                        continue;
                    }
                    match field.contains(':') && value.parse::<u32>().is_ok() {
                        true => fact(&format!("held by {field}")),
                        false => fact(&format!("{field} = {value}")),
                    };
                }
            }
            DumpedValue::List(_) => {}
            DumpedValue::Timestamps(members) => {
                let semaphore = key
                    .strip_prefix('{')
                    .and_then(|key| key.strip_suffix("}:timeout"));
                if semaphore.is_some_and(|semaphore| state.contains_key(semaphore)) {
                    for (member, _) in members.iter().filter(|(_, left)| **left > 0) {
                        fact(&member);
                    }
                }
            }
            DumpedValue::Text(number) => {
                let deadlines = state.get(&format!("{{{key}}}:timeout"));
                let expired = match deadlines {
                    Some((DumpedValue::Timestamps(members), _)) => {
                        members.values().filter(|left| **left <= 0).count()
                    }
                    _ => 0,
                };
                match number.parse::<i64>() {
                    Ok(number) => fact(&(number + expired as i64)),
                    Err(_) => fact(number),
                };
            }
        }
    }
    facts
}

/// A directory without such a test could have scripts that are never refused.
#[test]
fn each_directory_with_scripts_has_a_differential_test() {
    fn visit(directory: &Path, without: &mut Vec<PathBuf>) {
        let scripts = scripts_in(directory);
        if !scripts.is_empty() && !directory.join("differential.rs").exists() {
            without.extend(scripts);
        }
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                visit(&path, without);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut without = Vec::new();
    visit(&root, &mut without);
    without.retain(|file| !file.parent().unwrap().ends_with("counters"));
    without.sort();
    // These only read, or are a part of other scripts.
    let others = [
        "hold/fair_waiters.lua",
        "hold/record.lua",
        "hold/requests.lua",
        "locks/expire.lua",
        "session/handoff/check_handoff.lua",
    ];
    assert_eq!(without, others.map(|file| root.join(file)));
}
