//! Log events, compared with docs/logs.md.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Instant;

use redlatch_testkit::{Log, shared_sentinels};
use tracing::dispatcher::{self, Dispatch};
use tracing_subscriber::fmt::format::FmtSpan;

use crate::common;
use crate::common::prelude::*;

/// Returns a log of the events of this thread, which ends when the second value is dropped.
pub(crate) fn log() -> (Log, dispatcher::DefaultGuard) {
    log_with_spans(FmtSpan::NONE)
}

fn log_with_spans(spans: FmtSpan) -> (Log, dispatcher::DefaultGuard) {
    // `tracing` caches whether an event is logged. If there is only one subscriber, the first thread that logs the event decides this
    // for all, also if it has no subscriber itself. So there are always two.
    static SECOND: LazyLock<Dispatch> =
        LazyLock::new(|| Dispatch::new(tracing::subscriber::NoSubscriber::new()));
    LazyLock::force(&SECOND);
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_span_events(spans)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let guard = dispatcher::set_default(&Dispatch::new(subscriber));
    (log, guard)
}

/// Permits that will not be released any more are logged, unless the caller got an error.
#[tokio::test]
async fn possibly_lost_permits_are_logged() {
    let (log, _guard) = log();
    let warned = |name: &str, what: &str| {
        let lines = log.lines(&["WARN", name, what, "permits=2"]);
        !lines.is_empty()
    };
    let (server, proxy) = proxied_server();
    let direct = common::client(&server).await;
    let [hasty, client] = [SHORT, LONG].map(|timeout| Client::builder().response_timeout(timeout));
    let hasty = hasty.connect(&proxy.url()).await.unwrap();
    let client = client.connect(&proxy.url()).await.unwrap();
    let set = async |client: &Client, name: &str| {
        let same = direct.semaphore(name);
        same.try_set_permits(9).await.unwrap();
        // Loads the scripts, so that the unanswered request is the step itself.
        same.acquire().await.unwrap().release().await.unwrap();
        let semaphore = client.semaphore(name);
        // The client knows that its former connection was cut, and has another one.
        retry_transient(|| semaphore.available()).await;
        semaphore
    };

    // The caller got a timeout, and then the connection breaks.
    let semaphore = set(&hasty, "late-and-cut").await;
    proxy.lose_next_answer();
    let error = semaphore.acquire_many(2).await.unwrap_err();
    assert_matches!(error, Error::ResponseTimeout { .. });
    proxy.cut();
    within_limit("settled", hasty.flush()).await;
    assert!(warned("late-and-cut", "may have acquired"));

    // The caller dropped the request.
    let semaphore = set(&client, "dropped-and-cut").await;
    proxy.lose_next_answer();
    let acquiring = tokio::spawn(semaphore.acquire_many(2).into_future());
    wait_until_lost(&proxy).await;
    acquiring.abort();
    until("in the background", async || client.status().background > 0).await;
    proxy.cut();
    within_limit("settled", client.flush()).await;
    assert!(warned("dropped-and-cut", "may have acquired"));

    // The same for a release.
    let semaphore = set(&client, "given-and-cut").await;
    let permits = semaphore.acquire_many(2).await.unwrap();
    proxy.lose_next_answer();
    let releasing = tokio::spawn(permits.release());
    wait_until_lost(&proxy).await;
    releasing.abort();
    until("in the background", async || client.status().background > 0).await;
    proxy.cut();
    within_limit("settled", client.flush()).await;
    assert!(warned("given-and-cut", "may not have been released"));

    // A caller that gets the error itself needs no log.
    let semaphore = set(&client, "told").await;
    proxy.lose_next_answer();
    let acquiring = tokio::spawn(semaphore.acquire_many(2).into_future());
    wait_until_lost(&proxy).await;
    proxy.cut();
    assert_matches!(acquiring.await.unwrap(), Err(Error::OutcomeUnknown { .. }));
    assert!(!warned("told", ""));
}

