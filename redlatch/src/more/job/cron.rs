//! Cron expressions in a time zone.

use std::fmt;
use std::str::FromStr;
use std::time::SystemTime;

use croner::parser::{CronParser, Seconds, Year};
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};

use crate::error::{Error, Result};
use crate::more::once::Slot;

/// A cron expression in a time zone: when a job fires.
///
/// Five fields (minute, hour, day of the month, month, day of the week), or six with seconds before
/// them, or `@yearly`, `@monthly`, `@weekly`, `@daily`, `@hourly`. A field is `*`, a number or a
/// range, with `/n` for each nth, and lists of these; months and days of the week have names. 0 and
/// 7 are Sunday. Of two days (of the month and of the week), either one counts, unless one begins with
/// `*`: then both must match, as in cron.
/// Also `L`, `W` and `#`: `L` is the last day of the month, `15W` the working day closest to the
/// 15th, `FRI#2` the second Friday and `FRI#L` the last one.
///
/// The time zone is UTC unless [`in_tz`](Cron::in_tz) sets it. When the clocks go forward, an
/// expression with a single hour and minute that do not exist fires once, at the end of the gap. When
/// they go back, it fires once, at the first of the two times. One with several hours or minutes (`*`,
/// a step, a list or a range) fires by the time that passes: not in the gap, and at both of two times.
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// use std::time::{Duration, SystemTime};
/// use redlatch::job::Cron;
///
/// let nightly = Cron::parse("0 2 * * *")?.in_tz("Europe/Berlin")?;
/// let new_year = SystemTime::UNIX_EPOCH + Duration::from_secs(1_798_761_600); // 2027-01-01T00:00Z
/// let next = nightly.next_after(new_year).expect("there is always one");
/// assert_eq!(next, new_year + Duration::from_secs(3600));
/// assert!(Cron::parse("0 2 30 2 *").is_err()); // never
/// # Ok(()) }
/// ```
#[derive(Clone, PartialEq)]
pub struct Cron {
    text: String,
    pattern: croner::Cron,
    zone: TimeZone,
    zone_name: String,
}

/// The longest expression in bytes.
const MAX_TEXT: usize = 256;

impl Cron {
    /// Parses an expression, in UTC.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`], also if it never fires.
    pub fn parse(text: &str) -> Result<Cron> {
        let invalid = |reason: String| Error::InvalidSetting {
            setting: "cron",
            reason,
        };
        let text = text.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
        if text.len() > MAX_TEXT {
            let reason = format!("it has {} bytes; use up to {MAX_TEXT}", text.len());
            return Err(invalid(reason));
        }
        let fields = text.split(' ').filter(|field| !field.is_empty()).count();
        if !text.starts_with('@') && !(5..=6).contains(&fields) {
            let reason = format!("it has {fields} fields; use five, or six with seconds");
            return Err(invalid(reason));
        }
        // The parser takes an empty list for one that never fires, which it only finds out by trying all minutes until the year 5000.
        let shown = text.escape_debug();
        if text.split([' ', ',']).any(str::is_empty) {
            return Err(invalid(format!("`{shown}` has a list with an empty item")));
        }
        // The weekday is the last field, the day of the month the third from the end.
        let mut days = text.rsplit(' ').step_by(2).take(2);
        let parser = CronParser::builder()
            .dom_and_dow(days.any(|days| days.starts_with('*')))
            .seconds(Seconds::Optional)
            .year(Year::Disallowed)
            .build();
        let pattern = parser
            .parse(&text)
            .map_err(|error| invalid(format!("`{shown}`: {}", reason(&error))))?;
        let cron = Cron {
            pattern,
            zone: TimeZone::UTC,
            zone_name: "UTC".to_owned(),
            text: text.clone(),
        };
        match cron.next_after(SystemTime::UNIX_EPOCH) {
            Some(_) => Ok(cron),
            None => Err(invalid(format!("`{shown}` never fires"))),
        }
    }

