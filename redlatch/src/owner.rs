//! The identity that holds a lock.

use std::fmt::Write as _;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::environment::{known_process_id, process_id, random, simulated_owner_number};
use crate::error::{Error, Result};

/// The identity that acquires and holds a lock, like a thread in Redisson.
///
/// An async task is not a thread, so by default every acquisition gets a new owner, and two tasks that
/// share a handle exclude each other. For re-entrancy, pass an owner explicitly
/// ([`Acquire::owner`](crate::Acquire::owner)), set one for a scope ([`Owner::scope`]), or use the guard
/// ([`Guard::reenter`](crate::Guard::reenter)).
///
/// An acquisition that names no owner gets an *anonymous* one.
/// [`Guard::owner`](crate::Guard::owner) returns it, to compare, log and inspect. No request can
/// name it ([`Error::InvalidSetting`]): when the guard is released, the lock may pass to another
/// acquisition of the same client, which continues under this owner
/// ([`ClientBuilder::local_hand_over`](crate::ClientBuilder::local_hand_over)).
///
/// An owner is a number that is unique in its process. The first number of a process is random, so a
/// process that restarts under the same [`client_id`](crate::ClientBuilder::client_id) does not reuse the
/// owners of its predecessor. Nor does a child that `fork` creates; but a value of this type that the parent
/// passes to two children is one owner. The store keeps an owner in Redisson's format, `<client id>:<number>` (see
/// [`Client::owner_id`](crate::Client::owner_id)).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let lock = redlatch::Client::embedded().lock("orders:42");
/// let me = redlatch::Owner::new();
/// let outer = lock.lock().owner(me).await?;
/// let inner = lock.lock().owner(me).await?; // re-entered: does not wait for `outer`
/// assert_eq!(inner.hold_count(), 2);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
// Twice the number, plus 1 if it is anonymous: one word, because most futures contain an owner.
pub struct Owner(u64);

tokio::task_local! {
    static SCOPE: Owner;
}

impl Owner {
    /// Creates an owner that differs from all others.
    #[expect(
        clippy::new_without_default,
        reason = "a default that differs each time surprises"
    )]
    pub fn new() -> Owner {
        Owner(2 * next_number(process_id))
    }

    /// Creates the owner of an acquisition that names none. No request can name it: see
    /// [`Options::owner`].
    ///
    /// [`Options::owner`]: crate::locks::Options::owner
    pub(crate) fn anonymous() -> Owner {
        // Its client has asked for the process.
        Owner(2 * next_number(known_process_id) + 1)
    }

    /// Returns whether an acquisition that named no owner has created it.
    pub(crate) fn is_anonymous(self) -> bool {
        self.0 % 2 == 1
    }

    /// Runs `future` with this owner as the default of all acquisitions in it, so that they
    /// re-enter each other's locks. An owner that is passed explicitly has precedence. If this
    /// owner is anonymous, acquisitions in it fail as with
    /// [`Acquire::owner`](crate::Acquire::owner).
    ///
    /// The scope belongs to the task: tasks that `future` spawns are outside of it. Parts of `future` that
    /// run concurrently (`join!`) share the owner, so they do not exclude each other.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// redlatch::Owner::new().scope(async {
    ///     let _outer = client.lock("a").lock().await?;
    ///     let _inner = client.lock("a").lock().await?;
    ///     redlatch::Result::Ok(())
    /// }).await
    /// # }
    /// ```
    pub async fn scope<F: Future>(self, future: F) -> F::Output {
        SCOPE.scope(self, future).await
    }

    /// Returns the owner of the current scope, if there is one.
    pub fn current() -> Option<Owner> {
        SCOPE.try_with(|owner| *owner).ok()
    }

    /// Returns the number after the colon in the store. It is positive and fits into Java's `long` and into
    /// a double (less than 2⁵³).
    pub fn number(self) -> u64 {
        self.0 / 2
    }
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Owner").field(&self.number()).finish()
    }
}

/// An owner as the store keeps it: `<client id>:<number>`. In redlatch the number is that of an [`Owner`], in
/// Redisson that of a thread. Other programs may have written any other text.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerId(String);

impl OwnerId {
    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for OwnerId {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for OwnerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.0)
    }
}

impl From<String> for OwnerId {
    fn from(id: String) -> OwnerId {
        OwnerId(id)
    }
}

impl From<&str> for OwnerId {
    fn from(id: &str) -> OwnerId {
        OwnerId(id.to_owned())
    }
}

impl From<OwnerId> for String {
    fn from(id: OwnerId) -> String {
        id.0
    }
}

