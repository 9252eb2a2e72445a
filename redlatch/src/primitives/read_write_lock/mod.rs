//! The read-write lock (Redisson: `RReadWriteLock`, `RedissonReadWriteLock`): many readers or one
//! writer, who may read, too. Its two sides are two kinds of lock that share a key.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
mod rules;

use std::sync::Arc;

use redis::Value;
use tokio::time::Instant;

pub(crate) use self::rules::Inspect;
use self::rules::{Force, read, write};
use crate::error::{Error, Loss, Result};
use crate::hold::{Hold, Kind};
use crate::lease::Lease;
use crate::name::{Family, Place};
use crate::primitives::handle::{Acquire, Ask, Guard, Holder, Lock, OwnedKind, Rules};
use crate::session::Session;
use crate::space::{Mode, Space};
use crate::step::{Args, BoxedStep, Outcome, Script, Step};
use crate::wait::Queue;

/// A lock that many may hold to read, or one to write (Redisson: `RReadWriteLock`).
///
/// Its sides are locks of their own, with all that a [`Lock`] can do: [`ReadWriteLock::read`] is held
/// by any number of owners, [`ReadWriteLock::write`] by one, and never both; except that who writes
/// may read, too.
///
/// - Both sides are re-entrant, and each hold is renewed by the watchdog of its own client. A reader
///   that dies keeps writers waiting for one lease, however many others go on reading.
/// - When a writer leaves, all who wait to read go in together.
/// - Who writes and also reads ([`Guard::read`]) may give both back in any order; with the write
///   side gone it is a reader like others. [`Guard::downgrade`] is the short way.
/// - Who reads and asks to write is told [`Error::WriteWhileReading`] at once: it would wait for
///   itself, and two who try it for each other.
/// - Readers that come one after the other keep a writer out for as long as they overlap. If that
///   can happen, see [`ReadWriteLock::prefer_writers`].
///
/// Like all handles it is cheap and does nothing by itself.
///
/// # When not to use it
///
/// Reading under a lock costs as much as writing under one: two round trips. Where reads are short,
/// a plain [`Client::lock`](crate::Client::lock) is simpler; where they may see old data, take no
/// lock to read at all.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let catalogue = client.read_write_lock("catalogue");
///
/// let one = catalogue.read().lock().await?;
/// let two = catalogue.read().lock().await?; // somebody else, at the same time
/// assert!(catalogue.write().try_lock().await?.is_none());
/// one.unlock().await?;
/// two.unlock().await?;
///
/// let writer = catalogue.write().lock().await?;
/// assert!(catalogue.read().try_lock().await?.is_none());
/// let reader = writer.downgrade().await?; // nobody can write in between
/// assert!(catalogue.read().try_lock().await?.is_some());
/// # reader.unlock().await }
/// ```
#[derive(Clone, Debug)]
pub struct ReadWriteLock {
    read: ReadLock,
    write: WriteLock,
}

/// The read side of a [`ReadWriteLock`].
pub type ReadLock = Lock<Read>;

/// The write side of a [`ReadWriteLock`].
pub type WriteLock = Lock<Write>;

/// The kind of [`ReadLock`] (Redisson: `RedissonReadLock`).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Read {
    write: Arc<Place>,
    /// Whether writers that wait go first.
    yields: bool,
    /// Who writes and asks to read besides.
    besides: Option<Besides>,
}

/// The kind of [`WriteLock`] (Redisson: `RedissonWriteLock`).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Write {
    read: Arc<Place>,
    /// How long new readers are held back by one that waits, if they are.
    holds_back: Option<Lease>,
}

/// What lets somebody in to read who writes. Without it there is nothing to wait for.
#[derive(Clone)]
struct Besides {
    writing: Arc<Hold>,
    /// It had been lost before it was asked.
    lost: Option<Loss>,
}

impl std::fmt::Debug for Besides {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Besides").finish_non_exhaustive()
    }
}

impl OwnedKind for Read {}
impl OwnedKind for Write {}

impl ReadWriteLock {
    pub(crate) fn new(session: Arc<Session>, name: &str) -> ReadWriteLock {
        let place = |family| Arc::new(Place::new(family, &session.prefix, name));
        let (read, write) = (place(Family::Read), place(Family::Write));
        ReadWriteLock {
            read: Lock {
                session: session.clone(),
                place: read.clone(),
                kind: Arc::new(Read {
                    write: write.clone(),
                    yields: false,
                    besides: None,
                }),
                reentrant: true,
            },
            write: Lock {
                session,
                place: write,
                kind: Arc::new(Write {
                    read,
                    holds_back: None,
                }),
                reentrant: true,
            },
        }
    }

