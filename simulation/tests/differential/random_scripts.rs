//! Random histories of the library's scripts: recorded commands of the real client in random order, with the
//! owners and counts of other calls and with random leases.
//!
//! Timestamps must not differ by the time that passes between the two servers, or lists that are sorted by them would
//! differ. So the scripts take the time from an argument instead of from TIME; leases are so long that the
//! remaining time can be compared.

use std::collections::BTreeMap;

use crate::clients::{Command, run_everything};
use crate::random::{Random, seeded};
use crate::state;

const CALLS: usize = 6000;

/// Number of calls that start with an empty server.
const CALLS_PER_HISTORY: usize = 120;

/// Leases are multiples of this, in milliseconds.
const LEASE_UNIT: usize = 100_000_000;

/// Lets keys grow older.
const AGE_SCRIPT: &str = "
    for _, key in ipairs(redis.call('KEYS', '*')) do
        local left = redis.call('PTTL', key)
        if left >= 0 and left <= tonumber(ARGV[1]) then
            redis.call('DEL', key)
        elseif left >= 0 then
            redis.call('PEXPIRE', key, left - ARGV[1])
        end
    end";

/// A call of a script.
struct Call {
    source: String,
    sha: String,
    keys: Command,
    args: Command,
}

/// Returns all calls of scripts, each with the whole script.
fn calls(recorded: &[Command]) -> Vec<Call> {
    let mut sources = BTreeMap::new();
    for command in recorded.iter().filter(|command| command[0] == b"EVAL") {
        let source = String::from_utf8_lossy(&command[1]).into_owned();
        let sha = redis::Script::new(&source).get_hash().to_owned();
        sources.insert(sha.into_bytes(), source);
    }
    let call = |command: &Command| {
        let source = match command[0].as_slice() {
            b"EVAL" => String::from_utf8_lossy(&command[1]).into_owned(),
            // The servers did not know the script then, so it was sent again as a whole.
            b"EVALSHA" => sources.get(&command[1])?.clone(),
            _ => return None,
        };
        let timed = source.replace(
            "redis.call('TIME')",
            "{ string.sub(NOW, 1, 10), string.sub(NOW, 12) }",
        );
        let keys: usize = std::str::from_utf8(&command[2]).ok()?.parse().ok()?;
        let (keys, args) = command[3..].split_at(keys);
        let source = format!("local NOW = table.remove(ARGV) {timed}");
        Some(Call {
            sha: redis::Script::new(&source).get_hash().to_owned(),
            source,
            keys: keys.to_vec(),
            args: args.to_vec(),
        })
    };
    recorded.iter().filter_map(call).collect()
}

fn number(arg: &[u8]) -> Option<usize> {
    std::str::from_utf8(arg).ok()?.parse().ok()
}

/// Returns the arguments of a call, some of them replaced by another call's or random ones.
fn args(random: &mut Random, call: &Call, all: &[Call]) -> Command {
    let similar: Vec<&Call> = all.iter().filter(|other| other.sha == call.sha).collect();
    // If some arguments are counts of others, only leases may change.
    let counts = ["local scripts =", "number of fields to remove"];
    let is_counted = counts.iter().any(|text| call.source.contains(text));
    let arg = |(at, arg): (usize, &Vec<u8>)| match number(arg) {
        Some(20..) => (LEASE_UNIT * (1 + random.below(3)))
            .to_string()
            .into_bytes(),
        _ if is_counted || !random.one_in(3) => arg.clone(),
        _ => random.pick(&similar).args.get(at).unwrap_or(arg).clone(),
    };
    call.args.iter().enumerate().map(arg).collect()
}

#[test]
fn scripts_have_equal_replies_and_leave_equal_state() {
    let mut random = seeded("scripts");
    let (recorded, pair) = run_everything();
    let mut pair = pair.lock().expect("no connection has found a difference");
    let all = calls(&recorded);
    let is_channel = |arg: &&Vec<u8>| String::from_utf8_lossy(arg).contains("__channel");
    let mut channels: Vec<&Vec<u8>> = all.iter().flat_map(|call| &call.args).collect();
    channels.retain(is_channel);
    channels.sort_unstable();
    channels.dedup();
    println!("{} calls recorded, {} channels", all.len(), channels.len());

    let (caller, listener) = (pair.connect_resp3(), pair.connect_resp3());
    for call in &all {
        pair.send(caller, &["SCRIPT", "LOAD", &call.source]);
    }
    let mut micros: usize = 1_700_000_000_000_000;
    let (mut compared, refused) = (0, pair.refused);
    for call in 0..CALLS {
        if call % CALLS_PER_HISTORY == 0 {
            compared += state::compare(&mut pair, caller);
            pair.run(caller, &["FLUSHALL"]);
        }
        micros += random.below(60_000_000);
        let chosen = random.pick(&all);
        let now = format!("{:.6}", micros as f64 / 1e6);
        let mut command: Command = vec![b"EVALSHA".to_vec(), chosen.sha.clone().into_bytes()];
        command.push(chosen.keys.len().to_string().into_bytes());
        command.extend(chosen.keys.iter().cloned());
        command.extend(args(&mut random, chosen, &all));
        command.push(now.into_bytes());
        pair.send(caller, &command);
        match random.below(100) {
            0..4 => {
                let millis = LEASE_UNIT + LEASE_UNIT / 100;
                micros += 1000 * millis;
                pair.send(caller, &["EVAL", AGE_SCRIPT, "0", &millis.to_string()]);
            }
            4..10 => {
                let word = *random.pick(&["SUBSCRIBE", "UNSUBSCRIBE"]);
                let channel = *random.pick(&channels);
                pair.run(listener, &[word.as_bytes(), channel]);
            }
            10 => {
                let key = random.pick(&chosen.keys).clone();
                let word = *random.pick(&["PERSIST", "DEL", "INCR"]);
                pair.send(caller, &[word.as_bytes(), &key]);
            }
            _ => {}
        }
    }
    compared += state::compare(&mut pair, caller);
    let refused = pair.refused - refused;
    println!("{CALLS} calls, {refused} refused, {compared} keys compared");
    assert!(compared > 200, "there must be something to compare");
    assert!(refused < CALLS / 4, "most calls must make sense");
}
