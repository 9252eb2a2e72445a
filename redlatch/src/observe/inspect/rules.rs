//! The step that reads names without knowing the kinds of their objects.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::{ObjectState, Waiter};
use crate::error::Result;
use crate::keyspace::{Holds, Keyspace, Mode};
use crate::lease::Expiry;
use crate::locks::Holder;
use crate::locks::fair_shared::holders;
use crate::locks::fenced::token;
use crate::locks::permits::{HeldPermit, PermitId};
use crate::locks::read_write;
use crate::name::{CandidateKeys, ReadWriteKeys, is_writer_field, owner_of, permits_in};
use crate::step::{ScriptReply, Step, args, script, unexpected_reply};

/// Timestamps from this one on, in milliseconds, mean that an entry never expires.
const NEVER: i64 = 900_000_000_000_000;

/// The result for one name: its object, `None` if the name is unused, or as the error a description
/// of data that is no object of this library.
pub(crate) type Inspected = std::result::Result<Option<ObjectState>, &'static str>;

/// Returns the objects under some names.
pub(crate) fn inspect_names(names: &[CandidateKeys]) -> Step<'_, Vec<Inspected>> {
    Step::new(
        // Uses the read-write lock's own functions, so both see the same state.
        script!(
            undeclared
            "../../locks/read_write/readers.lua", "../../locks/read_write/sides.lua", "inspect.lua"
        ),
        names.iter().flat_map(CandidateKeys::keys),
        args![],
        move |reply| {
            match reply {
                ScriptReply::List(all) if all.len() == names.len() => {
                    // Data that cannot be parsed belongs to no object of this library. The other
                    // names are still returned.
                    let parse = |reply| parse_inspected(reply).unwrap_or(Err(OTHER_TYPE));
                    Ok(all.into_iter().map(parse).collect())
                }
                other => Err(unexpected_reply(&other)),
            }
        },
        move |keyspace| {
            let inspect = |name| inspect_name(keyspace, name);
            Ok(names.iter().map(inspect).collect())
        },
    )
}

/// Reads one name, as the script does.
fn inspect_name(keyspace: &mut Keyspace, name: &CandidateKeys) -> Inspected {
    let key = name.key.as_str();
    if let Ok(Some(number)) = keyspace.find::<i64>(key) {
        let (value, remaining) = (*number.value, number.remaining());
        return Ok(Some(match remaining_times(keyspace, &name.deadlines) {
            None => ObjectState::Counter { value, remaining },
            Some(deadlines) => {
                let is_held = |(_, left): &&(String, Expiry)| *left != Expiry::In(Duration::ZERO);
                let permit = |(id, left): &(String, Expiry)| {
                    Some(HeldPermit {
                        id: id.parse().ok()?,
                        remaining: *left,
                    })
                };
                let held: Vec<_> = deadlines.iter().filter(is_held).collect();
                let expired = deadlines.len() - held.len();
                let held = held.into_iter().filter_map(permit).collect();
                ObjectState::ExpirableSemaphore {
                    available: value.saturating_add(i64::try_from(expired).unwrap_or(0)),
                    held,
                }
            }
        }));
    }
    if let Ok(Some(found)) = keyspace.find::<BTreeMap<String, String>>(key) {
        let fields = found.value.clone();
        let now = keyspace.now_ms();
        let held = holders::read(&fields, now).ok_or("a hash of another kind")?;
        let holds = held
            .into_iter()
            .map(|it| (it.field, it.count, it.ends - now));
        let queue = unexpired_waiters(keyspace, &name.fair_queue, &name.fair_timeouts);
        return Ok(fair_state(holds, queue));
    }
    let holds = match keyspace.find::<Holds>(key) {
        Err(_) => return Err("another type"),
        Ok(None) => None,
        Ok(Some(found)) => {
            let remaining = found.remaining();
            Some((found.value.clone(), remaining))
        }
    };
    match holds {
        Some((holds, _)) if holds.mode.is_some() => {
            let keys = &ReadWriteKeys::new("", &name.key);
            let holders_of =
                |keyspace: &mut Keyspace, side| read_write::inspect(keys, side).apply(keyspace);
            let writer =
                holders_of(keyspace, Mode::Write).map(|writers| writers.into_iter().next());
            match (writer, holders_of(keyspace, Mode::Read)) {
                (Ok(writer), Ok(readers)) => {
                    Ok(Some(ObjectState::ReadWriteLock { writer, readers }))
                }
                _ => Err("a hash of another kind"),
            }
        }
        Some((holds, _)) if holds.counts.len() > 1 => Err("a hash of another kind"),
        holds => {
            let holder = holds.and_then(|(holds, remaining)| {
                let (owner, count) = holds.counts.first_key_value()?;
                Some(Holder::new(owner.as_str().into(), *count, remaining))
            });
            let is_free = holder.is_none();
            let queue = unexpired_waiters(keyspace, &name.queue, &name.timeouts);
            let token = match keyspace.find::<i64>(&name.token) {
                Ok(Some(token)) => u64::try_from(*token.value).ok(),
                _ => None,
            };
            // The token of an earlier lock may remain for ever.
            let [has_queue, has_fair] =
                [&name.queue, &name.fair_queue].map(|key| keyspace.exists(key));
            if is_free && !has_queue && has_fair {
                let queue = unexpired_waiters(keyspace, &name.fair_queue, &name.fair_timeouts);
                return Ok(fair_state([].into_iter(), queue));
            }
            Ok(lock_state(holder, queue, token))
        }
    }
}

