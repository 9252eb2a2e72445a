//! `redlatch doctor`: tries on the store what each feature needs, and says what to change.
//!
//! What a server can do is what it has shown: each feature is used as programs use it, by two
//! clients, on names of its own.

use std::collections::BTreeMap;
use std::time::Duration;

use redlatch::{Client, Error, MultiLock, ReplicaSync, SentinelReport, ServerReport};
use serde::Serialize;
use tokio::time::{Instant, sleep, timeout};

use crate::args::Doctor;
use crate::exit::{self, Failure};
use crate::output::stdout;
use crate::process::signals::Signals;
use crate::store;
use crate::store::args::StoreArgs;

/// The lease of each lock that a check holds: it ends if this program dies.
const LEASE: Duration = Duration::from_secs(10);

/// Time limit of each check.
const LIMIT: Duration = Duration::from_secs(10);

/// The lease of the lock that the other client waits for. A waiter that receives no message tries
/// again when it ends.
const FALLBACK: Duration = Duration::from_secs(3);

/// The lease of holds that the watchdog renews here.
const RENEWED_LEASE: Duration = Duration::from_secs(2);

/// How far the clock of a server may be off without a note.
const CLOCK_DISTANCE_MILLIS: u64 = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    /// Works, and has a limit that everyone should know.
    Note,
    /// Works less well.
    Degraded,
    Failed,
}

/// The result of one check.
#[derive(Debug, Serialize)]
struct Row {
    check: String,
    state: State,
    #[serde(skip_serializing_if = "String::is_empty")]
    detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    change: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    store: String,
    servers: Vec<Server>,
    checks: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Server {
    address: String,
    /// `None`: the server does not tell.
    version: Option<String>,
    round_trip_us: u64,
    clock_ahead_ms: Option<i64>,
    replicas: Option<usize>,
}

pub(crate) async fn doctor(store_args: &StoreArgs, doctor: &Doctor) -> Result<u8, Failure> {
    let settings = || {
        let settings = Client::builder().watchdog_lease(LEASE);
        // Whether replicas confirm anything is a check of its own.
        settings.replica_sync(ReplicaSync::Off)
    };
    let mut signals = Signals::catch_ending()?;
    let mut store_args = store_args.clone();
    let sync = store_args.replicas.take().unwrap_or_default();
    let connecting = async {
        let renewing = settings().watchdog_lease(RENEWED_LEASE);
        Ok::<_, Failure>([
            store::connect(&store_args, settings()).await?,
            store::connect(&store_args, settings()).await?,
            store::connect(&store_args, renewing).await?,
        ])
    };
    let clients = tokio::select! {
        biased;
        code = signals.next_end() => return Ok(code),
        connected = connecting => connected?,
    };
    let code = tokio::select! {
        biased;
        code = signals.next_end() => code,
        code = check(&store_args, &clients, sync, doctor) => return code,
    };
    let cleaning = async {
        // Otherwise a step in flight could arrive after the deletion.
        flush(&clients).await;
        attempt("clean-up", clean_up(&clients[0])).await
    };
    tokio::select! {
        biased;
        _ = signals.next_end() => {}
        _ = cleaning => {}
    }
    Ok(code)
}

/// Makes all checks, and prints what they found. Returns the exit code.
async fn check(
    store_args: &StoreArgs,
    clients: &[Client; 3],
    sync: ReplicaSync,
    doctor: &Doctor,
) -> Result<u8, Failure> {
    let [one, other, renewing] = clients;
    let mut checks = features(one, other, renewing).await;
    let servers = match one.server_reports().await {
        Ok(servers) => servers,
        Err(error) => {
            checks.push(Row::failed("servers", &error));
            Vec::new()
        }
    };
    for server in &servers {
        checks.extend(server_checks(server));
    }
    let sentinel_reports = one.sentinel_reports().await.unwrap_or_default();
    checks.extend(sentinels(&sentinel_reports));
    let has_sentinels = !sentinel_reports.is_empty();
    checks.push(replicas(store_args, &servers, sync, has_sentinels).await);
    flush(clients).await;
    let report = Report {
        store: store::shown_url(store_args)?,
        servers: servers.iter().map(Server::new).collect(),
        checks,
    };
    if doctor.json {
        stdout::json(&[&report]).await?;
    } else {
        stdout::lines(report.lines()).await?;
    }
    let is = |state| report.checks.iter().any(|row| row.state == state);
    // Nothing works without the first one.
    Ok(match report.checks.first() {
        Some(lock) if lock.state == State::Failed => exit::UNAVAILABLE,
        _ if is(State::Failed) || is(State::Degraded) => exit::DEGRADED,
        _ => exit::OK,
    })
}

async fn flush(clients: &[Client]) {
    for client in clients {
        store::flush(client).await;
    }
}

impl Report {
    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for server in &self.servers {
            lines.push(server.line());
        }
        for row in &self.checks {
            let state = match row.state {
                State::Ok => "ok",
                State::Note => "note",
                State::Degraded => "degraded",
                State::Failed => "failed",
            };
            let line = format!("{state:<9} {:<22} {}", row.check, row.detail);
            lines.push(line.trim_end().to_owned());
            if let Some(change) = &row.change {
                lines.push(format!("{:<9} {:<22} change: {change}", "", ""));
            }
        }
        lines
    }
}

