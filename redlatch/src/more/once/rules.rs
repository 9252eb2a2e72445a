//! The steps of a job that runs once for each slot.
//!
//! State: a hash, the *record* of the latest run: its id, which process it is, when it began, and
//! when and how it ended. Times are those of the store. A slot with a name has a record of its own.
//! Slots of a length share one: a run is of the current slot if it began in it.
//!
//! * Begin: if the current slot has no run, or that without an end which this one may replace, write
//!   the record of this run, without an end. Else reply the record.
//! * Finish: set the end and the outcome, if the record is that of this run.
//!
//! Invariant: at most one run begins in each slot, and with retries one more for each, while the
//! record exists. What must not happen, and what prevents it:
//!
//! - *A slot is repeated after a crash or a lost answer*, although its work may have been done. The
//!   record is written before the work, and nothing removes it but its expiry, which is later than
//!   the end of a slot with a length.
//! - *A repeated step refuses its own run.* It finds the id of its run.
//! - *A clock that is set back allows a slot again.* A run in a later slot than the current one
//!   refuses, too.
//! - *A retry replaces a run that lasts.* The record cannot tell it from a run whose process died.
//!   The caller must hold a lock that each run of the job holds ([`super::Once::retry_unfinished`]),
//!   and replaces only the run that it found while it held the lock. So a retry that arrives when the
//!   lock has ended does not replace a run that has begun since.
//! - *A retry allows a later slot again*, after a clock was set back. Only a run of the current slot
//!   is replaced.
//! - *An outcome of an earlier run gets into the record of the next.* `finish` compares the ids.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::locks::rules::no_record;
use crate::name::OnceKeys;
use crate::step::{ScriptReply, Step, args, script};

/// The fields of a record.
type Fields = BTreeMap<String, String>;

/// The reply to [`Begin`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Begun {
    /// This run has begun: the first of its slot, or a later one in the place of one without an end.
    New {
        attempt: u32,
    },
    /// The slot has no run, and none was requested.
    Vacant,
    Record(Record),
}

/// What the store has about a run. Times are in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) now: i64,
    pub(super) host: String,
    pub(super) by: String,
    pub(super) began: i64,
    pub(super) ended: Option<i64>,
    pub(super) outcome: String,
    pub(super) attempt: u32,
    /// The id of the run.
    pub(super) run: String,
}

/// Begins the run of a slot unless it has a run already.
#[derive(Clone, Copy)]
pub(super) struct Begin<'a> {
    pub(super) keys: &'a OnceKeys,
    /// The id of the run; `None`: only looks.
    pub(super) run: Option<&'a str>,
    /// The length of a slot; `None`: the key is that of one slot.
    pub(super) slot: Option<Lease>,
    pub(super) time_to_live: Lease,
    pub(super) host: &'a str,
    pub(super) by: &'a str,
    /// How much later than at 0 the slots begin, in milliseconds.
    pub(super) offset: i64,
    /// The id of the run without an outcome that this one may replace.
    pub(super) replaces: Option<&'a str>,
}

impl<'a> Begin<'a> {
    pub(super) fn step(self) -> Step<'a, Begun> {
        let record = &*self.keys.record;
        let args = args![
            self.run.unwrap_or_default(),
            self.slot,
            self.time_to_live,
            self.host,
            self.by,
            self.offset,
            self.replaces.unwrap_or_default(),
        ];
        let decode = |reply| match reply {
            ScriptReply::Integer(-1) => Err(no_record(record)),
            ScriptReply::Integer(0) => Ok(Begun::Vacant),
            ScriptReply::Integer(attempt) => Ok(Begun::New {
                attempt: attempt_of(attempt),
            }),
            other => {
                let [now, host, by, began, ended, outcome, attempt, run] = other.array()?;
                Ok(Begun::Record(Record {
                    now: now.integer()?,
                    host: host.text()?,
                    by: by.text()?,
                    began: began.integer()?,
                    ended: ended.text()?.parse().ok(),
                    outcome: outcome.text()?,
                    attempt: attempt_of(attempt.integer()?),
                    run: run.text()?,
                }))
            }
        };
        Step::new(
            script!("../../locks/expire.lua", "begin.lua"),
            [record],
            args,
            decode,
            move |keyspace| self.apply(keyspace),
        )
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<Begun> {
        let Begin {
            keys, run, slot, ..
        } = *self;
        let now = keyspace.now_ms();
        let key = &*keys.record;
        let mut attempt = 1;
        if let Some(found) = keyspace.find::<Fields>(key)? {
            let text = |field| found.value.get(field).cloned();
            let began = text("began").and_then(|began| began.parse::<i64>().ok());
            let Some((run, began)) = text("run").zip(began) else {
                return Err(no_record(&keys.record));
            };
            let latest = text("attempt").and_then(|attempt| attempt.parse().ok());
            let latest = latest.map_or(1, attempt_of);
            if self.run == Some(&*run) {
                return Ok(Begun::New { attempt: latest });
            }
            let behind = slot.map_or(0, |slot| {
                let number = |at: i64| at.saturating_sub(self.offset).div_euclid(slot.millis());
                number(now) - number(began)
            });
            let is_unfinished = text("ended").is_none();
            let is_replaced = is_unfinished && self.replaces == Some(&*run);
            let is_retry = behind == 0 && self.run.is_some() && is_replaced;
            if is_retry {
                attempt = latest.saturating_add(1);
            } else if behind <= 0 {
                return Ok(Begun::Record(Record {
                    now,
                    host: text("host").unwrap_or_default(),
                    by: text("by").unwrap_or_default(),
                    began,
                    ended: text("ended").and_then(|ended| ended.parse().ok()),
                    outcome: text("outcome").unwrap_or_default(),
                    attempt: latest,
                    run,
                }));
            }
        }
        let Some(run) = run else {
            return Ok(Begun::Vacant);
        };
        let fields = [
            ("run", run),
            ("host", self.host),
            ("by", self.by),
            ("began", &now.to_string()),
            ("attempt", &attempt.to_string()),
        ];
        let fields = fields.map(|(field, text)| (field.to_owned(), text.to_owned()));
        let time_to_live = Some(self.time_to_live.duration());
        keyspace.set(key, Fields::from(fields), time_to_live);
        Ok(Begun::New { attempt })
    }
}

/// Records the outcome of a run. Replies whether the record is that of this run.
pub(super) fn finish<'a>(keys: &'a OnceKeys, run: &'a str, outcome: &'a str) -> Step<'a, bool> {
    Step::new(
        script!("finish.lua"),
        [&*keys.record],
        args![run, outcome],
        ScriptReply::flag,
        move |keyspace| {
            let now = keyspace.now_ms();
            let Some(found) = keyspace.find::<Fields>(&keys.record)? else {
                return Ok(false);
            };
            if found.value.get("run").is_none_or(|found| found != run) {
                return Ok(false);
            }
            if !found.value.contains_key("ended") {
                let outcome = outcome.to_owned();
                found.value.insert("ended".to_owned(), now.to_string());
                found.value.insert("outcome".to_owned(), outcome);
            }
            Ok(true)
        },
    )
}

/// Converts the number of a run. Another program may have written any number.
fn attempt_of(number: i64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
