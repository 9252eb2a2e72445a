//! The steps of a job that runs by a schedule.
//!
//! State: a hash, the *record* of the job: the last slot that was decided, the latest runs and how
//! they have ended. A slot is a scheduled time. A run lasts while the record has no end of it and
//! the store has the lock of its owner.
//!
//! * Begin: if no run has had the slot, and the slot is later than the last one, write the run.
//!   Else reply what has become of it. A run whose lock is gone is dead: the slot begins once more
//!   if it may, else the run is recorded as lost.
//! * Finish: write the end of a run, unless it was recorded as lost.
//! * Read: the fields, and which runs last.
//!
//! What must not happen, and what prevents it:
//!
//! - *Two machines run one slot.* The run is in the record before the work begins, and only a dead
//!   run is repeated. A run begins only while the caller has the lock, so one without it is dead.
//! - *A slot is used up without a run.* A begin that arrives when its lock has ended, after an
//!   outage, changes nothing.
//! - *A slot runs again later.* Slots only grow.
//! - *A machine whose clock is far ahead uses up the slots of the others.* A slot that is too early
//!   by the clock of the server does not begin.
//! - *The record grows.* It keeps the latest runs only, and expires. Those that last are kept longest,
//!   so that their ends are recorded.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::Result;
use crate::keyspace::{Holds, Keyspace};
use crate::lease::{Expiry, Lease};
use crate::locks::rules::no_record;
use crate::name::JobKeys;
use crate::step::{ScriptReply, Step, args, script};

/// The fields of a record.
pub(super) type Fields = BTreeMap<String, String>;

/// What happens when a firing is due while another run of its job lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Overlap {
    /// The slot is skipped.
    #[default]
    Skip,
    /// The firing waits until the other run has ended. If several firings wait, the latest one
    /// runs, and the others are skipped.
    Wait,
    /// Both run. The job then is a reader of the read-write lock with its name.
    Allow,
}

/// How many runs the record of a job keeps.
pub(super) const KEPT: u32 = 20;

/// The largest number of fields that are read. Two for each run that is kept and a few others would do:
/// a hash with more is not one of this library, and may have any size.
pub(super) const MAX_FIELDS: u32 = 256;

/// The reply to [`Begin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begun {
    /// The slot may begin, but the request only asked, or the lock has ended.
    Vacant,
    /// Begun, as this attempt.
    New(u32),
    /// The slot was run, skipped or lost, or a later slot was.
    Done,
    /// A run of the slot lasts. Its lease ends after this time unless it is renewed.
    Lasts { attempt: u32, left: Duration },
    /// Too early by this time.
    Early(Duration),
    /// Skipped, because another run lasts.
    Skipped,
    /// Another run lasts, with the same time.
    Overlaps(Duration),
}

/// Begins the run of a slot, or asks whether it may begin.
#[derive(Clone, Copy)]
pub(super) struct Begin<'a> {
    pub(super) keys: &'a JobKeys,
    /// The id of the run; empty: only asks.
    pub(super) run: &'a str,
    /// In milliseconds since 1970.
    pub(super) slot: i64,
    pub(super) attempts: u32,
    /// How far the slot may be ahead of the clock of the store, in ms; 0: any time.
    pub(super) ahead: i64,
    pub(super) overlap: Overlap,
    pub(super) kept: u32,
    pub(super) time_to_live: Lease,
    /// Owner, lock, host and process of the run, as lines.
    pub(super) runner: &'a str,
    pub(super) schedule: &'a str,
}

/// Returns the part of the fields that belongs to one attempt.
pub(super) fn attempt_key(slot: i64, attempt: u32) -> String {
    format!("{slot}:{attempt}")
}

/// Returns how long the lock of a run is held at least. `None`: the run is dead.
fn left(keyspace: &mut Keyspace, run: &str) -> Result<Option<i64>> {
    let mut lines = run.split('\n').skip(2);
    let (Some(owner), Some(lock)) = (lines.next(), lines.next()) else {
        return Ok(None);
    };
    let is_held = match owner {
        "" => keyspace.exists(lock),
        owner => {
            let holds = keyspace.find::<Holds>(lock)?;
            holds.is_some_and(|holds| holds.value.counts.contains_key(owner))
        }
    };
    let left = keyspace.remaining(lock).map(Expiry::millis);
    Ok(left.filter(|_| is_held))
}

