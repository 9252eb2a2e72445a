//! The semaphore's steps in Rust, which the embedded store runs. Each has a Lua script that does the same.
//!
//! State: the number of free permits, and a sorted set of the held permits: id -> date of expiry.
//!
//! * Every step except renewal first removes the expired permits from the set and adds them to the
//!   free ones ([`Books::open`], `prelude.lua`).
//! * Acquire: the client chooses the ids. Ids that are already in the set were taken by an earlier
//!   attempt whose answer was lost, and are not counted again. If there are too few free permits,
//!   return when the first held permit expires.
//! * Release: remove the ids from the set, add them to the free permits, and publish their number.
//!   All steps that add free permits publish.
//! * Renew: extend the dates of a guard's permits, only if all of them are held.
//! * Without a number no permits are set, and the entries of the set belong to no semaphore.
//!
//! The embedded store keeps ids in hex, a server keeps their bytes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use super::MAX_PERMITS;
use super::permit_id::{PermitId, split};
use crate::error::Result;
use crate::hold::Hold;
use crate::lease::Lease;
use crate::name::Place;
use crate::primitives::handle::Holder;
use crate::space::Space;
use crate::step::{Args, Outcome, Script, Step, unexpected, yes_or_no};

/// Dates on which permits expire, by id.
type Dates = BTreeMap<String, i64>;

/// Returns the script of a step, with the prelude prepended.
macro_rules! script {
    ($file:literal) => {{
        static SCRIPT: Script =
            Script::new(concat!(include_str!("prelude.lua"), include_str!($file)));
        &SCRIPT
    }};
}

/// The keys of every step except renewal.
fn keys(place: &Place) -> impl ExactSizeIterator<Item = &str> + Send {
    [place.key(), place.deadlines()].into_iter()
}

/// The state after the prelude.
struct Books {
    /// `None`: no permits are set.
    available: Option<i64>,
    /// The date, rounded up to whole milliseconds, so that a lease that begins now is not shortened
    /// by a part of a millisecond.
    later: i64,
}

impl Books {
    /// Releases the expired permits. Permits of a deleted semaphore belong to no semaphore and stay as they are.
    fn open(space: &mut Space, place: &Place, at: Instant) -> Result<Books> {
        let now = space.date(at);
        let later = rounded_up(space, at);
        let Some(found) = space.find::<i64>(place.key(), at)? else {
            // An error, if it contains other data.
            dates(space, place, at)?;
            let available = None;
            return Ok(Books { available, later });
        };
        let mut sum = *found.value;
        let mut expired = 0;
        if let Some(out) = space.find::<Dates>(place.deadlines(), at)? {
            let before = out.value.len();
            out.value.retain(|_, date| *date > now);
            expired = before - out.value.len();
        }
        if expired > 0 {
            sum = add(space, place, signed(expired), at)?;
            if sum > 0 {
                space.publish(place.channel(), sum);
            }
        }
        let available = Some(sum);
        Ok(Books { available, later })
    }

    /// Returns the time until a date.
    fn left(&self, date: i64) -> Duration {
        millis(date.saturating_sub(self.later))
    }

    /// Returns the end of a lease that begins now.
    fn end(&self, lease: Lease) -> i64 {
        end(self.later, lease)
    }

    /// Adds free permits and publishes their number. Permits held of a deleted semaphore are not
    /// counted into one that is set again under the same name.
    fn add_and_tell(&self, space: &mut Space, place: &Place, more: i64, at: Instant) -> Result<()> {
        if self.available.is_none() {
            space.remove(place.deadlines());
        }
        let sum = add(space, place, more, at)?;
        space.publish(place.channel(), sum);
        Ok(())
    }

    /// Returns the number of held permits.
    fn out(&self, space: &mut Space, place: &Place, at: Instant) -> Result<i64> {
        let out = dates(space, place, at)?.map_or(0, |out| signed(out.len()));
        Ok(self.available.map_or(0, |_| out))
    }
}

/// Changes the number of free permits. Returns the new number.
fn add(space: &mut Space, place: &Place, more: i64, at: Instant) -> Result<i64> {
    let available: &mut i64 = space.find_or_begin(place.key(), at)?;
    *available = available.saturating_add(more);
    Ok(*available)
}

