//! In which slot of a cluster a key lies (the cluster specification's "hash tags" and CRC16).

pub(super) const SLOTS: u16 = 16384;

/// The slot of a key or channel.
pub(super) fn slot(key: &str) -> u16 {
    crc16(tag(key).as_bytes()) % SLOTS
}

/// What decides on the slot: what is in the first braces, if there is something, or all of it.
fn tag(key: &str) -> &str {
    let inside = || {
        let (_, rest) = key.split_once('{')?;
        let (inside, _) = rest.split_once('}')?;
        (!inside.is_empty()).then_some(inside)
    };
    inside().unwrap_or(key)
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    const TABLE: [u16; 256] = table();
    bytes.iter().fold(0, |crc: u16, &byte| {
        (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)]
    })
}

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let mut crc = (i as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = match crc & 0x8000 {
                0 => crc << 1,
                _ => (crc << 1) ^ 0x1021,
            };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As CLUSTER KEYSLOT answers.
    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        assert_eq!(slot("foo"), 12182);
        assert_eq!(slot("{user1000}.following"), slot("{user1000}.followers"));
        assert_eq!(slot("foo{}{bar}"), crc16(b"foo{}{bar}") % SLOTS);
        assert_eq!(slot("foo{{bar}}zap"), slot("{bar"));
        assert_eq!(slot("foo{bar}{zap}"), slot("bar"));
        assert_eq!(slot("foo{bar"), crc16(b"foo{bar") % SLOTS);
    }
}
