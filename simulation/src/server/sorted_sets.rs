//! Commands on sorted sets.

use super::command::{Call, CommandError, CommandResult, refused};
use super::keyspace::SortedSet;
use super::lists::range;
use super::resp::Reply;

const NOT_A_NUMBER: &str = "ERR resulting score is not a number (NaN)";

pub(super) fn zcard(call: &mut Call<'_>) -> CommandResult {
    let set = call.state.keys.read::<SortedSet>(&call.args[1])?;
    Ok(Reply::count(set.map_or(0, |set| set.0.len())))
}

pub(super) fn zscore(call: &mut Call<'_>) -> CommandResult {
    let set = call.state.keys.read::<SortedSet>(&call.args[1])?;
    let score = set.and_then(|set| set.0.get(&call.args[2]));
    Ok(score.map_or(Reply::Nil, |score| Reply::Double(*score)))
}

pub(super) fn zcount(call: &mut Call<'_>) -> CommandResult {
    let within = score_range(call, 2)?;
    let set = call.state.keys.read::<SortedSet>(&call.args[1])?;
    let scores = set.into_iter().flat_map(|set| set.0.values());
    Ok(Reply::count(
        scores.filter(|score| within.contains(**score)).count(),
    ))
}

pub(super) fn zrange(call: &mut Call<'_>) -> CommandResult {
    listed(call, |_| {})
}

pub(super) fn zrevrange(call: &mut Call<'_>) -> CommandResult {
    listed(call, |all| all.reverse())
}

fn listed(call: &mut Call<'_>, order: fn(&mut Vec<(Vec<u8>, f64)>)) -> CommandResult {
    let with_scores = match (call.args.len(), call.word(4).as_str()) {
        (4, _) => false,
        (5, "WITHSCORES") => true,
        _ => return Err(call.unsupported()),
    };
    let (first, last) = (call.integer(2)?, call.integer(3)?);
    let set = call.state.keys.read::<SortedSet>(&call.args[1])?;
    let mut all = set.map(SortedSet::sorted).unwrap_or_default();
    order(&mut all);
    let listed = all.drain(range(all.len(), first, last));
    Ok(match with_scores {
        true => Reply::Scored(listed.collect()),
        false => Reply::bulks(listed.map(|(member, _)| member)),
    })
}

/// The options of ZADD.
#[derive(Default, Clone, Copy)]
struct ZaddOptions {
    only_new: bool,
    only_existing: bool,
    only_greater: bool,
    only_less: bool,
    counts_changes: bool,
    increments: bool,
}

/// Effect on a member.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AddResult {
    Added,
    Changed,
    Same,
    Skipped,
}

impl ZaddOptions {
    /// Adds one member. Returns the change and the score; an error if the sum is not a number.
    fn add(
        self,
        set: &mut SortedSet,
        member: &[u8],
        score: f64,
    ) -> Result<(AddResult, f64), CommandError> {
        let Some(before) = set.0.get_mut(member) else {
            if self.only_existing {
                return Ok((AddResult::Skipped, score));
            }
            set.0.insert(member.to_vec(), score);
            return Ok((AddResult::Added, score));
        };
        if self.only_new {
            return Ok((AddResult::Skipped, *before));
        }
        let score = if self.increments {
            *before + score
        } else {
            score
        };
        if score.is_nan() {
            return Err(refused(NOT_A_NUMBER));
        }
        if (self.only_greater && score <= *before) || (self.only_less && score >= *before) {
            return Ok((AddResult::Skipped, *before));
        }
        let done = if score == *before {
            AddResult::Same
        } else {
            AddResult::Changed
        };
        *before = score;
        Ok((done, score))
    }
}

pub(super) fn zadd(call: &mut Call<'_>) -> CommandResult {
    let mut options = ZaddOptions::default();
    let mut at = 2;
    loop {
        match call.word(at).as_str() {
            "NX" => options.only_new = true,
            "XX" => options.only_existing = true,
            "GT" => options.only_greater = true,
            "LT" => options.only_less = true,
            "CH" => options.counts_changes = true,
            "INCR" => options.increments = true,
            _ => break,
        }
        at += 1;
    }
    let pairs = call.args[at..].chunks_exact(2);
    if pairs.len() == 0 || !pairs.remainder().is_empty() {
        return Err(refused("ERR syntax error"));
    }
    if options.only_new && options.only_existing {
        return Err(refused(
            "ERR XX and NX options at the same time are not compatible",
        ));
    }
    let (greater, less) = (options.only_greater, options.only_less);
    if (greater && (options.only_new || less)) || (less && options.only_new) {
        let text = "ERR GT, LT, and/or NX options at the same time are not compatible";
        return Err(refused(text));
    }
    if options.increments && pairs.len() > 1 {
        return Err(refused(
            "ERR INCR option supports a single increment-element pair",
        ));
    }
    let scored =
        pairs.map(|pair| Ok((float(&pair[0], "ERR value is not a valid float")?, &pair[1])));
    let scored: Vec<_> = scored.collect::<Result<_, CommandError>>()?;
    let done = call
        .state
        .keys
        .change(&call.args[1], |set: &mut SortedSet| {
            let add = |(score, member): &(f64, &Vec<u8>)| options.add(set, member, *score);
            let done: Result<Vec<_>, CommandError> = scored.iter().map(add).collect();
            let is_change = |(done, _): &(AddResult, f64)| {
                matches!(done, AddResult::Added | AddResult::Changed)
            };
            let changed = done.as_ref().is_ok_and(|done| done.iter().any(is_change));
            (done, changed)
        })??;
    let counted = done.iter().filter(|(done, _)| match done {
        AddResult::Added => true,
        AddResult::Changed => options.counts_changes,
        AddResult::Same | AddResult::Skipped => false,
    });
    Ok(match (options.increments, done.first()) {
        (true, Some((AddResult::Skipped, _))) => Reply::Nil,
        (true, Some((_, score))) => Reply::Double(*score),
        _ => Reply::count(counted.count()),
    })
}

