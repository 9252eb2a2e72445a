//! Fencing tokens: numbers of the store that only grow.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::counters::read_number;
use crate::keyspace::Keyspace;
use crate::lease::Lease;

/// Returns the current token, 0 if there is none. `None`: the key is no number.
pub(crate) fn read(keyspace: &mut Keyspace, key: &str) -> Option<i64> {
    let current = read_number(keyspace, key).ok()?;
    Some(current.unwrap_or_default())
}

/// The tokens of one name: where the latest one is stored, and how the next one is made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tokens<'a> {
    pub(crate) key: &'a str,
    /// `Some`: a token is at least the time by the clock, in µs since 1970, and the key expires so
    /// long after the clock has passed the token. `None`: tokens are counted up from 1 in a key
    /// that never expires.
    pub(crate) grace: Option<Lease>,
}

impl Tokens<'_> {
    /// Returns the next token. `None`: the key is no number, or the greatest.
    pub(crate) fn next(&self, keyspace: &mut Keyspace) -> Option<i64> {
        let next = read(keyspace, self.key)?.checked_add(1)?;
        let clock = self.grace.map(|_| keyspace.clock_micros());
        Some(next.max(clock.unwrap_or(next)))
    }

    /// Stores the next token.
    pub(crate) fn set(&self, keyspace: &mut Keyspace, token: i64) {
        let left = self.grace.map(|grace| {
            let ahead = unsigned(token.saturating_sub(keyspace.clock_micros()));
            Duration::from_millis(ahead / 1000) + grace.duration()
        });
        match keyspace.find(self.key) {
            // As INCR.
            Ok(Some(latest)) if left.is_none() => *latest.value = token,
            _ => keyspace.set(self.key, token, left),
        }
    }
}

/// Parses a number as the store writes it. Any other text is no number for INCR either.
pub(crate) fn parse_number(text: &str) -> Option<i64> {
    let number = text.parse().ok();
    number.filter(|number: &i64| number.to_string() == text)
}

pub(crate) const INVALID_EPOCH: &str = "its epoch is no number that can be counted up";

/// The fields of the latest term of an election.
pub(crate) type Term = BTreeMap<String, String>;

/// Parses the epoch of an election's term.
pub(crate) fn parse_epoch(text: &str) -> Option<i64> {
    parse_number(text).filter(|epoch| *epoch > 0)
}

/// Parses a token as the store writes it.
pub(crate) fn parse(text: &str) -> Option<u64> {
    parse_number(text).map(unsigned)
}

/// Converts a token. A negative one, which only another program can have set, counts as 0.
pub(crate) fn unsigned(token: i64) -> u64 {
    u64::try_from(token).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);
    const NOW: Duration = Duration::from_secs(1_800_000_000);

    /// Makes and stores the next token.
    fn acquire(keyspace: &mut Keyspace, grace: Option<Lease>) -> i64 {
        let tokens = Tokens { key: "t", grace };
        let next = tokens.next(keyspace).unwrap();
        tokens.set(keyspace, next);
        next
    }

    fn micros(time: Duration) -> i64 {
        time.as_micros() as i64
    }

    /// The key is lost or not, the time since its token, and how far the clock is set back then.
    #[test]
    fn token_is_not_repeated_unless_lost_and_clock_set_back_further_than_the_time_since() {
        let second = Duration::from_secs(1);
        for (is_lost, passed, back, grows) in [
            (false, second, Duration::ZERO, true),
            (false, second, 30 * DAY, true),
            (false, 2 * DAY, DAY, true),
            (true, second, Duration::ZERO, true),
            (true, 30 * second, 29 * second, true),
            (true, 30 * second, 31 * second, false),
            (true, 30 * DAY, 29 * DAY, true),
        ] {
            let mut keyspace = Keyspace::new(Instant::now());
            keyspace.set_clock(NOW);
            let first = acquire(&mut keyspace, Some(Lease::TOKEN_GRACE));
            assert_eq!(first, micros(NOW));
            keyspace.now += passed;
            if is_lost {
                keyspace.remove("t");
            }
            keyspace.set_clock(NOW + passed - back);
            let second = acquire(&mut keyspace, Some(Lease::TOKEN_GRACE));
            assert_eq!(second > first, grows, "{is_lost} {passed:?} {back:?}");
            let third = acquire(&mut keyspace, Some(Lease::TOKEN_GRACE));
            assert_eq!(third, second + 1);
        }
    }

    #[test]
    fn key_expires_a_day_after_clock_has_passed_its_token() {
        let grace = Some(Lease::TOKEN_GRACE);
        let hour = Duration::from_secs(3600);
        for (stored, left) in [
            (None, DAY),
            (Some(41), DAY),
            (Some(-7), DAY),
            (Some(micros(NOW) - 1), DAY),
            (Some(micros(NOW)), DAY),
            (Some(micros(NOW + hour)), DAY + hour),
        ] {
            let mut keyspace = Keyspace::new(Instant::now());
            keyspace.set_clock(NOW);
            if let Some(stored) = stored {
                keyspace.set("t", stored, None);
            }
            let token = acquire(&mut keyspace, grace);
            assert_eq!(token, micros(NOW).max(stored.unwrap_or(0) + 1));
            let expires = keyspace.remaining("t").unwrap();
            assert_eq!(expires.duration(), Some(left), "{stored:?}");
            // Counted up by a client that does not follow the clock.
            keyspace.now += hour;
            assert_eq!(acquire(&mut keyspace, None), token + 1);
            let expires = keyspace.remaining("t").unwrap();
            assert_eq!(expires.duration(), Some(left - hour));
        }
        let mut keyspace = Keyspace::new(Instant::now());
        keyspace.set("t", i64::MAX - 1, None);
        assert_eq!(acquire(&mut keyspace, grace), i64::MAX);
        assert!(Tokens { key: "t", grace }.next(&mut keyspace).is_none());
    }
}
