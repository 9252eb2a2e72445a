//! The load that a fault causes: connections and refused commands, as the servers count them.
//!
//! A client that repeats something without a pause makes thousands of them a second. The limits are far above what
//! clients need, and this process's own connections count, too.

use std::time::{Duration, Instant};

use redlatch_testkit::Server;

use crate::deployment::Deployment;

/// Limit of new connections per second, at all servers together.
const MAX_CONNECTIONS: u64 = 400;

/// Limit of error replies per second, at all servers together.
const MAX_ERRORS: u64 = 2000;

/// A burst at the begin and the end of a fault counts as this many seconds.
const BURST: Duration = Duration::from_secs(2);

/// The counters of one server: connections and error replies.
type Counters = [u64; 2];

/// The counters at the begin of a fault.
pub(crate) struct Load {
    begun: Instant,
    before: Vec<Counters>,
}

impl Load {
    pub(crate) fn begin(deployment: &dyn Deployment) -> Load {
        Load {
            begun: Instant::now(),
            before: all_counters(deployment),
        }
    }

    /// Returns what was more than it may be.
    pub(crate) fn check(&self, deployment: &dyn Deployment) -> Vec<String> {
        excess(
            &self.before,
            &all_counters(deployment),
            self.begun.elapsed(),
        )
    }
}

fn excess(before: &[Counters], after: &[Counters], elapsed: Duration) -> Vec<String> {
    let seconds = (elapsed + BURST).as_secs_f64();
    let limits = [
        ("connections", MAX_CONNECTIONS),
        ("error replies", MAX_ERRORS),
    ];
    let mut found = Vec::new();
    for (n, (what, limit)) in limits.into_iter().enumerate() {
        let increases = before.iter().zip(after).map(|(before, after)| {
            // A restarted server has begun to count anew.
            after[n].checked_sub(before[n]).unwrap_or(after[n])
        });
        let count: u64 = increases.sum();
        if count as f64 > limit as f64 * seconds {
            found.push(format!("{count} {what} in {} ms", elapsed.as_millis()));
        }
    }
    found
}

fn all_counters(deployment: &dyn Deployment) -> Vec<Counters> {
    deployment.servers().into_iter().map(counters).collect()
}

/// Returns the counters of a server; zero if it does not answer.
fn counters(server: &Server) -> Counters {
    let info: String = server.try_command(&["INFO", "stats"]).unwrap_or_default();
    ["total_connections_received:", "total_error_replies:"].map(|field| {
        let value = info.lines().find_map(|line| line.strip_prefix(field));
        value.map_or(0, |value| value.trim().parse().unwrap_or(0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_is_limited_per_second() {
        let second = Duration::from_secs(1);
        let at_most = [3 * MAX_CONNECTIONS, 3 * MAX_ERRORS];
        assert!(excess(&[[7, 9]], &[at_most], second).is_empty());
        let more = [at_most[0] + 8, at_most[1] + 10];
        let found = excess(&[[7, 9]], &[more], second);
        assert_eq!(found.len(), 2);
        assert!(excess(&[[7, 9]], &[more], 2 * second).is_empty());
        // Of several servers, and of one that was restarted.
        let two = excess(&[[7, 0], [9, 0]], &[[3, 0], [at_most[0] + 7, 0]], second);
        assert_eq!(two, [format!("{} connections in 1000 ms", at_most[0] + 1)]);
    }
}
