//! What the registry says about a client, and about one of its holds or waits: how it is written,
//! and read back.
//!
//! A field is `hold:<key>:<owner>` or `wait:<key>:<owner>`, where the owner is the number in its
//! id, followed by `:write` for a write lock: one owner may hold both sides. Its value is `<since>
//! <kind> <task> <note>`: since when, in milliseconds by the clock of the store; the kind of the
//! object; the task or `-`; and the note, which may be empty.

use std::sync::Arc;
use std::time::Duration;

use super::RequestInfo;
use super::step::{ClientHash, INSTANCE, Setting};
use crate::environment::ProcessInfo;
use crate::name::{KeyLayout, ObjectKeys, is_writer_field, owner_of, writer_field};
use crate::owner::{ClientId, Owner, OwnerId};

/// Largest size of a text that is written: label, program, host, note and outcome of a run.
const MAX_TEXT: usize = 256;

/// The fields about the client itself.
pub(super) const CLIENT_FIELDS: [&str; 7] = [
    "host", "pid", "program", "version", "label", "started", INSTANCE,
];

/// A client, as it has registered itself in the store: see
/// [`ClientBuilder::registry`](crate::ClientBuilder::registry).
///
/// Other programs may have written any text. It may contain control characters.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientInfo {
    /// Id of the client: the part of its owners before the colon.
    pub id: String,
    /// Name of the machine.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Version of this library.
    pub version: String,
    /// The [label](crate::ClientBuilder::label), if it has one.
    pub label: Option<String>,
    /// How long ago the client was created.
    pub age: Duration,
}

/// `label@host (pid 4711)`, with the name of the program if there is no label.
impl std::fmt::Display for ClientInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.label.as_ref().unwrap_or(&self.program);
        write!(f, "{name}@{} (pid {})", self.host, self.pid)
    }
}

/// What the registry says about a hold or a wait.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegistryEntry {
    /// The client that holds or waits.
    pub client: Arc<ClientInfo>,
    /// How long it has lasted, by the clock of the store.
    pub age: Duration,
    /// Kind of the object: `lock`, `fair`, `election`, `fenced`, `spin`, `read`, `write`, `group`
    /// or `permits`.
    pub kind: String,
    /// The note of the request: [`Acquire::note`](crate::Acquire::note).
    pub note: Option<String>,
    /// Number of the task that requested it, in its process.
    pub(crate) task: Option<String>,
    /// Since when it has lasted, by the clock of the store in milliseconds.
    pub(crate) since_ms: i64,
}

/// Whether a client holds an object or waits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Holds,
    Waits,
}

impl Role {
    fn prefix(self) -> &'static str {
        match self {
            Role::Holds => "hold:",
            Role::Waits => "wait:",
        }
    }

    /// Returns the field for a hold or wait of this client.
    pub(super) fn field(self, object: &ObjectKeys, owner: Owner) -> String {
        let number = object.field(owner.number().to_string());
        [self.prefix(), object.key(), ":", &number].concat()
    }

    /// Returns the field for a hold or wait of an owner in the store, and the id of its client.
    /// `None` if it is no owner of a client.
    pub(super) fn field_of<'a>(
        self,
        key: &str,
        owner: &'a OwnerId,
        writes: bool,
    ) -> Option<(&'a str, String)> {
        let (client, number) = owner.as_str().rsplit_once(':')?;
        let number = match writes {
            true => writer_field(number),
            false => number.to_owned(),
        };
        ClientId::is_valid(client).then(|| (client, [self.prefix(), key, ":", &number].concat()))
    }
}

/// A hold or wait as a field of a client's hash names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Registered {
    pub(crate) role: Role,
    pub(crate) key: String,
    pub(crate) owner: OwnerId,
    /// Whether it is about a write lock.
    pub(crate) writes: bool,
    pub(crate) entry: RegistryEntry,
}

/// Returns the text of an entry behind the time.
pub(super) fn entry_text(object: &ObjectKeys, request: &RequestInfo) -> String {
    let kind = match object.layout() {
        KeyLayout::Lock => "lock",
        KeyLayout::Spin => "spin",
        KeyLayout::Fenced => "fenced",
        KeyLayout::Fair => "fair",
        KeyLayout::Election => "election",
        KeyLayout::Read => "read",
        KeyLayout::Write => "write",
        KeyLayout::Group => "group",
        KeyLayout::Permits => "permits",
        KeyLayout::Semaphore => "semaphore",
        KeyLayout::Latch => "latch",
        KeyLayout::FairRead => "fair-read",
        KeyLayout::FairWrite => "fair-write",
        KeyLayout::FairSemaphore => "fair-semaphore",
    };
    let task = request.task.map_or("-".to_owned(), |task| task.to_string());
    let note = request.note.as_deref().unwrap_or_default();
    format!(" {kind} {task} {}", shortened(note))
}