/// Returns the state of a lock, if any of it exists.
fn lock_state(
    holder: Option<Holder>,
    queue: Vec<Waiter>,
    token: Option<u64>,
) -> Option<ObjectState> {
    let exists = holder.is_some() || !queue.is_empty() || token.is_some();
    exists.then_some(ObjectState::Lock {
        holder,
        queue,
        token,
    })
}

/// Returns the state of a fair object that several owners may hold, if any of it exists. `holds`: fields, hold counts and remaining
/// milliseconds.
fn fair_state(
    holds: impl Iterator<Item = (String, u32, i64)>,
    queue: Vec<Waiter>,
) -> Option<ObjectState> {
    let (mut writer, mut readers, mut has_permits) = (None, Vec::new(), false);
    for (field, count, left) in holds {
        has_permits |= permits_in(&field).is_some();
        let holder = holders::holder(&field, count, left);
        match is_writer_field(&field) {
            true => writer = Some(holder),
            false => readers.push(holder),
        }
    }
    let exists = writer.is_some() || !readers.is_empty() || !queue.is_empty();
    if has_permits || queue.iter().any(|waiter| waiter.permits.is_some()) {
        let holders = readers;
        return Some(ObjectState::FairSemaphore { holders, queue });
    }
    exists.then_some(ObjectState::FairReadWriteLock {
        writer,
        readers,
        queue,
    })
}

/// Returns what a field of a queue says about a waiter.
fn waiter(field: &str, remaining: Expiry) -> Waiter {
    Waiter {
        owner: owner_of(field).into(),
        writes: is_writer_field(field),
        permits: permits_in(field),
        remaining,
        registered: None,
    }
}

fn unexpired_waiters(keyspace: &mut Keyspace, queue: &str, timeouts: &str) -> Vec<Waiter> {
    let timeouts: BTreeMap<_, _> = remaining_times(keyspace, timeouts)
        .into_iter()
        .flatten()
        .collect();
    let Ok(Some(queue)) = keyspace.find::<VecDeque<String>>(queue) else {
        return Vec::new();
    };
    let waiting = |owner: &String| match timeouts.get(owner)? {
        Expiry::In(Duration::ZERO) => None,
        left => Some(waiter(owner, *left)),
    };
    queue.value.iter().filter_map(waiting).collect()
}

/// Returns the members of a sorted set with their remaining time: zero if it has passed.
fn remaining_times(keyspace: &mut Keyspace, key: &str) -> Option<Vec<(String, Expiry)>> {
    let now_ms = keyspace.now_ms();
    let found = keyspace.find::<BTreeMap<String, i64>>(key).ok()??;
    let mut remaining_times: Vec<_> = found.value.iter().collect();
    remaining_times.sort_by_key(|(member, timestamp)| (**timestamp, (*member).clone()));
    let with_remaining = |(member, timestamp): (&String, &i64)| {
        let remaining = match *timestamp < NEVER {
            true => Expiry::from_millis((timestamp - now_ms).max(0)),
            false => Expiry::Never,
        };
        (member.clone(), remaining)
    };
    Some(remaining_times.into_iter().map(with_remaining).collect())
}