    /// Sets the time zone, by its name in the database of IANA, such as `Europe/Berlin`. It is
    /// searched in the files of the system, and otherwise in those of this library.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] if there is no such zone.
    pub fn in_tz(mut self, name: &str) -> Result<Cron> {
        let found = TimeZone::get(name).ok();
        let known = found.filter(|zone| zone.iana_name().is_some() && !zone.is_unknown());
        let Some(zone) = known else {
            return Err(Error::InvalidSetting {
                setting: "time zone",
                reason: format!("`{}` is unknown", name.escape_debug()),
            });
        };
        zone.iana_name()
            .unwrap_or(name)
            .clone_into(&mut self.zone_name);
        self.zone = zone;
        Ok(self)
    }

    /// Returns the first firing after `time`. `None`: beyond the year 4999.
    pub fn next_after(&self, time: SystemTime) -> Option<SystemTime> {
        let found = self.pattern.find_next_occurrence(&self.at(time)?, false);
        Some(found.ok()?.timestamp().into())
    }

    /// Returns the latest firing until `time`, inclusive.
    pub fn latest_until(&self, time: SystemTime) -> Option<SystemTime> {
        // The pattern has whole seconds.
        let found = self.pattern.find_previous_occurrence(&self.at(time)?, true);
        Some(found.ok()?.timestamp().into())
    }

    /// Returns the expression.
    pub fn expression(&self) -> &str {
        &self.text
    }

    /// Returns the name of the time zone.
    pub fn tz(&self) -> &str {
        &self.zone_name
    }

    fn at(&self, time: SystemTime) -> Option<Zoned> {
        let time = Timestamp::try_from(time).ok()?;
        let seconds = Timestamp::from_second(time.as_second()).ok()?;
        Some(seconds.to_zoned(self.zone.clone()))
    }
}

/// Returns the reason without the words that each one begins with.
fn reason(error: &croner::errors::CronError) -> String {
    use croner::errors::CronError::{ComponentError, IllegalCharacters, InvalidPattern};
    match error {
        ComponentError(reason) | IllegalCharacters(reason) | InvalidPattern(reason) => {
            reason.trim_end_matches('.').to_owned()
        }
        other => other.to_string().trim_end_matches('.').to_owned(),
    }
}

/// In UTC.
impl FromStr for Cron {
    type Err = Error;

    fn from_str(text: &str) -> Result<Cron> {
        Cron::parse(text)
    }
}

/// The expression and the zone: `0 2 * * * (Europe/Berlin)`.
impl fmt::Display for Cron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.text, self.zone_name)
    }
}

impl fmt::Debug for Cron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cron({self})")
    }
}

impl Slot {
    /// Returns the slot of the firing of `cron` that is closest to `now`, named by its scheduled
    /// time in UTC, such as `2026-11-22T02:00:00Z`: for a program that has a scheduler of its own.
    /// The clocks of the machines may differ by up to half a period.
    ///
    /// ```
    /// # fn main() -> redlatch::Result<()> {
    /// use std::time::{Duration, SystemTime};
    /// use redlatch::{Slot, job::Cron};
    ///
    /// let hourly = Cron::parse("@hourly")?;
    /// let early = SystemTime::UNIX_EPOCH + Duration::from_secs(2 * 3600 - 1);
    /// assert_eq!(Slot::cron(&hourly, early), Slot::from("1970-01-01T02:00:00Z"));
    /// # Ok(()) }
    /// ```
    pub fn cron(cron: &Cron, now: SystemTime) -> Slot {
        let (before, after) = (cron.latest_until(now), cron.next_after(now));
        let distance = |time: SystemTime| match time.duration_since(now) {
            Ok(ahead) => ahead,
            Err(behind) => behind.duration(),
        };
        let nearest = before
            .into_iter()
            .chain(after)
            .min_by_key(|time| distance(*time));
        Slot::from(utc(nearest.unwrap_or(now)))
    }
}

/// Returns a time as text, in UTC and whole seconds.
pub(super) fn utc(time: SystemTime) -> String {
    let timestamp = Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH);
    let seconds = Timestamp::from_second(timestamp.as_second());
    seconds.unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}