/// Returns the fields about the client itself.
pub(super) fn client_settings(
    process: &ProcessInfo,
    label: Option<&str>,
    instance: &str,
    age: Duration,
) -> Vec<Setting> {
    let started = Setting {
        age: Some(age),
        ..Setting::text("started", "")
    };
    let mut all = vec![
        Setting::text("host", shortened(&process.host)),
        Setting::text("pid", process.pid.to_string()),
        Setting::text("program", shortened(&process.program)),
        Setting::text("version", env!("CARGO_PKG_VERSION")),
    ];
    all.extend(label.map(|label| Setting::text("label", shortened(label))));
    all.extend([started, Setting::text(INSTANCE, instance)]);
    all
}

/// Returns the beginning of a text that is too long.
pub(crate) fn shortened(text: &str) -> &str {
    let is_end = |at: &usize| text.is_char_boundary(*at);
    let end = (0..=MAX_TEXT.min(text.len())).rev().find(is_end);
    &text[..end.unwrap_or(0)]
}

impl ClientHash {
    /// Returns what it says about the client. `None` if it is not readable.
    pub(super) fn client(&self, id: &str) -> Option<Arc<ClientInfo>> {
        let text = |field: &str| {
            self.fields
                .get(field)
                .map(|text| shortened(text).to_owned())
        };
        Some(Arc::new(ClientInfo {
            id: id.to_owned(),
            host: text("host")?,
            pid: text("pid")?.parse().ok()?,
            program: text("program")?,
            version: text("version")?,
            label: text("label"),
            age: self.age(&text("started")?)?,
        }))
    }

    /// Returns a hold or wait of the client. `None` if there is none, or it is not readable.
    pub(super) fn entry(&self, client: &Arc<ClientInfo>, field: &str) -> Option<RegistryEntry> {
        let mut parts = self.fields.get(field)?.splitn(4, ' ');
        let (since, kind) = (parts.next()?, parts.next()?);
        let (task, note) = (parts.next()?, parts.next()?);
        let some = |text: &str| Some(shortened(text).to_owned());
        Some(RegistryEntry {
            client: client.clone(),
            age: self.age(since)?,
            since_ms: since.parse().ok()?,
            kind: shortened(kind).to_owned(),
            note: some(note).filter(|note| !note.is_empty()),
            task: some(task).filter(|task| task != "-"),
        })
    }

    /// Returns all holds and waits of the client that are readable.
    pub(super) fn entries(&self, client: &Arc<ClientInfo>) -> Vec<Registered> {
        let parse = |field: &String| {
            let (role, object) = [Role::Holds, Role::Waits]
                .into_iter()
                .find_map(|role| Some((role, field.strip_prefix(role.prefix())?)))?;
            let (key, number) = owner_of(object).rsplit_once(':')?;
            number.parse::<u64>().ok()?;
            Some(Registered {
                role,
                key: key.to_owned(),
                owner: format!("{}:{number}", client.id).into(),
                writes: is_writer_field(object),
                entry: self.entry(client, field)?,
            })
        };
        self.fields.keys().filter_map(parse).collect()
    }

    /// Returns how long ago a time was.
    fn age(&self, millis: &str) -> Option<Duration> {
        let millis: i64 = millis.parse().ok()?;
        let age = self.now.saturating_sub(millis).max(0);
        Some(Duration::from_millis(age.unsigned_abs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_at_a_character() {
        assert_eq!(shortened("short"), "short");
        assert_eq!(shortened(&"x".repeat(MAX_TEXT)).len(), MAX_TEXT);
        assert_eq!(shortened(&"x".repeat(MAX_TEXT + 1)).len(), MAX_TEXT);
        let cut = format!("x{}", "ü".repeat(MAX_TEXT));
        assert_eq!(shortened(&cut).len(), MAX_TEXT - 1);
        assert_eq!(shortened(""), "");
    }

    #[test]
    fn fields_of_an_owner_are_found_again() {
        let owner = Owner::new();
        let id: OwnerId = format!("client-1:{}", owner.number()).into();
        for layout in [KeyLayout::Lock, KeyLayout::Read, KeyLayout::Write] {
            let object = ObjectKeys::new(layout, "shop:", "orders:42");
            for role in [Role::Holds, Role::Waits] {
                let field = role.field(&object, owner);
                let writes = layout == KeyLayout::Write;
                let found = role.field_of(object.key(), &id, writes);
                assert_eq!(found, Some(("client-1", field.clone())));
                let fields = [(field, "3 lock - a note".to_owned())];
                let hash = ClientHash {
                    now: 5,
                    fields: [
                        ("host", "h"),
                        ("pid", "1"),
                        ("program", "p"),
                        ("version", "v"),
                        ("started", "1"),
                    ]
                    .map(|(field, text)| (field.to_owned(), text.to_owned()))
                    .into_iter()
                    .chain(fields)
                    .collect(),
                };
                let client = hash.client("client-1").unwrap();
                let entries = hash.entries(&client);
                let one = &entries[0];
                assert_eq!((one.role, &*one.key, &one.owner), (role, object.key(), &id));
                assert_eq!(one.entry.age, Duration::from_millis(2));
                assert_eq!(one.entry.note.as_deref(), Some("a note"));
            }
        }
        for foreign in ["", "client", "a b:1", ":1", "{a}:1"] {
            let owner = foreign.into();
            let found = Role::Holds.field_of("a", &owner, false);
            assert_eq!(found, None, "{foreign}");
        }
    }
}
