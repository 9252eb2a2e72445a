//! Lists the objects in a store, page by page.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::name::{Beside, Family, Place, is_beside, spans_slots};
use crate::primitives::survey::{ObjectState, Survey};
use crate::session::Session;
use crate::several::all;
use crate::store::{Cursor, Sought};

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
    cursor: Option<(Sought, Cursor)>,
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

impl Listing {
    pub(crate) fn new(session: Arc<Session>, pattern: &str) -> Listing {
        Listing {
            pattern: escaped(&session.prefix) + pattern,
            session,
            cursor: Some((Sought::Hashes, Cursor::default())),
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
                self.look_into().await?;
            } else if let Some((sought, cursor)) = self.cursor {
                let store = &self.session.store;
                let (keys, next) = store.scan(&self.pattern, sought, cursor).await?;
                // In a cluster no script could read all keys of a name that spans slots.
                let lies_apart = |key: &str| store.slot(key).is_some() && spans_slots(key);
                let listed = |key: &String| !is_beside(key) && !lies_apart(key);
                self.keys.extend(keys.into_iter().filter(listed));
                self.cursor = match (next, sought) {
                    (Some(next), _) => Some((sought, next)),
                    (None, Sought::Hashes) => Some((Sought::Strings, Cursor::default())),
                    (None, Sought::Strings) => None,
                };
            } else {
                return Ok(None);
            }
        }
    }

    async fn look_into(&mut self) -> Result<()> {
        let some = self.keys.len().min(PAGE);
        let keys = self.keys.iter().take(some);
        let store = &self.session.store;
        // Sends one script per cluster slot, all concurrently.
        let mut slots: BTreeMap<Option<u16>, Vec<Beside>> = BTreeMap::new();
        for key in keys {
            let names = slots.entry(store.slot(key)).or_default();
            names.push(Beside::new(key.clone()));
        }
        let surveys = slots.values().map(|names| async move {
            let seen = store.look(&Survey { names }).await?;
            Ok::<_, Error>(names.iter().zip(seen))
        });
        let mut found = VecDeque::new();
        for survey in all(surveys).await {
            for (Beside { key, .. }, seen) in survey? {
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

/// Returns the object under one name.
pub(crate) async fn look_at(session: &Session, name: &str) -> Result<Option<ObjectState>> {
    let place = Place::new(Family::Lock, &session.prefix, name);
    place.check()?;
    let names = [Beside::new(place.key().to_owned())];
    let seen = session.store.look(&Survey { names: &names }).await?;
    match seen.into_iter().next() {
        Some(Ok(state)) => Ok(state),
        Some(Err(reason)) => Err(Error::WrongKind {
            name: name.to_owned(),
            reason,
        }),
        None => Ok(None),
    }
}

/// Escapes text to a pattern that matches only itself.
fn escaped(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}
