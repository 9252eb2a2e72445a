//! Servers as users have them: behind one name, behind one address with many slots, with few commands, with passwords that
//! change. Some of those that tests share change all the time.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;
use std::time::Duration;

use redlatch::{Client, ClientBuilder, Credentials, ReplicaSync};
use redlatch_testkit::{Cluster, ClusterPlan, Proxy, Server};
use tokio::runtime::Builder;
use tokio::time::sleep;

use super::{patient, until, until_in_sync};

/// Time between two changes of a deployment that tests share: short, so that changes fall into some tests.
const CHANGE_INTERVAL: Duration = Duration::from_millis(250);

/// One name that leads to another server after a failover: managed Redis, a Kubernetes service, a load balancer. A master and its
/// replica; the name leads to the master.
pub(crate) struct MovedEndpoint {
    pub(crate) old: Server,
    pub(crate) new: Server,
    pub(crate) name: Proxy,
    /// Whether the servers have changed roles.
    is_exchanged: AtomicBool,
}

impl MovedEndpoint {
    pub(crate) fn start() -> MovedEndpoint {
        MovedEndpoint::start_with(&[])
    }

    pub(crate) fn start_with(settings: &[&str]) -> MovedEndpoint {
        let settings = [&["--repl-diskless-sync-delay", "0"], settings].concat();
        let old = Server::start_with(&settings);
        let follow = format!("127.0.0.1 {}", old.port());
        let new = Server::start_with(&[&settings[..], &["--replicaof", &follow]].concat());
        let name = Proxy::to_server(&old);
        MovedEndpoint {
            old,
            new,
            name,
            is_exchanged: AtomicBool::new(false),
        }
    }

    pub(crate) async fn until_in_sync(&self) {
        until_in_sync(&self.old, 1).await;
    }

    /// The replica has this key.
    pub(crate) async fn until_replicated(&self, key: &str) {
        let exists = || self.new.command::<u32>(&["EXISTS", key]) == 1;
        until("replicated", async || exists()).await;
    }

    /// Promotes the replica. The old master follows it, and keeps its connections open.
    pub(crate) fn fail_over(&self) {
        let _: String = self.new.command(&["REPLICAOF", "NO", "ONE"]);
        let new = self.new.port().to_string();
        let _: String = self.old.command(&["REPLICAOF", "127.0.0.1", &new]);
    }

    /// Returns how often clients have asked the old master for its role: for each connection.
    pub(crate) fn connections(&self) -> u64 {
        self.old.calls("role")
    }

    /// Lets the servers change roles without losing a write. The name follows, connections stay where they are.
    async fn exchange_roles(&self) {
        let (mut master, mut replica) = (&self.old, &self.new);
        if self.is_exchanged.fetch_xor(true, Ordering::Relaxed) {
            (master, replica) = (replica, master);
        }
        until_in_sync(master, 1).await;
        // Valkey 9 gives up a failover before anything was replicated.
        let _: i64 = master.command(&["PUBLISH", "nobody", ""]);
        let port = replica.port().to_string();
        let _: String = master.command(&["FAILOVER", "TO", "127.0.0.1", &port]);
        let role = || replica.command::<String>(&["INFO", "replication"]);
        until("promoted", async || role().contains("role:master")).await;
        self.name.redirect(replica);
    }
}

/// One address with many slots behind it: managed Redis and proxies that show a cluster as a single server. Here a cluster
/// of one node that does not tell.
pub(crate) struct ShardedEndpoint {
    pub(crate) cluster: Cluster,
    proxy: Proxy,
}

impl ShardedEndpoint {
    pub(crate) fn start() -> ShardedEndpoint {
        let cluster = Cluster::start_with(ClusterPlan {
            masters: 1,
            replicas: 0,
            ..ClusterPlan::default()
        });
        let proxy = Proxy::to_server(&cluster.nodes()[0]);
        proxy.hide_cluster(true);
        ShardedEndpoint { cluster, proxy }
    }

    pub(crate) async fn client(&self, settings: ClientBuilder) -> Client {
        patient(settings).connect(&self.proxy.url()).await.unwrap()
    }

    /// Returns how often keys of several slots were refused.
    pub(crate) fn refusals(&self) -> u64 {
        self.cluster.nodes()[0].errors("CROSSSLOT")
    }
}

/// A user whose password changes.
pub(crate) struct Rotating {
    pub(crate) server: Server,
    password: Arc<Mutex<String>>,
}

impl Rotating {
    pub(crate) fn start() -> Rotating {
        let rotating = Rotating {
            server: Server::start(),
            password: Arc::default(),
        };
        rotating.rotate("first");
        rotating
    }

    /// Changes the password.
    pub(crate) fn rotate(&self, password: &str) {
        self.accept(password, "");
    }