/// Returns the dates on which permits expire, if there are any.
fn dates<'a>(space: &'a mut Space, place: &Place, at: Instant) -> Result<Option<&'a mut Dates>> {
    let found = space.find::<Dates>(place.deadlines(), at)?;
    Ok(found.map(|found| found.value))
}

/// Returns how many of these permits are held.
fn count(space: &mut Space, place: &Place, ids: &str, at: Instant) -> Result<usize> {
    let out = space.find::<Dates>(place.deadlines(), at)?;
    Ok(out.map_or(0, |out| {
        split(ids).filter(|id| out.value.contains_key(*id)).count()
    }))
}

/// Returns the date, rounded up to whole milliseconds.
fn rounded_up(space: &mut Space, at: Instant) -> i64 {
    // The first call defines where dates begin, so it must be made with the original time.
    space.date(at);
    space.date(at + Duration::from_nanos(999_999))
}

fn end(later: i64, lease: Lease) -> i64 {
    later.saturating_add(i64::try_from(lease.millis()).unwrap_or(i64::MAX))
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn millis(millis: i64) -> Duration {
    Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}

/// Converts a remaining time from a script: -1 means forever.
fn left(raw: i64) -> Duration {
    match raw {
        -1 => Duration::MAX,
        left => millis(left),
    }
}

/// Acquires permits under ids that the client has chosen, or returns when the next one expires.
pub(super) struct Acquire<'a> {
    pub(super) place: &'a Place,
    pub(super) ids: &'a str,
    pub(super) lease: Lease,
}

impl Step for Acquire<'_> {
    type Reply = Outcome;

    fn script(&self) -> &'static Script {
        script!("acquire.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(self.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.place.channel());
        args.text(self.ids);
        args.number(self.lease.millis());
    }

    fn reply(&self, raw: Value) -> Result<Outcome> {
        match raw {
            Value::Nil => Ok(Outcome::Done(())),
            Value::Int(raw) => Ok(Outcome::Wait(left(raw))),
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, at: Instant) -> Result<Outcome> {
        let books = Books::open(space, self.place, at)?;
        let Some(available) = books.available else {
            return Ok(Outcome::Wait(Duration::MAX));
        };
        // Repeated because the answer was lost: the permits are already held.
        let missing = split(self.ids).count() - count(space, self.place, self.ids, at)?;
        if missing > 0 {
            if available < signed(missing) {
                let out = space.find::<Dates>(self.place.deadlines(), at)?;
                let first = out.and_then(|out| out.value.values().min().copied());
                let wait = first.map_or(Duration::MAX, |first| books.left(first));
                return Ok(Outcome::Wait(wait));
            }
            add(space, self.place, -signed(missing), at)?;
        }
        let end = books.end(self.lease);
        let out: &mut Dates = space.find_or_begin(self.place.deadlines(), at)?;
        for id in split(self.ids) {
            let date = out.entry(id.to_owned()).or_insert(end);
            *date = end.max(*date);
        }
        Ok(Outcome::Done(()))
    }
}

/// Releases permits.
pub(super) struct Release<'a> {
    pub(super) place: &'a Place,
    pub(super) ids: &'a str,
    pub(super) which: Which,
}

/// Which of the permits to release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    /// Those that are held.
    Any,
    /// All, if all are held; otherwise none.
    All,
    /// None: only count.
    None,
}

impl Step for Release<'_> {
    /// How many of them were held.
    type Reply = usize;

    fn script(&self) -> &'static Script {
        script!("release.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(self.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.place.channel());
        args.text(self.ids);
        args.text(match self.which {
            Which::Any => "any",
            Which::All => "all",
            Which::None => "none",
        });
    }

    fn reply(&self, raw: Value) -> Result<usize> {
        match raw {
            Value::Int(out) => Ok(usize::try_from(out).unwrap_or(0)),
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, at: Instant) -> Result<usize> {
        let books = Books::open(space, self.place, at)?;
        let were_out = match books.available {
            Some(_) => count(space, self.place, self.ids, at)?,
            None => 0,
        };
        let kept = match self.which {
            Which::Any => false,
            Which::All => were_out < split(self.ids).count(),
            Which::None => true,
        };
        if were_out == 0 || kept {
            return Ok(were_out);
        }
        if let Some(out) = space.find::<Dates>(self.place.deadlines(), at)? {
            for id in split(self.ids) {
                out.value.remove(id);
            }
        }
        books.add_and_tell(space, self.place, signed(were_out), at)?;
        Ok(were_out)
    }
}

