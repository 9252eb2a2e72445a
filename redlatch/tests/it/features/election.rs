//! Elections on every store, over broken connections, and with processes that are killed, stopped and cut off.

use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::SystemTime;

use redlatch::{Election, Leader, Leadership, MAX_TOKEN, Observer};

use crate::common::prelude::*;

on_every_store! {
    candidates_succeed_each_other_and_observers_see_the_final_state,
    leader_resigns_to_a_candidate,
    lost_leadership_is_noticed_and_its_value_is_refused,
    epoch_is_advanced_after_lost_data,
}

/// Campaigns in a task, and waits until the candidate is in the queue.
async fn candidate(election: &Election, value: &str) -> JoinHandle<redlatch::Result<Leadership>> {
    let campaign = election.campaign(value);
    let owner = campaign.owner_id().clone();
    let waiting = tokio::spawn(campaign.into_future());
    until("a candidate waits", async || {
        let candidates = election.candidates().await.unwrap();
        candidates.iter().any(|waiter| waiter.owner == owner)
    })
    .await;
    waiting
}

async fn led(waiting: JoinHandle<redlatch::Result<Leadership>>) -> Leadership {
    joined("the candidate leads", waiting).await
}

/// Returns the reports of an observer up to the first of a leader with this value, or of none.
async fn reports_until(observer: &mut Observer, value: Option<&str>) -> Vec<Option<(u64, String)>> {
    let mut reports = Vec::new();
    loop {
        let report = done("a report", observer.next()).await;
        let is_last = report.as_ref().map(|leader| &*leader.value) == value;
        reports.push(report.map(|leader| (leader.epoch, leader.value)));
        if is_last {
            return reports;
        }
    }
}

async fn candidates_succeed_each_other_and_observers_see_the_final_state(store: TestStore) {
    // Only messages can be in time.
    let one = store.client_without_retries().await;
    let [two, observing] = store.clients_without_retries().await;
    let name = unique("election");
    let mut observer = observing.election(&name).observe();
    assert_eq!(observer.next().await.unwrap(), None);

    let first = one.election(&name).campaign("first").await.unwrap();
    let second = candidate(&two.election(&name), "second").await;
    first.proclaim("first, ready").await.unwrap();
    let reports = reports_until(&mut observer, Some("first, ready")).await;
    let of_first = |(epoch, _): &(u64, String)| *epoch == first.epoch();
    assert!(reports.iter().flatten().all(of_first));

    let before = first.epoch();
    first.resign().await.unwrap();
    let second = led(second).await;
    assert_eq!(second.epoch(), before + 1);
    let leader = one.election(&name).leader().await.unwrap().unwrap();
    assert_eq!((leader.epoch, &*leader.value), (before + 1, "second"));
    assert_eq!(&leader.owner, second.owner_id());
    reports_until(&mut observer, Some("second")).await;

    second.resign().await.unwrap();
    reports_until(&mut observer, None).await;
    assert_eq!(observing.election(&name).leader().await.unwrap(), None);
}

async fn leader_resigns_to_a_candidate(store: TestStore) {
    let client = store.client_without_retries().await;
    let election = client.election(&unique("election"));
    let leadership = election.campaign("leader").await.unwrap();
    let second = candidate(&election, "second").await;
    let third = candidate(&election, "third").await;
    let queue = election.candidates().await.unwrap();
    leadership.resign_to(&queue[1].owner).await.unwrap();
    let third = led(third).await;
    assert_eq!(third.owner_id(), &queue[1].owner);
    assert!(!second.is_finished());
    third.resign().await.unwrap();
    led(second).await.resign().await.unwrap();
}