impl PartialEq<str> for OwnerId {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

impl PartialEq<&str> for OwnerId {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}

/// Returns a number that no other owner of this process has.
fn next_number(process: fn() -> u32) -> u64 {
    static NUMBERS: OwnerNumbers = OwnerNumbers::new();
    simulated_owner_number().unwrap_or_else(|| NUMBERS.next(process()))
}

/// The numbers of the owners of a process. A child that `fork` creates has a copy, which starts anew.
struct OwnerNumbers {
    /// The process that they belong to. None has the id 0.
    process: AtomicU32,
    next: AtomicU64,
}

impl OwnerNumbers {
    const fn new() -> OwnerNumbers {
        OwnerNumbers {
            process: AtomicU32::new(0),
            next: AtomicU64::new(0),
        }
    }

    fn next(&self, process: u32) -> u64 {
        if self.process.load(Ordering::Acquire) != process {
            // In this order: a thread that finds the process also finds its numbers. Another thread may start them once more.
            self.next.store(first_number(), Ordering::Relaxed);
            self.process.store(process, Ordering::Release);
        }
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}

/// Chooses the number of the first owner of this process.
///
/// Invariant: two processes never use the same number with the same client id, even if one restarts within
/// the other's lease. Otherwise the second process would re-enter the hold of the first and get its fencing
/// token. A process uses consecutive numbers, starting at a random one of 2⁵². Two processes with 10⁹
/// acquisitions each overlap with a probability of one in two million.
fn first_number() -> u64 {
    // The low half of a UUID starts with its variant, two constant bits.
    let (_, random) = random().as_u64_pair();
    1 + random % (1 << 52)
}

/// Identifies a client in the store: a UUID unless the user sets another id.
#[derive(Debug, Clone)]
pub(crate) struct ClientId(Arc<str>);

impl ClientId {
    pub(crate) fn random() -> ClientId {
        ClientId(random().to_string().into())
    }

    /// Checks an id that the user chose. It must be valid for Redisson and printable in a listing.
    pub(crate) fn custom(id: &str) -> Result<ClientId> {
        if !ClientId::is_valid(id) {
            return Err(Error::InvalidSetting {
                setting: "client_id",
                reason: "use 1 to 64 letters, digits, '-', '_' or '.'".into(),
            });
        }
        Ok(ClientId(id.into()))
    }

    /// Returns whether a text may be the id of a client.
    pub(crate) fn is_valid(id: &str) -> bool {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !id.is_empty() && id.len() <= 64 && id.chars().all(plain)
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns `owner` as the store keeps it when it acts through this client.
    pub(crate) fn owner_id(&self, owner: Owner) -> OwnerId {
        // One allocation of the exact size: every acquisition needs an id.
        let digits = owner.number().checked_ilog10().unwrap_or(0) as usize + 1;
        let mut id = String::with_capacity(self.0.len() + 1 + digits);
        id.push_str(&self.0);
        id.push(':');
        // Writing to a string never fails.
        let _ = write!(id, "{}", owner.number());
        OwnerId(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_have_numbers_of_their_own() {
        let owners = [Owner::new, Owner::anonymous, Owner::new].map(|create| create());
        assert_eq!(owners.map(Owner::is_anonymous), [false, true, false]);
        let numbers: std::collections::HashSet<u64> = owners.map(Owner::number).into();
        assert_eq!(numbers.len(), 3);
        let owner = Owner(2 * 42 + 1);
        assert_eq!(format!("{owner:?}"), "Owner(42)");
        let client = ClientId::custom("client").unwrap();
        assert_eq!(client.owner_id(owner), "client:42");
        assert_eq!(size_of::<Owner>(), 8);
    }

    /// A child has a copy of the numbers of its parent.
    #[test]
    fn processes_have_numbers_of_their_own() {
        let parent = OwnerNumbers::new();
        let first = parent.next(1);
        assert_eq!(parent.next(1), first + 1);
        let children = [2, 3].map(|process| {
            let copy = OwnerNumbers {
                process: parent.process.load(Ordering::Relaxed).into(),
                next: parent.next.load(Ordering::Relaxed).into(),
            };
            let numbers = [copy.next(process), copy.next(process)];
            assert_eq!(numbers[1], numbers[0] + 1);
            numbers
        });
        let all: std::collections::HashSet<u64> = children.into_iter().flatten().collect();
        assert_eq!(all.len(), 4);
        assert!(!all.contains(&parent.next(1)));
    }

    #[test]
    fn first_numbers_are_random_positive_and_exact_in_a_double() {
        let firsts: std::collections::HashSet<u64> = (0..1000).map(|_| first_number()).collect();
        assert_eq!(firsts.len(), 1000);
        assert!(firsts.iter().all(|&first| (1..=1 << 52).contains(&first)));
        // All bits vary: the numbers cover the whole range.
        assert!(firsts.iter().any(|&first| first > 1 << 51));
    }
}