/// The end of a runtime also ends its background work.
#[test]
fn permits_lost_with_a_runtime_are_logged() {
    let (log, _guard) = log();
    let (_server, proxy) = proxied_server();
    let subscriber = dispatcher::get_default(Clone::clone);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        // The threads end with the runtime.
        .on_thread_start(move || std::mem::forget(dispatcher::set_default(&subscriber)))
        .build()
        .unwrap();
    runtime.block_on(async {
        let client = client_at(&proxy.url()).await;
        let semaphore = client.semaphore("ended");
        semaphore.try_set_permits(9).await.unwrap();
        semaphore.acquire().await.unwrap().release().await.unwrap();
        proxy.lose_next_answer();
        let acquiring = tokio::spawn(semaphore.acquire().into_future());
        proxy.wait_until_lost();
        acquiring.abort();
        until("in the background", async || client.status().background > 0).await;
    });
    drop(runtime);
    let warned = log.lines(&["WARN", "ended", "may have acquired"]);
    assert!(!warned.is_empty(), "{}", log.text());
}

/// F26: dropping a guard never blocks, and a warning is logged if the lock could not be released.
/// The log also records the life of a lock, with name and owner, and never a password.
#[test]
fn failed_release_of_dropped_guard_is_logged() {
    let (log, _guard) = log();
    runtime().block_on(async {
        let mut server = Server::start_with(&["--requirepass", "sesame"]);
        let url = format!("redis://:sesame@127.0.0.1:{}", server.port());
        let client = connect(renewing().response_timeout(SHORT), &url).await;
        let guard = held(&client.lock("journal")).await;
        let owner = String::from(guard.owner_id());
        let (lock, wait) = (client.lock("journal"), Duration::from_millis(5));
        // On a busy machine the wait limit may pass before the waiter has its first answer.
        until("a waiter is answered", async || {
            assert!(retry_if_late(|| lock.try_lock().wait(wait)).await.is_none());
            log.text().contains("waiting")
        })
        .await;
        until("renewed", async || log.text().contains("renewed")).await;
        free(guard).await;
        let said = log.text();
        let of_a_hold = ["acquire", "acquired", "renewed", "released"];
        for word in of_a_hold.into_iter().chain(["waiting", "not acquired"]) {
            assert!(said.contains(word), "{word} is missing in\n{said}");
        }
        assert!(said.contains("journal") && said.contains(&owner), "{said}");

        let lock = client.lock("left");
        let guard = lock.lock().lease(SHORT).await.unwrap();
        let brief = client.lock("lost");
        let lost = retry_if_late(|| brief.lock().lease(Duration::from_millis(500))).await;
        server.kill();
        let begun = Instant::now();
        drop(guard);
        // Dropping does not block.
        assert_took(begun.elapsed(), ..SHORT - SECOND);
        within_limit("settled", client.flush()).await;
        within_limit("lost", lost.lost()).await;
    });
    let said = log.text();
    let failed = "release failed until the lease ended";
    assert!(!log.lines(&["WARN", failed, "left"]).is_empty(), "{said}");
    assert!(!log.lines(&["WARN", "lost"]).is_empty(), "{said}");
    assert!(!said.contains("sesame"), "{said}");
}

/// Once for each handle, until permits are set.
#[tokio::test]
async fn semaphore_without_permits_is_logged() {
    let (log, _guard) = log();
    let client = Client::embedded();
    let plain = client.semaphore("plain");
    let expirable = client.expirable_semaphore("expirable");
    let mut expected = 0;
    for _ in 0..2 {
        for _ in 0..3 {
            assert!(plain.try_acquire().await.unwrap().is_none());
            assert!(expirable.try_acquire().await.unwrap().is_none());
        }
        expected += 1;
        for name in ["plain", "expirable"] {
            let about = format!("semaphore=\"{name}\"");
            let warned = log.lines(&["WARN", "no permits are set", &about]);
            assert_eq!(warned.len(), expected, "{}", log.text());
        }
        plain.try_set_permits(1).await.unwrap();
        expirable.try_set_permits(1).await.unwrap();
        plain.acquire().await.unwrap().release().await.unwrap();
        expirable.acquire().await.unwrap().release().await.unwrap();
        assert!(plain.delete().await.unwrap() && expirable.delete().await.unwrap());
    }
}

