//! Commands on keys of any type: existence, expiry, deletion, listing.

use super::command::{Call, CommandResult, refused};
use super::glob::matches;
use super::resp::{Bytes, Reply};

/// Default number of keys that SCAN visits.
const DEFAULT_SCAN_COUNT: usize = 10;

pub(super) fn type_of(call: &mut Call<'_>) -> CommandResult {
    let entry = call.state.keys.get(&call.args[1]);
    let name = entry.map_or("none", |entry| entry.value.type_name());
    Ok(Reply::Status(name.into()))
}

pub(super) fn exists(call: &mut Call<'_>) -> CommandResult {
    let keys = &mut call.state.keys;
    let there = call.args[1..].iter().filter(|key| keys.contains(key));
    Ok(Reply::count(there.count()))
}

pub(super) fn del(call: &mut Call<'_>) -> CommandResult {
    let keys = &mut call.state.keys;
    // An expired key is removed, too, but does not count.
    let removed = call.args[1..]
        .iter()
        .filter(|key| keys.contains(key) && keys.remove(key));
    Ok(Reply::count(removed.count()))
}

pub(super) fn ttl(call: &mut Call<'_>) -> CommandResult {
    Ok(Reply::Int(match left(call) {
        left @ ..0 => left,
        left => (left + 500) / 1000,
    }))
}

pub(super) fn pttl(call: &mut Call<'_>) -> CommandResult {
    Ok(Reply::Int(left(call)))
}

/// Returns the milliseconds until a key expires; -1: it does not expire, -2: there is no key.
fn left(call: &mut Call<'_>) -> i64 {
    match timestamp(call) {
        timestamp @ ..0 => timestamp,
        timestamp => timestamp - now(call),
    }
}

pub(super) fn pexpiretime(call: &mut Call<'_>) -> CommandResult {
    Ok(Reply::Int(timestamp(call)))
}

/// Returns the timestamp when a key expires; -1: it does not expire, -2: there is no key.
fn timestamp(call: &mut Call<'_>) -> i64 {
    match call.state.keys.get(&call.args[1]) {
        None => -2,
        Some(entry) => match entry.expires {
            None => -1,
            Some(expires) => i64::try_from(expires).unwrap_or(i64::MAX),
        },
    }
}

fn now(call: &Call<'_>) -> i64 {
    i64::try_from(call.state.keys.now).unwrap_or(i64::MAX)
}

/// Returns a timestamp in milliseconds from an argument; `None` if it cannot be represented.
pub(super) fn expiry(
    call: &Call<'_>,
    time: i64,
    in_seconds: bool,
    is_timestamp: bool,
) -> Option<i64> {
    let millis = if in_seconds {
        time.checked_mul(1000)?
    } else {
        time
    };
    if is_timestamp {
        Some(millis)
    } else {
        millis.checked_add(now(call))
    }
}

/// Returns a timestamp as it is stored: one before 1970 has passed like any other past timestamp.
pub(super) fn stored_timestamp(timestamp: i64) -> u64 {
    u64::try_from(timestamp).unwrap_or(0)
}

pub(super) fn expire(call: &mut Call<'_>) -> CommandResult {
    set_expiry(call, true, false)
}

pub(super) fn pexpire(call: &mut Call<'_>) -> CommandResult {
    set_expiry(call, false, false)
}

pub(super) fn expireat(call: &mut Call<'_>) -> CommandResult {
    set_expiry(call, true, true)
}

pub(super) fn pexpireat(call: &mut Call<'_>) -> CommandResult {
    set_expiry(call, false, true)
}

