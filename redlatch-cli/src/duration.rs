//! Durations as parsed from the command line, and as displayed.

use std::time::Duration;

/// The longest duration that can be given, a thousand years: its sum with the present time is a
/// time. The library limits leases to ten years.
const LONGEST: Duration = Duration::from_secs(1000 * 365 * 24 * 60 * 60);

/// Parses a whole number and a unit: `300ms`, `2s`, `5m` or `5min`, `1h`, `1d`. A number alone is
/// in seconds, as in `sleep 5`.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let help = "use a whole number and a unit, such as 300ms, 2s, 5m, 1h or 1d";
    if text.starts_with('-') {
        return Err(format!("it cannot be negative; {help}"));
    }
    let unit_at = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let seconds_per = match unit {
        _ if number.is_empty() => return Err(help.into()),
        "ms" | "s" | "" => 1,
        "m" | "min" => 60,
        "h" => 60 * 60,
        "d" => 24 * 60 * 60,
        _ => return Err(help.into()),
    };
    let number: Option<u64> = number.parse().ok();
    let duration = match unit {
        "ms" => number.map(Duration::from_millis),
        _ => number
            .and_then(|number| number.checked_mul(seconds_per))
            .map(Duration::from_secs),
    };
    let duration = duration.filter(|duration| *duration <= LONGEST);
    duration.ok_or_else(|| "it is too long; use at most 365000d".into())
}

/// The shortest pause of a command that asks the store again and again.
const MIN_PAUSE: Duration = Duration::from_millis(100);

/// Parses a pause between two requests to the store.
pub(crate) fn parse_pause(text: &str) -> Result<Duration, String> {
    match parse(text)? {
        pause if pause < MIN_PAUSE => Err(format!("use at least {}", short(MIN_PAUSE))),
        pause => Ok(pause),
    }
}

/// Formats a duration for display: `850ms`, `29.2s`, `4m05s`, `3h20m`.
pub(crate) fn short(duration: Duration) -> String {
    let (millis, seconds) = (duration.as_millis(), duration.as_secs());
    match seconds {
        0 => format!("{millis}ms"),
        // Truncated, not rounded: a lease is never shown longer than it is.
        1..60 => format!("{seconds}.{}s", duration.subsec_millis() / 100),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}

/// Formats a duration for sentences, rounded up: `850 ms`, `24 s`, `4 min`, `3 h`.
pub(crate) fn rough(duration: Duration) -> String {
    let (number, unit) = match duration.as_millis() {
        millis @ 0..1_000 => (millis, "ms"),
        millis @ 1_000..120_000 => (millis.div_ceil(1_000), "s"),
        millis @ 120_000..7_200_000 => (millis.div_ceil(60_000), "min"),
        millis => (millis.div_ceil(3_600_000), "h"),
    };
    format!("{number} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_consist_of_number_and_unit() {
        for (text, millis) in [
            ("0s", 0),
            ("300ms", 300),
            ("2s", 2_000),
            ("5m", 300_000),
            ("1h", 3_600_000),
            ("007s", 7_000),
            ("5", 5_000),
            ("0", 0),
            ("5min", 300_000),
            ("5d", 432_000_000),
            ("365000d", 31_536_000_000_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn invalid_durations_are_rejected_with_a_reason() {
        for (text, reason) in [
            ("", "whole number"),
            ("s", "whole number"),
            ("-5s", "negative"),
            ("1.5s", "whole number"),
            ("5 s", "whole number"),
            (" 5s", "whole number"),
            ("5w", "whole number"),
            ("5mins", "whole number"),
            ("5S", "whole number"),
            ("1m30s", "whole number"),
            ("+5s", "whole number"),
            ("٣s", "whole number"),
            ("18446744073709551616s", "too long"),
            ("18446744073709551615h", "too long"),
            ("18446744073709551615", "too long"),
            ("31536000000001ms", "too long"),
            ("365001d", "at most 365000d"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn rough_durations_are_rounded_up() {
        for (millis, shown) in [
            (0, "0 ms"),
            (850, "850 ms"),
            (23_001, "24 s"),
            (120_000, "2 min"),
            (180_001, "4 min"),
            (7_200_001, "3 h"),
        ] {
            assert_eq!(rough(Duration::from_millis(millis)), shown);
        }
    }

    #[test]
    fn short_durations_are_truncated() {
        for (millis, shown) in [
            (0, "0ms"),
            (999, "999ms"),
            (29_999, "29.9s"),
            (60_000, "1m00s"),
            (245_000, "4m05s"),
            (12_000_000, "3h20m"),
        ] {
            assert_eq!(short(Duration::from_millis(millis)), shown);
        }
    }
}
