//! What there is in a store, page by page.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::error::Result;
use crate::primitives::handle::Holder;
use crate::primitives::survey::{Seen, Survey};
use crate::session::Session;

/// Keys looked into per round trip.
const PAGE: usize = 100;

/// The objects whose names match a pattern: [`Client::list`](crate::Client::list).
///
/// Walks the store with SCAN, which never holds the server up. What is there from beginning to end
/// is listed, perhaps twice; what comes or goes meanwhile may be listed or not.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded();
/// let _guard = client.lock("orders:42").lock().await?;
/// let mut listing = client.list("orders:*");
/// while let Some(found) = listing.next().await? {
///     println!("{} is held by {}", found.name, found.holder.owner);
/// }
/// # Ok(()) }
/// ```
pub struct Listing {
    session: Arc<Session>,
    pattern: String,
    /// Where the next page begins; `None` after the last.
    cursor: Option<u64>,
    keys: VecDeque<String>,
    found: VecDeque<Listed>,
}

/// One object in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// Its name, without the client's prefix.
    pub name: String,
    /// What it is.
    pub kind: ObjectKind,
    /// Who holds it.
    pub holder: Holder,
}

/// What kind of object is kept under a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ObjectKind {
    /// A lock. All kinds of exclusive lock look the same in the store.
    Lock,
}

impl std::fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            ObjectKind::Lock => "lock",
        })
    }
}

impl Listing {
    pub(crate) fn new(session: Arc<Session>, pattern: &str) -> Listing {
        Listing {
            pattern: escaped(&session.prefix) + pattern,
            session,
            cursor: Some(0),
            keys: VecDeque::new(),
            found: VecDeque::new(),
        }
    }

    /// The next object; `None` after the last.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable),
    /// [`Error::ResponseTimeout`](crate::Error::ResponseTimeout).
    ///
    /// # Cancel safety
    ///
    /// When dropped, nothing is lost but perhaps a page, which is read again.
    pub async fn next(&mut self) -> Result<Option<Listed>> {
        loop {
            if let Some(found) = self.found.pop_front() {
                return Ok(Some(found));
            }
            if !self.keys.is_empty() {
                self.look_into().await?;
            } else if let Some(cursor) = self.cursor {
                let (keys, next) = self.session.store.scan(&self.pattern, cursor).await?;
                self.keys.extend(keys);
                self.cursor = next;
            } else {
                return Ok(None);
            }
        }
    }

    async fn look_into(&mut self) -> Result<()> {
        let some = self.keys.len().min(PAGE);
        let keys: Vec<&str> = self.keys.range(..some).map(String::as_str).collect();
        let step = Survey { keys: &keys };
        let seen = self.session.store.look(&step).await?;
        for (key, seen) in self.keys.drain(..some).zip(seen) {
            let Some(name) = key.strip_prefix(&self.session.prefix) else {
                continue;
            };
            if let Seen::Held(holder) = seen {
                self.found.push_back(Listed {
                    name: name.to_owned(),
                    kind: ObjectKind::Lock,
                    holder,
                });
            }
        }
        Ok(())
    }
}

/// Text as a pattern that matches only itself.
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