fn set_expiry(call: &mut Call<'_>, in_seconds: bool, is_timestamp: bool) -> CommandResult {
    let time = call.integer(2)?;
    let condition = match call.args.len() {
        3 => String::new(),
        4 => call.word(3),
        _ => return Err(call.unsupported()),
    };
    let timestamp = expiry(call, time, in_seconds, is_timestamp).ok_or_else(|| {
        let name = call.word(0).to_ascii_lowercase();
        refused(format!("ERR invalid expire time in '{name}' command"))
    })?;
    let before = self::timestamp(call);
    if before == -2 {
        return Ok(Reply::Int(0));
    }
    let lasts = before == -1;
    let is_met = match condition.as_str() {
        "" => true,
        "NX" => lasts,
        "XX" => !lasts,
        "GT" => !lasts && timestamp > before,
        "LT" => lasts || timestamp < before,
        _ => return Err(call.unsupported()),
    };
    if !is_met {
        return Ok(Reply::Int(0));
    }
    let is_over = timestamp <= now(call);
    let (key, keys) = (&call.args[1], &mut call.state.keys);
    match is_over {
        true => drop(keys.remove(key)),
        false => keys.set_expiry(key, Some(stored_timestamp(timestamp))),
    }
    Ok(Reply::Int(1))
}

pub(super) fn persist(call: &mut Call<'_>) -> CommandResult {
    if timestamp(call) < 0 {
        return Ok(Reply::Int(0));
    }
    call.state.keys.set_expiry(&call.args[1], None);
    Ok(Reply::Int(1))
}

pub(super) fn keys(call: &mut Call<'_>) -> CommandResult {
    let all = call.state.keys.keys();
    let found = all.filter(|key| matches(&call.args[1], key));
    Ok(Reply::bulks(found.cloned()))
}

pub(super) fn dbsize(call: &mut Call<'_>) -> CommandResult {
    Ok(Reply::count(call.state.keys.keys().count()))
}

pub(super) fn flush(call: &mut Call<'_>) -> CommandResult {
    match (call.args.len(), call.word(1).as_str()) {
        (1, _) | (2, "SYNC" | "ASYNC") => {}
        _ => return Err(call.unsupported()),
    }
    call.state.keys.clear();
    Ok(Reply::ok())
}

/// Lists keys in the order of a hash, which is also the cursor: if keys are added or removed between two pages,
/// no other key is left out.
pub(super) fn scan(call: &mut Call<'_>) -> CommandResult {
    let cursor = std::str::from_utf8(call.arg(1)).ok();
    let cursor: Option<u64> = cursor.and_then(|cursor| cursor.parse().ok());
    let cursor = cursor.ok_or_else(|| refused("ERR invalid cursor"))?;
    let (mut pattern, mut type_name, mut count) = (None, None, DEFAULT_SCAN_COUNT);
    for at in (2..call.args.len()).step_by(2) {
        if at + 1 == call.args.len() {
            return Err(refused("ERR syntax error"));
        }
        match call.word(at).as_str() {
            "MATCH" => pattern = Some(&call.args[at + 1]),
            "TYPE" => type_name = Some(call.word(at + 1).to_ascii_lowercase()),
            "COUNT" => {
                let given = usize::try_from(call.integer(at + 1)?).ok();
                let given = given.filter(|&given| given > 0);
                count = given.ok_or_else(|| refused("ERR syntax error"))?;
            }
            _ => return Err(call.unsupported()),
        }
    }
    let visible = call.state.keys.visible();
    let mut all: Vec<_> = visible
        .map(|(key, entry)| (cursor_of(key), key, entry))
        .collect();
    all.sort_by_key(|(place, ..)| *place);
    let rest = all.iter().filter(|(place, ..)| *place >= cursor);
    let rest: Vec<_> = rest.collect();
    // Keys in the same place are on the same page.
    let next = rest
        .iter()
        .skip(count)
        .find(|(place, ..)| *place > rest[count - 1].0);
    let next = next.map_or(0, |(place, ..)| *place);
    let page = rest.iter().filter(|(place, ..)| next == 0 || *place < next);
    let found = page.filter(|(_, key, entry)| {
        pattern.is_none_or(|pattern| matches(pattern, key))
            && type_name
                .as_ref()
                .is_none_or(|name| entry.value.type_name() == name)
    });
    let found = Reply::bulks(found.map(|(_, key, _)| (*key).clone()));
    Ok(Reply::Array(vec![Reply::text(next.to_string()), found]))
}

/// Returns the FNV-1a hash of a key; never 0, the first and last cursor.
fn cursor_of(key: &Bytes) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    key.iter().fold(0xcbf2_9ce4_8422_2325, step).max(1)
}
