//! A real Redis server for tests.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use crate::child_guard::ServerProcess;
use crate::config;
use crate::ports::free_port;
use crate::temp_dir::TempDir;
use crate::tls;

/// A `redis-server` on a free port of a loopback address, without persistence. It ends when
/// dropped, and also when the process that started it dies in any way, because its supervisor reads
/// from a pipe of that process.
#[derive(Debug)]
pub struct Server {
    address: Ipv4Addr,
    port: u16,
    args: Vec<String>,
    connect_settings: ConnectSettings,
    running: Option<ServerProcess>,
    /// The server's own directory, unless a deployment owns it. Declared after the process that
    /// writes to it, so that it is removed last.
    _dir: Option<TempDir>,
}

/// The settings that are needed to connect to it.
#[derive(Debug)]
struct ConnectSettings {
    password: Option<String>,
    /// The Unix socket of a server whose port speaks only TLS.
    socket: Option<String>,
}

impl ConnectSettings {
    fn from(lines: &str) -> ConnectSettings {
        ConnectSettings {
            password: config::value(lines, "requirepass"),
            socket: config::value(lines, "unixsocket")
                .filter(|_| config::value(lines, "port").as_deref() == Some("0")),
        }
    }
}

/// Time that [`Server::try_command`] waits for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The server that the tests of one binary share. Tests that break a server start their own.
pub fn shared() -> &'static Server {
    static SHARED: OnceLock<Server> = OnceLock::new();
    SHARED.get_or_init(Server::start)
}

impl Server {
    /// Starts a server with the default settings.
    pub fn start() -> Server {
        Server::start_with(&[])
    }

    /// Starts a server with additional settings, such as `["--requirepass", "x"]`.
    ///
    /// # Panics
    ///
    /// If `redis-server` is missing or does not start.
    pub fn start_with(args: &[&str]) -> Server {
        // A separate directory, so that a server does not load a file that an earlier replica
        // wrote.
        let dir = TempDir::new();
        let further: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        let connect_settings = ConnectSettings::from(&config::lines(&further));
        let address = Ipv4Addr::LOCALHOST;
        let server = Server::start_on_free_port(address, connect_settings, |port| {
            let mut args = settings(address, port);
            args.extend(["--dir".to_owned(), config::path(dir.path())]);
            args.extend_from_slice(&further);
            args
        });
        Server {
            _dir: Some(dir),
            ..server
        }
    }

    /// Starts a server that keeps its data when it is killed: everything that it has acknowledged
    /// is on disk.
    pub fn start_durable() -> Server {
        Server::start_durable_with(&[])
    }

    /// Starts a durable server with additional settings.
    ///
    /// # Panics
    ///
    /// If `redis-server` is missing or does not start.
    pub fn start_durable_with(args: &[&str]) -> Server {
        let dir = TempDir::new();
        let further: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        let lines = config::lines(&further);
        let lines = |_| format!("appendonly yes\nappendfsync always\n{lines}");
        let server = Server::start_in_dir(dir.path(), Ipv4Addr::LOCALHOST, lines, &[]);
        Server {
            _dir: Some(dir),
            ..server
        }
    }

    /// Starts a server that keeps its settings in a file in its `home` directory, so that it can
    /// change them. `lines` are all of its settings except address and port. The settings in `mode`
    /// are passed on the command line.
    pub(crate) fn start_in_dir(
        home: &Path,
        address: Ipv4Addr,
        mut lines: impl FnMut(u16) -> String,
        mode: &[&str],
    ) -> Server {
        std::fs::create_dir_all(home).expect("a directory for its files");
        let file = home.join("redis.conf");
        let connect_settings = ConnectSettings::from(&lines(0));
        Server::start_on_free_port(address, connect_settings, |port| {
            let mut text = config::lines(&settings(address, port));
            text += &config::lines(&["--dir".to_owned(), config::path(home)]);
            text += &lines(port);
            std::fs::write(&file, text).expect("its configuration file");
            let mode = mode.iter().map(|&arg| arg.to_owned());
            std::iter::once(config::path(&file)).chain(mode).collect()
        })
    }