/// The loss of one member is not reported as the loss of the RedLock.
#[tokio::test(start_paused = true)]
async fn losses_of_red_lock_and_its_members_differ() {
    let (log, _guard) = log();
    let clients = [(); 3].map(|()| Client::embedded());
    let lock = redlatch::RedLock::new(clients.each_ref().map(|client| client.lock("several")));
    let guard = held(&lock).await;
    clients[0].lock("several").force_unlock().await.unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    let about = |what: &'static str| log.lines(&[what, "lock=\"several\""]).len();
    let member = "a member of a RedLock was lost";
    assert_eq!([about(member), about(": lost ")], [1, 0], "{}", log.text());
    assert_eq!(about("a member of a RedLock was acquired again"), 1);
    for client in &clients[1..] {
        client.lock("several").force_unlock().await.unwrap();
    }
    guard.lost().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!([about(member), about(": lost ")], [3, 1], "{}", log.text());
}

/// However often connecting fails in the meantime.
#[tokio::test]
async fn lost_connection_and_its_return_are_logged_once() {
    let (log, _guard) = log();
    let mut server = Server::start_durable();
    let address = format!("127.0.0.1:{}", server.port());
    let client = connect(response_timeout(Duration::from_secs(1)), &server.url()).await;
    let lock = client.lock("lost-connection");
    assert!(!retry_if_late(|| lock.is_locked()).await);
    server.kill();
    for _ in 0..3 {
        lock.is_locked().await.unwrap_err();
    }
    let lost = log.lines(&["WARN", "the connection to the store was lost", &address]);
    assert_eq!(lost.len(), 1, "{lost:?}");
    let restored = "the connection to the store was restored";
    let back = ["INFO", restored, &address, "elapsed_ms="];
    assert_eq!(log.lines(&back).len(), 0);
    server.restart();
    retry_transient(|| lock.is_locked()).await;
    let logged = log.lines(&back);
    assert_eq!(logged.len(), 1, "{logged:?}");
    // Dropping a client is not logged as a lost connection.
    drop((client, lock));
    assert_eq!(log.lines(&["WARN", "was lost", &address]).len(), 1);
}

/// The client finds its master without that sentinel.
#[tokio::test]
async fn lost_connection_to_a_sentinel_is_not_logged_as_an_outage() {
    let (log, _guard) = log();
    let all = shared_sentinels();
    let proxy = Proxy::to_server(&all.sentinels()[0]);
    let address = format!("127.0.0.1:{}", proxy.port());
    let name = all.url().rsplit('/').next().unwrap().to_owned();
    let url = format!("redis+sentinel://{address}/{name}");
    let client = retry_transient(|| long_timeout().connect(&url)).await;
    proxy.cut();
    let logged = |text: &'static str| log.lines(&["INFO", text, &address]).len();
    until("the client has noticed both", async || {
        let texts = [
            "the connection to a sentinel was lost",
            "the connection to a sentinel was restored",
        ];
        texts.map(logged) == [1, 1]
    })
    .await;
    assert_eq!(log.lines(&["WARN"]).len(), 0, "{}", log.text());
    drop(client);
}

#[tokio::test]
async fn failed_renewal_names_its_locks() {
    let (log, _guard) = log();
    let server = Server::start();
    let client = connect(renewing(), &server.url()).await;
    let lock = client.lock("unrenewed");
    let guard = held(&lock).await;
    server.freeze();
    let words = [
        "WARN",
        "renewal failed; retrying",
        "holds=1",
        r#"locks="unrenewed""#,
    ];
    until("the renewal fails", async || !log.lines(&words).is_empty()).await;
    server.thaw();
    drop(guard);
}