    /// The same lock, with right of way for writers: once one waits, new readers wait behind it. Who
    /// reads already may enter again.
    ///
    /// It takes effect between handles that were all made like this; whoever uses another handle, or
    /// Redisson, neither holds readers back nor is held back. A waiting writer asks again every 3 s
    /// and is remembered in the store for 10 s, so one that dies holds readers back for 10 s at most.
    ///
    /// Of the writers that wait through one client only the first is known to the store: when it
    /// has had its turn, a new reader may come before the next.
    ///
    /// Somebody who reads must not wait for somebody else who is yet to read: a writer may have come
    /// in between. And a constant stream of writers now keeps readers out.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let catalogue = client.read_write_lock("catalogue").prefer_writers();
    /// let reader = catalogue.read().lock().await?;
    /// let writer = tokio::spawn(catalogue.write().lock().into_future());
    /// # while client.status().subscriptions == 0 { tokio::task::yield_now().await }
    /// // Once the writer waits:
    /// assert!(catalogue.read().try_lock().await?.is_none());
    /// reader.unlock().await?;
    /// # writer.await.unwrap()?.unlock().await }
    /// ```
    #[must_use]
    pub fn prefer_writers(self) -> ReadWriteLock {
        let read = Read {
            yields: true,
            ..(*self.read.kind).clone()
        };
        let write = Write {
            holds_back: Some(Lease::WAITING_WRITER),
            ..(*self.write.kind).clone()
        };
        ReadWriteLock {
            read: self.read.with_kind(read),
            write: self.write.with_kind(write),
        }
    }

    /// The name, as it was given.
    pub fn name(&self) -> &str {
        self.read.name()
    }

    /// The side that many may hold at a time (Redisson: `readLock()`).
    ///
    /// [`Lock::holders`] tells all who read, [`Lock::is_locked`] whether anybody does;
    /// [`Lock::force_unlock`] takes the read side from all of them.
    pub fn read(&self) -> &ReadLock {
        &self.read
    }

    /// The side that one may hold at a time, while nobody else reads (Redisson: `writeLock()`).
    ///
    /// Asking for it while reading is [`Error::WriteWhileReading`]. [`Lock::is_locked`] tells whether
    /// anybody writes. [`Lock::force_unlock`] takes the write side from who has it, and what it reads
    /// besides.
    pub fn write(&self) -> &WriteLock {
        &self.write
    }
}

impl Guard<Write> {
    /// Enters the read side, too, for the same owner: at once, since nobody else can be in the way.
    /// Both sides are held then, and may be given back in any order.
    ///
    /// [`Error::Lost`], at once, if the write side has been lost: what is known here, and what the
    /// store says when somebody is in the way.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let lock = client.read_write_lock("a");
    /// let writer = lock.write().lock().await?;
    /// let reader = writer.read().await?;
    /// writer.unlock().await?;
    /// assert!(lock.read().is_held_by(reader.owner()).await?);
    /// # reader.unlock().await }
    /// ```
    pub fn read(&self) -> Acquire<Read> {
        let writing = self.claim().hold.clone();
        let besides = Besides {
            lost: writing.loss(),
            writing,
        };
        let side = self.read_side(Some(besides));
        side.lock().owner(self.owner())
    }

    /// Gives the write side back and goes on reading, with nobody writing in between. Others may
    /// read then, too. A fixed lease begins anew.
    ///
    /// If the write side was entered several times, this gives back one of the holds, and the others
    /// keep others out as before.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the write side was no longer held, so others may have written meanwhile. Or
    /// the store did not answer or refused when asked for the read side. In all cases neither side is
    /// held through this guard any more; what is left is given back in the background. A release of
    /// the write side that the store does not answer is no error: it goes on in the background.
    ///
    /// # Cancel safety
    ///
    /// When dropped, both sides are given back in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let lock = client.read_write_lock("a");
    /// let writer = lock.write().lock().await?;
    /// let reader = writer.downgrade().await?;
    /// assert!(!lock.write().is_locked().await?);
    /// assert!(lock.read().is_locked().await?);
    /// # reader.unlock().await }
    /// ```
    pub async fn downgrade(self) -> Result<Guard<Read>> {
        let hold = self.claim().hold.clone();
        if let Some(loss) = hold.loss() {
            return Err(hold.lost_error(loss));
        }
        let mut reading = self.read_side(None).try_lock().owner(self.owner());
        if !self.terms().renewed {
            reading = reading.lease(self.terms().lease.duration());
        }
        // Who writes can always read: if somebody is in the way, it no longer writes.
        let Some(reader) = reading.await? else {
            return Err(hold.lost_error(hold.loss().unwrap_or(Loss::NotHeld)));
        };
        match self.unlock().await {
            Err(lost @ Error::Lost { .. }) => Err(lost),
            _ => Ok(reader),
        }
    }

    /// The other side of the same lock.
    fn read_side(&self, besides: Option<Besides>) -> ReadLock {
        let write = self.handle();
        Lock {
            session: write.session,
            place: write.kind.read.clone(),
            kind: Arc::new(Read {
                write: write.place,
                yields: write.kind.holds_back.is_some(),
                besides,
            }),
            reentrant: true,
        }
    }
}