    fn start_on_free_port(
        address: Ipv4Addr,
        connect_settings: ConnectSettings,
        mut args: impl FnMut(u16) -> Vec<String>,
    ) -> Server {
        // Another process may take the port before the server does. In that case, try another port.
        for _ in 0..20 {
            let port = free_port();
            let args = args(port);
            if let Some(running) = ServerProcess::launch(&args) {
                return Server {
                    address,
                    port,
                    args,
                    connect_settings,
                    running: Some(running),
                    _dir: None,
                };
            }
        }
        panic!("redis-server did not start; on Debian: apt-get install redis-server");
    }

    /// Returns the URL for clients.
    pub fn url(&self) -> String {
        let scheme = tls::scheme(self.connect_settings.socket.is_some());
        format!("{scheme}://{}:{}", self.address, self.port)
    }

    /// Returns the address that it listens on.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Returns the port that it listens on. No other server of this process uses the same port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns its process id; `None` after it was killed.
    pub fn pid(&self) -> Option<u32> {
        self.running.as_ref().map(ServerProcess::pid)
    }

    /// Kills the server as `kill -9` does. All data is lost, unless the server is durable.
    pub fn kill(&mut self) {
        self.running = None;
    }

    /// Restarts a killed server on the same port.
    ///
    /// # Panics
    ///
    /// If it does not start.
    pub fn restart(&mut self) {
        self.kill();
        // A process that searches for a free port may occupy this one for a moment.
        self.running = (0..50).find_map(|_| ServerProcess::launch(&self.args));
        assert!(self.running.is_some(), "redis-server did not start again");
    }

    /// Restarts a server with a configuration file without a setting, however often the file has it.
    pub(crate) fn restart_without(&mut self, setting: &str) {
        self.kill();
        let file = &self.args[0];
        let text = std::fs::read_to_string(file).expect("its configuration file");
        let has_setting = |line: &&str| line.split_whitespace().next() == Some(setting);
        let kept: Vec<&str> = text.lines().filter(|line| !has_setting(line)).collect();
        std::fs::write(file, kept.join("\n")).expect("its configuration file");
        self.restart();
    }

    /// Stops the server (SIGSTOP): its connections stay open, but it answers nothing.
    pub fn freeze(&self) {
        self.signal("STOP");
    }

    /// Resumes a frozen server.
    pub fn thaw(&self) {
        self.signal("CONT");
    }

    /// Returns the password that it requires from clients.
    pub(crate) fn password(&self) -> Option<&str> {
        self.connect_settings.password.as_deref()
    }

    fn signal(&self, signal: &str) {
        if let Some(running) = &self.running {
            running.signal(signal);
        }
    }

    /// Opens a connection for inspecting the server, apart from any client under test.
    ///
    /// # Panics
    ///
    /// If the server cannot be reached.
    pub fn connection(&self) -> redis::Connection {
        self.client().get_connection().expect("a running server")
    }

    fn client(&self) -> redis::Client {
        let url = match &self.connect_settings.socket {
            Some(socket) => format!("unix://{socket}"),
            None => self.url(),
        };
        let info = redis::IntoConnectionInfo::into_connection_info(url);
        let mut info = info.expect("a valid URL");
        if let Some(password) = &self.connect_settings.password {
            let login = info.redis_settings().clone().set_password(password);
            info = info.set_redis_settings(login);
        }
        redis::Client::open(info).expect("a valid URL")
    }

