//! A master with replicas, monitored by sentinels. All of them are real processes.

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use crate::config;
use crate::deployment::Deployment;
use crate::server::Server;
use crate::tls::{Ca, TlsPlan};
use crate::until::until;

/// One master, its replicas, and the sentinels that elect a new master when it fails. All of them
/// end as a [`Server`] does, and their files are removed with them.
///
/// The data servers keep their index in [`servers`](Sentinels::servers) regardless of their role; the
/// first one is the initial master.
#[derive(Debug)]
pub struct Sentinels {
    servers: Vec<Server>,
    sentinels: Vec<Server>,
    deployment: Deployment,
}

/// Configuration of [`Sentinels`].
#[derive(Debug, Clone, Copy)]
pub struct SentinelPlan<'a> {
    /// Number of replicas of the master.
    pub replicas: usize,
    /// Number of sentinels.
    pub sentinels: usize,
    /// Number of sentinels that must find the master down before they elect a new one.
    pub quorum: usize,
    /// `down-after-milliseconds`: time without an answer after which the master counts as down.
    pub down_after_millis: u32,
    /// `failover-timeout`, in milliseconds. After a failover, or a vote without a winner, the next
    /// one starts after twice this time.
    pub failover_timeout_millis: u32,
    /// Additional settings of the master and the replicas, such as `["--min-replicas-to-write",
    /// "1"]`.
    pub server_args: &'a [&'a str],
    /// Additional lines in the configuration of each sentinel, such as `"sentinel auth-pass
    /// mymaster secret"`.
    pub sentinel_lines: &'a [&'a str],
    /// Makes all of them speak only TLS, with clients and with each other.
    pub tls: Option<TlsPlan<'a>>,
    /// Whether each server has its own address in [`SEPARATE_NETWORK`](crate::SEPARATE_NETWORK), where it listens and
    /// from which it connects to the others. Such a server can be cut off from the others but not
    /// from clients (Linux only).
    pub separate_addresses: bool,
}

/// The sentinels' name for the master.
const MASTER_NAME: &str = "mymaster";

/// After this time a failover that was ordered has been aborted: its replica did not answer in time on a busy machine.
const FAILOVER_LIMIT: Duration = Duration::from_secs(20);

/// The internal timers of sentinels, in milliseconds. With these, sentinels discover each other and
/// notice changes faster than the default 2 and 10 seconds. After they were stopped or starved,
/// they leave tilt mode soon instead of after 30 seconds.
const FAST_TIMERS: &str = "SENTINEL DEBUG info-period 300 publish-period 300 ask-period 300 \
                    ping-period 300 tilt-period 1000";

impl Default for SentinelPlan<'_> {
    fn default() -> Self {
        SentinelPlan {
            replicas: 2,
            sentinels: 3,
            quorum: 2,
            down_after_millis: 1000,
            failover_timeout_millis: 3000,
            server_args: &[],
            sentinel_lines: &[],
            tls: None,
            separate_addresses: false,
        }
    }
}

impl Sentinels {
    /// Starts one master, two replicas, and three sentinels with a quorum of two.
    pub fn start() -> Sentinels {
        Sentinels::start_with(SentinelPlan::default())
    }

    /// Starts servers with this configuration. Returns once the replicas confirm writes, and the
    /// sentinels know each other and the replicas.
    ///
    /// # Panics
    ///
    /// If a server does not start, or the servers do not find each other.
    pub fn start_with(plan: SentinelPlan<'_>) -> Sentinels {
        let deployment = Deployment::new(plan.tls, plan.separate_addresses);
        let args: Vec<String> = plan.server_args.iter().map(|&arg| arg.into()).collect();
        let server = |index: usize, own_lines: &str| {
            let lines = format!("{FAST_REPLICATION}{own_lines}{}", config::lines(&args));
            deployment.start(&format!("server-{index}"), |_| lines.clone(), &[])
        };
        let master = server(0, "");
        let follow = format!("replicaof {} {}\n", master.address(), master.port());
        let sentinel_config = sentinel_config(&plan, &master);
        let sentinel = |index: usize| {
            let home = format!("sentinel-{index}");
            let sentinel = deployment.start(&home, |_| sentinel_config.clone(), &["--sentinel"]);
            speed_up_timers(&sentinel);
            sentinel
        };
        let (servers, sentinels) = thread::scope(|scope| {
            let (server, sentinel, follow) = (&server, &sentinel, &follow);
            let replicas =
                (1..=plan.replicas).map(|index| scope.spawn(move || server(index, follow)));
            let replicas: Vec<_> = replicas.collect();
            let sentinels = (0..plan.sentinels).map(|index| scope.spawn(move || sentinel(index)));
            let sentinels: Vec<_> = sentinels.collect();
            let join =
                |thread: thread::ScopedJoinHandle<'_, Server>| thread.join().expect("it starts");
            let servers = std::iter::once(master).chain(replicas.into_iter().map(join));
            (servers.collect(), sentinels.into_iter().map(join).collect())
        });
        let all = Sentinels {
            servers,
            sentinels,
            deployment,
        };
        all.await_healthy();
        if plan.replicas > 0 {
            all.servers[0].write_to_replicas(plan.replicas);
        }
        all
    }