async fn epoch_is_advanced_after_lost_data(store: TestStore) {
    let (client, election) = store.object(Client::election, "election").await;
    let epoch = async || {
        let leadership = election.campaign("").await.unwrap();
        let epoch = leadership.epoch();
        leadership.resign().await.unwrap();
        epoch
    };
    assert_eq!(election.advance_epoch(0).await.unwrap(), 0);
    assert_eq!((epoch().await, epoch().await), (1, 2));
    assert_eq!(election.advance_epoch(0).await.unwrap(), 2);

    // Epochs are the tokens of the lock, so this loses the latest term, too.
    let tokens = client.fenced_lock(election.name());
    assert!(tokens.delete_token().await.unwrap());
    assert_eq!(election.advance_epoch(7000).await.unwrap(), 7000);
    assert_eq!(epoch().await, 7001);
    assert_eq!(election.advance_epoch(3).await.unwrap(), 7001);

    let leadership = election.campaign("").await.unwrap();
    assert!(!tokens.delete_token().await.unwrap());
    assert_eq!(election.advance_epoch(9000).await.unwrap(), 9000);
    // The leader keeps its epoch.
    let leader = election.leader().await.unwrap().unwrap();
    assert_eq!((leader.epoch, leadership.epoch()), (7002, 7002));
    leadership.resign().await.unwrap();
    assert_eq!(epoch().await, 9001);

    let too_great = election.advance_epoch(MAX_TOKEN + 1).await;
    assert_matches!(too_great, Err(Error::InvalidSetting { .. }));
    assert_eq!(election.advance_epoch(MAX_TOKEN).await.unwrap(), MAX_TOKEN);
    assert_eq!(epoch().await, MAX_TOKEN + 1);
    assert_matches!(election.campaign("").await, Err(Error::WrongKind { .. }));
    assert!(tokens.delete_token().await.unwrap());
    assert_eq!(epoch().await, 1);
}

/// Earlier versions counted epochs in the term, without a token, and their candidates still do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn term_of_an_earlier_version_is_advanced() {
    let server = redlatch_testkit::shared();
    let client = client(server).await;
    let election = client.election(&unique("election"));
    let tokens = client.fenced_lock(election.name());
    let term = format!("redlatch_election:{{{}}}", election.name());
    let of_term = || -> String { server.command(&["HGET", &term, "epoch"]) };
    let mut set = vec!["HSET", &term, "epoch", "41", "leader", "client:1"];
    set.extend(["value", "", "revision", "0"]);
    let _: u32 = server.command(&set);
    assert_eq!(election.advance_epoch(0).await.unwrap(), 41);
    assert_eq!(tokens.advance_token(7).await.unwrap(), 41);
    assert_eq!(tokens.advance_token(100).await.unwrap(), 100);
    assert_eq!(of_term(), "100");
    let leadership = election.campaign("").await.unwrap();
    assert_eq!(leadership.epoch(), 101);
    // The leader keeps its epoch.
    assert_eq!(election.advance_epoch(200).await.unwrap(), 200);
    assert_eq!(of_term(), "101");
    leadership.resign().await.unwrap();
    assert_eq!(election.advance_epoch(0).await.unwrap(), 200);
    assert_eq!(of_term(), "200");
}

/// A term without its token (or with a smaller one) still counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn epoch_is_greater_than_that_of_the_latest_term() {
    let server = redlatch_testkit::shared();
    let client = client(server).await;
    let election = client.election(&unique("election"));
    let token = format!("redisson_lock_token:{{{}}}", election.name());
    for (command, epoch) in [
        (&["DEL", &token][..], 1),
        (&["DEL", &token], 2),
        (&["SET", &token, "1"], 3),
        (&["SET", &token, "-5"], 4),
    ] {
        let _: redis::Value = server.command(command);
        let leadership = election.campaign("").await.unwrap();
        assert_eq!(leadership.epoch(), epoch);
        leadership.resign().await.unwrap();
        assert_eq!(election.advance_epoch(0).await.unwrap(), epoch);
    }
}