impl<'a> Begin<'a> {
    pub(super) fn step(self) -> Step<'a, Begun> {
        let mode = match self.overlap {
            Overlap::Skip => "skip",
            Overlap::Wait => "wait",
            Overlap::Allow => "allow",
        };
        let args = args![
            self.run,
            self.slot,
            self.attempts,
            self.ahead,
            mode,
            self.kept,
            self.time_to_live,
            self.runner,
            self.schedule,
        ];
        let record = &*self.keys.record;
        let lock = self.runner.split('\n').nth(1);
        let lock = lock.filter(|_| !self.run.is_empty());
        Step::new(
            script!(undeclared "../../locks/expire.lua", "begin.lua"),
            [&*self.keys.record].into_iter().chain(lock),
            args,
            move |reply| {
                let [code, a, b] = reply.array()?;
                decode(record, [code.integer()?, a.integer()?, b.integer()?])
            },
            move |keyspace| decode(record, self.apply(keyspace)?),
        )
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<[i64; 3]> {
        let now = keyspace.now_ms();
        let key = &*self.keys.record;
        let fields = keyspace.find::<Fields>(key)?;
        let existing = fields.map(|found| found.value.clone());
        let number = |field| -> Option<i64> { existing.as_ref()?.get(field)?.parse().ok() };
        let last = number("last");
        if last.is_none() && existing.is_some() {
            return Ok([-1, 0, 0]);
        }
        let skipped = number("skipped").unwrap_or(0);
        let mut fields = existing.unwrap_or_default();
        let of = |attempt| attempt_key(self.slot, attempt);
        let attempt = (1..).take_while(|n| fields.contains_key(&format!("run:{}", of(*n))));
        let attempt = attempt.last().unwrap_or(0);
        let text = fields.get(&format!("run:{}", of(attempt))).cloned();
        let lost = format!("{now}\nlost\n\n");
        let mut changes = Vec::new();
        if let Some(text) = &text {
            if text.split('\n').nth(1) == Some(self.run) {
                return Ok([1, attempt.into(), 0]);
            }
            if fields.contains_key(&format!("end:{}", of(attempt))) {
                return Ok([2, 0, 0]);
            }
            if let Some(left) = left(keyspace, text)? {
                return Ok([3, attempt.into(), left]);
            }
            // Those that wait do not look at later runs here, but below.
            let has_later = self.overlap == Overlap::Allow && last > Some(self.slot);
            if attempt >= self.attempts || has_later {
                changes.push((format!("end:{}", of(attempt)), lost));
                change(keyspace, key, changes)?;
                return Ok([2, 0, 0]);
            }
        } else if last.is_some_and(|last| self.slot <= last) {
            return Ok([2, 0, 0]);
        } else if self.ahead > 0 && self.slot - now > self.ahead {
            return Ok([4, self.slot - now - self.ahead, 0]);
        }
        let latest = fields.get("latest").cloned();
        if let Some(latest) = latest
            && latest != of(attempt)
            && self.overlap != Overlap::Allow
            && let Some(other) = fields.get(&format!("run:{latest}")).cloned()
            && !fields.contains_key(&format!("end:{latest}"))
        {
            match left(keyspace, &other)? {
                Some(left) if self.overlap == Overlap::Wait || text.is_some() => {
                    return Ok([6, left, 0]);
                }
                // The other run may end in time.
                Some(_) if self.ahead > 0 && self.slot > now => {
                    return Ok([4, self.slot - now, 0]);
                }
                Some(_) => {
                    changes.push(("last".to_owned(), self.slot.to_string()));
                    changes.push(("skipped".to_owned(), (skipped + 1).to_string()));
                    change(keyspace, key, changes)?;
                    return Ok([5, 0, 0]);
                }
                None => changes.push((format!("end:{latest}"), lost.clone())),
            }
        }
        if self.run.is_empty() || left(keyspace, &format!("\n\n{}", self.runner))?.is_none() {
            return Ok([0, 0, 0]);
        }
        if text.is_some() {
            changes.push((format!("end:{}", of(attempt)), lost));
        }
        let attempt = attempt + 1;
        let last = last.unwrap_or(self.slot).max(self.slot);
        let run = format!("{now}\n{}\n{}", self.run, self.runner);
        fields.extend(changes);
        fields.extend([
            ("last".to_owned(), last.to_string()),
            ("latest".to_owned(), of(attempt)),
            ("schedule".to_owned(), self.schedule.to_owned()),
            (format!("run:{}", of(attempt)), run),
        ]);
        let mut runs = Vec::new();
        for (field, text) in &fields {
            if let Some((slot, attempt)) = slot_of(field) {
                let has_ended = fields.contains_key(&field.replacen("run", "end", 1));
                let lasts = !has_ended && left(keyspace, text)?.is_some();
                runs.push((lasts, slot, attempt));
            }
        }
        runs.sort_unstable();
        let surplus = runs.len().saturating_sub(self.kept as usize);
        for (_, slot, attempt) in runs.into_iter().take(surplus) {
            for part in ["run", "end"] {
                fields.remove(&format!("{part}:{}", attempt_key(slot, attempt)));
            }
        }
        keyspace.set(key, fields, Some(self.time_to_live.duration()));
        Ok([1, attempt.into(), 0])
    }
}

