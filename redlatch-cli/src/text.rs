//! How holders and waiters, times, numbers and names are written.

use std::fmt::Display;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redlatch::inspect::{Holder, ObjectState, RegistryEntry};
use redlatch::{Expiry, OwnerId};

use crate::duration;

const DAY: u64 = 24 * 60 * 60;

/// Describes a holder: `report@db7 (pid 4711) since 02:00:13 UTC, "reindex 42", lease 24 s left`.
pub(crate) fn holder(holder: &Holder) -> String {
    let lease = match holder.remaining {
        Expiry::In(left) => format!(", lease {} left", duration::rough(left)),
        Expiry::Never => ", forever".into(),
    };
    owner(&holder.owner, holder.registered.as_ref()) + &lease
}

/// Describes an owner: by its client if that is in the registry, else by its id.
pub(crate) fn owner(id: &OwnerId, registered: Option<&RegistryEntry>) -> String {
    registered.map_or_else(|| id.to_string(), client)
}

/// Describes a holder or waiter that is in the registry, without its lease.
pub(crate) fn client(entry: &RegistryEntry) -> String {
    let since = clock(ago(SystemTime::now(), entry.age), entry.age);
    let note = note(entry.note.as_deref());
    format!("{} since {since}{note}", entry.client)
}

/// Returns the kind of an object. The store has an election as a lock with a queue and a token: only
/// the registry tells them apart.
pub(crate) fn kind(state: &ObjectState) -> String {
    let holders = state.holders().into_iter();
    let holders = holders.filter_map(|holder| holder.registered.as_ref());
    let waiters = state.queue().iter();
    let waiters = waiters.filter_map(|waiter| waiter.registered.as_ref());
    match holders
        .chain(waiters)
        .find(|entry| entry.kind == "election")
    {
        Some(entry) => entry.kind.clone(),
        None => state.kind().to_string(),
    }
}

/// Describes the number of a semaphore or latch. A latch at zero does not exist.
pub(crate) fn number(value: i64) -> String {
    match value {
        ..=0 => "no permit free".to_owned(),
        value => format!("{} free, or latch at {value}", counted(value, "permit")),
    }
}

/// Returns the note of an owner as the end of its description.
pub(crate) fn note(note: Option<&str>) -> String {
    note.map_or(String::new(), |note| format!(", \"{note}\""))
}

/// Returns when something began that has lasted for this time.
pub(crate) fn ago(now: SystemTime, age: Duration) -> SystemTime {
    now.checked_sub(age).unwrap_or(UNIX_EPOCH)
}

/// Formats a time of this age: `02:00:13 UTC`, with its date if it is more than a day ago.
pub(crate) fn clock(time: SystemTime, age: Duration) -> String {
    let [date, time] = utc(time);
    match age < Duration::from_secs(DAY) {
        true => format!("{time} UTC"),
        false => format!("{date} {time} UTC"),
    }
}

/// Returns the time as `2026-11-22T02:00:00Z`.
pub(crate) fn utc_time(time: SystemTime) -> String {
    let [date, time] = utc(time);
    format!("{date}T{time}Z")
}

/// Returns the date and the time of the day.
pub(crate) fn utc(time: SystemTime) -> [String; 2] {
    let seconds = time
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let (days, second) = (seconds / DAY, seconds % DAY);
    // The days of the Gregorian calendar, counted in years that begin in March, so that a leap day
    // is the last of its year: Howard Hinnant, "chrono-compatible low-level date algorithms".
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let date = format!("{year:04}-{month:02}-{day:02}");
    let (hour, minute) = (second / 3600, second / 60 % 60);
    [date, format!("{hour:02}:{minute:02}:{:02}", second % 60)]
}

/// Returns a noun with its article, such as `a lock`.
pub(crate) fn with_article(noun: &str) -> String {
    let article = match noun.starts_with(['a', 'e', 'i', 'o', 'u']) {
        true => "an",
        false => "a",
    };
    format!("{article} {noun}")
}

/// Returns a number of things: `1 lock`, `2 locks`.
pub(crate) fn counted<N: Display + From<u8> + PartialEq>(count: N, what: &str) -> String {
    let plural = if count == N::from(1) { "" } else { "s" };
    format!("{count} {what}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_utc() {
        for (seconds, date, time) in [
            (0, "1970-01-01", "00:00:00"),
            (951_782_399, "2000-02-28", "23:59:59"),
            (951_782_400, "2000-02-29", "00:00:00"),
            (1_709_251_199, "2024-02-29", "23:59:59"),
            (1_764_000_013, "2025-11-24", "16:00:13"),
            (4_107_542_400, "2100-03-01", "00:00:00"),
        ] {
            let at = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(utc(at), [date, time], "{seconds}");
        }
    }
}