impl Server {
    fn new(report: &ServerReport) -> Server {
        let version = report.info.as_ref().ok().and_then(|info| {
            let version =
                |name: &str| Some(format!("{name} {}", info.get(&format!("{name}_version"))?));
            version("valkey").or_else(|| version("redis"))
        });
        Server {
            address: report.address.clone(),
            version,
            round_trip_us: u64::try_from(report.round_trip.as_micros()).unwrap_or(u64::MAX),
            clock_ahead_ms: report.clock_ahead_millis.as_ref().ok().copied(),
            replicas: report.replicas.as_ref().ok().copied(),
        }
    }

    fn line(&self) -> String {
        let version = self.version.as_deref().unwrap_or("unknown version");
        let (address, micros) = (&self.address, self.round_trip_us);
        format!("{address}: {version}, round trip {micros} µs")
    }
}

impl Row {
    fn new(check: impl Into<String>, state: State, detail: impl Into<String>) -> Row {
        Row {
            check: check.into(),
            state,
            detail: detail.into(),
            change: None,
        }
    }

    fn change(mut self, change: impl Into<String>) -> Row {
        self.change = Some(change.into());
        self
    }

    fn failed(check: impl Into<String>, error: &Error) -> Row {
        Row::new(check, State::Failed, error.to_string())
    }
}

/// Uses the main features.
async fn features(one: &Client, other: &Client, renewing: &Client) -> Vec<Row> {
    let mut rows = vec![attempt("lock", lock(one)).await];
    if rows[0].state == State::Failed {
        return rows;
    }
    let renewed = async {
        match renewal(renewing).await {
            // A busy machine may have renewed too late.
            Err(Error::Lost { .. }) => renewal(renewing).await,
            renewed => renewed,
        }
    };
    rows.push(attempt("renewal", renewed).await);
    rows.push(waiting(one, other).await);
    rows.push(attempt("fair lock", fair_lock(one, other)).await);
    rows.push(attempt("read-write lock", read_write_lock(one, other)).await);
    rows.push(attempt("fenced lock", fenced_lock(one)).await);
    rows.push(attempt("multi-lock", multi_lock(one)).await);
    rows.push(attempt("semaphore", semaphore(one)).await);
    rows.push(attempt("expirable semaphore", expirable_semaphore(one)).await);
    rows.push(attempt("count-down latch", latch(one)).await);
    rows.push(attempt("election", election(one)).await);
    rows.push(attempt("ticket", ticket(one, other)).await);
    rows.push(listing(one).await);
    rows.push(registry(one).await);
    rows.push(attempt("clean-up", clean_up(one)).await);
    rows
}

/// Makes a check that does what it checks, or fails.
async fn attempt(check: &str, work: impl Future<Output = redlatch::Result<()>>) -> Row {
    measure(check, work, |()| Row::new(check, State::Ok, "")).await
}

/// Makes a check within its time limit. `judge` returns the row for what it found.
async fn measure<T>(
    check: &str,
    work: impl Future<Output = redlatch::Result<T>>,
    judge: impl FnOnce(T) -> Row,
) -> Row {
    match timeout(LIMIT, work).await {
        Ok(Ok(found)) => judge(found),
        Ok(Err(error)) => Row::failed(check, &error),
        Err(_) => Row::new(check, State::Failed, not_done()),
    }
}

/// Returns what a row says of a check that has reached its time limit.
fn not_done() -> String {
    format!("not done within {LIMIT:?}")
}

/// Returns a name that no other program uses.
fn name(client: &Client, what: &str) -> String {
    format!("redlatch-doctor:{}:{what}", client.id())
}