/// Parses the script's reply for one name.
fn parse_inspected(reply: ScriptReply) -> Result<Inspected> {
    if reply == ScriptReply::Nil {
        return Ok(Ok(None));
    }
    let mut parts = Parts(reply.list()?.into_iter());
    let state = match parts.text()?.as_str() {
        "lock" => {
            let owner = parts.next_text()?;
            let (holds, remaining) = (parts.number()?, parts.time()?);
            let token = parts.next_text()?;
            let queue = parts.waiters()?;
            let holder = owner.map(|owner| Holder::new(owner.into(), holds, remaining));
            let token = token.and_then(|token| token::parse_number(&token));
            let token = token.and_then(|token| u64::try_from(token).ok());
            return Ok(Ok(lock_state(holder, queue, token)));
        }
        "rwlock" => {
            let (mut writer, mut readers) = (None, Vec::new());
            while let Some(side) = parts.next_text()? {
                let owner = parts.text()?.into();
                let holder = Holder::new(owner, parts.number()?, parts.time()?);
                match side.as_str() {
                    "write" => writer = Some(holder),
                    _ => readers.push(holder),
                }
            }
            ObjectState::ReadWriteLock { writer, readers }
        }
        "fair" => {
            let mut holds = Vec::new();
            for _ in 0..parts.number::<u32>()? {
                let (field, count) = (parts.text()?, parts.number()?);
                holds.push((field, count, parts.integer()?));
            }
            return Ok(Ok(fair_state(holds.into_iter(), parts.waiters()?)));
        }
        "number" => ObjectState::Counter {
            value: parts.number()?,
            remaining: parts.time()?,
        },
        "permits" => {
            let available: i64 = parts.number()?;
            let expired = parts.number()?;
            let mut held = Vec::new();
            while let Some(id) = parts.next_bytes()? {
                let remaining = parts.time()?;
                let permit = |id| HeldPermit { id, remaining };
                held.extend(PermitId::from_store(&id).map(permit));
            }
            ObjectState::ExpirableSemaphore {
                available: available.saturating_add(expired),
                held,
            }
        }
        "other" => return Ok(Err(other_kind(&parts.text()?))),
        _ => return Ok(Err(OTHER_TYPE)),
    };
    Ok(Ok(Some(state)))
}

const OTHER_TYPE: &str = "a key of another type";

/// Returns the description of a type that the script reported.
fn other_kind(found: &str) -> &'static str {
    match found {
        "a hash of another kind" => "a hash of another kind",
        "a text" => "a text",
        "a list" => "a list",
        "a set" => "a set",
        "a zset" => "a sorted set",
        "a stream" => "a stream",
        _ => OTHER_TYPE,
    }
}

/// The parts of a reply, in order.
struct Parts(std::vec::IntoIter<ScriptReply>);

impl Parts {
    fn next_bytes(&mut self) -> Result<Option<Vec<u8>>> {
        match self.0.next() {
            None | Some(ScriptReply::Nil) => Ok(None),
            Some(ScriptReply::Bytes(bytes)) => Ok(Some(bytes)),
            Some(other) => Err(unexpected_reply(&other)),
        }
    }

    fn next_text(&mut self) -> Result<Option<String>> {
        let bytes = self.next_bytes()?;
        Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    fn text(&mut self) -> Result<String> {
        self.next_text()?
            .ok_or_else(|| unexpected_reply(&ScriptReply::Nil))
    }

    fn number<T: std::str::FromStr>(&mut self) -> Result<T> {
        let text = self.text()?;
        text.parse().map_err(|_| unexpected_reply(&text))
    }

    fn integer(&mut self) -> Result<i64> {
        self.0.next().unwrap_or(ScriptReply::Nil).integer()
    }

    /// Parses milliseconds.
    fn time(&mut self) -> Result<Expiry> {
        self.integer().map(Expiry::from_millis)
    }

    /// Parses the waiters of a queue, which come last.
    fn waiters(&mut self) -> Result<Vec<Waiter>> {
        let mut queue = Vec::new();
        while let Some(field) = self.next_text()? {
            queue.push(waiter(&field, self.time()?));
        }
        Ok(queue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_of_other_kinds_is_described() {
        let text = |text: &str| ScriptReply::Bytes(text.into());
        let described =
            |found| parse_inspected(ScriptReply::List(vec![text("other"), text(found)])).unwrap();
        for kind in [
            "a hash of another kind",
            "a text",
            "a list",
            "a set",
            "a stream",
        ] {
            assert_eq!(described(kind), Err(kind));
        }
        assert_eq!(described("a zset"), Err("a sorted set"));
        assert_eq!(described("a module's"), Err(OTHER_TYPE));
    }

    #[test]
    fn reply_without_an_answer_for_each_name_is_rejected() {
        let names = [CandidateKeys::new("name".into())];
        let step = inspect_names(&names);
        let one = ScriptReply::List(vec![ScriptReply::Nil]);
        assert!(step.decode(one).is_ok());
        assert!(step.decode(ScriptReply::List(vec![])).is_err());
    }
}
