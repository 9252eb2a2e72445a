//! The steps of a job that runs once for each slot.
//!
//! State: a hash, the *record* of the latest run: its id, which process it is, when it began, and
//! when and how it ended. Times are those of the store. A slot with a name has a record of its own.
//! Slots of a length share one: a run is of the current slot if it began in it.
//!
//! * Begin: if the current slot has no run, replace the record by one of this run, without an end.
//!   Else reply the record.
//! * Finish: set the end and the outcome, if the record is that of this run.
//!
//! Invariant: at most one run begins in each slot, while the record exists. What must not happen,
//! and what prevents it:
//!
//! - *A slot is repeated after a crash or a lost answer*, although its work may have been done. The
//!   record is written before the work, and nothing removes it but its expiry, which is later than
//!   the end of a slot with a length.
//! - *A repeated step refuses its own run.* It finds the id of its run.
//! - *A clock that is set back allows a slot again.* A run in a later slot than the current one
//!   refuses, too.
//! - *An outcome of an earlier run gets into the record of the next.* `finish` compares the ids.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::locks::rules::wrong_kind;
use crate::name::{ObjectKeys, OnceKeys};
use crate::step::{ScriptReply, Step, args, script};

/// The fields of a record.
type Fields = BTreeMap<String, String>;

/// The reply to [`Begin`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Begun {
    /// This run has begun.
    New,
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
}

impl<'a> Begin<'a> {
    pub(super) fn step(self) -> Step<'a, Begun> {
        let object = &self.keys.object;
        let args = args![
            self.run.unwrap_or_default(),
            self.slot,
            self.time_to_live,
            self.host,
            self.by,
        ];
        let decode = |reply| match reply {
            ScriptReply::Integer(-1) => Err(not_a_record(object)),
            ScriptReply::Integer(0) => Ok(Begun::Vacant),
            ScriptReply::Integer(_) => Ok(Begun::New),
            other => {
                let [now, host, by, began, ended, outcome] = other.array()?;
                Ok(Begun::Record(Record {
                    now: now.integer()?,
                    host: host.text()?,
                    by: by.text()?,
                    began: began.integer()?,
                    ended: ended.text()?.parse().ok(),
                    outcome: outcome.text()?,
                }))
            }
        };
        Step::new(
            script!("../../locks/expire.lua", "begin.lua"),
            [&*self.keys.record],
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
        if let Some(found) = keyspace.find::<Fields>(key)? {
            let text = |field| found.value.get(field).cloned();
            let began = text("began").and_then(|began| began.parse::<i64>().ok());
            let Some((run, began)) = text("run").zip(began) else {
                return Err(not_a_record(&keys.object));
            };
            if self.run == Some(&*run) {
                return Ok(Begun::New);
            }
            let is_of_slot = slot.is_none_or(|slot| {
                now.div_euclid(slot.millis()) <= began.div_euclid(slot.millis())
            });
            if is_of_slot {
                return Ok(Begun::Record(Record {
                    now,
                    host: text("host").unwrap_or_default(),
                    by: text("by").unwrap_or_default(),
                    began,
                    ended: text("ended").and_then(|ended| ended.parse().ok()),
                    outcome: text("outcome").unwrap_or_default(),
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
        ];
        let fields = fields.map(|(field, text)| (field.to_owned(), text.to_owned()));
        let time_to_live = Some(self.time_to_live.duration());
        keyspace.set(key, Fields::from(fields), time_to_live);
        Ok(Begun::New)
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

fn not_a_record(object: &ObjectKeys) -> crate::Error {
    wrong_kind(object, "the key of its runs is a hash of another kind")
}