/// Only for the first local waiter, and once.
#[tokio::test(start_paused = true)]
async fn long_wait_names_the_holder() {
    let (log, _guard) = log();
    let [holder, client] = embedded_clients();
    let guard = held(&holder.lock("busy-for-long")).await;
    let lock = client.lock("busy-for-long");
    let waiting = async |wait: u32| lock.try_lock().wait(wait * SECOND).await.unwrap();
    let words = ["WARN", "long wait for a lock", "busy-for-long"];
    assert!(waiting(29).await.is_none());
    assert_eq!(log.lines(&words).len(), 0);
    let (one, other) = tokio::join!(waiting(90), waiting(90));
    assert!(one.is_none() && other.is_none());
    let logged = log.lines(&words);
    assert_eq!(logged.len(), 1, "{logged:?}");
    let named = format!("holder=\"{}\"", guard.owner_id());
    for field in [&*named, "elapsed_ms=30", "remaining_ms="] {
        assert!(logged[0].contains(field), "{logged:?}");
    }

    // Another owner of the same client, which may be the same task.
    let same = holder.lock("busy-for-long");
    let waited = same.try_lock().wait(Duration::from_secs(90)).await;
    assert!(waited.unwrap().is_none());
    let words_of_own = [
        "WARN",
        "busy-for-long",
        "this client holds",
        "Guard::reenter",
    ];
    let logged = log.lines(&words_of_own);
    assert_eq!(logged.len(), 1, "{logged:?}");
    assert!(logged[0].contains(&named), "{logged:?}");

    // The same for a member of a multi-lock.
    let several = MultiLock::new([lock.clone(), client.lock("free-for-long")]);
    let waited = several.try_lock().wait(Duration::from_secs(90)).await;
    assert!(waited.unwrap().is_none());
    // Including the one of this client's own holder.
    assert_eq!(log.lines(&words).len(), 3);
}

/// A standby waits as long as the leader lives.
#[tokio::test(start_paused = true)]
async fn wait_for_an_election_is_not_reported() {
    let (log, _guard) = log();
    let [leader, standby] = embedded_clients();
    let _leads = leader.election("scheduler").campaign("a").await.unwrap();
    let election = standby.election("scheduler");
    let waiting = tokio::time::timeout(10 * LONG, election.campaign("b").into_future());
    assert!(waiting.await.is_err());
    assert_eq!(log.lines(&["long wait"]), Vec::<String>::new());
}

/// Otherwise staging and production would look the same.
#[tokio::test(start_paused = true)]
async fn names_in_events_have_the_prefix() {
    let (log, _guard) = log();
    let store = Embedded::new();
    let [client, other] = [(); 2].map(|()| {
        let settings = Client::builder().prefix("staging:").client_tracking(true);
        settings.connect_embedded(&store).unwrap()
    });
    let lock = client.lock("a");
    let guard = held(&lock).await;
    let waited = other.lock("a").try_lock().wait(Duration::from_secs(40));
    assert!(waited.await.unwrap().is_none(), "a long wait");
    other.lock("a").ask().await.unwrap();
    guard.asked().await;
    other.lock("a").force_unlock().await.unwrap();
    guard.lost().await;
    let several = MultiLock::new([client.lock("b"), client.lock("c")]);
    free(held(&several).await).await;
    drop(held(&client.group_lock("g", "v")).await);
    let ticket = held(&lock).await.into_ticket_for(LONG).await.unwrap();
    drop(lock.adopt(&ticket).await.unwrap());
    let _ = timeout(LONG, client.semaphore("s").acquire()).await;
    let _ = timeout(LONG, client.expirable_semaphore("e").acquire()).await;
    client.flush().await;
    let logged = log.text();
    let mut fields = 0;
    for field in ["lock=\"", "locks=\"", "semaphore=\"", "once=\""] {
        for value in logged.split(field).skip(1) {
            let value = value.split('"').next().unwrap_or_default();
            assert!(value.starts_with("staging:"), "{field}{value}");
            fields += 1;
        }
    }
    assert!(fields > 20, "{logged}");
}

