//! Databases with a ledger, a service, and holders in processes of their own.

use std::convert::Infallible;
use std::fmt::Debug;
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use redlatch_fencing::{mariadb, postgresql, sqlite};
use redlatch_testkit::{Mariadb, Postgres, unique};
use rusqlite::Connection;
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Connection as _, MySqlConnection};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, NoTls};

/// Waits until a condition holds. The limit is far longer than anything takes, even on a busy machine.
pub(crate) async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition().await {
        assert!(Instant::now() < deadline, "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The ledger. An insertion and its COMMIT wait while the test holds the advisory lock of their account.
const POSTGRESQL_LEDGER: &str = "
    CREATE TABLE ledger (
        id bigserial PRIMARY KEY, account text NOT NULL, amount bigint NOT NULL, token bigint NOT NULL
    );
    CREATE FUNCTION wait_for_test() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock(hashtext(TG_ARGV[0]), hashtext(NEW.account));
        RETURN NULL;
    END $$;
    CREATE TRIGGER wait_in_insert AFTER INSERT ON ledger
        FOR EACH ROW EXECUTE FUNCTION wait_for_test('insert');
    CREATE CONSTRAINT TRIGGER wait_in_commit AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION wait_for_test('commit');
";

/// A storage that accepts every token, to show what the check prevents.
const POSTGRESQL_UNCHECKED: &str = "
    CREATE OR REPLACE FUNCTION redlatch_fence(resource text, token bigint) RETURNS void
    LANGUAGE sql AS 'SELECT';
";

const SQLITE_LEDGER: &str = "
    CREATE TABLE ledger (
        id INTEGER PRIMARY KEY, account TEXT NOT NULL, amount INTEGER NOT NULL, token INTEGER NOT NULL
    );
";

const SQLITE_UNCHECKED: &str = "
    DROP TRIGGER redlatch_fence_check;
    CREATE TRIGGER redlatch_fence_check INSTEAD OF INSERT ON redlatch_fence BEGIN SELECT 1; END;
";

/// The server that all tests share.
fn server() -> &'static Postgres {
    static SERVER: OnceLock<Postgres> = OnceLock::new();
    SERVER.get_or_init(Postgres::start)
}

/// A PostgreSQL database with a ledger and a client.
pub(crate) struct Database {
    pub(crate) url: String,
    pub(crate) client: Client,
}

impl Database {
    /// Creates a database that checks tokens.
    pub(crate) async fn create() -> Database {
        Database::with(&[postgresql::SCHEMA, POSTGRESQL_LEDGER]).await
    }

    /// Creates a database that accepts every token.
    pub(crate) async fn create_unchecked() -> Database {
        let schema = [postgresql::SCHEMA, POSTGRESQL_LEDGER, POSTGRESQL_UNCHECKED];
        Database::with(&schema).await
    }

    async fn with(schema: &[&str]) -> Database {
        let name = unique("fencing").replace('-', "_");
        let create = format!("CREATE DATABASE {name}");
        let admin = connect(&server().url()).await;
        // The template must have no other connection, so a test that creates a database at the same time can disturb.
        until("the database is created", async || {
            admin.batch_execute(&create).await.is_ok()
        })
        .await;
        let url = format!("{}/{name}", server().url());
        let client = connect(&url).await;
        for part in schema {
            client.batch_execute(part).await.unwrap();
        }
        Database { url, client }
    }

    pub(crate) async fn connect(&self) -> Client {
        connect(&self.url).await
    }

    /// Returns the tokens of the entries of an account, in the order in which they were written.
    pub(crate) async fn tokens(&self, account: &str) -> Vec<i64> {
        let entries = "SELECT token FROM ledger WHERE account = $1 ORDER BY id";
        let rows = self.client.query(entries, &[&account]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// Waits until a statement that begins with `statement` waits for a lock.
    pub(crate) async fn until_blocked(&self, statement: &str) {
        let blocked = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()
            AND wait_event_type = 'Lock' AND starts_with(query, $1)";
        let what = format!("{statement} is blocked");
        until(&what, async || {
            let rows = self.client.query(blocked, &[&statement]).await.unwrap();
            !rows.is_empty()
        })
        .await;
    }

    /// Makes the insertion (`insert`) or the COMMIT (`commit`) of each entry of an account wait.
    pub(crate) async fn block(&self, what: &str, account: &str) {
        let block = "SELECT pg_advisory_lock(hashtext($1), hashtext($2))";
        self.client.query(block, &[&what, &account]).await.unwrap();
    }

    pub(crate) async fn unblock(&self) {
        let unblock = "SELECT pg_advisory_unlock_all()";
        self.client.batch_execute(unblock).await.unwrap();
    }
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

const MARIADB_LEDGER: &str = "
    CREATE TABLE ledger (
        id bigint AUTO_INCREMENT PRIMARY KEY, account varbinary(512) NOT NULL, amount bigint NOT NULL, token bigint NOT NULL
    );
";

const MARIADB_UNCHECKED: &str = "
    CREATE OR REPLACE PROCEDURE redlatch_fence(IN resource_name varbinary(512), IN holder_token bigint) DO 0;
";

/// A MariaDB database with a ledger.
pub(crate) struct MariadbDatabase {
    pub(crate) url: String,
}

impl MariadbDatabase {
    /// Creates a database that checks tokens.
    pub(crate) async fn create() -> MariadbDatabase {
        MariadbDatabase::with("")
    }

    /// Creates a database that accepts every token.
    pub(crate) async fn create_unchecked() -> MariadbDatabase {
        MariadbDatabase::with(MARIADB_UNCHECKED)
    }

    fn with(more: &str) -> MariadbDatabase {
        static SERVER: OnceLock<Mariadb> = OnceLock::new();
        let server = SERVER.get_or_init(Mariadb::start);
        let name = unique("fencing").replace('-', "_");
        server.create_database(&name, &format!("{}{MARIADB_LEDGER}{more}", mariadb::SCHEMA));
        let url = format!("{}/{name}", server.url());
        MariadbDatabase { url }
    }

    pub(crate) async fn connect(&self) -> MySqlConnection {
        MySqlConnection::connect(&self.url).await.unwrap()
    }

    /// Returns the tokens of the entries of an account, in the order in which they were written.
    pub(crate) async fn tokens(&self, account: &str) -> Vec<i64> {
        let entries = "SELECT token FROM ledger WHERE account = ? ORDER BY id";
        let entries = sqlx::query_scalar(entries).bind(account);
        let mut connection = self.connect().await;
        entries.fetch_all(&mut connection).await.unwrap()
    }

    /// Waits until a transaction in this database waits for a lock.
    pub(crate) async fn until_blocked(&self) {
        let blocked = "SELECT count(*) FROM information_schema.innodb_trx
            JOIN information_schema.processlist ON id = trx_mysql_thread_id
            WHERE trx_state = 'LOCK WAIT' AND db = DATABASE()";
        let mut connection = self.connect().await;
        until("a transaction waits", async || {
            // The table is not refreshed before it has not been read for 100 ms.
            tokio::time::sleep(Duration::from_millis(120)).await;
            let count = sqlx::query_scalar(blocked).fetch_one(&mut connection).await;
            let count: i64 = count.unwrap();
            count > 0
        })
        .await;
    }
}

/// An SQLite file with a ledger. Removed when dropped.
pub(crate) struct File {
    pub(crate) path: String,
}

impl File {
    /// Creates a file that checks tokens.
    pub(crate) fn create() -> File {
        File::with(&[sqlite::SCHEMA, SQLITE_LEDGER])
    }

    /// Creates a file that accepts every token.
    pub(crate) fn create_unchecked() -> File {
        File::with(&[sqlite::SCHEMA, SQLITE_LEDGER, SQLITE_UNCHECKED])
    }

    fn with(schema: &[&str]) -> File {
        let path = std::env::temp_dir().join(unique("redlatch-fencing"));
        let path = path.to_string_lossy().into_owned();
        // A previous process with the same process id may have left it behind when the machine stopped.
        let _ = std::fs::remove_file(&path);
        let file = File { path };
        let database = file.connect();
        for part in schema {
            database.execute_batch(part).unwrap();
        }
        file
    }

    pub(crate) fn connect(&self) -> Connection {
        let database = Connection::open(&self.path).unwrap();
        database.busy_timeout(Duration::from_secs(60)).unwrap();
        // These tests stop processes, but not the machine.
        database.execute_batch("PRAGMA synchronous = OFF").unwrap();
        database
    }

    /// Returns the tokens of the entries of an account, in the order in which they were written.
    pub(crate) fn tokens(&self, account: &str) -> Vec<i64> {
        let database = self.connect();
        let entries = "SELECT token FROM ledger WHERE account = ?1 ORDER BY id";
        let mut statement = database.prepare(entries).unwrap();
        let tokens = statement.query_map([account], |row| row.get(0)).unwrap();
        tokens.map(Result::unwrap).collect()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// An HTTP service that keeps its ledger in an SQLite file. Ends when dropped.
pub(crate) struct Service {
    pub(crate) address: SocketAddr,
    task: JoinHandle<Infallible>,
}

impl Service {
    pub(crate) async fn start(file: &File) -> Service {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(serve(listener, Arc::new(Mutex::new(file.connect()))));
        Service { address, task }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(listener: TcpListener, database: Arc<Mutex<Connection>>) -> Infallible {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let database = database.clone();
        let answer = service_fn(move |request| answer(request, database.clone()));
        let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
        tokio::spawn(connection);
    }
}

/// Answers `POST /account` with the amount as its body.
async fn answer(
    request: Request<Incoming>,
    database: Arc<Mutex<Connection>>,
) -> hyper::Result<Response<Empty<Bytes>>> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let amount = std::str::from_utf8(&body).unwrap().parse().unwrap();
    let account = head.uri.path().trim_start_matches('/');
    let mut database = database.lock().unwrap();
    let status = redlatch_fencing::http::book(&mut database, &head.headers, account, amount);
    let mut response = Response::new(Empty::new());
    *response.status_mut() = status;
    Ok(response)
}

/// A holder in a process of its own. Killed when dropped.
pub(crate) struct Holder {
    process: Child,
    requests: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Holder {
    pub(crate) fn start(redis: &str, name: &str, storage: &str) -> Holder {
        let mut process = Command::new(env!("CARGO_BIN_EXE_redlatch-fencing-holder"))
            .args([redis, name, storage])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let requests = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap()).lines();
        Holder {
            process,
            requests,
            answers,
        }
    }

    /// Acquires the lock. Returns the token.
    pub(crate) fn acquire(&mut self) -> u64 {
        self.send("acquire");
        self.answer().parse().unwrap()
    }

    /// Sends a request. A stopped process reads it when it continues.
    pub(crate) fn send(&mut self, request: &str) {
        writeln!(self.requests, "{request}").unwrap();
    }

    pub(crate) fn answer(&mut self) -> String {
        self.answers.next().expect("an answer").unwrap()
    }

    /// Sends SIGSTOP, and waits until all threads are stopped.
    pub(crate) async fn stop(&self) {
        self.signal(Signal::STOP);
        let stat = format!("/proc/{}/stat", self.process.id());
        until("the holder is stopped", async || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            stat.rsplit(')').next().unwrap().starts_with(" T")
        })
        .await;
    }

    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns how many tokens are smaller than one before them.
pub(crate) fn stale(tokens: &[i64]) -> usize {
    let mut greatest = 0;
    tokens
        .iter()
        .filter(|&&token| {
            greatest = greatest.max(token);
            token < greatest
        })
        .count()
}

/// The tokens of two transactions that overlap, whether the first one commits, and whether the second one then passes.
pub(crate) const OVERLAPS: [([u64; 2], bool, bool); 5] = [
    ([4, 6], true, true),
    ([4, 6], false, true),
    ([4, 4], true, true),
    ([6, 4], true, false),
    ([6, 4], false, true),
];

/// Checks how the second one has ended.
#[track_caller]
pub(crate) fn assert_overlap<E: Debug>(
    what: &str,
    second: Result<i64, E>,
    commits: bool,
    passes: bool,
    is_stale: fn(&E) -> bool,
) {
    match second {
        // It reads what the transaction that it waited for has written.
        Ok(entries) => assert!(passes && entries == i64::from(commits), "{what}: {entries}"),
        Err(error) => assert!(!passes && is_stale(&error), "{what}: {error:?}"),
    }
}