    /// Changes the password. Accepts the former one, too, unless it is empty.
    fn accept(&self, password: &str, former: &str) {
        let mut current = self.password.lock().unwrap();
        password.clone_into(&mut current);
        let (password, former) = (format!(">{password}"), format!(">{former}"));
        let mut rule = vec!["ACL", "SETUSER", "app", "reset", "on", "~*", "&*", "+@all"];
        rule.push(&password);
        rule.extend((former != ">").then_some(&*former));
        let _: String = self.server.command(&rule);
    }

    /// Ends all connections of the user.
    pub(crate) fn end_connections(&self) {
        let _: u32 = self.server.command(&["CLIENT", "KILL", "USER", "app"]);
    }

    /// Without ending connections, because steps that cannot be repeated would fail in some tests. A former password remains valid
    /// until the next change, as with services that rotate them.
    async fn keep_rotating(&self) {
        let mut former = "first".to_owned();
        for number in 0_u64.. {
            sleep(CHANGE_INTERVAL).await;
            let password = format!("password-{number}");
            self.accept(&password, &former);
            former = password;
        }
    }

    /// Returns settings that ask for the current password.
    fn settings(&self, settings: ClientBuilder) -> ClientBuilder {
        let password = self.password.clone();
        settings.credentials(move || {
            let current = Credentials::new(password.lock().unwrap().clone()).username("app");
            async move { io::Result::Ok(current) }
        })
    }
}

/// Commands that some services do not have.
const UNKNOWN: [&str; 6] = ["WAIT", "ROLE", "INFO", "CLIENT", "CONFIG", "PUBSUB"];

/// A server without the commands that locks can do without, and with one database.
fn start_restricted() -> Server {
    let unknown = UNKNOWN.map(|command| ["--rename-command", command, ""]);
    Server::start_with(&[unknown.as_flattened(), &["--databases", "1"]].concat())
}

/// Settings of a server without RESP3, as some proxies are.
pub(crate) const RESP2: [&str; 3] = ["--rename-command", "HELLO", ""];

pub(crate) fn start_resp2() -> Server {
    Server::start_with(&RESP2)
}

/// A deployment as a store of tests. They share all but the first.
#[derive(Clone)]
pub(crate) enum Deployment {
    MovedEndpoint(Arc<MovedEndpoint>),
    ShardedEndpoint(&'static ShardedEndpoint),
    /// Restricted, or without RESP3.
    Limited(&'static Server),
    Rotating(&'static Rotating),
}

impl Deployment {
    pub(crate) fn moved_endpoint() -> Deployment {
        Deployment::MovedEndpoint(Arc::new(MovedEndpoint::start()))
    }

    pub(crate) fn sharded_endpoint() -> Deployment {
        static SHARED: LazyLock<ShardedEndpoint> = LazyLock::new(ShardedEndpoint::start);
        Deployment::ShardedEndpoint(&SHARED)
    }

    pub(crate) fn restricted() -> Deployment {
        static SHARED: LazyLock<Server> = LazyLock::new(start_restricted);
        Deployment::Limited(&SHARED)
    }

    pub(crate) fn resp2() -> Deployment {
        static SHARED: LazyLock<Server> = LazyLock::new(start_resp2);
        Deployment::Limited(&SHARED)
    }

    pub(crate) fn rotating() -> Deployment {
        static SHARED: LazyLock<&Rotating> =
            LazyLock::new(|| shared(Rotating::start(), Rotating::keep_rotating));
        Deployment::Rotating(*SHARED)
    }

    fn url(&self) -> String {
        match self {
            Deployment::MovedEndpoint(named) => named.name.url(),
            Deployment::ShardedEndpoint(endpoint) => endpoint.proxy.url(),
            Deployment::Limited(server) => server.url(),
            Deployment::Rotating(rotating) => rotating.server.url(),
        }
    }

    /// Creates a client. Behind one name, there is then another server, and the client's first step meets the former master.
    pub(crate) async fn client(&self, settings: ClientBuilder) -> Client {
        let client = self.settings(settings).connect(&self.url()).await.unwrap();
        if let Deployment::MovedEndpoint(named) = self {
            named.exchange_roles().await;
        }
        client
    }

    fn settings(&self, settings: ClientBuilder) -> ClientBuilder {
        match self {
            // The next master must have each lock that a client has acquired.
            Deployment::MovedEndpoint(_) => settings.replica_sync(ReplicaSync::AtLeast(1)),
            Deployment::Rotating(rotating) => rotating.settings(settings),
            Deployment::ShardedEndpoint(_) | Deployment::Limited(_) => settings,
        }
    }
}

/// Returns a deployment that changes as long as the tests run.
fn shared<D: Sync>(
    deployment: D,
    change: impl AsyncFnOnce(&'static D) + Send + 'static,
) -> &'static D {
    let deployment: &D = Box::leak(Box::new(deployment));
    thread::spawn(|| {
        let runtime = Builder::new_current_thread().enable_time().build();
        runtime.unwrap().block_on(change(deployment));
    });
    deployment
}
