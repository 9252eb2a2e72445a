//! Tests of the ACL rules in docs/security.md. The rules are sufficient (all suites run under them)
//! and minimal, and a user without permission gets a clear error.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;

use redlatch::inspect::{Event, ObjectState};
use redlatch::job::{Cron, RunState, Scheduled};
use redlatch_testkit::{Ca, LOOPBACK, TlsPlan};
use tokio::sync::{Notify, oneshot, watch};

use crate::common::prelude::*;
use crate::common::secured::{PREFIX, Rules, Secured, login, rules};

/// Uses every feature once.
async fn everything(client: &Client, other: &Client) {
    let name = |what: &str| unique(what);
    let plain = client.lock(&name("lock"));
    let guard = held(&plain).await;
    let inner = guard.reenter().await.unwrap();
    let waiting = waiter_of(other, other.lock(plain.name()).lock()).await;
    free(inner).await;
    free(guard).await;
    free(joined("its turn", waiting).await).await;
    let guard = plain.lock().owner(Owner::new()).await.unwrap();
    let asked = other.lock(plain.name()).revoke(LONG).await.unwrap();
    assert!(asked.is_some());
    within_limit("it is asked", guard.asked()).await;
    free(guard).await;
    let _guard = held(&plain).await;
    assert!(plain.force_unlock().await.unwrap());

    let fair = client.fair_lock(&name("fair"));
    let guard = held(&fair).await;
    let waiter = |of: &Client| {
        let lock = of.fair_lock(fair.name());
        tokio::spawn(async move { lock.lock().await?.unlock().await })
    };
    let waiters = async |wanted: usize| {
        until("so many wait", async || {
            let state = client.inspect(fair.name()).await.unwrap();
            matches!(state, Some(ObjectState::Lock { queue, .. }) if queue.len() == wanted)
        })
        .await;
    };
    // The first waiter is canceled, and the waiter behind it moves up.
    let first = waiter(other);
    waiters(1).await;
    let waiting = waiter(client);
    waiters(2).await;
    first.abort();
    waiters(1).await;
    free(guard).await;
    joined("its turn", waiting).await;
    // The head of the queue does not take its turn, so this attempt checks whether the head is
    // connected.
    let guard = held(&fair).await;
    let theirs = other.fair_lock(fair.name());
    let mut head = theirs.lock().into_future();
    let subscribed = async {
        waiters(1).await;
        // These follow its requests on the same connection.
        for _ in 0..2 {
            free(held(&other.lock(&name("other"))).await).await;
        }
    };
    poll_until(&mut head, subscribed).await;
    free(guard).await;
    assert!(fair.try_lock().await.unwrap().is_none());
    free(done("its turn", head).await).await;

    let election = client.election(&name("election"));
    let leadership = election.campaign("leader").await.unwrap();
    let campaigns = ["second", "third"].map(|value| election.campaign(value));
    let third = campaigns[1].owner_id().clone();
    let [second, next] = campaigns.map(|campaign| tokio::spawn(campaign.into_future()));
    let both_wait = async || election.candidates().await.unwrap().len() == 2;
    until("both wait", both_wait).await;
    // The order in which they have joined is unknown.
    let last = election.candidates().await.unwrap().remove(1).owner;
    leadership.proclaim("ready").await.unwrap();
    leadership.resign_to(&last).await.unwrap();
    until("there is a leader", async || {
        let leader = other.election(election.name()).leader().await.unwrap();
        leader.is_some_and(|leader| leader.owner == last)
    })
    .await;
    let in_order = match last == third {
        true => [next, second],
        false => [second, next],
    };
    for waiting in in_order {
        joined("its turn", waiting).await.resign().await.unwrap();
    }

    // There is a term, and no leader: so the script reads the lock, and changes the term.
    assert_eq!(election.advance_epoch(100).await.unwrap(), 100);

    let fenced = client.fenced_lock(&name("fenced"));
    free(held(&fenced).await).await;
    client.inspect(fenced.name()).await.unwrap();
    fenced.advance_token(7).await.unwrap();
    assert!(fenced.delete_token().await.unwrap());

    let lock = client.read_write_lock(&name("read-write")).prefer_writers();
    let read = held(&lock.read()).await;
    assert_eq!(lock.read().holders().await.unwrap().len(), 1);
    let theirs = other.read_write_lock(lock.name()).prefer_writers();
    let waiting = tokio::spawn(async move { theirs.write().lock().await?.unlock().await });
    // A waiting writer blocks new readers.
    let refused = async || lock.read().try_lock().await.unwrap().is_none();
    until("a writer waits", refused).await;
    free(read).await;
    joined("its turn", waiting).await;
    let write = held(&lock.write()).await;
    let read = write.reenter_read().await.unwrap();
    client.inspect(lock.name()).await.unwrap();
    free(write).await;
    free(read).await;
    lock.write().force_unlock().await.unwrap();

    let lock = client.fair_read_write_lock(&name("fair-read-write"));
    let read = held(&lock.read()).await;
    let theirs = other.fair_read_write_lock(lock.name());
    let waiting = tokio::spawn(async move { theirs.write().lock().await?.unlock().await });
    let queued = async || lock.queue().await.unwrap().len() == 1;
    until("a writer waits", queued).await;
    free(read).await;
    joined("its turn", waiting).await;
    assert!(!lock.write().force_unlock().await.unwrap());

    let job = running_job(client, &name("job")).await;
    assert!(job.scheduled.job().history().await.unwrap().is_some());
    job.end().await;
    let once = client.once(&name("once"), "a slot");
    assert!(once.run(async {}).await.unwrap().is_ok());
    let semaphore = client.semaphore(&name("semaphore"));
    assert!(semaphore.try_set_permits(2).await.unwrap());
    semaphore.acquire().await.unwrap().release().await.unwrap();
    semaphore.add_permits(1).await.unwrap();

    let semaphore = client.expirable_semaphore(&name("permits"));
    assert!(semaphore.try_set_permits(2).await.unwrap());
    let permit = semaphore.acquire().await.unwrap();
    client.inspect(semaphore.name()).await.unwrap();
    permit.release().await.unwrap();
    semaphore.set_permits(1).await.unwrap();
    semaphore.delete().await.unwrap();

    let latch = client.count_down_latch(&name("latch"));
    assert!(latch.try_set_count(2).await.unwrap());
    latch.count_down().await.unwrap();
    latch.count_down().await.unwrap();
    latch.wait().await.unwrap();

    let many = MultiLock::new([client.lock(&name("a")), client.lock(&name("b"))]);
    free(held(&many).await).await;
    let mut all = client.list("*");
    while all.next().await.unwrap().is_some() {}
    until_subscribed(other, 0).await;
}