    /// Returns the URL for clients: the addresses of the sentinels.
    pub fn url(&self) -> String {
        let url = self.deployment.url("sentinel", &self.sentinels);
        format!("{url}/{MASTER_NAME}")
    }

    /// Returns the CA of all certificates, if the servers use TLS.
    pub fn ca(&self) -> Option<&Ca> {
        self.deployment.ca()
    }

    /// Returns the master and the replicas.
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// Returns the sentinels.
    pub fn sentinels(&self) -> &[Server] {
        &self.sentinels
    }

    /// Returns the index of the master, which most answering sentinels and the server itself must
    /// confirm. Waits while they disagree.
    ///
    /// # Panics
    ///
    /// If they do not reach an agreement.
    pub fn master(&self) -> usize {
        until("one master", || self.agreed_master())
    }

    /// Waits until a server other than `old` is the master; returns its index.
    ///
    /// # Panics
    ///
    /// If it takes too long.
    pub fn await_new_master(&self, old: usize) -> usize {
        until("a new master", || match self.agreed_master()? {
            master if master == old => Err(format!("it is still server {old}")),
            master => Ok(master),
        })
    }

    /// Makes a sentinel promote a replica, and waits until that is done. Returns the index of the
    /// new master.
    ///
    /// # Panics
    ///
    /// If it takes too long.
    pub fn fail_over(&self) -> usize {
        let (old, mut ordered_at) = (self.master(), None::<Instant>);
        until("a failover", || {
            match self.agreed_master()? {
                master if master != old => return Ok(master),
                _ if ordered_at.is_none_or(|at| at.elapsed() > FAILOVER_LIMIT) => {}
                _ => return Err(format!("it is still server {old}")),
            }
            self.order_failover()?;
            ordered_at = Some(Instant::now());
            Err("it has just been ordered".to_owned())
        })
    }

    /// Orders a failover from the first sentinel that does not refuse: it may not know a suitable replica.
    fn order_failover(&self) -> Result<(), String> {
        let mut missing = String::new();
        for sentinel in &self.sentinels {
            match sentinel.try_command(&["SENTINEL", "FAILOVER", MASTER_NAME]) {
                Ok(()) => return Ok(()),
                Err(error) => missing = error.to_string(),
            }
        }
        Err(missing)
    }

    /// Waits until all running servers are in the same healthy state as after the start: the
    /// replicas follow the master, and the sentinels see all of them.
    ///
    /// # Panics
    ///
    /// If it takes too long, for example because a server is frozen.
    pub fn await_healthy(&self) {
        until("master, replicas and sentinels together", || {
            self.check_health()
        });
    }

    /// Runs one command on a server, on a separate connection.
    ///
    /// # Panics
    ///
    /// If the command fails or its answer does not have the requested type.
    pub fn command<T: redis::FromRedisValue>(&self, index: usize, command: &[&str]) -> T {
        self.servers[index].command(command)
    }

    /// Kills a server as `kill -9` does.
    pub fn kill(&mut self, index: usize) {
        self.servers[index].kill();
    }

    /// Restarts a killed server in its previous role.
    pub fn restart(&mut self, index: usize) {
        self.servers[index].restart();
    }

    /// Stops a server: its connections stay open, but it answers nothing.
    pub fn freeze(&self, index: usize) {
        self.servers[index].freeze();
    }

    /// Resumes a frozen server.
    pub fn thaw(&self, index: usize) {
        self.servers[index].thaw();
    }

    /// Kills a sentinel as `kill -9` does.
    pub fn kill_sentinel(&mut self, index: usize) {
        self.sentinels[index].kill();
    }

    /// Restarts a killed sentinel. It still has its view of the servers.
    pub fn restart_sentinel(&mut self, index: usize) {
        self.sentinels[index].restart();
        speed_up_timers(&self.sentinels[index]);
    }