/// Renews the leases of many sets of permits.
pub(super) fn renew_script() -> &'static Script {
    static SCRIPT: Script = Script::new(include_str!("renew.lua"));
    &SCRIPT
}

/// Renews one set, as the script does.
pub(super) fn renew(
    space: &mut Space,
    hold: &Hold,
    lease: Option<Lease>,
    at: Instant,
) -> Result<bool> {
    let now = space.date(at);
    let later = rounded_up(space, at);
    let Some(out) = space.find::<Dates>(hold.place.deadlines(), at)? else {
        return Ok(false);
    };
    let is_out = |id| out.value.get(id).is_some_and(|date| *date > now);
    if !split(&hold.field).all(is_out) {
        return Ok(false);
    }
    let Some(end) = lease.map(|lease| end(later, lease)) else {
        return Ok(true);
    };
    for id in split(&hold.field) {
        if let Some(date) = out.value.get_mut(id) {
            *date = end.max(*date);
        }
    }
    Ok(true)
}

/// Sets the total number of permits, including held ones.
pub(super) struct Set {
    pub(super) place: Arc<Place>,
    pub(super) permits: u32,
    /// Only if none are set.
    pub(super) first: bool,
}

impl Step for Set {
    /// Whether they were set.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("set.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(&self.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.place.channel());
        args.number(self.permits.into());
        args.number(self.first.into());
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        yes_or_no(&raw)
    }

    fn apply(&self, space: &mut Space, at: Instant) -> Result<bool> {
        let books = Books::open(space, &self.place, at)?;
        if books.available.is_some() && self.first {
            return Ok(false);
        }
        let wanted = i64::from(self.permits) - books.out(space, &self.place, at)?;
        if books.available != Some(wanted) {
            let more = wanted - books.available.unwrap_or(0);
            books.add_and_tell(space, &self.place, more, at)?;
        }
        Ok(true)
    }
}

/// Adds free permits, or removes some.
pub(super) struct Add {
    pub(super) place: Arc<Place>,
    pub(super) more: i64,
}

impl Step for Add {
    /// Whether they were added; otherwise there would be too many.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("add.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(&self.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.place.channel());
        args.signed(self.more);
        args.number(MAX_PERMITS.into());
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        yes_or_no(&raw)
    }

    fn apply(&self, space: &mut Space, at: Instant) -> Result<bool> {
        let books = Books::open(space, &self.place, at)?;
        let sum = books.available.unwrap_or(0).saturating_add(self.more);
        if sum.saturating_abs() > i64::from(MAX_PERMITS) {
            return Ok(false);
        }
        books.add_and_tell(space, &self.place, self.more, at)?;
        Ok(true)
    }
}

/// Returns the numbers of permits.
pub(super) struct Count<'a> {
    pub(super) place: &'a Place,
}

/// The reply of [`Count`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) available: i64,
    pub(super) acquired: i64,
}

impl Step for Count<'_> {
    type Reply = Counts;

    fn script(&self) -> &'static Script {
        script!("count.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(self.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.place.channel());
    }

    fn reply(&self, raw: Value) -> Result<Counts> {
        match &raw {
            Value::Array(counts) => match counts.as_slice() {
                [Value::Int(available), Value::Int(acquired)] => Ok(Counts {
                    available: *available,
                    acquired: *acquired,
                }),
                _ => Err(unexpected(&raw)),
            },
            _ => Err(unexpected(&raw)),
        }
    }

    fn apply(&self, space: &mut Space, at: Instant) -> Result<Counts> {
        let books = Books::open(space, self.place, at)?;
        let Some(available) = books.available else {
            return Ok(Counts {
                available: 0,
                acquired: 0,
            });
        };
        Ok(Counts {
            available,
            acquired: books.out(space, self.place, at)?,
        })
    }
}

/// Sets the time at which a permit expires, earlier or later than before.
pub(super) struct UpdateLease<'a> {
    pub(super) place: &'a Place,
    pub(super) id: &'a str,
    pub(super) lease: Lease,
}