/// A run of a job that lasts until it is told to end.
struct RunningJob {
    scheduled: Scheduled,
    ends: Arc<Notify>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<redlatch::Result<()>>,
}

async fn running_job(client: &Client, name: &str) -> RunningJob {
    let each_second = Cron::parse("* * * * * *").unwrap();
    let scheduled = client.job(name).schedule(each_second);
    let ((begins, mut begun), (stop, stopped)) = (watch::channel(false), oneshot::channel());
    let ends = Arc::new(Notify::new());
    let task = tokio::spawn({
        let (scheduled, ends) = (scheduled.clone(), ends.clone());
        let stopped = async { drop(stopped.await) };
        async move {
            let work = async |_| {
                begins.send_replace(true);
                ends.notified().await;
            };
            scheduled.run_until(stopped, work).await
        }
    });
    within_limit("a run", begun.wait_for(|begun| *begun))
        .await
        .unwrap();
    RunningJob {
        scheduled,
        ends,
        stop,
        task,
    }
}

impl RunningJob {
    async fn end(self) {
        drop(self.stop);
        self.ends.notify_one();
        joined("the job", self.task).await;
    }
}

/// Returns the commands that were called, as the rules spell them.
fn called(secured: &Secured) -> HashSet<String> {
    let stats: String = secured.server.plain().command(&["INFO", "commandstats"]);
    let names = stats.lines().filter_map(|line| {
        let (name, _) = line.strip_prefix("cmdstat_")?.split_once(':')?;
        Some(name.to_owned())
    });
    names.collect()
}

fn allowed(rules: &str) -> HashSet<String> {
    let commands = rules.split(' ').filter_map(|rule| rule.strip_prefix('+'));
    commands.map(str::to_owned).collect()
}