    /// Runs one command on a separate connection.
    ///
    /// # Panics
    ///
    /// If the command fails or its answer does not have the requested type.
    pub fn command<T: redis::FromRedisValue>(&self, command: &[&str]) -> T {
        let answer = query(command, &mut self.connection());
        answer.unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    /// Runs one command on a server that may be dead, frozen or refusing.
    ///
    /// # Errors
    ///
    /// If there is no answer within two seconds, or the answer is an error.
    pub fn try_command<T: redis::FromRedisValue>(&self, command: &[&str]) -> redis::RedisResult<T> {
        let mut connection = self.client().get_connection_with_timeout(ANSWER_TIMEOUT)?;
        connection.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        query(command, &mut connection)
    }

    /// Returns one field of INFO, such as `total_commands_processed`.
    ///
    /// # Panics
    ///
    /// If there is no such field.
    pub fn info(&self, field: &str) -> String {
        let info: String = self.command(&["INFO", "everything"]);
        info_field(&info, field).unwrap_or_else(|| panic!("no {field} in INFO"))
    }

    /// Returns how many commands the server has received whose names begin with `command` (in lower
    /// case; append a colon to match a full name).
    pub fn calls(&self, command: &str) -> u64 {
        let statistics: String = self.command(&["INFO", "commandstats"]);
        let begin = format!("cmdstat_{command}");
        let calls = |line: &str| line.split(['=', ',']).nth(1)?.parse::<u64>().ok();
        let lines = statistics.lines().filter(|line| line.starts_with(&begin));
        lines.filter_map(calls).sum()
    }

    /// Returns how often the server has replied an error with this code.
    pub fn errors(&self, code: &str) -> u64 {
        let statistics: String = self.command(&["INFO", "errorstats"]);
        let count = info_field(&statistics, &format!("errorstat_{code}"));
        let count = count.and_then(|count| count.strip_prefix("count=")?.parse().ok());
        count.unwrap_or_default()
    }

    /// Returns how many replicas are connected and in sync.
    ///
    /// # Panics
    ///
    /// If the server does not answer.
    pub fn replicas_in_sync(&self) -> usize {
        self.try_replicas_in_sync().expect("the server")
    }

    pub(crate) fn try_replicas_in_sync(&self) -> redis::RedisResult<usize> {
        let info: String = self.try_command(&["INFO", "replication"])?;
        let online = info.lines().filter(|line| line.contains("state=online"));
        Ok(online.count())
    }

    /// Flushes all data, and waits until this many replicas confirm it. Until then clients would wait for their first
    /// acquisitions, because a new replica acknowledges nothing for up to a second.
    ///
    /// # Panics
    ///
    /// If they do not confirm it.
    pub fn write_to_replicas(&self, replicas: usize) {
        let mut write = redis::pipe();
        write
            .cmd("FLUSHALL")
            .ignore()
            .cmd("WAIT")
            .arg(replicas)
            .arg(10_000);
        let confirmed: redis::RedisResult<[usize; 1]> = write.query(&mut self.connection());
        assert_eq!(confirmed, Ok([replicas]), "replicas that confirm a write");
    }

    /// Returns the number of connections, not counting the one that this call uses.
    pub fn clients(&self) -> usize {
        self.command::<String>(&["CLIENT", "LIST"]).lines().count() - 1
    }

    /// Makes the server close the connections of all clients, but not of replicas.
    pub fn cut_all(&self) {
        let mut connection = self.connection();
        for kind in ["normal", "pubsub"] {
            let _: i64 = redis::cmd("CLIENT")
                .arg(&["KILL", "TYPE", kind, "SKIPME", "yes"])
                .query(&mut connection)
                .expect("CLIENT KILL");
        }
    }
}

/// Returns one field of the answer to INFO, or to another command with the same format.
pub(crate) fn info_field(info: &str, field: &str) -> Option<String> {
    info.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name == field).then(|| value.trim().to_owned())
    })
}

fn query<T: redis::FromRedisValue>(
    command: &[&str],
    connection: &mut redis::Connection,
) -> redis::RedisResult<T> {
    redis::cmd(command[0]).arg(&command[1..]).query(connection)
}

/// The settings that all servers share.
fn settings(address: Ipv4Addr, port: u16) -> Vec<String> {
    let (address, port) = (address.to_string(), port.to_string());
    let mut settings = vec![
        ["--port", &port],
        ["--bind", &address],
        ["--daemonize", "no"],
        ["--save", ""],
        ["--appendonly", "no"],
        // A replica does not keep the transfer file: only durable servers keep data.
        ["--rdb-del-sync-files", "yes"],
        ["--enable-debug-command", "yes"],
    ];
    if address != Ipv4Addr::LOCALHOST.to_string() {
        // Other servers know it by the address from which it connects to them. Protected mode would
        // accept connections from 127.0.0.1 only.
        settings.push(["--bind-source-addr", &address]);
        settings.push(["--protected-mode", "no"]);
    }
    settings
        .concat()
        .iter()
        .map(|&arg| arg.to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn failed_server_start_is_detected() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        assert!(ServerProcess::launch(&settings(Ipv4Addr::LOCALHOST, port)).is_none());
    }
}