impl Step for UpdateLease<'_> {
    /// Whether the permit is held.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("update_lease.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(self.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.place.channel());
        args.text(self.id);
        args.number(self.lease.millis());
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        yes_or_no(&raw)
    }

    fn apply(&self, space: &mut Space, at: Instant) -> Result<bool> {
        let books = Books::open(space, self.place, at)?;
        let Some(available) = books.available else {
            return Ok(false);
        };
        let end = books.end(self.lease);
        let out = dates(space, self.place, at)?;
        let Some(date) = out.and_then(|out| out.get_mut(self.id)) else {
            return Ok(false);
        };
        let nearer = end < *date;
        *date = end;
        if nearer {
            // Waiters sleep until the first permit expires, and this may be the first now.
            space.publish(self.place.channel(), available);
        }
        Ok(true)
    }
}

/// Returns when a permit expires.
pub(super) struct LeaseOf<'a> {
    pub(super) place: &'a Place,
    pub(super) id: &'a str,
}

impl Step for LeaseOf<'_> {
    /// `None`: it is not held.
    type Reply = Option<Duration>;

    fn script(&self) -> &'static Script {
        script!("lease_of.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(self.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.place.channel());
        args.text(self.id);
    }

    fn reply(&self, raw: Value) -> Result<Option<Duration>> {
        match raw {
            Value::Nil => Ok(None),
            Value::Int(raw) => Ok(Some(left(raw))),
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, at: Instant) -> Result<Option<Duration>> {
        let books = Books::open(space, self.place, at)?;
        if books.available.is_none() {
            return Ok(None);
        }
        let date = dates(space, self.place, at)?.and_then(|out| out.get(self.id));
        Ok(date.map(|date| books.left(*date)))
    }
}

/// Returns the held permits and their remaining leases.
pub(super) struct Inspect<'a> {
    pub(super) place: &'a Place,
}

impl Step for Inspect<'_> {
    type Reply = Vec<Holder>;

    fn script(&self) -> &'static Script {
        script!("inspect.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(self.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.place.channel());
    }

    fn reply(&self, raw: Value) -> Result<Vec<Holder>> {
        let Value::Array(out) = raw else {
            return Err(unexpected(&raw));
        };
        let holder = |one: &[Value]| match one {
            [Value::BulkString(id), Value::Int(raw)] => {
                // An id of another format, written to the set by another program, is shown as it is.
                let owner = match <[u8; PermitId::BYTES]>::try_from(id.as_slice()) {
                    Ok(id) => PermitId::from_bytes(id).to_string(),
                    Err(_) => String::from_utf8_lossy(id).into_owned(),
                };
                Ok(Holder {
                    owner,
                    holds: 1,
                    remaining: Some(left(*raw)).filter(|left| *left != Duration::MAX),
                })
            }
            _ => Err(unexpected(&Value::Array(one.to_vec()))),
        };
        out.chunks(2).map(holder).collect()
    }

    fn apply(&self, space: &mut Space, at: Instant) -> Result<Vec<Holder>> {
        let books = Books::open(space, self.place, at)?;
        if books.available.is_none() {
            return Ok(Vec::new());
        }
        let Some(out) = dates(space, self.place, at)? else {
            return Ok(Vec::new());
        };
        let holder = |(id, date): (&String, &i64)| Holder {
            owner: id.clone(),
            holds: 1,
            remaining: Some(books.left(*date)),
        };
        Ok(out.iter().map(holder).collect())
    }
}

/// Releases all held permits, whichever clients hold them.
pub(super) struct Force<'a> {
    pub(super) place: &'a Place,
}

impl Step for Force<'_> {
    /// Whether any were held.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("force.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(self.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.place.channel());
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        yes_or_no(&raw)
    }

    fn apply(&self, space: &mut Space, at: Instant) -> Result<bool> {
        let books = Books::open(space, self.place, at)?;
        let out = match books.available {
            Some(_) => books.out(space, self.place, at)?,
            None => 0,
        };
        if out == 0 {
            return Ok(false);
        }
        space.remove(self.place.deadlines());
        books.add_and_tell(space, self.place, out, at)?;
        Ok(true)
    }
}

/// Deletes the semaphore.
pub(super) struct Delete {
    pub(super) place: Arc<Place>,
}

impl Step for Delete {
    /// Whether it existed.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("delete.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(&self.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.place.channel());
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        yes_or_no(&raw)
    }

    fn apply(&self, space: &mut Space, at: Instant) -> Result<bool> {
        let books = Books::open(space, &self.place, at)?;
        if books.available.is_none() {
            return Ok(false);
        }
        space.remove(self.place.deadlines());
        space.remove(self.place.key());
        Ok(true)
    }
}