impl Kind for Read {
    fn renew_script(&self) -> &'static Script {
        read::renew_script()
    }

    fn renew(
        &self,
        space: &mut Space,
        hold: &Hold,
        lease: Option<Lease>,
        now: Instant,
    ) -> Result<bool> {
        read::renew(space, hold, lease, now)
    }

    fn renew_args(&self, hold: &Hold, args: &mut Args<'_>) {
        args.text(&hold.field);
        args.text(&hold.own);
        args.text(hold.place.channel());
    }

    fn release<'a>(
        &'a self,
        hold: &'a Hold,
        keep: u32,
        lease: Option<Lease>,
    ) -> BoxedStep<'a, bool> {
        let step = read::Release { hold, keep, lease };
        Box::new(step)
    }

    fn beside(&self) -> Option<&Arc<Place>> {
        Some(&self.write)
    }
}

impl Rules for Read {
    type Won = ();
    const FAMILY: Family = Family::Read;
    const QUEUE: Queue = Queue::Shared;

    fn acquire<'a>(&'a self, ask: Ask<'a>) -> impl Step<Reply = Outcome> + 'a {
        let yields = self.yields;
        // Who reads already has come in, however it did, and is not kept out by what is lost now.
        let besides = self.besides.as_ref().filter(|_| ask.count == 1);
        LetIn {
            step: read::Acquire { ask, yields },
            besides: besides.map(|besides| &*besides.writing),
        }
    }

    fn check(&self) -> Result<()> {
        match &self.besides {
            Some(Besides {
                writing,
                lost: Some(loss),
            }) => Err(writing.lost_error(*loss)),
            _ => Ok(()),
        }
    }

    fn inspect<'a>(&'a self, place: &'a Place) -> impl Step<Reply = Vec<Holder>> + 'a {
        let side = Mode::Read;
        Inspect { place, side }
    }

    fn force<'a>(&'a self, place: &'a Place) -> impl Step<Reply = bool> + 'a {
        let side = Mode::Read;
        Force { place, side }
    }
}

/// The read side, taken on the strength of a write side that may turn out to be lost.
struct LetIn<'a> {
    step: read::Acquire<'a>,
    besides: Option<&'a Hold>,
}

impl LetIn<'_> {
    fn seen(&self, outcome: Outcome) -> Result<Outcome> {
        let Some(writing) = self.besides else {
            return Ok(outcome);
        };
        if let Outcome::Wait(_) = outcome {
            // Nobody can be in the way of who writes.
            writing.lose(Loss::NotHeld);
        }
        match (writing.loss(), outcome) {
            (Some(loss), _) => Err(writing.lost_error(loss)),
            (None, Outcome::Wait(_)) => Err(writing.lost_error(Loss::NotHeld)),
            (None, done) => Ok(done),
        }
    }
}

impl Step for LetIn<'_> {
    type Reply = Outcome;

    fn script(&self) -> &'static Script {
        self.step.script()
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        self.step.keys()
    }

    fn args(&self, args: &mut Args<'_>) {
        self.step.args(args);
    }

    fn reply(&self, raw: Value) -> Result<Outcome> {
        self.seen(self.step.reply(raw)?)
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<Outcome> {
        self.seen(self.step.apply(space, now)?)
    }
}

/// A writer is renewed as the holder of a plain lock is: its lease is the key's.
impl Kind for Write {
    fn renew_script(&self) -> &'static Script {
        write::renew_script()
    }

    fn renew(
        &self,
        space: &mut Space,
        hold: &Hold,
        lease: Option<Lease>,
        now: Instant,
    ) -> Result<bool> {
        write::renew(space, hold, lease, now)
    }

    fn release<'a>(
        &'a self,
        hold: &'a Hold,
        keep: u32,
        lease: Option<Lease>,
    ) -> BoxedStep<'a, bool> {
        let step = write::Release { hold, keep, lease };
        Box::new(step)
    }

    fn beside(&self) -> Option<&Arc<Place>> {
        Some(&self.read)
    }
}

impl Rules for Write {
    type Won = ();
    const FAMILY: Family = Family::Write;

    fn acquire<'a>(&'a self, ask: Ask<'a>) -> impl Step<Reply = Outcome> + 'a {
        let holds_back = self.holds_back;
        write::Acquire { ask, holds_back }
    }

    fn inspect<'a>(&'a self, place: &'a Place) -> impl Step<Reply = Vec<Holder>> + 'a {
        let side = Mode::Write;
        Inspect { place, side }
    }

    fn force<'a>(&'a self, place: &'a Place) -> impl Step<Reply = bool> + 'a {
        let side = Mode::Write;
        Force { place, side }
    }

    fn remembers_waiters(&self) -> Option<Lease> {
        self.holds_back
    }
}
