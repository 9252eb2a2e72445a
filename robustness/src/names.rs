//! Names of locks, `kind:number` each: the kind selects the handle that workers use.

use std::collections::BTreeSet;
use std::time::Duration;

use redlatch::job::{CatchUp, Overlap};

/// Kinds with leases. A `multi` is a multi-lock of three kinds, a `red` a RedLock of three locks, a
/// `group` has two values.
pub const KINDS: [&str; 12] = [
    "lock",
    "fair",
    "fenced",
    "rw",
    "permits",
    "spin",
    "multi",
    "red",
    "election",
    "group",
    "fair-rw",
    "fair-permits",
];

/// Kinds without leases: what they lose in an outage is lost for good. Only simulated runs use them.
pub const COUNTERS: [&str; 2] = ["semaphore", "latch"];

/// The kinds that owners shared by tasks, and threads, use, over few names. Only threads use `red`.
pub const OWNER_KINDS: [&str; 6] = ["fenced", "lock", "rw", "fair", "spin", "red"];

/// How a job runs. All processes use the same settings.
#[derive(Debug, Clone, Copy)]
pub struct JobSettings {
    /// Divides a minute.
    pub period: Duration,
    pub overlap: Overlap,
    pub catch_up: CatchUp,
    pub retries: u32,
    pub jitter: Duration,
    /// The longest time that its work takes.
    pub longest: Duration,
}

/// The settings of the jobs `job:0`, `job:1`, …
pub const JOBS: [JobSettings; 7] = {
    let (none, last) = (CatchUp::None, CatchUp::Last);
    [
        job(1_000, Overlap::Skip, none, 0, 0, 1_500),
        job(1_000, Overlap::Allow, last, 0, 300, 1_200),
        job(2_000, Overlap::Wait, last, 1, 100, 2_500),
        job(2_000, Overlap::Allow, none, 2, 0, 4_000),
        job(5_000, Overlap::Skip, last, 2, 0, 4_500),
        job(10_000, Overlap::Wait, none, 1, 0, 9_000),
        // Later slots are skipped while its runs last.
        job(5_000, Overlap::Skip, none, 2, 0, 8_000),
    ]
};

/// Times in milliseconds.
const fn job(
    period: u64,
    overlap: Overlap,
    catch_up: CatchUp,
    retries: u32,
    jitter: u64,
    longest: u64,
) -> JobSettings {
    JobSettings {
        period: Duration::from_millis(period),
        overlap,
        catch_up,
        retries,
        jitter: Duration::from_millis(jitter),
        longest: Duration::from_millis(longest),
    }
}

/// Returns the settings of a job by its name, or `None` if it is not a job.
pub fn job_settings(name: &str) -> Option<&'static JobSettings> {
    JOBS.get(name.strip_prefix("job:")?.parse::<usize>().ok()?)
}

/// Returns the names of the jobs whose settings these are.
pub fn jobs(mut fits: impl FnMut(&JobSettings) -> bool) -> Vec<String> {
    let numbers = (0..JOBS.len()).filter(|number| fits(&JOBS[*number]));
    numbers.map(|number| format!("job:{number}")).collect()
}

/// Returns whether waiters for a name are served from a queue in the store, which waits for those that died.
pub(crate) fn has_queue(name: &str) -> bool {
    name.starts_with("fair") || name.starts_with("election")
}

/// Returns whether the tokens of a lock follow the clock of the server.
pub(crate) fn follows_clock(name: &str) -> bool {
    name == "fenced:0"
}

/// Returns the names of the locks that are acquired for a name: itself, or the members of a
/// multi-lock or a RedLock, or the values of a group. Two multi-locks share members, with each
/// other and with tasks that use these alone.
pub fn locks_of(name: &str) -> Vec<String> {
    match name.split_once(':') {
        Some(("red", number)) => (0..3).map(|one| format!("lock:{number}.{one}")).collect(),
        Some(("group", number)) if !number.contains('.') => {
            (0..2).map(|value| format!("{name}.{value}")).collect()
        }
        Some(("multi", number)) => {
            let half = number.parse().unwrap_or(0) / 2;
            vec![
                format!("lock:{number}"),
                format!("fair:{half}"),
                format!("rw:{half}"),
            ]
        }
        _ => vec![name.to_owned()],
    }
}

/// Returns the key of a lock. The values of a group have one.
pub(crate) fn key_of(name: &str) -> &str {
    match name.split_once('.') {
        Some((group, _)) if name.starts_with("group:") => group,
        _ => name,
    }
}

/// Returns the locks that are requested together for a name, all or none. A RedLock does not need
/// all.
pub(crate) fn members_of(name: &str) -> Vec<String> {
    let mut members = locks_of(name);
    members.retain(|member| member != name && !name.starts_with("red:"));
    members
}

/// Returns the names of all locks that are acquired for these names, each once.
pub fn locks_of_all<'a>(names: impl Iterator<Item = &'a String>) -> Vec<String> {
    let locks: BTreeSet<String> = names.flat_map(|name| locks_of(name)).collect();
    locks.into_iter().collect()
}

/// Returns the names of the jobs for runs on a real clock: a busy machine may delay a slot by a second.
pub(crate) fn slow_jobs() -> Vec<String> {
    jobs(|job| job.period > Duration::from_secs(1))
}

/// Returns this many names, of all kinds in turn.
pub(crate) fn names(many: usize) -> Vec<String> {
    let kinds = KINDS.iter().cycle().take(many).enumerate();
    // The members of a multi-lock have its number, or half of it as theirs.
    kinds
        .map(|(number, kind)| format!("{kind}:{}", number / KINDS.len()))
        .collect()
}

/// Returns this many names for owners that several tasks share, and for threads: few, so that they compete.
pub(crate) fn contended_names(many: usize) -> Vec<String> {
    let kinds = OWNER_KINDS.iter().cycle().take(many).enumerate();
    kinds
        .map(|(number, kind)| format!("{kind}:contended-{number}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_group_have_one_key() {
        let keys: Vec<String> = locks_of("group:3")
            .iter()
            .map(|name| key_of(name).to_owned())
            .collect();
        assert_eq!(keys, ["group:3", "group:3"]);
        assert_eq!(key_of("lock:0.1"), "lock:0.1");
    }
}
