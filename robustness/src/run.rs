//! One run: starts servers and workers, injects faults, ends the workers, and checks the history.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redlatch_testkit::Server;

use crate::Result;
use crate::checker::{self, Losses, MARGIN, Rule, Violation};
use crate::clock::{Time, nanos, now};
use crate::context::Context;
use crate::deployment::{Deployment, Needs, Topology};
use crate::final_check::check_all_free_blocking;
use crate::history::History;
use crate::load::Load;
use crate::mechanisms::Mechanisms;
use crate::names::has_queue;
use crate::observers::Observers;
use crate::processes::{Processes, lock};
use crate::random::Random;
use crate::resource::Resource;
use crate::worker::WorkerOptions;

/// Setup of a run.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) topology: Topology,
    pub(crate) needs: Needs,
    pub(crate) losses: Losses,
    pub(crate) processes: usize,
    /// Settings of each process. URL and resource are filled in.
    pub(crate) worker: WorkerOptions,
    /// Folder for the output of the workers.
    pub(crate) keep: Option<PathBuf>,
}

/// Explained violations of one rule.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Explained {
    pub(crate) count: usize,
    /// Duration of the longest one.
    pub(crate) longest: Time,
}

/// Result of a run.
pub(crate) struct Outcome {
    pub(crate) entered: usize,
    pub(crate) during_faults: usize,
    pub(crate) lost: usize,
    pub(crate) errors: BTreeMap<String, usize>,
    pub(crate) violations: Vec<Violation>,
    /// Explained violations, by explanation and rule.
    pub(crate) explained: BTreeMap<&'static str, BTreeMap<Rule, Explained>>,
    pub(crate) recovery: Option<Time>,
    /// The longest time that the machine did not schedule a process.
    pub(crate) stalled: Time,
}

/// Runs the workers while `inject` injects faults.
pub(crate) fn run(
    setup: &Setup,
    inject: impl FnOnce(&mut Context) -> Result<()>,
) -> Result<Outcome> {
    let lease = Duration::from_millis(setup.worker.lease);
    if let Some(folder) = &setup.keep {
        std::fs::create_dir_all(folder)?;
    }
    let resource = Resource::start()?;
    let mut history = History::new(lease);
    history.margin = nanos(MARGIN);
    history.tells_listeners = setup.topology != Topology::Restricted;
    let history = Arc::new(Mutex::new(history));
    let deployment = setup.topology.start(setup.needs)?;
    let mut context = Context {
        worker: WorkerOptions {
            url: deployment.worker_url(),
            password_file: deployment.password_file(),
            resource: resource.address(),
            ..setup.worker.clone()
        },
        deployment,
        processes: Processes::new(history.clone(), setup.keep.clone()),
        history,
        random: Random::new(setup.worker.seed),
        schedule: None,
    };
    let observers = Observers::start(
        &context.deployment.url(),
        &context.names(),
        &context.history,
    )?;
    let mechanisms = Mechanisms::start(&context.deployment.url(), lease)?;
    for _ in 0..setup.processes {
        context.processes.start(&context.worker)?;
    }
    context
        .processes
        .wait_until_ready(Duration::from_secs(60))?;
    sleep(lease / 3);
    let load = Load::begin(context.deployment.as_ref());
    inject(&mut context)?;
    // Time for holders to learn of losses, and for waiters to find free locks.
    sleep(lease / 2);
    let load = load.check(context.deployment.as_ref());
    let left = shut_down_and_check(&mut context, observers, mechanisms, lease)?;
    let mut history = lock(&context.history);
    history.end = now();
    let mut violations = checker::check(&history, setup.losses, &resource.tallies());
    violations.extend(checker::check_slots(&history, MARGIN));
    violations.extend(left);
    violations.extend(load.into_iter().map(|text| violation(Rule::Load, text)));
    Ok(evaluate(&history, violations))
}

fn evaluate(history: &History, violations: Vec<Violation>) -> Outcome {
    let mut explained: BTreeMap<_, BTreeMap<Rule, Explained>> = BTreeMap::new();
    let (mut unexplained, mut errors) = (Vec::new(), BTreeMap::new());
    for violation in violations {
        match checker::explain(&violation, history) {
            Some(why) => {
                let rules = explained.entry(why).or_default();
                let group = rules.entry(violation.rule).or_default();
                group.count += 1;
                group.longest = group.longest.max(violation.until - violation.from);
            }
            None => unexplained.push(violation),
        }
    }
    for (error, count) in history.errors() {
        errors.insert(error.to_owned(), count);
    }
    Outcome {
        entered: history.entered(),
        during_faults: history.entered_during_faults(),
        lost: history.sections.iter().filter(|one| one.was_lost()).count(),
        errors,
        violations: unexplained,
        explained,
        recovery: checker::worst_recovery(history),
        stalled: history.stalled(),
    }
}

/// Time for the clients to finish their background work.
const CLEANUP_LIMIT: Duration = Duration::from_secs(10);

/// Returns how long fair locks are reserved at most for queued waiters, if all of them are dead: until the
/// last one's turn has passed.
fn fair_queue_limit(context: &mut Context) -> Result<Duration> {
    let mut longest = Duration::ZERO;
    for name in context.names().iter().filter(|name| has_queue(name)) {
        let server = context.server_of(name)?;
        let key = format!("redisson_lock_timeout:{{{name}}}");
        let last: Vec<(String, f64)> =
            run_command(server, &["ZRANGE", &key, "-1", "-1", "WITHSCORES"])?;
        let (seconds, _): (u64, u64) = run_command(server, &["TIME"])?;
        for (_, millis) in last {
            let end = Duration::try_from_secs_f64(millis / 1000.0)?;
            longest = longest.max(end.saturating_sub(Duration::from_secs(seconds)));
        }
    }
    Ok(longest)
}

