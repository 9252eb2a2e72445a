//! The table of docs/feature-pairs.md, and the pairs of settings that are checked together.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use redlatch::kind::Revocable;
use redlatch::{Acquire, HasMinimum};
use tokio::time::Instant;

/// All features that can meet.
const FEATURES: [&str; 18] = [
    "re-entry",
    "fixed lease",
    "`at_least`",
    "`at_most`",
    "`fed_every`",
    "local handoff",
    "store handoff",
    "grant",
    "ticket",
    "adoption",
    "renewal of a ticket",
    "`ask`",
    "`revoke`",
    "election",
    "group values",
    "multi-lock",
    "RedLock",
    "`flush`",
];

/// Returns the names of all tests in Rust files below a folder.
fn tests_below(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            tests_below(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            names.extend(tests_in(&text).into_iter().map(str::to_owned));
        }
    }
}

/// Returns the names of the functions with a test attribute, or in the list of a macro that adds
/// it: `name,` or `name(3),`.
fn tests_in(text: &str) -> BTreeSet<&str> {
    let (mut listed, mut functions) = (BTreeSet::new(), Vec::new());
    let mut has_attribute = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with("#[") {
            has_attribute |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        } else if let Some((before, rest)) = line.split_once("fn ")
            && matches!(before, "" | "async " | "pub(super) async ")
            && let Some(end) = rest.find(['(', '<'])
        {
            functions.push((&rest[..end], std::mem::take(&mut has_attribute)));
        } else if !line.starts_with("//") {
            has_attribute = false;
            let name = line.strip_suffix(',').unwrap_or_default();
            listed.insert(name.split('(').next().unwrap_or_default());
        }
    }
    let is_test = |(name, has_attribute): &(&str, bool)| *has_attribute || listed.contains(name);
    let tests = functions.into_iter().filter(is_test);
    tests.map(|(name, _)| name).collect()
}

#[test]
fn only_functions_that_run_as_tests_are_tests() {
    let text = "
        on_every_store! {
            listed,
            listed_with_number(3),
        }
        #[test]
        fn plain() {
            helper(3),
        }
        #[tokio::test(start_paused = true)]
        // Why.
        async fn asynchronous() {}
        #[derive(Debug)]
        struct Other;
        async fn listed(store: TestStore) {}
        async fn listed_with_number<S>(stores: S) {}
        async fn unlisted(store: TestStore) {}
        #[inline]
        fn inlined() {}";
    let wanted = ["asynchronous", "listed", "listed_with_number", "plain"];
    assert_eq!(tests_in(text), BTreeSet::from(wanted));
}

/// Each pair is in the table once, with what must hold, and a test that exists or the reason why there is none.
#[test]
fn each_pair_has_a_test_or_a_reason() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let mut tests = BTreeSet::new();
    for folder in ["src", "tests"] {
        tests_below(&root.join(folder), &mut tests);
    }
    let page = std::fs::read_to_string(root.join("../docs/feature-pairs.md")).unwrap();
    let rows = page
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| one "));
    let mut pairs = BTreeMap::new();
    for row in rows {
        let cells: Vec<_> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [one, others, holds, check] = cells.as_slice() else {
            panic!("not four columns: {row}");
        };
        assert!(!holds.is_empty(), "{row}");
        match check.strip_prefix("none: ") {
            Some(reason) => assert!(!reason.is_empty(), "{row}"),
            None => {
                let named = check.split("`").skip(1).step_by(2);
                let named: Vec<_> = named
                    .map(|test| test.split(' ').next_back().unwrap())
                    .collect();
                assert!(!named.is_empty(), "no test and no reason: {row}");
                for test in named {
                    assert!(tests.contains(test), "there is no test {test}: {row}");
                }
            }
        }
        for other in others.split(", ") {
            for feature in [one, other] {
                assert!(FEATURES.contains(&feature), "{feature:?}: {row}");
            }
            let pair = BTreeSet::from([*one, other]);
            assert_eq!(pair.len(), 2, "{row}");
            assert!(pairs.insert(pair, row).is_none(), "twice: {one}, {other}");
        }
    }
    let all = FEATURES.iter().enumerate().flat_map(|(i, one)| {
        FEATURES[..i]
            .iter()
            .map(move |other| BTreeSet::from([*one, *other]))
    });
    let missing: Vec<_> = all.filter(|pair| !pairs.contains_key(pair)).collect();
    assert!(missing.is_empty(), "missing: {missing:?}");
}