async fn lost_leadership_is_noticed_and_its_value_is_refused(store: TestStore) {
    let [one, two] = store.clients().await;
    let name = unique("election");
    let former = one.election(&name).campaign("one").await.unwrap();
    assert!(one.fair_lock(&name).force_unlock().await.unwrap());
    let leader = two.election(&name).campaign("two").await.unwrap();
    assert!(leader.epoch() > former.epoch());
    assert_matches!(former.proclaim("late").await, Err(Error::Lost { .. }));
    within_limit("the loss", former.lost()).await;
    let seen = two.election(&name).leader().await.unwrap().unwrap();
    assert_eq!(seen.value, "two");
    leader.resign().await.unwrap();
}

/// The answer to the acquisition is lost. Its repetition finds the term, so the epoch is counted once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_acquisition_counts_one_epoch() {
    let (server, proxy) = proxied_server();
    let candidate = connect(long_timeout(), &proxy.url()).await;
    let election = candidate.election("e");
    election.campaign("").await.unwrap().resign().await.unwrap();
    let campaign = election.campaign("again").into_future();
    let leadership = with_lost_answer(&proxy, campaign).await.unwrap();
    assert_eq!(leadership.epoch(), 2);
    let epoch: String = server.command(&["HGET", "redlatch_election:{e}", "epoch"]);
    assert_eq!(epoch, "2");
}

/// The message is lost with the connection of the observer: it reads again after it has reconnected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn observer_misses_no_last_state_when_its_connection_breaks() {
    let (server, proxy) = proxied_server();
    let observing = connect(long_timeout().watchdog_lease(10 * LONG), &proxy.url()).await;
    let mut observer = observing.election("e").observe();
    assert_eq!(observer.next().await.unwrap(), None);
    let next = tokio::spawn(async move { observer.next().await });
    let channel = "redisson_lock__channel:{e}";
    until("subscribed", async || subscribers(&server, channel) == 1).await;
    cut_off(&proxy);
    let leading = client(&server).await;
    let leadership = leading.election("e").campaign("leader").await.unwrap();
    proxy.refuse(false);
    let report = joined("a report", next).await;
    assert_eq!(report.unwrap().epoch, leadership.epoch());
}

/// Another program has overwritten the term: the election fails, and the lock stays free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn term_of_another_program_is_an_error() {
    let (server, client) = server_and_client().await;
    let election = client.election("e");
    for broken in [&["SET"][..], &["HSET", "epoch"]] {
        let (command, field) = broken.split_first().unwrap();
        let key = "redlatch_election:{e}";
        let _: i64 = server.command(&["DEL", key]);
        let command = [&[*command, key], field, &["many"]].concat();
        let _: redis::Value = server.command(&command);
        let refused = election.campaign("").await.map(drop);
        assert_matches!(refused, Err(Error::WrongKind { .. }));
        client.flush().await;
        assert_eq!(server.command::<i64>(&["EXISTS", "e"]), 0);
    }
}

/// Set for the process that campaigns: the URL to connect to.
const CAMPAIGNS: &str = "REDLATCH_TEST_CAMPAIGNS_AT";

/// The lease of these processes.
const LEASE: Duration = Duration::from_secs(1);

/// How often each fault is injected.
const ROUNDS: usize = 3;

/// A time at which a leadership was valid, and its epoch.
type Sighting = (SystemTime, u64);

/// A process that campaigns again and again through a proxy of its own. While it leads it records that.
struct Candidate {
    child: Child,
    _stdin: ChildStdin,
    proxy: Proxy,
    value: String,
}