async fn lock(client: &Client) -> redlatch::Result<()> {
    let lock = client.lock(&name(client, "lock"));
    let guard = lock.lock().await?;
    guard.reenter().await?.unlock().await?;
    lock.is_locked().await?;
    guard.unlock().await
}

/// Several at once: they are renewed together.
async fn renewal(client: &Client) -> redlatch::Result<()> {
    let mut guards = Vec::new();
    for n in 0..5 {
        guards.push(
            client
                .lock(&name(client, &format!("renewal-{n}")))
                .lock()
                .await?,
        );
    }
    sleep(RENEWED_LEASE * 3 / 2).await;
    for guard in guards {
        guard.unlock().await?;
    }
    Ok(())
}

/// Waits with the other client until the first one releases the lock.
async fn waiting(one: &Client, other: &Client) -> Row {
    let check = "waiting";
    let passed_on = async {
        let name = name(one, "waiting");
        let held = one.lock(&name).lock().lease(FALLBACK).await?;
        let lock = other.lock(&name);
        let waiting = lock.lock();
        let release = async {
            while other.status().subscriptions == 0 {
                sleep(Duration::from_millis(5)).await;
            }
            // It has subscribed then, and tried again.
            sleep(FALLBACK / 6).await;
            let released = Instant::now();
            held.unlock().await?;
            Ok::<_, Error>(released)
        };
        let acquire = async {
            let guard = waiting.await?;
            Ok::<_, Error>((guard, Instant::now()))
        };
        let ((guard, acquired), released) = tokio::try_join!(acquire, release)?;
        guard.unlock().await?;
        Ok::<_, Error>(acquired.saturating_duration_since(released))
    };
    let judge = |after: Duration| match after < FALLBACK / 2 {
        true => {
            let detail = format!("{} µs after the release", after.as_micros());
            Row::new(check, State::Ok, detail)
        }
        false => {
            let detail = format!("messages do not arrive: {after:?} after the release");
            let row = Row::new(check, State::Degraded, detail);
            row.change("find out what loses messages between PUBLISH in a script and a subscriber: a proxy, or ACL rules for channels")
        }
    };
    measure(check, passed_on, judge).await
}

async fn fair_lock(one: &Client, other: &Client) -> redlatch::Result<()> {
    let name = name(one, "fair");
    let held = one.fair_lock(&name).lock().await?;
    let lock = other.fair_lock(&name);
    let release = async {
        while one.fair_lock(&name).queue().await?.is_empty() {
            sleep(Duration::from_millis(5)).await;
        }
        held.unlock().await
    };
    let (next, ()) = tokio::try_join!(async { lock.lock().await }, release)?;
    next.unlock().await
}

async fn read_write_lock(one: &Client, other: &Client) -> redlatch::Result<()> {
    let name = name(one, "read-write");
    let [read, other_read] = [one, other].map(|client| client.read_write_lock(&name).read());
    let (first, second) = (read.lock().await?, other_read.lock().await?);
    first.unlock().await?;
    second.unlock().await?;
    let write = one.read_write_lock(&name).write();
    write.lock().await?.unlock().await
}

async fn fenced_lock(client: &Client) -> redlatch::Result<()> {
    let lock = client.fenced_lock(&name(client, "fenced"));
    lock.lock().await?.unlock().await
}

async fn multi_lock(client: &Client) -> redlatch::Result<()> {
    let names = [1, 2, 3].map(|n| name(client, &format!("multi-{n}")));
    let locks = names.iter().map(|name| client.lock(name));
    MultiLock::new(locks).lock().await?.unlock().await
}

async fn semaphore(client: &Client) -> redlatch::Result<()> {
    let semaphore = client.semaphore(&name(client, "semaphore"));
    semaphore.try_set_permits(1).await?;
    semaphore.acquire().await?.release().await
}

async fn expirable_semaphore(client: &Client) -> redlatch::Result<()> {
    let semaphore = client.expirable_semaphore(&name(client, "expirable"));
    semaphore.try_set_permits(1).await?;
    semaphore.acquire().await?.release().await
}

async fn latch(client: &Client) -> redlatch::Result<()> {
    let latch = client.count_down_latch(&name(client, "latch"));
    latch.try_set_count(1).await?;
    latch.count_down().await.map(drop)
}

async fn election(client: &Client) -> redlatch::Result<()> {
    let election = client.election(&name(client, "election"));
    let leadership = election.campaign("doctor").await?;
    election.leader().await?;
    leadership.resign().await
}

