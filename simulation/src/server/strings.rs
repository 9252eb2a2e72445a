//! Commands on strings and numbers.

use super::command::{Call, CommandError, CommandResult, integer, refused};
use super::keys::{expiry, stored_timestamp};
use super::keyspace::{Entry, Value};
use super::resp::Reply;

pub(super) fn get(call: &mut Call<'_>) -> CommandResult {
    let text = call.state.keys.text(&call.args[1])?;
    Ok(text.map_or(Reply::Nil, |text| Reply::Bulk(text.clone())))
}

pub(super) fn strlen(call: &mut Call<'_>) -> CommandResult {
    let text = call.state.keys.text(&call.args[1])?;
    Ok(Reply::count(text.map_or(0, Vec::len)))
}

pub(super) fn getrange(call: &mut Call<'_>) -> CommandResult {
    let (first, last) = (call.integer(2)?, call.integer(3)?);
    let text = call.state.keys.text(&call.args[1])?;
    let text = text.map(Vec::as_slice).unwrap_or_default();
    // Unlike other ranges, two negative indexes in the wrong order give an empty range before they are clamped.
    if first < 0 && last < 0 && first > last {
        return Ok(Reply::text(""));
    }
    let length = i64::try_from(text.len()).unwrap_or(i64::MAX);
    let from_start = |at: i64| if at < 0 { (length + at).max(0) } else { at };
    let (first, last) = (from_start(first), from_start(last).min(length - 1));
    let range = usize::try_from(first).ok().zip(usize::try_from(last).ok());
    let range = range.and_then(|(first, last)| text.get(first..=last));
    Ok(Reply::Bulk(range.unwrap_or_default().to_vec()))
}

pub(super) fn set(call: &mut Call<'_>) -> CommandResult {
    let (mut expires, mut keeps) = (None, false);
    let (mut only_new, mut only_existing, mut returns_old) = (false, false, false);
    let mut at = 3;
    while at < call.args.len() {
        match call.word(at).as_str() {
            "NX" if !only_existing => only_new = true,
            "XX" if !only_new => only_existing = true,
            "GET" => returns_old = true,
            "KEEPTTL" if expires.is_none() => keeps = true,
            unit @ ("EX" | "PX" | "EXAT" | "PXAT")
                if expires.is_none() && !keeps && at + 1 < call.args.len() =>
            {
                at += 1;
                let time = call.integer(at)?;
                let invalid = || refused("ERR invalid expire time in 'set' command");
                if time <= 0 {
                    return Err(invalid());
                }
                let timestamp = expiry(call, time, unit.starts_with("EX"), unit.ends_with("AT"));
                expires = Some(timestamp.ok_or_else(invalid)?);
            }
            "NX" | "XX" | "KEEPTTL" | "EX" | "PX" | "EXAT" | "PXAT" => {
                return Err(refused("ERR syntax error"));
            }
            _ => return Err(call.unsupported()),
        }
        at += 1;
    }
    let (key, keys) = (&call.args[1], &mut call.state.keys);
    let old = match returns_old {
        true => keys
            .text(key)?
            .map_or(Reply::Nil, |old| Reply::Bulk(old.clone())),
        false => Reply::Nil,
    };
    let before = keys.get(key);
    if (only_new && before.is_some()) || (only_existing && before.is_none()) {
        return Ok(old);
    }
    let expires = match keeps {
        true => before.and_then(|entry| entry.expires),
        false => expires.map(stored_timestamp),
    };
    let value = Value::Text(call.args[2].clone());
    keys.put(key, Entry { value, expires });
    Ok(if returns_old { old } else { Reply::ok() })
}

pub(super) fn incr(call: &mut Call<'_>) -> CommandResult {
    add(call, 1)
}

pub(super) fn decr(call: &mut Call<'_>) -> CommandResult {
    add(call, -1)
}

pub(super) fn incrby(call: &mut Call<'_>) -> CommandResult {
    let by = call.integer(2)?;
    add(call, by)
}

pub(super) fn decrby(call: &mut Call<'_>) -> CommandResult {
    let by = call.integer(2)?.checked_neg();
    let by = by.ok_or_else(|| refused("ERR decrement would overflow"))?;
    add(call, by)
}

fn add(call: &mut Call<'_>, by: i64) -> CommandResult {
    let (key, keys) = (&call.args[1], &mut call.state.keys);
    let before = match keys.text(key)? {
        Some(text) => integer(text).ok_or_else(not_an_integer)?,
        None => 0,
    };
    let overflow = || refused("ERR increment or decrement would overflow");
    let after = before.checked_add(by).ok_or_else(overflow)?;
    keys.set_text(key, after.to_string().into_bytes());
    Ok(Reply::Int(after))
}

fn not_an_integer() -> CommandError {
    refused("ERR value is not an integer or out of range")
}
