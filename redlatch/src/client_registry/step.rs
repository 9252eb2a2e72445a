//! The two steps on the hash of a client: one writes it, one reads it.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::Result;
use crate::keyspace::Keyspace;
use crate::lease::{Lease, millis};
use crate::step::{Arg, Args, ScriptReply, Step, args, script, unexpected_reply};

/// Largest number of fields of a hash that is read: those of [`MAX_ENTRIES`](super::MAX_ENTRIES),
/// and some for later versions.
pub(super) const MAX_FIELDS: usize = super::MAX_ENTRIES + 100;
/// Largest size of a field or value that is read: a name, an owner and a kind, or a note, and some
/// for later versions.
pub(super) const MAX_BYTES: usize = 1024;

/// The field with the instance of the client.
pub(super) const INSTANCE: &str = "instance";

/// The fields of a hash.
type Fields = BTreeMap<String, String>;

/// A field to set.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    pub(super) field: String,
    /// How long ago something began. The value then starts with that time, by the clock of the
    /// store: clients on different machines may have different clocks.
    pub(super) age: Option<Duration>,
    pub(super) text: String,
}

impl Setting {
    /// Sets a field to a text without a time.
    pub(super) fn text(field: impl Into<String>, text: impl Into<String>) -> Setting {
        Setting {
            field: field.into(),
            age: None,
            text: text.into(),
        }
    }
}

/// Writes the hash of a client.
pub(crate) struct Write<'a> {
    pub(super) key: &'a str,
    pub(super) ttl: Lease,
    /// Whether the hash is replaced. Otherwise it is changed if it is that of `instance`.
    pub(super) replace: bool,
    /// The instance of the client.
    pub(super) instance: &'a str,
    pub(super) removed: Vec<String>,
    pub(super) set: Vec<Setting>,
}

impl Write<'_> {
    /// Returns the step. Replies the number of fields afterwards.
    pub(super) fn step(&self) -> Step<'_, i64> {
        let removed = i64::try_from(self.removed.len()).unwrap_or(0);
        let mut args = args![self.ttl, self.replace, self.instance, removed];
        args.extend(self.removed.iter().map(|field| field.as_str().into()));
        for Setting { field, age, text } in &self.set {
            let age = age.map_or_else(|| "".into(), |age| millis(age).into());
            args.extend([field.as_str().into(), age, text.as_str().into()]);
        }
        Step::new(
            script!("../locks/expire.lua", "write.lua"),
            [self.key],
            args,
            ScriptReply::integer,
            |keyspace| self.apply(keyspace),
        )
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<i64> {
        let found = keyspace.find::<Fields>(self.key)?;
        let instance = found.and_then(|found| found.value.get(INSTANCE).cloned());
        if self.replace {
            keyspace.remove(self.key);
        } else if instance.as_deref() != Some(self.instance) {
            return Ok(0);
        }
        let now = keyspace.now_ms();
        let fields: &mut Fields = keyspace.find_or_create(self.key)?;
        for field in &self.removed {
            fields.remove(field);
        }
        for Setting { field, age, text } in &self.set {
            let value = match age {
                Some(age) => format!("{}{text}", now - millis(*age)),
                None => text.clone(),
            };
            fields.insert(field.clone(), value);
        }
        let len = fields.len();
        if let Some(mut found) = keyspace.find::<Fields>(self.key)? {
            found.expire_after(self.ttl.duration());
        }
        Ok(i64::try_from(len).unwrap_or(i64::MAX))
    }
}

/// What the hash of a client contains.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ClientHash {
    /// The time in the store, in milliseconds.
    pub(super) now: i64,
    pub(super) fields: Fields,
}

/// Reads the hash of a client. Replies `None` if it is no hash, or has too many fields. `fields`:
/// those to read; none: all.
pub(crate) fn read(key: &str, fields: Vec<String>) -> Step<'_, Option<ClientHash>> {
    let limits = [MAX_FIELDS, MAX_BYTES].map(|limit| i64::try_from(limit).unwrap_or(i64::MAX));
    let mut args: Args = limits.map(Arg::from).into_iter().collect();
    args.extend(fields.iter().cloned().map(Arg::from));
    Step::new(
        script!("read.lua"),
        [key],
        args,
        |reply| {
            let ScriptReply::List(parts) = reply else {
                return Ok(None);
            };
            let mut parts = parts.into_iter();
            let now = parts.next().unwrap_or(ScriptReply::Nil).integer()?;
            let mut fields = Fields::new();
            while let Some(field) = parts.next() {
                let value = parts
                    .next()
                    .ok_or_else(|| unexpected_reply(&ScriptReply::Nil))?;
                fields.insert(field.text()?, value.text()?);
            }
            Ok(Some(ClientHash { now, fields }))
        },
        move |keyspace| {
            let now = keyspace.now_ms();
            let found = match keyspace.find::<Fields>(key) {
                Ok(Some(found)) if found.value.len() <= MAX_FIELDS => found.value.clone(),
                Ok(None) => Fields::new(),
                Ok(Some(_)) | Err(_) => return Ok(None),
            };
            let is_read = |field: &String, value: &String| {
                field.len() <= MAX_BYTES
                    && value.len() <= MAX_BYTES
                    && (fields.is_empty() || fields.contains(field))
            };
            let fields = found
                .into_iter()
                .filter(|(field, value)| is_read(field, value));
            Ok(Some(ClientHash {
                now,
                fields: fields.collect(),
            }))
        },
    )
}
