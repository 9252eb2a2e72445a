//! Compares the methods of the blocking API with those of the async API, by their names in the
//! source.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The names of the public methods, by type.
type Methods = BTreeMap<String, BTreeSet<String>>;

/// What only the async API has: `Client::with` replaces the builder, and a function cannot be
/// stopped as a future can (`Guard::run`, `Guard::run_until_asked`, `Leadership::run`).
const ONLY_ASYNC: &[(&str, &str)] = &[
    ("Acquire", "run_until_asked"),
    ("Client", "builder"),
    // See `NOT_WRAPPED`.
    ("Client", "job"),
    ("Client", "jobs"),
    // For the command.
    ("Client", "sentinel_reports"),
    ("Client", "server_reports"),
    ("Guard", "run"),
    ("Guard", "run_until_asked"),
    ("Leadership", "run"),
    ("Leadership", "run_until_asked"),
];

/// What only the blocking API has: what replaces `.await` and the builder, and the thread as the
/// owner. (`crate::Client::blocking` is a method of the async client. It is listed because its
/// source is in this folder.)
const ONLY_BLOCKING: &[(&str, &str)] = &[
    ("Acquire", "block"),
    ("Campaign", "block"),
    ("Client", "blocking"),
    ("Client", "with"),
    ("Client", "with_embedded"),
    ("Client", "with_redis"),
    ("Lock", "is_held_by_current_thread"),
    ("MultiLock", "is_held_by_current_thread"),
    ("OrBusy", "block"),
    ("RedLock", "is_held_by_current_thread"),
    ("TryAcquire", "block"),
    ("TrySetPermits", "block"),
    ("TryWait", "block"),
    ("Wait", "block"),
];

/// Types with async methods that the blocking API does not wrap: `Client::with` takes the builder,
/// `Listing`, `Observer` and `Watch` are iterators there, and threads need no scope. `Scheduled` runs
/// in a task, and a thread with a scheduler of its own uses `Slot::cron`.
const NOT_WRAPPED: &[&str] = &[
    "ClientBuilder",
    "Job",
    "Listing",
    "Observer",
    "Owner",
    "Scheduled",
    "Watch",
];

#[test]
fn both_apis_have_the_same_methods() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut of_async, mut of_blocking) = (Methods::new(), Methods::new());
    let mut awaits = BTreeSet::new();
    let mut files = vec![source.clone()];
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(
                std::fs::read_dir(&path)
                    .unwrap()
                    .map(|file| file.unwrap().path()),
            );
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let methods = match path.starts_with(source.join("blocking")) {
                true => &mut of_blocking,
                false => &mut of_async,
            };
            read_methods(
                &std::fs::read_to_string(path).unwrap(),
                methods,
                &mut awaits,
            );
        }
    }
    for wrapped in awaits
        .iter()
        .filter(|name| !NOT_WRAPPED.contains(&&***name))
    {
        assert!(
            of_blocking.contains_key(wrapped),
            "{wrapped} is not wrapped"
        );
    }
    let difference = |one: &Methods, other: &Methods| -> Vec<(String, String)> {
        let all = of_blocking.keys().flat_map(|name| {
            let methods = one.get(name).into_iter().flatten();
            methods.map(move |method| (name.clone(), method.clone()))
        });
        let is_missing = |(name, method): &(String, String)| {
            !other
                .get(name)
                .is_some_and(|methods| methods.contains(method))
        };
        all.filter(is_missing).collect()
    };
    let expected = |names: &[(&str, &str)]| -> Vec<(String, String)> {
        let owned = |(name, method): &(&str, &str)| (name.to_string(), method.to_string());
        names.iter().map(owned).collect()
    };
    assert_eq!(difference(&of_async, &of_blocking), expected(ONLY_ASYNC));
    assert_eq!(difference(&of_blocking, &of_async), expected(ONLY_BLOCKING));
    assert!(of_blocking.values().map(BTreeSet::len).sum::<usize>() > 100);
}

/// Adds the public methods in this source, and the types that have async ones.
fn read_methods(source: &str, methods: &mut Methods, awaits: &mut BTreeSet<String>) {
    let mut types: Vec<&str> = Vec::new();
    let mut end = String::new();
    for line in source.lines() {
        let code = line.trim_start();
        let indent = &line[..line.len() - code.len()];
        let forwarded = code.strip_prefix("forward! { [");
        if let Some(header) = forwarded.or_else(|| code.strip_prefix("impl")) {
            types = match header {
                " $lock {" => vec!["MultiLock", "RedLock"],
                _ if header.contains(" for ") => Vec::new(),
                _ => header.split(", [").map(type_name).collect(),
            };
            end = format!("{indent}}}");
        } else if line.starts_with(&end) {
            types.clear();
        }
        let mut words = code.split([' ', '(', '<']);
        let (is_async, name) = match [words.next(), words.next(), words.next(), words.next()] {
            [Some("pub"), Some("async"), Some("fn"), Some(name)] => (true, name),
            [Some("pub"), Some("fn"), Some(name), _] => (false, name),
            [Some("get" | "set" | "new" | "run"), Some(name), ..] if code.contains("(") => {
                (false, name)
            }
            _ => continue,
        };
        for of in &types {
            let of = (*of).to_owned();
            if is_async {
                awaits.insert(of.clone());
            }
            methods.entry(of).or_default().insert(name.to_owned());
        }
    }
}

/// Returns the name of the type in the header of an `impl`; for an alias, the name of what it
/// stands for.
fn type_name(header: &str) -> &str {
    let mut depth = 0;
    let after_generics = header.find(|c: char| {
        depth += i32::from(c == '<') - i32::from(c == '>');
        depth == 0 && c.is_alphabetic()
    });
    let header = &header[after_generics.unwrap_or(0)..];
    let header = header.strip_prefix("crate::").unwrap_or(header);
    let end = header
        .find(|c: char| !c.is_alphanumeric())
        .unwrap_or(header.len());
    match &header[..end] {
        "FairPermitGuard" | "MultiGuard" | "PermitGuard" | "RedGuard" | "SemaphorePermits" => {
            "Guard"
        }
        "FairLock" | "FairReadLock" | "FairWriteLock" | "FencedLock" | "ReadLock" | "SpinLock"
        | "WriteLock" => "Lock",
        other => other,
    }
}
