//! Tests of a single server, and of the cleanup after it.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use redlatch_testkit::{Cluster, ClusterPlan, Postgres, SentinelPlan, Sentinels, Server, TlsPlan};

#[test]
fn durable_server_keeps_acknowledged_writes() {
    let mut server = Server::start_durable();
    let () = server.command(&["SET", "key", "value"]);
    server.restart();
    assert_eq!(server.command::<String>(&["GET", "key"]), "value");

    let dir = files_of(&server);
    assert!(Path::new(&dir).exists());
    drop(server);
    assert!(!Path::new(&dir).exists());
}

/// A replica writes the data that its master sends to a file. No later server may load that file,
/// not even the same one.
#[test]
fn restarted_server_without_persistence_is_empty() {
    let master = Server::start_with(&["--repl-diskless-sync-delay", "0"]);
    let () = master.command(&["SET", "key", "value"]);
    let port = master.port().to_string();
    let mut replica = Server::start_with(&["--replicaof", &format!("127.0.0.1 {port}")]);
    let end = Instant::now() + Duration::from_secs(30);
    while replica.command::<Option<String>>(&["GET", "key"]).is_none() {
        assert!(Instant::now() < end, "the replica does not follow");
        thread::sleep(Duration::from_millis(10));
    }
    drop(master);
    replica.restart();
    assert_eq!(replica.command::<Option<String>>(&["GET", "key"]), None);
    assert_ne!(files_of(&replica), files_of(&Server::start()));
}

#[test]
fn password_is_used_for_inspection() {
    for start in [Server::start_with, Server::start_durable_with] {
        let server = start(&["--requirepass", r#"a "b" \c"#]);
        assert_eq!(server.command::<String>(&["PING"]), "PONG");
    }
}

#[test]
fn tls_deployment_rejects_plain_connections() {
    let tls = Some(TlsPlan::default());
    let sentinels = Sentinels::start_with(SentinelPlan {
        replicas: 1,
        sentinels: 1,
        quorum: 1,
        tls,
        ..SentinelPlan::default()
    });
    let cluster = Cluster::start_with(ClusterPlan {
        masters: 1,
        tls,
        ..ClusterPlan::default()
    });
    for server in data(&sentinels, &cluster).chain(sentinels.sentinels()) {
        let in_the_open = server.url().replace("rediss:", "redis:");
        let client = redis::Client::open(in_the_open).expect("a valid URL");
        let patience = Duration::from_secs(10);
        assert!(client.get_connection_with_timeout(patience).is_err());
        // Through its Unix socket, which shows that it runs; the failed plain connection is thus
        // not a wrong port.
        assert_eq!(server.command::<String>(&["PING"]), "PONG");
    }
    for server in data(&sentinels, &cluster) {
        let [_, port]: [String; 2] = server.command(&["CONFIG", "GET", "port"]);
        assert_eq!(port, "0");
    }
}

#[test]
fn files_are_removed() {
    let sentinels = Sentinels::start();
    let cluster = Cluster::start_with(ClusterPlan {
        replicas: 0,
        ..ClusterPlan::default()
    });
    let all = data(&sentinels, &cluster).chain(sentinels.sentinels());
    let seen: Vec<_> = all.map(|server| (server.pid(), server.port())).collect();
    let dirs: Vec<_> = data(&sentinels, &cluster).map(files_of).collect();
    drop((sentinels, cluster));
    for (pid, port) in seen {
        let process = format!("/proc/{}", pid.expect("it ran"));
        assert!(!Path::new(&process).exists(), "{process} still runs");
        assert!(TcpListener::bind(("127.0.0.1", port)).is_ok(), "{port}");
    }
    for dir in dirs {
        assert!(!Path::new(&dir).exists(), "{dir} is still there");
        let parent = Path::new(&dir).parent().expect("that of all of them");
        assert!(!parent.exists(), "{dir} was not alone");
    }
}

#[test]
fn servers_and_files_do_not_outlive_killed_process() {
    if std::env::var_os(TO_BE_KILLED).is_some() {
        return run_until_killed();
    }
    let program = std::env::current_exe().expect("this program");
    let this = "server::servers_and_files_do_not_outlive_killed_process";
    let mut process = Command::new(program)
        .args(["--exact", this, "--nocapture"])
        .env(TO_BE_KILLED, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program");
    let output = BufReader::new(process.stdout.take().expect("a pipe")).lines();
    let words = output.map_while(Result::ok).find_map(|line| {
        let (_, words) = line.split_once("runs: ")?;
        Some(
            words
                .split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>(),
        )
    });
    let left = words.expect("what it has started");
    assert!(left.iter().all(|path| Path::new(path).exists()), "{left:?}");
    process.kill().expect("a process");
    process.wait().expect("a process");
    let deadline = Instant::now() + Duration::from_secs(60);
    while left.iter().any(|path| Path::new(path).exists()) {
        assert!(Instant::now() < deadline, "one of {left:?} is still there");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Set in the child process that this test starts from its own binary and then kills.
const TO_BE_KILLED: &str = "REDLATCH_TEST_TO_BE_KILLED";

fn run_until_killed() {
    let sentinels = Sentinels::start();
    let postgres = Postgres::start();
    let all = sentinels.servers().iter().chain(sentinels.sentinels());
    let pids = all.map(|server| server.pid().expect("it runs"));
    let pids = pids.chain([postgres.pid()]);
    let processes: Vec<_> = pids.map(|pid| format!("/proc/{pid}")).collect();
    println!(
        "runs: {} {} {}",
        files_of(&sentinels.servers()[0]),
        postgres.dir().display(),
        processes.join(" ")
    );
    // Ends together with the test that started it, if that test fails early.
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
fn many_servers_start_concurrently() {
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| Sentinels::start().fail_over());
            scope.spawn(|| Server::start().command::<String>(&["PING"]));
            scope.spawn(|| Cluster::start().master_of_key("key"));
        }
    });
}

/// Returns the data servers of both deployments.
fn data<'a>(sentinels: &'a Sentinels, cluster: &'a Cluster) -> impl Iterator<Item = &'a Server> {
    sentinels.servers().iter().chain(cluster.nodes())
}

fn files_of(server: &Server) -> String {
    let [_, dir]: [String; 2] = server.command(&["CONFIG", "GET", "dir"]);
    dir
}