async fn ticket(one: &Client, other: &Client) -> redlatch::Result<()> {
    let guard = one.lock(&name(one, "ticket")).lock().await?;
    let ticket = guard.into_ticket().await;
    let ticket = ticket.map_err(redlatch::IntoTicketError::into_error)?;
    other.lock(ticket.name()).unlock_ticket(&ticket).await
}

/// Looks for a lock that is held among all keys.
async fn listing(client: &Client) -> Row {
    let check = "list and inspect";
    let name = name(client, "listed");
    let listed = async {
        let guard = client.lock(&name).lock().await?;
        let mut listing = client.list(&name);
        let found = listing.next().await?.is_some() && client.inspect(&name).await?.is_some();
        guard.unlock().await?;
        Ok::<_, Error>(found)
    };
    match timeout(LIMIT, listed).await {
        Ok(Ok(true)) => Row::new(check, State::Ok, ""),
        Ok(Ok(false)) => Row::new(check, State::Failed, "a lock that was held was not found"),
        Ok(Err(error)) => Row::failed(check, &error),
        Err(_) => {
            let detail = format!("{}; the database may have many keys", not_done());
            Row::new(check, State::Degraded, detail)
        }
    }
}

/// Looks up who holds a lock.
async fn registry(client: &Client) -> Row {
    let check = "who holds a lock";
    let name = name(client, "registered");
    let registered = async {
        let guard = client.lock(&name).lock().await?;
        let begun = Instant::now();
        // Holds of less than a second are not registered.
        let found = loop {
            let state = client.inspect(&name).await?;
            let holders = state.as_ref().map(|state| state.holders());
            let mut holders = holders.into_iter().flatten();
            let found = holders.any(|holder| holder.registered.is_some());
            if found || begun.elapsed() > LIMIT / 2 {
                break found;
            }
            sleep(Duration::from_millis(200)).await;
        };
        guard.unlock().await?;
        Ok::<_, Error>(found)
    };
    let judge = |found| match found {
        true => Row::new(check, State::Ok, ""),
        false => {
            let detail = "only owners are known, not their programs";
            let row = Row::new(check, State::Degraded, detail);
            row.change("give the user the keys redlatch_client:* (docs/security.md)")
        }
    };
    measure(check, registered, judge).await
}

/// Deletes what the checks have made and does not expire.
async fn clean_up(client: &Client) -> redlatch::Result<()> {
    let name = |what| name(client, what);
    let [fenced, election] = ["fenced", "election"].map(|what| client.fenced_lock(&name(what)));
    let semaphore = client.semaphore(&name("semaphore"));
    let expirable = client.expirable_semaphore(&name("expirable"));
    let latch = client.count_down_latch(&name("latch"));
    let deleted = tokio::join!(
        fenced.delete_token(),
        election.delete_token(),
        semaphore.delete(),
        expirable.delete(),
        latch.delete(),
    );
    let (fenced, election, semaphore, expirable, latch) = deleted;
    fenced
        .and(election)
        .and(semaphore)
        .and(expirable)
        .and(latch)
        .map(drop)
}

/// Checks what a server says about itself.
fn server_checks(server: &ServerReport) -> Vec<Row> {
    let mut rows = Vec::new();
    let at = |check: &str| format!("{check} {}", server.address);
    let info = match &server.info {
        Ok(info) => info,
        Err(error) => {
            let detail = format!("unknown: {error}");
            rows.push(Row::new(at("settings of"), State::Note, detail));
            return rows;
        }
    };
    rows.push(eviction(at("eviction at"), info));
    if field(info, "aof_enabled") == Some("0") {
        let detail = "the server may lose locks when it restarts (appendonly no)";
        rows.push(Row::new(at("restarts of"), State::Note, detail));
    }
    if let Some([commands, keys]) = &server.default_user
        && !(commands.starts_with("+@all") && keys == "~*")
    {
        let detail = "a restart may lose locks: Redis 7.0 reads its append-only file as the default user, whose rights are too few";
        let row = Row::new(at("restarts of"), State::Degraded, detail);
        rows.push(row.change("user default off resetpass ~* &* +@all (docs/security.md)"));
    }
    match server.clock_ahead_millis {
        Ok(ahead) if ahead.unsigned_abs() > CLOCK_DISTANCE_MILLIS => {
            let direction = if ahead > 0 { "ahead of" } else { "behind" };
            let detail = format!("{} ms {direction} this machine", ahead.unsigned_abs());
            let row = Row::new(at("clock of"), State::Note, detail);
            rows.push(row.change("synchronize the clocks (NTP): slots of jobs are named by them"));
        }
        _ => {}
    }
    rows
}

