//! Names, and the keys and channels that they stand for: the only home of Redisson's layout.

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hash, Hasher};

use crate::error::{Error, Result};

/// The longest name, in bytes, prefix included. Redis would take 512 MB; a name is read by people,
/// in logs and in `redlatch ls`.
pub(crate) const MAX_NAME_BYTES: usize = 512;

/// Where one object lives in the store.
#[derive(Debug)]
pub(crate) struct Place {
    name: String,
    key: String,
    channel: String,
    /// Why the name cannot be used, if so. Said whenever it is used, because making a handle
    /// cannot fail.
    fault: Option<&'static str>,
    /// Of the key, because a place is looked up each time it is locked and unlocked.
    hash: u64,
}

impl Place {
    /// The place of the lock called `name` (Redisson: `RedissonLock`).
    pub(crate) fn lock(prefix: &str, name: &str) -> Place {
        let key = format!("{prefix}{name}");
        Place {
            fault: fault(prefix, name),
            channel: prefixed("redisson_lock__channel", &key),
            hash: BuildHasherDefault::<DefaultHasher>::default().hash_one(&key),
            name: name.to_owned(),
            key,
        }
    }

    /// Whether the name can be used.
    pub(crate) fn check(&self) -> Result<()> {
        match self.fault {
            None => Ok(()),
            Some(reason) => Err(Error::InvalidName {
                name: self.name.chars().take(64).collect(),
                reason,
            }),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    pub(crate) fn channel(&self) -> &str {
        &self.channel
    }
}

/// Places are told apart by their keys; the rest follows from those.
impl PartialEq for Place {
    fn eq(&self, other: &Place) -> bool {
        self.key == other.key
    }
}

impl Eq for Place {}

impl Hash for Place {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// A key or channel that belongs to `name` and lies in its cluster slot: the name becomes the hash
/// tag, unless it brings one of its own.
fn prefixed(prefix: &str, name: &str) -> String {
    if name.contains('{') {
        format!("{prefix}:{name}")
    } else {
        format!("{prefix}:{{{name}}}")
    }
}

fn fault(prefix: &str, name: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("it is empty")
    } else if prefix.len() + name.len() > MAX_NAME_BYTES {
        Some("it is longer than 512 bytes, the client's prefix included")
    } else {
        forbidden(name)
    }
}

/// What a name or prefix must not contain: it would break lines of logs and listings.
pub(crate) fn forbidden(text: &str) -> Option<&'static str> {
    if text.contains('\0') {
        Some("it contains a NUL")
    } else if text.contains(['\n', '\r']) {
        Some("it contains a line break")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_channels_are_redissons() {
        let plain = Place::lock("", "orders:42");
        assert_eq!(plain.key(), "orders:42");
        assert_eq!(plain.channel(), "redisson_lock__channel:{orders:42}");

        let tagged = Place::lock("", "{orders}:42");
        assert_eq!(tagged.channel(), "redisson_lock__channel:{orders}:42");

        let prefixed = Place::lock("shop:", "a");
        assert_eq!(prefixed.name(), "a");
        assert_eq!(prefixed.key(), "shop:a");
        assert_eq!(prefixed.channel(), "redisson_lock__channel:{shop:a}");
    }

    #[test]
    fn bad_names_are_refused_with_the_reason() {
        for (name, reason) in [
            ("", "empty"),
            ("a\0b", "NUL"),
            ("a\nb", "line break"),
            ("a\rb", "line break"),
            (&"x".repeat(513), "512"),
        ] {
            let said = Place::lock("", name).check().unwrap_err().to_string();
            assert!(said.contains(reason), "{said}");
            assert!(said.len() < 400, "{said}");
        }
        assert!(Place::lock("", &"x".repeat(512)).check().is_ok());
        assert!(Place::lock("p", &"x".repeat(512)).check().is_err());
        assert!(Place::lock("", "köln ✓ {a}").check().is_ok());
    }
}