/// Ends all workers and checks whether they left anything behind.
fn shut_down_and_check(
    context: &mut Context,
    observers: Observers,
    mechanisms: Mechanisms,
    lease: Duration,
) -> Result<Vec<Violation>> {
    let mut found = Vec::new();
    context.processes.request_shutdown();
    // Holds of dead processes expire with their leases, places in queues when their turns have passed; and then
    // the last waiters are served.
    let limit = fair_queue_limit(context)? + lease * 5 + CLEANUP_LIMIT;
    if !context.processes.wait_until_done(limit) {
        for crashed in context.processes.crashed() {
            found.push(violation(Rule::Crash, crashed));
        }
        let history = lock(&context.history);
        let open = history.sections.iter().filter(|one| {
            let process = history.processes.get(&one.process);
            one.answered.is_none() && process.is_some_and(|of| of.killed.is_none())
        });
        for section in open {
            let text = format!(
                "{}: {} is still waiting",
                section.request.name,
                section.requester()
            );
            found.push(violation(Rule::Hang, text));
        }
        if found.is_empty() {
            let text = format!("the workers did not finish within {limit:?}");
            found.push(violation(Rule::Hang, text));
        }
    }
    for failed in mechanisms.check(context.deployment.as_ref()) {
        found.push(violation(Rule::Mechanism, failed));
    }
    // The clients still run: if a lock cannot be acquired now, one of them renews it without a holder.
    for kept in
        check_all_free_blocking(&context.deployment.url(), &context.names(), lease + MARGIN)?
    {
        found.push(violation(
            Rule::NotCleanedUp,
            format!("cannot be acquired: {kept}"),
        ));
    }
    for (rule, text) in observers.check(&context.deployment.url(), lease + MARGIN)? {
        found.push(violation(rule, text));
    }
    let deployment = context.deployment.as_ref();
    for key in leftovers(keys, deployment, lease + MARGIN)? {
        found.push(violation(
            Rule::NotCleanedUp,
            format!("remaining key {key}"),
        ));
    }
    for channel in leftovers(channels, deployment, MARGIN)? {
        found.push(violation(
            Rule::NotCleanedUp,
            format!("remaining subscription to {channel}"),
        ));
    }
    context.processes.terminate();
    for client in leftovers(connections, deployment, MARGIN * 2)? {
        found.push(violation(
            Rule::NotCleanedUp,
            format!(
                "remaining connection: {client}; its other end: {:?}",
                other_end(&client)
            ),
        ));
    }
    Ok(found)
}

/// Waits until `find` finds nothing at any master, at most until the limit. Returns what it finds then.
fn leftovers(
    find: fn(&Server) -> Result<Vec<String>>,
    deployment: &dyn Deployment,
    limit: Duration,
) -> Result<Vec<String>> {
    let end = Instant::now() + limit;
    loop {
        let mut left = Vec::new();
        for master in deployment.masters() {
            left.extend(find(deployment.server(master))?);
        }
        if left.is_empty() || Instant::now() > end {
            return Ok(left);
        }
        sleep(Duration::from_millis(50));
    }
}

fn violation(rule: Rule, text: String) -> Violation {
    Violation::at(now(), rule, text)
}

/// Returns all keys except those that may remain.
fn keys(server: &Server) -> Result<Vec<String>> {
    let mut keys: Vec<String> = run_command(server, &["KEYS", "*"])?;
    keys.retain(|key| !checker::may_remain(key));
    Ok(keys)
}

fn channels(server: &Server) -> Result<Vec<String>> {
    let mut channels: Vec<String> = run_command(server, &["PUBSUB", "CHANNELS"])?;
    channels.extend(run_command::<Vec<String>>(
        server,
        &["PUBSUB", "SHARDCHANNELS"],
    )?);
    // Sentinels have a channel of their own.
    channels.retain(|channel| channel != "__sentinel__:hello");
    Ok(channels)
}

/// Returns all connections except the one of this query, and those among the servers themselves.
fn connections(server: &Server) -> Result<Vec<String>> {
    let list: String = run_command(server, &["CLIENT", "LIST"])?;
    let own = [
        "cmd=client",
        "flags=S",
        "flags=M",
        "name=sentinel-",
        "cmd=restore-asking",
    ];
    let others = list
        .lines()
        .filter(|line| !own.iter().any(|own| line.contains(own)));
    Ok(others.map(str::to_owned).collect())
}

/// Returns the line of the kernel's table about the client's end of a connection: its state, what it has not sent yet, and the
/// inode of the socket, 0 if no process has it any more. `None`: it has ended.
fn other_end(client: &str) -> Option<String> {
    let mut fields = client.split(' ');
    let address = fields.find_map(|field| field.strip_prefix("addr="))?;
    let address: std::net::SocketAddr = address.parse().ok()?;
    let port = format!(":{:04X}", address.port());
    let table = std::fs::read_to_string("/proc/net/tcp").ok()?;
    let is_local = |line: &&str| {
        let local = line.split_whitespace().nth(1);
        local.is_some_and(|local| local.ends_with(&port))
    };
    let line = table.lines().find(is_local)?;
    Some(line.trim().to_owned())
}

fn run_command<T: redis::FromRedisValue>(server: &Server, words: &[&str]) -> Result<T> {
    let mut command = redis::cmd(words[0]);
    command.arg(&words[1..]);
    Ok(command.query(&mut server.connection())?)
}
