//! Lists the objects in a store, page by page.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::join::join_all;
use crate::name::{CandidateKeys, is_extra_key, spans_slots};
use crate::primitives::inspect::{InspectNames, ObjectState};
use crate::session::Session;
use crate::store::{Cursor, ScanType};

/// Keys inspected per round trip.
const PAGE: usize = 100;

/// The objects whose names match a pattern: [`Client::list`](crate::Client::list).
///
/// Uses SCAN, which does not block the server. An object that exists during the whole listing is listed at
/// least once. An object that is created or deleted meanwhile may be missing.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded();
/// let _guard = client.lock("orders:42").lock().await?;
/// let mut listing = client.list("orders:*");
/// while let Some(found) = listing.next().await? {
///     println!("{}: {}", found.name, found.state.kind());
/// }
/// # Ok(()) }
/// ```
pub struct Listing {
    session: Arc<Session>,
    pattern: String,
    /// Position and kind of keys of the next page; `None` after the last.
    cursor: Option<(ScanType, Cursor)>,
    keys: VecDeque<String>,
    found: VecDeque<Listed>,
}

/// One object in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// Name without the client's prefix.
    pub name: String,
    /// Kind and state of the object.
    pub state: ObjectState,
}

impl std::fmt::Debug for Listing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listing")
            .field("pattern", &self.pattern)
            .finish_non_exhaustive()
    }
}

impl Listing {
    pub(crate) fn new(session: Arc<Session>, pattern: &str) -> Listing {
        Listing {
            pattern: escape_glob(&session.prefix) + pattern,
            session,
            cursor: Some((ScanType::Hashes, Cursor::default())),
            keys: VecDeque::new(),
            found: VecDeque::new(),
        }
    }

    /// Returns the next object, or `None` after the last.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable),
    /// [`Error::ResponseTimeout`](crate::Error::ResponseTimeout).
    ///
    /// # Cancel safety
    ///
    /// Loses nothing if it is dropped. A page may be read again.
    pub async fn next(&mut self) -> Result<Option<Listed>> {
        loop {
            if let Some(found) = self.found.pop_front() {
                return Ok(Some(found));
            }
            if !self.keys.is_empty() {
                self.inspect_page().await?;
            } else if let Some((scan_type, cursor)) = self.cursor {
                let store = &self.session.store;
                let (keys, next) = store.scan(&self.pattern, scan_type, cursor).await?;
                // In a cluster no script could read all keys of a name that spans slots.
                let in_other_slots = |key: &str| store.slot(key).is_some() && spans_slots(key);
                let listed = |key: &String| !is_extra_key(key) && !in_other_slots(key);
                self.keys.extend(keys.into_iter().filter(listed));
                self.cursor = match (next, scan_type) {
                    (Some(next), _) => Some((scan_type, next)),
                    (None, ScanType::Hashes) => Some((ScanType::Strings, Cursor::default())),
                    (None, ScanType::Strings) => None,
                };
            } else {
                return Ok(None);
            }
        }
    }

    async fn inspect_page(&mut self) -> Result<()> {
        let some = self.keys.len().min(PAGE);
        let keys = self.keys.iter().take(some);
        let store = &self.session.store;
        // Sends one script per cluster slot, all concurrently.
        let mut slots: BTreeMap<Option<u16>, Vec<CandidateKeys>> = BTreeMap::new();
        for key in keys {
            let names = slots.entry(store.slot(key)).or_default();
            names.push(CandidateKeys::new(key.clone()));
        }
        let inspections = slots.values().map(|names| async move {
            let seen = store.read(&InspectNames { names }).await?;
            Ok::<_, Error>(names.iter().zip(seen))
        });
        let mut found = VecDeque::new();
        for inspection in join_all(inspections).await {
            for (CandidateKeys { key, .. }, seen) in inspection? {
                if let (Some(name), Ok(Some(state))) =
                    (key.strip_prefix(&self.session.prefix), seen)
                {
                    found.push_back(Listed {
                        name: name.to_owned(),
                        state,
                    });
                }
            }
        }
        self.keys.drain(..some);
        self.found = found;
        Ok(())
    }
}

/// Escapes text to a pattern that matches only itself.
fn escape_glob(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}
