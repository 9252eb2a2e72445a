//! Comparison of all stored data.

use redis::Value;
use redlatch_simulation::server::ConnectionId;

use crate::pair::ServerPair;
use crate::tolerance::Tolerance;

/// Compares all keys with their types, values and times.
pub(crate) fn compare(pair: &mut ServerPair, id: ConnectionId) -> usize {
    let keys = pair.run(id, &["KEYS", "*"]);
    let [Value::Array(keys)] = keys.as_slice() else {
        panic!("{keys:?}");
    };
    for key in keys {
        let Value::BulkString(key) = key else {
            panic!("{key:?}");
        };
        let command = |words: &[&str]| {
            let rest = words[1..].iter().map(|word| word.as_bytes());
            let args = [words[0].as_bytes(), key.as_slice()];
            args.into_iter()
                .chain(rest)
                .map(<[u8]>::to_vec)
                .collect::<Vec<_>>()
        };
        let kind = pair.run(id, &command(&["TYPE"]));
        let [Value::SimpleString(kind)] = kind.as_slice() else {
            panic!("{kind:?}");
        };
        let read = match kind.as_str() {
            "string" => command(&["GET"]),
            "hash" => command(&["HGETALL"]),
            "list" => command(&["LRANGE", "0", "-1"]),
            "zset" => command(&["ZRANGE", "0", "-1", "WITHSCORES"]),
            // It may have expired.
            _ => continue,
        };
        pair.run_as(id, &read, Tolerance::Times);
        pair.run(id, &command(&["PTTL"]));
    }
    keys.len()
}
