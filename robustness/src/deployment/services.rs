//! What users have in place of a server of their own: managed services and proxies, imitated in front of real servers.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use redlatch_testkit::{Cluster, ClusterPlan, Proxy, Server, TempDir};

use super::topology::Single;
use super::{DURABLE, Deployment, Needs, Topology};
use crate::Result;
use crate::worker::USER;

/// The password of a user that does not change.
const PASSWORD: &str = "first";

/// Commands that some services do not have, or do not permit.
const UNAVAILABLE: [&str; 5] = ["client", "info", "role", "wait", "pubsub"];

/// Time between two changes of a password.
const ROTATION: Duration = Duration::from_secs(2);

/// How long the roles of two servers may take to change.
const FAILOVER_LIMIT: Duration = Duration::from_secs(30);

/// A master and its replica behind one name, which leads to the master.
pub(super) struct Named {
    servers: [Server; 2],
    name: Proxy,
    master: AtomicUsize,
}

impl Named {
    pub(super) fn start(needs: Needs) -> Named {
        let start = |further: &[&str]| {
            let mut settings = vec!["--repl-diskless-sync-delay", "0"];
            settings.extend(if needs.durable { &DURABLE[..] } else { &[] });
            settings.extend(further);
            Server::start_with(&settings)
        };
        let first = start(&[]);
        let follow = format!("127.0.0.1 {}", first.port());
        let second = start(&["--replicaof", &follow]);
        let named = Named {
            name: Proxy::to_server(&first),
            servers: [first, second],
            master: AtomicUsize::new(0),
        };
        named.await_healthy();
        named.servers[0].write_to_replicas(1);
        named
    }

    fn at(&self) -> usize {
        self.master.load(Ordering::Relaxed)
    }

    /// Lets the name lead to another server.
    fn lead_to(&self, place: usize) {
        self.master.store(place, Ordering::Relaxed);
        self.name.redirect(&self.servers[place]);
    }
}

impl Deployment for Named {
    fn url(&self) -> String {
        self.name.url()
    }

    fn masters(&self) -> Vec<usize> {
        vec![self.at()]
    }

    fn server(&self, place: usize) -> &Server {
        &self.servers[place]
    }

    fn servers(&self) -> Vec<&Server> {
        self.servers.iter().collect()
    }

    fn kill(&mut self, place: usize) {
        self.servers[place].kill();
    }

    /// It returns as the replica of the other one.
    fn restart(&mut self, place: usize) {
        assert_ne!(place, self.at(), "it has no successor");
        self.servers[place].restart();
        follow(&self.servers[place], &self.servers[self.at()]);
    }

    fn network(&self) -> Option<&Proxy> {
        Some(&self.name)
    }

    fn await_successor(&self, place: usize) -> Result<()> {
        let _: String = self.servers[1 - place].command(&["REPLICAOF", "NO", "ONE"]);
        self.lead_to(1 - place);
        Ok(())
    }

    /// The former master keeps its connections.
    fn hand_over(&self, place: usize) -> Result<()> {
        let successor = &self.servers[1 - place];
        let port = successor.port().to_string();
        let begun: redis::RedisResult<String> = redis::cmd("FAILOVER")
            .arg(&["TO", "127.0.0.1", &port])
            .query(&mut self.servers[place].connection());
        begun?;
        await_master(successor)?;
        // Clients may learn of it only later.
        sleep(Duration::from_millis(100));
        self.lead_to(1 - place);
        Ok(())
    }

    fn await_healthy(&self) {
        let master = &self.servers[self.at()];
        let end = Instant::now() + FAILOVER_LIMIT;
        while master.replicas_in_sync() == 0 {
            assert!(Instant::now() < end, "the replica is not in sync");
            sleep(Duration::from_millis(20));
        }
    }
}

fn follow(replica: &Server, master: &Server) {
    let port = master.port().to_string();
    let _: String = replica.command(&["REPLICAOF", "127.0.0.1", &port]);
}

fn await_master(server: &Server) -> Result<()> {
    let end = Instant::now() + FAILOVER_LIMIT;
    loop {
        let info: String = server.command(&["INFO", "replication"]);
        if info.contains("role:master") {
            return Ok(());
        }
        if Instant::now() > end {
            return Err("the server did not become master".into());
        }
        sleep(Duration::from_millis(5));
    }
}

/// A server with many slots, which does not say so.
pub(super) struct Sharded {
    node: Cluster,
    proxy: Proxy,
}

impl Sharded {
    pub(super) fn start(needs: Needs) -> Sharded {
        let node = Cluster::start_with(ClusterPlan {
            masters: 1,
            replicas: 0,
            args: if needs.durable { &DURABLE } else { &[] },
            ..ClusterPlan::default()
        });
        let proxy = Proxy::to_server(&node.nodes()[0]);
        proxy.hide_cluster(true);
        Sharded { node, proxy }
    }
}

