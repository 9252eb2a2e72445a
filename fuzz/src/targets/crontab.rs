//! Crontabs of the command.

use std::time::{Duration, SystemTime};

use crate::crontab::parse;

/// Reads a crontab. A wrong line is reported in one line. A job fires, later than any time, and then again.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    match parse(text) {
        Ok(jobs) => {
            for job in jobs {
                let mut last = SystemTime::UNIX_EPOCH + Duration::from_secs(1_798_700_000);
                for _ in 0..3 {
                    let Some(next) = job.cron.next_after(last) else {
                        break;
                    };
                    assert!(next > last, "{} {last:?}", job.cron);
                    assert_eq!(job.cron.latest_until(next), Some(next), "{}", job.cron);
                    last = next;
                }
            }
        }
        Err(wrong) => {
            let count = text.lines().count();
            for (number, reason) in wrong {
                assert!((1..=count).contains(&number), "{number}");
                assert!(!reason.is_empty() && !reason.contains('\n'), "{reason}");
            }
        }
    }
}