    /// Stops a sentinel: its connections stay open, but it answers nothing.
    pub fn freeze_sentinel(&self, index: usize) {
        self.sentinels[index].freeze();
    }

    /// Resumes a frozen sentinel.
    pub fn thaw_sentinel(&self, index: usize) {
        self.sentinels[index].thaw();
    }

    fn agreed_master(&self) -> Result<usize, String> {
        let running = self
            .sentinels
            .iter()
            .filter(|sentinel| sentinel.pid().is_some());
        let reported = running.filter_map(|sentinel| {
            let question = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER_NAME];
            let (_, port) = sentinel.try_command::<(String, u16)>(&question).ok()?;
            Some(port)
        });
        let reported: Vec<u16> = reported.collect();
        let ports = self.servers.iter().map(Server::port);
        let most = ports.enumerate().find(|(_, port)| {
            let votes = reported.iter().filter(|&other| other == port).count();
            votes * 2 > reported.len()
        });
        let (index, _) = most.ok_or_else(|| format!("sentinels say {reported:?}"))?;
        let role: Vec<redis::Value> = self.servers[index]
            .try_command(&["ROLE"])
            .map_err(|error| format!("server {index}: {error}"))?;
        match role.first() {
            Some(redis::Value::BulkString(role)) if role == b"master" => Ok(index),
            role => Err(format!("server {index} is {role:?}")),
        }
    }

    fn check_health(&self) -> Result<(), String> {
        let master = self.agreed_master()?;
        let running = |servers: &[Server]| servers.iter().filter(|s| s.pid().is_some()).count();
        let replicas = running(&self.servers) - 1;
        let online = self.servers[master].try_replicas_in_sync();
        let online = online.map_err(|error| error.to_string())?;
        if online != replicas {
            return Err(format!("{online} of {replicas} replicas are in sync"));
        }
        for sentinel in self.sentinels.iter().filter(|s| s.pid().is_some()) {
            let port = sentinel.port();
            let known = |what: &str, healthy: fn(&ReportedFields) -> bool| {
                let seen: Vec<ReportedFields> = sentinel
                    .try_command(&["SENTINEL", what, MASTER_NAME])
                    .map_err(|error| error.to_string())?;
                Ok::<usize, String>(seen.iter().filter(|seen| healthy(seen)).count())
            };
            let in_sync = known("REPLICAS", |seen| {
                field_is(seen, "flags", "slave") && field_is(seen, "master-link-status", "ok")
            })?;
            if in_sync != replicas {
                return Err(format!("{port} knows {in_sync} of {replicas} replicas"));
            }
            let others = running(&self.sentinels) - 1;
            // After a failover, Valkey 9.1 keeps the flag of what this sentinel reported of the old master.
            let met = known("SENTINELS", |seen| {
                field_is(seen, "flags", "sentinel")
                    || field_is(seen, "flags", "sentinel,master_down")
            })?;
            if met != others {
                return Err(format!("{port} knows {met} of {others} sentinels"));
            }
        }
        Ok(())
    }
}

/// What a sentinel knows of another process.
type ReportedFields = HashMap<String, String>;

fn field_is(seen: &ReportedFields, what: &str, value: &str) -> bool {
    seen.get(what).is_some_and(|found| found == value)
}

/// Makes replicas synchronize quickly: the master does not wait for more replicas to join a
/// transfer, and sends its replication offset every second.
pub(crate) const FAST_REPLICATION: &str =
    "\nrepl-diskless-sync-delay 0\nrepl-ping-replica-period 1\n";

fn sentinel_config(plan: &SentinelPlan<'_>, master: &Server) -> String {
    let SentinelPlan {
        quorum,
        down_after_millis,
        failover_timeout_millis,
        ..
    } = plan;
    let replicas = plan.replicas.max(1);
    let (address, port) = (master.address(), master.port());
    let further = plan.sentinel_lines.join("\n");
    format!(
        "sentinel monitor {MASTER_NAME} {address} {port} {quorum}
sentinel down-after-milliseconds {MASTER_NAME} {down_after_millis}
sentinel failover-timeout {MASTER_NAME} {failover_timeout_millis}
sentinel parallel-syncs {MASTER_NAME} {replicas}
{further}
"
    )
}

/// Makes a sentinel run its periodic tasks more often.
fn speed_up_timers(sentinel: &Server) {
    let fast_timers: Vec<&str> = FAST_TIMERS.split_whitespace().collect();
    // Without this command everything works, but slowly.
    let _ = sentinel.try_command::<()>(&fast_timers);
}