impl Deployment for Sharded {
    fn url(&self) -> String {
        self.proxy.url()
    }

    fn is_single_server(&self) -> bool {
        true
    }

    fn has_slots(&self) -> bool {
        true
    }

    fn masters(&self) -> Vec<usize> {
        vec![0]
    }

    fn server(&self, _: usize) -> &Server {
        &self.node.nodes()[0]
    }

    fn servers(&self) -> Vec<&Server> {
        vec![self.server(0)]
    }

    fn kill(&mut self, place: usize) {
        self.node.kill(place);
    }

    fn restart(&mut self, place: usize) {
        self.node.restart(place);
        self.node.await_healthy();
    }

    fn network(&self) -> Option<&Proxy> {
        Some(&self.proxy)
    }
}

/// How workers use a server that they cannot use as the checks do.
#[derive(Default)]
pub(super) struct WorkerAccess {
    pub(super) url: Option<String>,
    rotation: Option<Rotation>,
    /// The workers' way to the proxy, without RESP3.
    _resp2: Option<Proxy>,
}

impl WorkerAccess {
    /// Returns the file that has the password, if it changes.
    pub(super) fn password_file(&self) -> Option<PathBuf> {
        self.rotation.as_ref().map(|rotation| rotation.file.clone())
    }
}

impl Single {
    /// Starts a server that limits its workers.
    pub(super) fn limited(topology: Topology, needs: Needs) -> Single {
        let denied = UNAVAILABLE.map(|command| format!("-{command}")).join(" ");
        let rule = match topology {
            Topology::Restricted => denied,
            _ => String::new(),
        };
        let user = format!("{USER} on >{PASSWORD} ~* &* +@all {rule}");
        let user: Vec<&str> = ["--user"]
            .into_iter()
            .chain(user.split_whitespace())
            .collect();
        let server = match needs.durable {
            true => Server::start_durable_with(&user),
            false => Server::start_with(&user),
        };
        let proxy = Proxy::to_server(&server);
        let resp2 = (topology == Topology::Resp2).then(|| Proxy::to(proxy.port()));
        let (mut url, mut rotation) = (proxy.url(), None);
        match topology {
            Topology::Restricted => {
                url = format!("redis://{USER}:{PASSWORD}@127.0.0.1:{}", proxy.port());
            }
            Topology::Rotating => {
                url = format!("redis://{USER}@127.0.0.1:{}", proxy.port());
                rotation = Some(Rotation::start(server.url()));
            }
            _ => {}
        }
        if let Some(resp2) = &resp2 {
            resp2.hide_resp3();
            url = resp2.url();
        }
        Single {
            server,
            proxy: Some(proxy),
            workers: WorkerAccess {
                url: Some(url),
                rotation,
                _resp2: resp2,
            },
        }
    }
}

/// Changes a password again and again, and ends the connections that logged in with the former one.
struct Rotation {
    file: PathBuf,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _folder: TempDir,
}

impl Rotation {
    fn start(url: String) -> Rotation {
        let (folder, ended) = (TempDir::new(), Arc::new(AtomicBool::new(false)));
        let file = folder.path().join("password");
        write(&file, PASSWORD).expect("a file for the password");
        let (of_thread, stopped) = (file.clone(), ended.clone());
        let thread = thread::spawn(move || {
            let mut number = 0;
            while !stopped.load(Ordering::Relaxed) {
                sleep(ROTATION);
                number += 1;
                let next = format!("password-{number}");
                // The server may be broken: then an earlier password stays.
                let _ = rotate(&url, &next, &of_thread);
            }
        });
        Rotation {
            file,
            ended,
            thread: Some(thread),
            _folder: folder,
        }
    }
}

/// Makes `next` the password. Both are valid until the file has it.
fn rotate(url: &str, next: &str, file: &Path) -> Result<()> {
    let client = redis::Client::open(url)?;
    let mut connection = client.get_connection_with_timeout(ROTATION)?;
    connection.set_read_timeout(Some(ROTATION))?;
    let mut run = |words: &[&str]| -> Result<()> {
        let mut cmd = redis::cmd(words[0]);
        cmd.arg(&words[1..])
            .query::<redis::Value>(&mut connection)?;
        Ok(())
    };
    run(&["ACL", "SETUSER", USER, &format!(">{next}")])?;
    write(file, next)?;
    run(&["ACL", "SETUSER", USER, "resetpass", &format!(">{next}")])?;
    run(&["CLIENT", "KILL", "USER", USER])
}

/// Writes a file that others read at any time.
fn write(file: &Path, text: &str) -> std::io::Result<()> {
    let new = file.with_extension("new");
    std::fs::File::create(&new)?.write_all(text.as_bytes())?;
    std::fs::rename(new, file)
}

impl Drop for Rotation {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
