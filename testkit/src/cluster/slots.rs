//! The masters of slots, and what nodes know of each other.

use std::ops::RangeInclusive;

use redis::Value;

use crate::server::Server;

/// Returns the slot of a key: the slot of the text between its first `{` and the next `}`, unless
/// it is empty.
pub fn slot_of(key: &[u8]) -> u16 {
    let open = key.iter().position(|&byte| byte == b'{').map(|at| at + 1);
    let tag = open.and_then(|open| {
        let length = key[open..].iter().position(|&byte| byte == b'}')?;
        (length > 0).then(|| &key[open..open + length])
    });
    crc16(tag.unwrap_or(key)) % 16_384
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, &byte| {
        (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| {
            let shifted = crc << 1;
            if crc & 0x8000 == 0 {
                shifted
            } else {
                shifted ^ 0x1021
            }
        })
    })
}

/// A range of slots that have the same master. Nodes are identified by their ports.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SlotRange {
    pub(super) slots: RangeInclusive<u16>,
    pub(super) master: u16,
    pub(super) replicas: Vec<u16>,
}

/// Returns the slot ranges that a node reports to clients.
pub(super) fn slot_ranges(node: &Server) -> Result<Vec<SlotRange>, String> {
    let answer: redis::RedisResult<Vec<Vec<Value>>> = node.try_command(&["CLUSTER", "SLOTS"]);
    let answer = answer.map_err(|error| error.to_string())?;
    let mut ranges = answer
        .iter()
        .map(|entry| parse_slot_range(entry).ok_or_else(|| format!("CLUSTER SLOTS: {entry:?}")))
        .collect::<Result<Vec<_>, _>>()?;
    ranges.sort_by_key(|range| *range.slots.start());
    Ok(ranges)
}

/// Parses an entry: first slot, last slot, master, replicas.
fn parse_slot_range(entry: &[Value]) -> Option<SlotRange> {
    let [first, last, master, replicas @ ..] = entry else {
        return None;
    };
    let mut replicas = replicas.iter().map(port).collect::<Option<Vec<_>>>()?;
    // Nodes report them in no particular order.
    replicas.sort_unstable();
    Some(SlotRange {
        slots: number(first)?..=number(last)?,
        master: port(master)?,
        replicas,
    })
}

/// Returns the port from an entry of address, port and more.
fn port(node: &Value) -> Option<u16> {
    match node {
        Value::Array(parts) => number(parts.get(1)?),
        _ => None,
    }
}

fn number(value: &Value) -> Option<u16> {
    match value {
        Value::Int(number) => u16::try_from(*number).ok(),
        _ => None,
    }
}

/// What a node knows of another node or of itself.
#[derive(Debug)]
pub(super) struct NodeInfo {
    pub(super) id: String,
    pub(super) port: u16,
    flags: String,
    /// The id of its master, if it is a replica.
    pub(super) master: Option<String>,
    connected: bool,
}

impl NodeInfo {
    /// Returns whether it is reachable, as far as the reporting node knows.
    pub(super) fn healthy(&self) -> bool {
        let bad = |flag| matches!(flag, "fail" | "fail?" | "handshake" | "noaddr");
        self.connected && !self.flags.split(',').any(bad)
    }
}

/// Returns what a node knows of all nodes.
pub(super) fn cluster_nodes(node: &Server) -> Result<Vec<NodeInfo>, String> {
    let answer: redis::RedisResult<String> = node.try_command(&["CLUSTER", "NODES"]);
    let answer = answer.map_err(|error| error.to_string())?;
    Ok(answer.lines().filter_map(parse_node).collect())
}

/// Returns the id of a node's master, if the node is a replica.
pub(super) fn own_master_id(node: &Server) -> Result<Option<String>, String> {
    let port = node.port();
    let itself = cluster_nodes(node)?
        .into_iter()
        .find(|known| known.port == port);
    Ok(itself.ok_or("it does not know itself")?.master)
}

/// Parses `id 127.0.0.1:10000@20000 flags master ping pong epoch link slots...`. Returns `None` for
/// a node without an address yet.
fn parse_node(line: &str) -> Option<NodeInfo> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let address = words.get(1)?.split('@').next()?;
    Some(NodeInfo {
        id: (*words.first()?).to_owned(),
        port: address.rsplit(':').next()?.parse().ok()?,
        flags: (*words.get(2)?).to_owned(),
        master: words
            .get(3)
            .filter(|&&id| id != "-")
            .map(|&id| id.to_owned()),
        connected: words.get(7) == Some(&"connected"),
    })
}

#[cfg(test)]
mod tests {
    use super::slot_of;

    #[test]
    fn slots_match_the_specification() {
        assert_eq!(slot_of(b"123456789"), 0x31c3);
        assert_eq!(slot_of(b"foo{bar}{zap}"), slot_of(b"bar"));
        assert_eq!(slot_of(b"foo{{bar}}zap"), slot_of(b"{bar"));
        assert_ne!(slot_of(b"foo{}{bar}"), slot_of(b"bar"));
    }
}
