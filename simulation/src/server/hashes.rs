//! Commands on hashes.

use super::command::{Call, CommandResult, integer, refused};
use super::keyspace::Hash;
use super::resp::{Bytes, Reply};

fn bulk(value: Option<&Bytes>) -> Reply {
    value.map_or(Reply::Nil, |value| Reply::Bulk(value.clone()))
}

pub(super) fn hget(call: &mut Call<'_>) -> CommandResult {
    let hash = call.state.keys.read::<Hash>(&call.args[1])?;
    Ok(bulk(hash.and_then(|hash| hash.get(&call.args[2]))))
}

pub(super) fn hmget(call: &mut Call<'_>) -> CommandResult {
    let hash = call.state.keys.read::<Hash>(&call.args[1])?;
    let value = |field| bulk(hash.and_then(|hash| hash.get(field)));
    Ok(Reply::Array(call.args[2..].iter().map(value).collect()))
}

pub(super) fn hgetall(call: &mut Call<'_>) -> CommandResult {
    let hash = call.state.keys.read::<Hash>(&call.args[1])?;
    let pairs = hash.into_iter().flatten();
    let pair =
        |(field, value): (&Bytes, &Bytes)| (Reply::Bulk(field.clone()), Reply::Bulk(value.clone()));
    Ok(Reply::Map(pairs.map(pair).collect()))
}

pub(super) fn hkeys(call: &mut Call<'_>) -> CommandResult {
    let hash = call.state.keys.read::<Hash>(&call.args[1])?;
    Ok(Reply::bulks(
        hash.into_iter().flat_map(|hash| hash.keys().cloned()),
    ))
}

pub(super) fn hvals(call: &mut Call<'_>) -> CommandResult {
    let hash = call.state.keys.read::<Hash>(&call.args[1])?;
    Ok(Reply::bulks(
        hash.into_iter().flat_map(|hash| hash.values().cloned()),
    ))
}

pub(super) fn hlen(call: &mut Call<'_>) -> CommandResult {
    let hash = call.state.keys.read::<Hash>(&call.args[1])?;
    Ok(Reply::count(hash.map_or(0, Hash::len)))
}

pub(super) fn hexists(call: &mut Call<'_>) -> CommandResult {
    let hash = call.state.keys.read::<Hash>(&call.args[1])?;
    let is_there = hash.is_some_and(|hash| hash.contains_key(&call.args[2]));
    Ok(Reply::Int(is_there.into()))
}

pub(super) fn hset(call: &mut Call<'_>) -> CommandResult {
    let pairs = call.args[2..].chunks_exact(2);
    if !pairs.remainder().is_empty() {
        return Err(refused("ERR wrong number of arguments for 'hset' command"));
    }
    let added = call.state.keys.change(&call.args[1], |hash: &mut Hash| {
        let is_new = |pair: &&[Bytes]| hash.insert(pair[0].clone(), pair[1].clone()).is_none();
        (pairs.filter(is_new).count(), true)
    })?;
    Ok(Reply::count(added))
}

pub(super) fn hincrby(call: &mut Call<'_>) -> CommandResult {
    let by = call.integer(3)?;
    let sum = call.state.keys.change(&call.args[1], |hash: &mut Hash| {
        let before = match hash.get(&call.args[2]) {
            Some(text) => integer(text).ok_or("ERR hash value is not an integer"),
            None => Ok(0),
        };
        let overflow = "ERR increment or decrement would overflow";
        let sum = before.and_then(|before| before.checked_add(by).ok_or(overflow));
        if let Ok(sum) = sum {
            hash.insert(call.args[2].clone(), sum.to_string().into_bytes());
        }
        (sum, sum.is_ok())
    })?;
    sum.map(Reply::Int).map_err(refused)
}

pub(super) fn hdel(call: &mut Call<'_>) -> CommandResult {
    let removed = call.state.keys.change(&call.args[1], |hash: &mut Hash| {
        let fields = call.args[2..].iter();
        let removed = fields.filter(|field| hash.remove(*field).is_some()).count();
        (removed, removed > 0)
    })?;
    Ok(Reply::count(removed))
}