/// Returns the slot and the attempt of the field of a run.
pub(super) fn slot_of(field: &str) -> Option<(i64, u32)> {
    let (slot, attempt) = field.strip_prefix("run:")?.split_once(':')?;
    slot.parse().ok().zip(attempt.parse().ok())
}

fn change(keyspace: &mut Keyspace, key: &str, changes: Vec<(String, String)>) -> Result<()> {
    if let Some(found) = keyspace.find::<Fields>(key)? {
        found.value.extend(changes);
    }
    Ok(())
}

fn decode(record: &str, [code, a, b]: [i64; 3]) -> Result<Begun> {
    /// How long a lock without an expiry counts as held, before the store is asked again.
    const UNKNOWN: Duration = Duration::from_secs(30);
    let time = |millis| u64::try_from(millis).map_or(UNKNOWN, Duration::from_millis);
    let number = |number| u32::try_from(number).unwrap_or(u32::MAX);
    Ok(match code {
        -1 => return Err(no_record(record)),
        0 => Begun::Vacant,
        1 => Begun::New(number(a)),
        3 => Begun::Lasts {
            attempt: number(a),
            left: time(b),
        },
        4 => Begun::Early(time(a)),
        5 => Begun::Skipped,
        6 => Begun::Overlaps(time(a)),
        _ => Begun::Done,
    })
}

/// Records how a run has ended: `end` is its state, outcome and output, as lines. Replies whether
/// the run is known and was not recorded as lost.
pub(super) fn finish<'a>(
    keys: &'a JobKeys,
    run: &'a str,
    attempt: &'a str,
    end: &'a str,
) -> Step<'a, bool> {
    Step::new(
        script!("finish.lua"),
        [&*keys.record],
        args![run, attempt, end],
        ScriptReply::flag,
        move |keyspace| {
            let now = keyspace.now_ms();
            let Some(found) = keyspace.find::<Fields>(&keys.record)? else {
                return Ok(false);
            };
            let text = found.value.get(&format!("run:{attempt}"));
            if text.and_then(|text| text.split('\n').nth(1)) != Some(run) {
                return Ok(false);
            }
            let field = format!("end:{attempt}");
            if let Some(ended) = found.value.get(&field) {
                return Ok(ended.split_once('\n').is_some_and(|(_, rest)| rest == end));
            }
            found.value.insert(field, format!("{now}\n{end}"));
            let latest = found.value.get("succeeded");
            let latest = latest.and_then(|slot| slot.parse().ok()).unwrap_or(0);
            let slot = attempt
                .split(':')
                .next()
                .and_then(|slot| slot.parse::<i64>().ok());
            if let Some(slot) = slot.filter(|slot| end.starts_with("ok\n") && *slot > latest) {
                found.value.insert("succeeded".to_owned(), slot.to_string());
            }
            Ok(true)
        },
    )
}

/// What the store has about a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    /// The time of the store in milliseconds.
    pub(super) now: i64,
    pub(super) fields: Fields,
    /// The fields of the runs that last.
    pub(super) live: Vec<String>,
}

/// Reads the record, with the outputs of its runs or without them.
pub(super) fn read(keys: &JobKeys, outputs: bool) -> Step<'_, Record> {
    Step::new(
        script!(undeclared "read.lua"),
        [&*keys.record],
        args![outputs, MAX_FIELDS],
        |reply| {
            let [now, fields, live] = reply.array()?;
            let mut texts = fields.list()?.into_iter().map(ScriptReply::text);
            let mut fields = Fields::new();
            while let Some((field, value)) = texts.next().zip(texts.next()) {
                fields.insert(field?, value?);
            }
            let live = live.list()?.into_iter().map(ScriptReply::text);
            Ok(Record {
                now: now.integer()?,
                fields,
                live: live.collect::<Result<_>>()?,
            })
        },
        move |keyspace| {
            let now = keyspace.now_ms();
            let found = keyspace.find::<Fields>(&keys.record)?;
            let found = found.filter(|found| found.value.len() <= MAX_FIELDS as usize);
            let mut fields = found.map(|found| found.value.clone()).unwrap_or_default();
            let mut live = Vec::new();
            for (field, text) in &fields {
                if let Some(of) = field.strip_prefix("run:")
                    && !fields.contains_key(&format!("end:{of}"))
                    && left(keyspace, text)?.is_some()
                {
                    live.push(field.clone());
                }
            }
            if !outputs {
                for (_, end) in fields
                    .iter_mut()
                    .filter(|(field, _)| field.starts_with("end:"))
                {
                    let head: usize = end.split_inclusive('\n').take(3).map(str::len).sum();
                    end.truncate(head);
                }
            }
            Ok(Record { now, fields, live })
        },
    )
}