/// Exchanges are in spans with the fields that OpenTelemetry names, behind that of the acquisition.
#[tokio::test]
async fn exchanges_are_spans_of_a_database_client() {
    let (log, _guard) = log_with_spans(FmtSpan::CLOSE);
    let client = Client::connect(&redlatch_testkit::shared().url()).await;
    let name = redlatch_testkit::unique("traced");
    let lock = client.unwrap().lock(&name);
    free(held(&lock).await).await;
    let fields = [
        "close",
        r#"otel.kind="client" otel.name="EVALSHA" db.system.name="redis" db.operation.name="EVALSHA""#,
        &format!(r#"db.operation.parameter.key="{name}""#),
    ];
    let spans = log.lines(&fields);
    assert!(spans.len() >= 2, "{}", log.text());
    assert!(spans[0].contains("acquire{lock="), "{spans:?}");
    assert!(!spans[1].contains("error.type"), "{spans:?}");
}

/// A log event: level, message and fields.
type Event = (String, String, BTreeSet<String>);

/// The table in the documentation lists exactly the events in the sources.
#[test]
fn all_events_are_documented() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = Vec::new();
    rust_files(&root.join("src"), &mut sources);
    let mut events: BTreeSet<Event> = BTreeSet::new();
    for path in sources {
        let source = std::fs::read_to_string(&path).unwrap();
        for level in ["error", "warn", "info", "debug", "trace"] {
            let call = format!("tracing::{level}!(");
            for (at, _) in source.match_indices(&call) {
                let (message, fields) = arguments(&source[at + call.len()..]);
                let message = message.unwrap_or_else(|| panic!("no message: {path:?}"));
                events.insert((level.to_uppercase(), message, fields));
            }
        }
    }
    let listed = |page: &str| -> BTreeSet<Event> {
        let page = std::fs::read_to_string(root.join(page)).unwrap();
        page.lines().filter_map(row).collect()
    };
    let documented = listed("../docs/logs.md");
    let most_important = listed("src/crate.md");
    assert!(!most_important.is_empty() && most_important.is_subset(&documented));
    let missing: Vec<_> = events.difference(&documented).collect();
    let superfluous: Vec<_> = documented.difference(&events).collect();
    assert!(missing.is_empty(), "not in docs/logs.md: {missing:#?}");
    let only_there = "only in docs/logs.md";
    assert!(superfluous.is_empty(), "{only_there}: {superfluous:#?}");
    assert!(events.len() > 20, "{}", events.len());
}

fn rust_files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

/// Parses `| level | message | fields | …`.
fn row(line: &str) -> Option<Event> {
    let mut cells = line.strip_prefix("| ")?.split('|').map(str::trim);
    let levels = ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"];
    let level = cells.next().filter(|level| levels.contains(level))?;
    let message = cells.next()?.to_owned();
    let fields = cells.next()?.split(", ").filter(|field| !field.is_empty());
    let fields = fields.map(str::to_owned).collect();
    Some((level.to_owned(), message, fields))
}

/// Returns the message and the field names of a macro call, given the text after its opening
/// parenthesis.
fn arguments(source: &str) -> (Option<String>, BTreeSet<String>) {
    let (mut message, mut fields) = (None, BTreeSet::new());
    let (mut depth, mut argument) = (0, String::new());
    let mut chars = source.chars();
    while let Some(c) = chars.next() {
        let ends = depth == 0 && matches!(c, ',' | ')');
        if !ends {
            argument.push(c);
        }
        match c {
            '"' => {
                while let Some(c) = chars.next() {
                    argument.push(c);
                    match c {
                        '"' => break,
                        '\\' => argument.extend(chars.next()),
                        _ => {}
                    }
                }
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if !ends => depth -= 1,
            _ => {}
        }
        if !ends {
            continue;
        }
        let text = std::mem::take(&mut argument);
        match text.trim() {
            "" => {}
            literal if literal.starts_with('"') => {
                // A line that continues in the next one.
                let mut parts = literal.trim_matches('"').split("\\\n");
                let first = parts.next().unwrap_or_default().to_owned();
                message = Some(parts.fold(first, |all, part| all + part.trim_start()));
            }
            field => {
                let name = field.split('=').next().unwrap_or_default();
                fields.insert(name.trim().trim_start_matches(['%', '?']).to_owned());
            }
        }
        if c == ')' {
            break;
        }
    }
    (message, fields)
}

/// A lock whose lease has ended is free, whether its release is answered or not.
#[tokio::test]
async fn release_after_the_lease_warns_of_nothing() {
    let (log, _guard) = log();
    let mut server = Server::start();
    let client = connect(response_timeout(Duration::from_millis(300)), &server.url()).await;
    let lock = client.lock("ended");
    let guard = retry_if_late(|| lock.lock().lease(Duration::from_millis(200))).await;
    server.kill();
    within_limit("the lease has ended", guard.lost()).await;
    drop(guard);
    within_limit("flushed", client.flush()).await;
    assert_eq!(client.status().background, 1, "it is tried again");
    assert_eq!(log.lines(&["WARN", "release failed"]), Vec::<String>::new());
}