/// What a request sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Setting {
    Lease,
    AtLeast,
    AtMost,
    FedEvery,
}
use Setting::{AtLeast, AtMost, FedEvery, Lease};

use crate::common::prelude::*;

/// What the holder, or another client, does ten seconds after the acquisition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// Nothing: the holder hangs.
    Hang,
    Unlock,
    /// It drops its guards, and waits until they are released.
    DropAndFlush,
    Ask,
    Revoke,
    Ticket,
    /// Another client adopts the ticket two seconds later, and releases it at once.
    Adopt,
}

/// The time of each setting in seconds. `at_least` ends after the limits, and before the lease.
fn seconds(setting: Setting) -> u64 {
    match setting {
        Lease => 40,
        AtLeast => 35,
        AtMost => 30,
        FedEvery => 25,
    }
}

/// Returns after how many seconds another owner acquires the lock, and how the guard was lost, if it was.
fn expected(settings: &[Setting], act: Act, is_reentered: bool) -> (Option<u64>, Option<Loss>) {
    let has = |setting| settings.contains(&setting);
    let length = |setting| Duration::from_secs(seconds(setting));
    // The watchdog renews a hold if any of its guards requires it.
    let is_renewed = !has(Lease) || is_reentered;
    let kept = if has(AtLeast) { seconds(AtLeast) } else { 0 };
    let at_limit = if has(FedEvery) {
        let limit = length(FedEvery);
        Some((seconds(FedEvery), Loss::NotFed { limit }))
    } else {
        let limit = length(AtMost);
        has(AtMost).then_some((seconds(AtMost), Loss::HeldTooLong { limit }))
    };
    let ends = match at_limit {
        Some((end, loss)) => (Some(end.max(kept)), Some(loss)),
        None if is_renewed => (None, None),
        None => (Some(seconds(Lease)), Some(Loss::LeaseEnded)),
    };
    match act {
        Act::Hang | Act::Ask => ends,
        Act::Unlock | Act::DropAndFlush => (Some(kept.max(10)), None),
        Act::Revoke => (Some(kept.max(15)), Some(Loss::Revoked)),
        // The owner has several guards, or a minimum time: it keeps them, and releases them.
        Act::Ticket | Act::Adopt if has(AtLeast) || is_reentered => (Some(kept.max(10)), None),
        // The rest of a fixed lease, or the lease of the watchdog, without the limits.
        Act::Ticket => (Some(40), None),
        Act::Adopt => (Some(12), None),
    }
}

fn with<R: HasMinimum>(request: Acquire<R>, setting: Setting) -> Acquire<R> {
    let length = Duration::from_secs(seconds(setting));
    match setting {
        Lease => request.lease(length),
        AtLeast => request.at_least(length),
        AtMost => request.at_most(length),
        FedEvery => request.fed_every(length),
    }
}

