//! Cluster slots of keys (the cluster specification's "hash tags" and CRC16).

use crate::name::hash_tag;

pub(super) const SLOT_COUNT: u16 = 16384;

/// Returns the slot of a key or channel.
pub(in crate::store) fn slot(key: &str) -> u16 {
    crc16(hashed_part(key).as_bytes()) % SLOT_COUNT
}

/// Returns the part of a key or channel that determines its slot.
fn hashed_part(key: &str) -> &str {
    hash_tag(key).unwrap_or(key)
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
    use proptest::prelude::*;

    use super::*;
    use crate::name::{
        CandidateKeys, FairKeys, FencedKeys, KeyLayout, ObjectKeys, PermitKeys, ReadWriteKeys,
        spans_slots,
    };

    /// Adds the keys and the channel of a waiter of a fair object.
    fn add_queue(all: &mut Vec<String>, keys: FairKeys) {
        all.push(keys.waiter_channel("c:1"));
        all.extend([
            keys.queue,
            keys.timeouts,
            keys.absent_waiters,
            keys.announcements,
        ]);
    }

    /// Returns all keys and channels of an object with this name.
    fn keys_and_channels(layout: KeyLayout, prefix: &str, name: &str) -> Vec<String> {
        let mut object = ObjectKeys::new(layout, prefix, name);
        let key = object.key().to_owned();
        if layout == KeyLayout::Latch && hashed_part(object.channel()) != hashed_part(&key) {
            object.move_channel_to_slot();
        }
        let mut all = vec![key.clone(), object.channel().to_owned()];
        match layout {
            KeyLayout::Fenced => all.push(FencedKeys::new(prefix, name).token),
            KeyLayout::Fair | KeyLayout::Election => {
                add_queue(&mut all, FairKeys::new(prefix, name));
            }
            KeyLayout::Read | KeyLayout::Write => {
                let keys = ReadWriteKeys::new(prefix, name);
                all.extend([keys.reader_timeouts_prefix("c:1") + ":1", keys.writers]);
            }
            KeyLayout::Permits => all.push(PermitKeys::new(prefix, name).deadlines),
            KeyLayout::FairRead | KeyLayout::FairWrite | KeyLayout::FairSemaphore => {
                let object = ObjectKeys::new(layout, prefix, name);
                add_queue(&mut all, FairKeys::shared(object.into()));
            }
            KeyLayout::Lock
            | KeyLayout::Spin
            | KeyLayout::Group
            | KeyLayout::Semaphore
            | KeyLayout::Latch => {}
        }
        all.extend(CandidateKeys::new(key).keys().map(str::to_owned));
        all
    }

    proptest! {
        /// A name is valid exactly if all keys and channels of its objects lie in one slot because of their
        /// hash tags, for every kind of object. (Comparing slots is not enough: two different texts share
        /// one by chance in one of 16,384 cases.)
        #[test]
        fn all_keys_of_valid_name_lie_in_one_slot(
            prefix in "[{}a:]{0,3}",
            name in "[{}ab:ö]{1,8}",
        ) {
            let key = format!("{prefix}{name}");
            for layout in [
                KeyLayout::Lock,
                KeyLayout::Spin,
                KeyLayout::Fenced,
                KeyLayout::Fair,
                KeyLayout::Election,
                KeyLayout::Read,
                KeyLayout::Write,
                KeyLayout::Group,
                KeyLayout::Semaphore,
                KeyLayout::Permits,
                KeyLayout::Latch,
                KeyLayout::FairRead,
                KeyLayout::FairWrite,
                KeyLayout::FairSemaphore,
            ] {
                let valid = ObjectKeys::new(layout, &prefix, &name).check().is_ok();
                prop_assert_eq!(valid, !spans_slots(&key));
                let all = keys_and_channels(layout, &prefix, &name);
                let together = all.iter().all(|other| hashed_part(other) == hashed_part(&key));
                prop_assert_eq!(valid, together, "{:?} {:?}: {:?}", layout, key, all);
            }
        }
    }

    /// The slot of `foo` is the reply of CLUSTER KEYSLOT. The keys with braces are the specification's examples.
    #[test]
    fn slots_match_cluster_specification() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        assert_eq!(slot("foo"), 12182);
        assert_eq!(slot("{user1000}.following"), slot("{user1000}.followers"));
        assert_eq!(slot("foo{}{bar}"), crc16(b"foo{}{bar}") % SLOT_COUNT);
        assert_eq!(slot("foo{{bar}}zap"), slot("{bar"));
        assert_eq!(slot("foo{bar}{zap}"), slot("bar"));
        assert_eq!(slot("foo{bar"), crc16(b"foo{bar") % SLOT_COUNT);
    }
}