impl Candidate {
    fn start(server: &Server, sightings: &Arc<Mutex<Vec<Sighting>>>) -> Candidate {
        let proxy = Proxy::to(server.port());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "--test-threads=1"])
            .arg("features::election::at_most_one_process_leads_and_epochs_grow")
            .env(CAMPAIGNS, proxy.url())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let sightings = sightings.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                // The test harness also writes to standard output.
                let sighting = line.split_once("sighting ").and_then(|(_, sighting)| {
                    // A line may be cut when the process is killed; its end is a full stop.
                    let (epoch, nanos) = sighting.strip_suffix('.')?.split_once(' ')?;
                    let nanos = Duration::from_nanos(nanos.parse().ok()?);
                    Some((SystemTime::UNIX_EPOCH + nanos, epoch.parse().ok()?))
                });
                sightings.lock().unwrap().extend(sighting);
            }
        });
        Candidate {
            _stdin: child.stdin.take().unwrap(),
            value: child.id().to_string(),
            child,
            proxy,
        }
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.value]).status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Candidate {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs in that process, until its standard input ends.
async fn campaign(url: &str) {
    std::thread::spawn(|| {
        let _ = std::io::stdin().lines().count();
        std::process::exit(0);
    });
    let settings = || {
        let settings = Client::builder().watchdog_lease(LEASE);
        settings.outage_limit(None).connect(url)
    };
    let client = retry_transient(settings).await;
    let election = client.election("e");
    loop {
        let Ok(leadership) = election.campaign(std::process::id().to_string()).await else {
            continue;
        };
        loop {
            // Before it is known to be valid, so it was valid then.
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            if !leadership.is_valid() {
                break;
            }
            let nanos = now.unwrap().as_nanos();
            let line = format!("sighting {} {nanos}.\n", leadership.epoch());
            std::io::stdout().write_all(line.as_bytes()).unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Invariants: two leaderships are never valid at the same time, epochs only grow, and an observer ends with the final state.
/// Five processes campaign; the leader is killed, stopped for longer than its lease, or cut off from the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_most_one_process_leads_and_epochs_grow() {
    if let Ok(url) = std::env::var(CAMPAIGNS) {
        return campaign(&url).await;
    }
    let server = Server::start();
    let sightings = Arc::default();
    let mut candidates: Vec<_> = (0..5)
        .map(|_| Candidate::start(&server, &sightings))
        .collect();
    let watching = client(&server).await;
    let election = watching.election("e");
    let latest = Arc::new(Mutex::new(None));
    let observing = tokio::spawn({
        let (mut observer, latest) = (election.observe(), latest.clone());
        async move {
            let mut epoch = 0;
            loop {
                let report = observer.next().await.unwrap();
                if let Some(leader) = &report {
                    assert!(epoch <= leader.epoch, "{epoch} before {leader:?}");
                    epoch = leader.epoch;
                }
                *latest.lock().unwrap() = report;
            }
        }
    });
    let leader_after = async |epoch: u64| -> Leader {
        let mut leader = None;
        until("there is another leader", || {
            leader = latest.lock().unwrap().clone();
            let is_later = |leader: &Leader| leader.epoch > epoch;
            std::future::ready(leader.as_ref().is_some_and(is_later))
        })
        .await;
        leader.unwrap()
    };
    let mut leader = leader_after(0).await;
    for fault in ["kill", "stop", "cut off"].repeat(ROUNDS) {
        let is_leader = |candidate: &Candidate| candidate.value == leader.value;
        let at = candidates.iter().position(is_leader).unwrap();
        match fault {
            "kill" => candidates[at] = Candidate::start(&server, &sightings),
            "stop" => candidates[at].signal("-STOP"),
            _ => candidates[at].proxy.stall(true),
        }
        leader = leader_after(leader.epoch).await;
        match fault {
            "stop" => candidates[at].signal("-CONT"),
            "cut off" => candidates[at].proxy.stall(false),
            _ => {}
        }
    }
    drop(candidates);
    let none = async || latest.lock().unwrap().is_none();
    until("the observer sees that there is no leader", none).await;
    assert_eq!(election.leader().await.unwrap(), None);
    assert!(!observing.is_finished());
    observing.abort();

    let mut sightings: Vec<Sighting> = std::mem::take(&mut *sightings.lock().unwrap());
    sightings.sort_unstable();
    assert!(sightings.len() > 10 * ROUNDS, "{sightings:?}");
    for pair in sightings.windows(2) {
        assert!(pair[0].1 <= pair[1].1, "two valid leaderships: {pair:?}");
    }
}