fn eviction(check: String, info: &BTreeMap<String, String>) -> Row {
    let (limit, policy) = (field(info, "maxmemory"), field(info, "maxmemory_policy"));
    match (limit, policy) {
        (None, None) => Row::new(check, State::Note, "unknown: the server does not tell"),
        (Some("0"), _) | (_, Some("noeviction")) => Row::new(check, State::Ok, "no key is evicted"),
        (_, policy) => {
            let policy = policy.unwrap_or("unknown");
            let detail =
                format!("locks are deleted while they are held when memory is full ({policy})");
            Row::new(check, State::Degraded, detail).change("maxmemory-policy noeviction")
        }
    }
}

fn field<'a>(info: &'a BTreeMap<String, String>, name: &str) -> Option<&'a str> {
    info.get(name).map(String::as_str)
}

/// Checks that all sentinels, if there are any, answer and name the same master.
fn sentinels(reports: &[SentinelReport]) -> Option<Row> {
    let named = reports
        .iter()
        .filter_map(|it| it.master.as_ref().ok()?.as_deref());
    let votes = |master: &str| named.clone().filter(|other| *other == master).count();
    let master = named.clone().max_by_key(|master| votes(master))?;
    let differs = reports.iter().filter_map(
        |SentinelReport {
             address,
             master: theirs,
         }| match theirs {
            Ok(Some(theirs)) if theirs == master => None,
            Ok(Some(other)) => Some(format!("{address} names {other}")),
            Ok(None) => Some(format!("{address} knows no master of this name")),
            // It begins with the address.
            Err(Error::Unavailable { reason, .. }) if reason.starts_with(&**address) => {
                Some(reason.clone())
            }
            Err(error) => Some(format!("{address}: {error}")),
        },
    );
    let differs: Vec<String> = differs.collect();
    let (agreeing, all) = (reports.len() - differs.len(), reports.len());
    let detail = format!("{agreeing} of {all} answer and agree on master {master}");
    let check = "sentinels";
    Some(match differs.is_empty() {
        true => Row::new(check, State::Ok, detail),
        false => {
            let detail = format!("{detail}; {}", differs.join("; "));
            Row::new(check, State::Degraded, detail).change(
                "repair these sentinels, or correct the URL: a failover, and a client that follows it, need most of them",
            )
        }
    })
}

/// Checks that as many replicas confirm an acquisition as `sync` requires, and that sentinels have a replica to promote.
async fn replicas(
    store_args: &StoreArgs,
    servers: &[ServerReport],
    sync: ReplicaSync,
    has_sentinels: bool,
) -> Row {
    let check = "replicas";
    if has_sentinels
        && servers
            .iter()
            .any(|server| matches!(server.replicas, Ok(0)))
    {
        let detail =
            "the master has no connected replica: a failover is impossible, or loses locks";
        let row = Row::new(check, State::Degraded, detail);
        return row.change("connect a replica; with --replicas 1, no lock is acquired without one");
    }
    if sync == ReplicaSync::Off || servers.is_empty() {
        return Row::new(check, State::Note, "not checked");
    }
    let mut least = usize::MAX;
    for server in servers {
        match &server.replicas {
            Ok(count) => least = least.min(*count),
            Err(error) => {
                let detail = format!("a failover may lose new acquisitions: {error}");
                let row = Row::new(check, State::Degraded, detail);
                let change =
                    "let the user call ROLE and WAIT, if the server has them; use fencing tokens";
                return row.change(change);
            }
        }
    }
    let confirmed = async {
        let settings = Client::builder().watchdog_lease(LEASE);
        let settings = settings.replica_sync(match sync {
            // Requires what it would only wait for.
            ReplicaSync::All if least > 0 => ReplicaSync::AtLeast(1),
            sync => sync,
        });
        let client = store::connect(store_args, settings).await;
        let client = client.map_err(|failure| failure.message)?;
        let locked = lock(&client).await.map_err(|error| error.to_string());
        store::flush(&client).await;
        locked
    };
    let confirmed = timeout(LIMIT, confirmed).await;
    match confirmed.unwrap_or_else(|_| Err(not_done())) {
        Ok(()) if least == 0 => {
            let detail = "a master has none: if it is lost, so are its locks";
            Row::new(check, State::Note, detail)
        }
        Ok(()) => {
            let detail = format!("{least} connected; those of one master confirm acquisitions");
            Row::new(check, State::Ok, detail)
        }
        Err(error) => {
            let detail = format!("{least} connected; they do not confirm acquisitions: {error}");
            Row::new(check, State::Degraded, detail)
        }
    }
}