pub(super) fn zincrby(call: &mut Call<'_>) -> CommandResult {
    let by = float(call.arg(2), "ERR value is not a valid float")?;
    let options = ZaddOptions {
        increments: true,
        ..ZaddOptions::default()
    };
    let sum = call
        .state
        .keys
        .change(&call.args[1], |set: &mut SortedSet| {
            let sum = options.add(set, &call.args[3], by);
            let changed = sum.as_ref().is_ok_and(|(done, _)| *done != AddResult::Same);
            (sum, changed)
        })?;
    sum.map(|(_, sum)| Reply::Double(sum))
}

pub(super) fn zrem(call: &mut Call<'_>) -> CommandResult {
    remove(call, |call, set| {
        let members = call.args[2..].iter();
        members
            .filter(|member| set.0.contains_key(*member))
            .cloned()
            .collect()
    })
}

pub(super) fn zremrangebyrank(call: &mut Call<'_>) -> CommandResult {
    let (first, last) = (call.integer(2)?, call.integer(3)?);
    remove(call, |_, set| {
        let mut all = set.sorted();
        all.drain(range(all.len(), first, last))
            .map(|(member, _)| member)
            .collect()
    })
}

pub(super) fn zremrangebyscore(call: &mut Call<'_>) -> CommandResult {
    let within = score_range(call, 2)?;
    remove(call, |_, set| {
        let members = set.0.iter().filter(|(_, score)| within.contains(**score));
        members.map(|(member, _)| member.clone()).collect()
    })
}

/// Removes the selected members, and returns their number.
fn remove(
    call: &mut Call<'_>,
    choose: impl FnOnce(&Call<'_>, &SortedSet) -> Vec<Vec<u8>>,
) -> CommandResult {
    let set = call.state.keys.read::<SortedSet>(&call.args[1])?;
    let set = set.cloned().unwrap_or_default();
    let chosen = choose(call, &set);
    let removed = call
        .state
        .keys
        .change(&call.args[1], |set: &mut SortedSet| {
            let removed = chosen
                .iter()
                .filter(|member| set.0.remove(*member).is_some());
            let removed = removed.count();
            (removed, removed > 0)
        })?;
    Ok(Reply::count(removed))
}

/// A range of scores; each end is inclusive or exclusive.
#[derive(Clone, Copy)]
struct ScoreRange {
    low: (f64, bool),
    high: (f64, bool),
}

impl ScoreRange {
    fn contains(self, score: f64) -> bool {
        let above = score > self.low.0 || (self.low.1 && score == self.low.0);
        let below = score < self.high.0 || (self.high.1 && score == self.high.0);
        above && below
    }
}

/// Parses a range from two arguments: `5`, `(5` for exclusive, `-inf`. An empty text is 0.
fn score_range(call: &Call<'_>, at: usize) -> Result<ScoreRange, CommandError> {
    let end = |at: usize| {
        let text = call.arg(at);
        let without = text.strip_prefix(b"(");
        let score = match without.unwrap_or(text) {
            b"" => 0.0,
            text => float(text, "ERR min or max is not a float")?,
        };
        Ok::<_, CommandError>((score, without.is_none()))
    };
    let (low, high) = (end(at)?, end(at + 1)?);
    Ok(ScoreRange { low, high })
}

/// Parses a score, which may be infinite.
fn float(text: &[u8], refusal: &str) -> Result<f64, CommandError> {
    let text = std::str::from_utf8(text).ok();
    let number = text.and_then(|text| text.parse::<f64>().ok());
    let number = number.filter(|number| !number.is_nan());
    // Converts -0 to 0.
    let number = number.map(|number| number + 0.0);
    number.ok_or_else(|| refused(refusal))
}