/// Acquires a lock with both settings, in one request or in two, and checks when a waiter of another client acquires it, and how
/// the guards end.
async fn check<K: HasTicket + Revocable>(
    clients: &[Client; 2],
    locks: [Lock<K>; 2],
    settings: [Setting; 2],
    act: Act,
    is_reentered: bool,
) where
    Lock<K>: HasMinimum,
{
    let case = format!("{settings:?}, {act:?}, re-entered: {is_reentered}");
    let [lock, other] = locks;
    let begun = Instant::now();
    let mut guards = Vec::new();
    if is_reentered {
        let outer = with(lock.lock(), settings[0]).await.unwrap();
        let inner = with(outer.reenter(), settings[1]).await.unwrap();
        guards.extend([outer, inner]);
    } else {
        let request = with(with(lock.lock(), settings[0]), settings[1]);
        guards.push(request.await.unwrap());
    }
    let waiting = other.lock().into_future();
    let waiter = tokio::spawn(async move {
        let guard = waiting.await.unwrap();
        let acquired_at = begun.elapsed();
        free(guard).await;
        acquired_at
    });
    let asked = tokio::spawn(guards[0].asked());
    sleep(10 * SECOND).await;
    match act {
        Act::Hang => {}
        Act::Unlock => {
            free_all(guards.drain(..)).await;
        }
        Act::DropAndFlush => {
            guards.clear();
            assert!(clients[0].flush_within(SECOND).await.is_empty(), "{case}");
        }
        Act::Ask => {
            assert!(other.ask().await.unwrap().is_some(), "{case}");
            sleep(SECOND).await;
            assert!(asked.is_finished(), "{case}");
        }
        Act::Revoke => {
            assert!(other.revoke(5 * SECOND).await.unwrap().is_some(), "{case}");
        }
        Act::Ticket | Act::Adopt => {
            let guard = guards.remove(0);
            match guard.into_ticket().await {
                Ok(ticket) if act == Act::Adopt => {
                    sleep(2 * SECOND).await;
                    free(other.adopt(&ticket).await.unwrap()).await;
                }
                Ok(_) => {}
                Err(error) => {
                    guards.extend(error.into_guard());
                    free_all(guards.drain(..)).await;
                }
            }
        }
    }
    let (free_after, loss) = expected(&settings, act, is_reentered);
    let acquired_at = tokio::time::timeout(120 * SECOND, waiter).await;
    match free_after.map(Duration::from_secs) {
        Some(free_after) => {
            let acquired_at = acquired_at.expect(&case).unwrap();
            let limits = free_after - SECOND / 10..free_after + SECOND;
            assert!(limits.contains(&acquired_at), "{case}: {acquired_at:?}");
        }
        None => assert!(acquired_at.is_err(), "{case}"),
    }
    for guard in guards {
        match (guard.unlock().await, loss) {
            (Err(Error::Lost { reason, .. }), Some(loss)) => assert_eq!(reason, loss, "{case}"),
            (unlocked, loss) => {
                assert!(unlocked.is_ok() && loss.is_none(), "{case}: {unlocked:?}");
            }
        }
    }
    asked.abort();
    for client in clients {
        client.flush().await;
        assert_eq!(client.status().background, 0, "{case}");
    }
}

/// Checks all pairs of settings of this kind of lock with all acts.
macro_rules! check_all_pairs {
    ($kind:ident) => {
        let acts = [
            Act::Hang,
            Act::Unlock,
            Act::DropAndFlush,
            Act::Ask,
            Act::Revoke,
            Act::Ticket,
            Act::Adopt,
        ];
        let settings = [Lease, AtLeast, AtMost, FedEvery];
        for (i, one) in settings.into_iter().enumerate() {
            for other in settings[i + 1..].iter().copied() {
                for (act, is_reentered) in
                    acts.into_iter().flat_map(|act| [(act, false), (act, true)])
                {
                    let store = Embedded::new();
                    let clients =
                        [(); 2].map(|()| Client::builder().connect_embedded(&store).unwrap());
                    let locks = clients.each_ref().map(|client| client.$kind("a"));
                    check(&clients, locks, [one, other], act, is_reentered).await;
                }
            }
        }
    };
}

#[tokio::test(start_paused = true)]
async fn settings_of_a_lock_meet_each_end() {
    check_all_pairs!(lock);
}

#[tokio::test(start_paused = true)]
async fn settings_of_a_fair_lock_meet_each_end() {
    check_all_pairs!(fair_lock);
}

#[tokio::test(start_paused = true)]
async fn settings_of_a_fenced_lock_meet_each_end() {
    check_all_pairs!(fenced_lock);
}

#[tokio::test(start_paused = true)]
async fn settings_of_a_spin_lock_meet_each_end() {
    check_all_pairs!(spin_lock);
}