/// Returns what users were denied, each as `reason object`.
fn denied(server: &Server) -> Vec<String> {
    let log: Vec<HashMap<String, String>> = server.command(&["ACL", "LOG"]);
    let denied = log
        .iter()
        .map(|entry| format!("{} {}", entry["reason"], entry["object"]));
    // Optional: for users who want the server to show which library is connected (from 7.2 on), to report changed locks, and to
    // have the registry of clients.
    let optional = ["setinfo", "tracking", "caching"].map(|name| format!("client|{name}"));
    let is_optional = |denied: &String| {
        denied.contains("redlatch_client:") || optional.iter().any(|name| denied.contains(name))
    };
    denied.filter(|denied| !is_optional(denied)).collect()
}

#[track_caller]
fn assert_refused<T: Debug>(result: Result<T, Error>) {
    assert_matches!(result, Err(Error::NotPermitted { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documented_rules_are_sufficient_and_minimal() {
    let Rules { app, .. } = rules();
    let secured = Secured::start(&[app]);
    let client = secured.client(Client::builder(), "").await;
    let other = secured.client(Client::builder(), "").await;
    everything(&client, &other).await;
    assert_eq!(denied(secured.server.plain()), [""; 0]);
    let called = called(&secured);
    let unused = allowed(app).into_iter().filter(|it| !called.contains(it));
    assert_eq!(unused.collect::<Vec<_>>(), [""; 0]);
}

#[tokio::test]
async fn operator_can_inspect_but_not_change() {
    let Rules { app, operator, .. } = rules();
    let secured = Secured::start(&[app, operator]);
    let client = secured.client(Client::builder(), "").await;
    let name = unique("looked-at");
    let plain = held(&client.lock(&name)).await;
    let fenced = client.fenced_lock(&unique("fenced"));
    let fenced = held(&fenced).await;
    let fair = held(&client.fair_lock(&unique("fair"))).await;
    let reading = client.read_write_lock(&unique("reading"));
    let reader = held(&reading.read()).await;
    let semaphore = client.expirable_semaphore(&unique("permits"));
    semaphore.try_set_permits(1).await.unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let latch = client.count_down_latch(&unique("latch"));
    latch.try_set_count(1).await.unwrap();
    let election = client.election(&unique("election"));
    let leadership = election.campaign("value").await.unwrap();
    let job = running_job(&client, &unique("job")).await;

    let settings = secured.settings_of(operator, Client::builder());
    let operator = settings.connect(&secured.server.url()).await.unwrap();
    let mut seen = 0;
    let mut all = operator.list("*");
    while all.next().await.unwrap().is_some() {
        seen += 1;
    }
    assert_eq!(seen, 8);
    let mut watch = operator.watch(&format!("{PREFIX}*"));
    for _ in 0..seen {
        assert_matches!(done("an event", watch.next()).await, Event::Changed { .. });
    }
    let key = format!("{PREFIX}{name}");
    assert!(operator.inspect(&key).await.unwrap().is_some());
    let election = operator.election(&format!("{PREFIX}{}", election.name()));
    assert!(election.leader().await.unwrap().is_some());
    let jobs = operator.jobs("*").await.unwrap();
    let history = operator.job(&jobs[0]).history().await.unwrap();
    assert_eq!(history.unwrap().runs[0].state, RunState::Running);
    assert_eq!(denied(secured.server.plain()), [""; 0]);

    assert_refused(operator.lock(&key).force_unlock().await);
    assert_refused(operator.lock(&unique("new")).lock().await);
    assert_refused(operator.lock(&key).lock().await);
    free(plain).await;
    free(fenced).await;
    free(fair).await;
    free(reader).await;
    permit.release().await.unwrap();
    leadership.resign().await.unwrap();
    job.end().await;
}

#[tokio::test]
async fn denied_request_fails_immediately() {
    let Rules { app, .. } = rules();
    let restricted = app.replacen("app ", "restricted ", 1);
    let restricted = restricted.replace("+subscribe ", "");
    let secured = Secured::start(&[app, &restricted]);
    let url = secured.server.url();

    let elsewhere = connect(secured.settings_of(app, Client::builder()), &url).await;
    let lock = elsewhere.lock(&unique("foreign"));
    assert_refused(within_limit("refused", lock.lock()).await);
    // The client keeps retrying in the background to release what it may have acquired.
    let status = elsewhere.status();
    assert_eq!((status.holds, status.subscriptions), (0, 0));

    let client = secured.client(Client::builder(), "").await;
    let settings = secured.settings_of(&restricted, Client::builder().prefix(PREFIX));
    let restricted = settings.connect(&url).await.unwrap();
    let lock = client.lock(&unique("waited-for"));
    let guard = held(&lock).await;
    let waiting = restricted.lock(lock.name());
    assert_refused(within_limit("refused", waiting.lock()).await);
    free(guard).await;
    assert!(!lock.is_locked().await.unwrap());
}

/// Some scripts find keys that they have not declared. The server refuses these in the middle of a script, and the user may
/// use the key of the lock itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_without_further_keys_leaves_nothing_behind() {
    let Rules { app, .. } = rules();
    let is_kept = |rule: &&str| !rule.starts_with('~') || *rule == "~app:*";
    let kept: Vec<&str> = app.split(' ').filter(is_kept).collect();
    let restricted = kept.join(" ").replacen("app ", "restricted ", 1);
    let secured = Secured::start(&[app, &restricted]);
    let settings = secured.settings_of(&restricted, Client::builder().prefix(PREFIX));
    let client = settings.connect(&secured.server.url()).await.unwrap();
    let name = unique("derived");
    let data = client.read_write_lock(&name);
    assert_refused(data.read().lock().await);
    assert_refused(client.fair_lock(&name).lock().await);
    assert_refused(client.fenced_lock(&name).lock().await);
    assert_refused(client.lock(&name).ask().await);
    let semaphore = client.expirable_semaphore(&name);
    assert_refused(semaphore.try_set_permits(1).await);
    free(held(&client.lock(&name)).await).await;
    let left: Vec<String> = secured.server.plain().command(&["KEYS", "*"]);
    assert_eq!(left, [""; 0]);

    let writer = held(&data.write()).await;
    // A writer also reads.
    assert_refused(writer.reenter_read().await);
    // Nor may it release, because other writers may wait.
    assert_refused(writer.unlock().await);
    let left: Vec<String> = secured.server.plain().command(&["KEYS", "*"]);
    assert_eq!(left, [format!("{PREFIX}{name}")]);
    assert!(secured.server.plain().command::<i64>(&["PTTL", &left[0]]) > 0);
}

/// Returns the user as arguments of a server.
fn user(rules: &str) -> Vec<&str> {
    std::iter::once("--user").chain(rules.split(' ')).collect()
}

/// Servers that speak only TLS and require client certificates.
const BOTH_WAYS: Option<TlsPlan<'_>> = Some(TlsPlan {
    certificate: LOOPBACK,
    auth_clients: "yes",
});

fn logged_in(rules: &str, ca: Option<&Ca>) -> redlatch::ClientBuilder {
    let (name, password) = login(rules);
    let ca = ca.expect("there is TLS");
    let ours = ca.client();
    long_timeout()
        .prefix(PREFIX)
        .tls_ca(ca.pem())
        .tls_client_cert(ours.cert, ours.key)
        .username(name)
        .password(password)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documented_rules_are_sufficient_in_cluster() {
    let Rules { app, cluster, .. } = rules();
    let rules = format!("{app} {cluster}");
    let servers = Cluster::start_with(ClusterPlan {
        args: &user(&rules),
        tls: BOTH_WAYS,
        ..ClusterPlan::default()
    });
    let settings = || logged_in(app, servers.ca());
    let url = servers.url();
    let client = retry_transient(|| settings().connect(&url)).await;
    let other = retry_transient(|| settings().connect(&url)).await;
    everything(&client, &other).await;
    for server in servers.nodes() {
        assert_eq!(denied(server), [""; 0]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documented_rules_are_sufficient_with_sentinels() {
    let Rules {
        app,
        sentinel,
        replica_user,
        sentinel_user,
        ..
    } = rules();
    let rules = format!("{app} +wait");
    let users = [&rules, replica_user, sentinel_user].map(user).concat();
    let (replica, password) = login(replica_user);
    let as_replica = ["--masteruser", replica, "--masterauth", password];
    let (name, password) = login(sentinel_user);
    let servers = Sentinels::start_with(SentinelPlan {
        server_args: &[&users[..], &as_replica].concat(),
        sentinel_lines: &[
            &format!("user {sentinel}"),
            &format!("sentinel auth-user mymaster {name}"),
            &format!("sentinel auth-pass mymaster {password}"),
        ],
        tls: BOTH_WAYS,
        ..SentinelPlan::default()
    });
    let settings = || {
        let (name, password) = login(sentinel);
        let settings = logged_in(app, servers.ca());
        settings.sentinel_username(name).sentinel_password(password)
    };
    let url = servers.url();
    let client = retry_transient(|| settings().connect(&url)).await;
    let other = retry_transient(|| settings().connect(&url)).await;
    everything(&client, &other).await;
    servers.fail_over();
    servers.await_healthy();
    for server in servers.servers().iter().chain(servers.sentinels()) {
        assert_eq!(denied(server), [""; 0]);
    }
    let clients: String = servers.command(servers.master(), &["CLIENT", "LIST"]);
    for user in [replica, name] {
        assert!(clients.contains(&format!(" user={user} ")), "{clients}");
    }
}

/// The server reads its append-only file as the default user.
#[tokio::test]
async fn restart_keeps_tokens_under_documented_rules() {
    let Rules {
        app, default_user, ..
    } = rules();
    let mut server = Server::start_durable_with(&[app, default_user].map(user).concat());
    let (name, password) = login(app);
    let settings = || patient(Client::builder()).prefix(PREFIX);
    let settings = || settings().username(name).password(password);
    let client = connect(settings(), &server.url()).await;
    let lock = client.fenced_lock(&unique("kept"));
    free(held(&lock).await).await;
    let guard = held(&lock).await;
    assert_eq!(guard.token(), 2);
    let url = server.url();
    server.kill();
    server.restart();
    let other = connect(settings(), &url).await;
    let kept = other.inspect(lock.name()).await.unwrap();
    assert_matches!(
        kept,
        Some(ObjectState::Lock {
            holder: Some(_),
            token: Some(2),
            ..
        })
    );
    free(guard).await;
    assert_eq!(held(&other.fenced_lock(lock.name())).await.token(), 3);
}

/// Redis names neither the key nor the channel.
#[tokio::test]
async fn error_for_a_foreign_prefix_names_the_keys() {
    let server = Server::start();
    for (user, rules) in [("keys", ["~app:*", "&*"]), ("channels", ["~*", "&app:*"])] {
        let rules = [
            &["ACL", "SETUSER", user, "on", ">secret", "+@all"],
            &rules[..],
        ]
        .concat();
        let () = server.command(&rules);
    }
    let connected = async |user: &str| {
        let url = format!("redis://{user}:secret@127.0.0.1:{}", server.port());
        long_timeout().prefix("other:").connect(&url).await.unwrap()
    };
    let client = connected("keys").await;
    let error = client.lock("a").lock().await.unwrap_err();
    let said = error.to_string();
    assert_matches!(error, Error::NotPermitted { .. });
    assert!(said.contains("; keys: other:a"), "{said}");
    let mine = connected("channels").await;
    let _guard = held(&mine.lock("b")).await;
    let theirs = connected("channels").await;
    let error = theirs.lock("b").lock().await.unwrap_err();
    let said = error.to_string();
    let channel = "; channel: redisson_lock__channel:{other:b}";
    assert!(said.contains(channel), "{said}");
}

/// The server refuses a whole script with steps of many callers because of the key of one.
#[tokio::test]
async fn forbidden_name_concerns_only_its_caller() {
    let server = Server::start();
    let rules = ["bob", "on", ">secret", "+@all", "~*allowed*", "&*"];
    let () = server.command(&[&["ACL", "SETUSER"], &rules[..]].concat());
    let url = format!("redis://bob:secret@127.0.0.1:{}", server.port());
    let client = Client::connect(&url).await.unwrap();
    let mut requests = tokio::task::JoinSet::new();
    for n in 0..60 {
        let is_allowed = n % 20 != 10;
        let name = format!("{}-{n}", if is_allowed { "allowed" } else { "forbidden" });
        let request = client.lock(&name).try_lock().into_future();
        requests.spawn(async move { (is_allowed, request.await) });
    }
    while let Some(answered) = within_limit("an answer", requests.join_next()).await {
        match answered.unwrap() {
            (true, acquired) => assert!(acquired.unwrap().is_some()),
            (false, refused) => assert_refused(refused),
        }
    }
}
