//! Commands on lists.

use super::command::{Call, CommandResult};
use super::keyspace::List;
use super::resp::{Bytes, Reply};

/// Returns the range between two indexes, which count from the end if they are negative.
pub(super) fn range(length: usize, first: i64, last: i64) -> std::ops::Range<usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    let place = |at: i64| if at < 0 { length + at } else { at };
    let (first, last) = (place(first).max(0), place(last).min(length - 1));
    let index = |at: i64| usize::try_from(at).unwrap_or(0);
    if first > last {
        return 0..0;
    }
    index(first)..index(last) + 1
}

pub(super) fn llen(call: &mut Call<'_>) -> CommandResult {
    let list = call.state.keys.read::<List>(&call.args[1])?;
    Ok(Reply::count(list.map_or(0, List::len)))
}

pub(super) fn lrange(call: &mut Call<'_>) -> CommandResult {
    let (first, last) = (call.integer(2)?, call.integer(3)?);
    let list = call.state.keys.read::<List>(&call.args[1])?;
    let list = list.map(List::as_slice).unwrap_or_default();
    let range = range(list.len(), first, last);
    Ok(Reply::bulks(list[range].iter().cloned()))
}

pub(super) fn lindex(call: &mut Call<'_>) -> CommandResult {
    let at = call.integer(2);
    let list = call.state.keys.read::<List>(&call.args[1])?;
    let Some(list) = list else {
        return Ok(Reply::Nil);
    };
    let at = at?;
    let length = i64::try_from(list.len()).unwrap_or(i64::MAX);
    let at = usize::try_from(if at < 0 { length + at } else { at }).ok();
    let element = at.and_then(|at| list.get(at));
    Ok(element.map_or(Reply::Nil, |element| Reply::Bulk(element.clone())))
}

pub(super) fn lpos(call: &mut Call<'_>) -> CommandResult {
    if call.args.len() > 3 {
        return Err(call.unsupported());
    }
    let list = call.state.keys.read::<List>(&call.args[1])?;
    let is_it = |element: &Bytes| *element == call.args[2];
    let at = list.and_then(|list| list.iter().position(is_it));
    Ok(at.map_or(Reply::Nil, Reply::count))
}

pub(super) fn lpush(call: &mut Call<'_>) -> CommandResult {
    push(call, |list, element| list.insert(0, element))
}

pub(super) fn rpush(call: &mut Call<'_>) -> CommandResult {
    push(call, List::push)
}

fn push(call: &mut Call<'_>, push: fn(&mut List, Bytes)) -> CommandResult {
    let length = call.state.keys.change(&call.args[1], |list: &mut List| {
        let elements = call.args[2..].iter().cloned();
        elements.for_each(|element| push(list, element));
        (list.len(), true)
    })?;
    Ok(Reply::count(length))
}

pub(super) fn lpop(call: &mut Call<'_>) -> CommandResult {
    pop(call, |list| list.remove(0))
}

pub(super) fn rpop(call: &mut Call<'_>) -> CommandResult {
    pop(call, |list| list.remove(list.len() - 1))
}

fn pop(call: &mut Call<'_>, pop: fn(&mut List) -> Bytes) -> CommandResult {
    if call.args.len() > 2 {
        return Err(call.unsupported());
    }
    let popped = call.state.keys.change(&call.args[1], |list: &mut List| {
        let popped = (!list.is_empty()).then(|| pop(list));
        let changed = popped.is_some();
        (popped, changed)
    })?;
    Ok(popped.map_or(Reply::Nil, Reply::Bulk))
}

pub(super) fn lrem(call: &mut Call<'_>) -> CommandResult {
    let count = call.integer(2)?;
    let most = match usize::try_from(count.unsigned_abs()) {
        Ok(1..) => usize::try_from(count.unsigned_abs()).unwrap_or(usize::MAX),
        _ => usize::MAX,
    };
    let removed = call.state.keys.change(&call.args[1], |list: &mut List| {
        let is_it = |at: &usize| list[*at] == call.args[3];
        let mut places: Vec<usize> = match count {
            0.. => (0..list.len()).filter(is_it).take(most).collect(),
            ..0 => (0..list.len()).rev().filter(is_it).take(most).collect(),
        };
        places.sort_unstable();
        for at in places.iter().rev() {
            list.remove(*at);
        }
        (places.len(), !places.is_empty())
    })?;
    Ok(Reply::count(removed))
}
