//! What the registry of clients says about holders and waiters, as text and in JSON.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redlatch::inspect::RegistryEntry;
use serde::Serialize;

use crate::show::whole_millis;

const DAY: u64 = 24 * 60 * 60;

/// A holder or waiter that is in the registry, in JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Registered {
    host: String,
    pid: u32,
    program: String,
    version: String,
    label: Option<String>,
    kind: String,
    since: String,
    age_ms: u64,
    note: Option<String>,
    /// For people.
    #[serde(skip)]
    pub(crate) text: String,
}

impl Registered {
    pub(crate) fn new(entry: &RegistryEntry) -> Registered {
        let client = &*entry.client;
        let since = SystemTime::now().checked_sub(entry.age);
        let since = since.unwrap_or(UNIX_EPOCH);
        let [date, time] = utc(since);
        Registered {
            host: client.host.clone(),
            pid: client.pid,
            program: client.program.clone(),
            version: client.version.clone(),
            label: client.label.clone(),
            kind: entry.kind.clone(),
            since: format!("{date}T{time}Z"),
            age_ms: whole_millis(entry.age),
            note: entry.note.clone(),
            text: text(entry),
        }
    }
}

/// Describes a holder or waiter: `report@db7 (pid 4711) since 02:00:13 UTC, "reindex 42"`.
pub(crate) fn text(entry: &RegistryEntry) -> String {
    let client = &entry.client;
    let since = SystemTime::now().checked_sub(entry.age);
    let [date, time] = utc(since.unwrap_or(UNIX_EPOCH));
    let date = match entry.age < Duration::from_secs(DAY) {
        true => String::new(),
        false => format!("{date} "),
    };
    let note = entry.note.as_ref();
    let note = note.map_or(String::new(), |note| format!(", \"{note}\""));
    format!("{client} since {date}{time} UTC{note}")
}

/// Returns the date and the time of the day.
pub(crate) fn utc(time: SystemTime) -> [String; 2] {
    let seconds = time
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let (days, second) = (seconds / DAY, seconds % DAY);
    // The days of the Gregorian calendar, counted in years that begin in March, so that a leap day is the last of its year:
    // Howard Hinnant, "chrono-compatible low-level date algorithms".
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
