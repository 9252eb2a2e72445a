//! A real Redis, for as long as it is needed.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use crate::config;
use crate::dir::Dir;
use crate::keeper::Running;
use crate::ports::free_port;
use crate::tls;

/// A `redis-server` on a free port of a loopback address, without persistence. Ends when dropped, and
/// also when the process that started it dies in any way: it hangs on a pipe of that process.
#[derive(Debug)]
pub struct Server {
    address: Ipv4Addr,
    port: u16,
    args: Vec<String>,
    known: Known,
    running: Option<Running>,
    /// Of its own, if no deployment has it. After that which writes to it, so that it is removed last.
    _dir: Option<Dir>,
}

/// What its settings say about how to look at it.
#[derive(Debug)]
struct Known {
    password: Option<String>,
    /// Of one that speaks nothing but TLS on its port.
    socket: Option<String>,
}

impl Known {
    fn from(lines: &str) -> Known {
        Known {
            password: config::value(lines, "requirepass"),
            socket: config::value(lines, "unixsocket")
                .filter(|_| config::value(lines, "port").as_deref() == Some("0")),
        }
    }
}

/// How long [`Server::try_ask`] waits for an answer.
const ANSWER: Duration = Duration::from_secs(2);

/// The server that the tests of one binary share. Tests that break things start their own.
pub fn shared() -> &'static Server {
    static SHARED: OnceLock<Server> = OnceLock::new();
    SHARED.get_or_init(Server::start)
}

impl Server {
    /// A server with the default settings.
    pub fn start() -> Server {
        Server::start_with(&[])
    }

    /// A server with further settings, such as `["--requirepass", "x"]`.
    ///
    /// # Panics
    ///
    /// When `redis-server` is missing or does not start.
    pub fn start_with(args: &[&str]) -> Server {
        // Of its own: what a replica once wrote must not be what another server begins with.
        let dir = Dir::new();
        let further: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        let known = Known::from(&config::lines(&further));
        let address = Ipv4Addr::LOCALHOST;
        let server = Server::on_some_port(address, known, |port| {
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

    /// A server that keeps its data when it is killed: what it has answered, it has on disk.
    pub fn start_durable() -> Server {
        Server::start_durable_with(&[])
    }

    /// The same, with further settings.
    ///
    /// # Panics
    ///
    /// When `redis-server` is missing or does not start.
    pub fn start_durable_with(args: &[&str]) -> Server {
        let dir = Dir::new();
        let further: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        let lines = config::lines(&further);
        let lines = |_| format!("appendonly yes\nappendfsync always\n{lines}");
        let server = Server::at_home(dir.path(), Ipv4Addr::LOCALHOST, lines, &[]);
        Server {
            _dir: Some(dir),
            ..server
        }
    }

    /// A server that keeps its settings in a file in its own `home`, so that it may change them.
    /// `lines` are all of its settings but address and port. Of these `mode` are on the command line.
    pub(crate) fn at_home(
        home: &Path,
        address: Ipv4Addr,
        mut lines: impl FnMut(u16) -> String,
        mode: &[&str],
    ) -> Server {
        std::fs::create_dir_all(home).expect("a place for its files");
        let file = home.join("redis.conf");
        let known = Known::from(&lines(0));
        Server::on_some_port(address, known, |port| {
            let mut text = config::lines(&settings(address, port));
            text += &config::lines(&["--dir".to_owned(), config::path(home)]);
            text += &lines(port);
            std::fs::write(&file, text).expect("its configuration file");
            let mode = mode.iter().map(|&arg| arg.to_owned());
            std::iter::once(config::path(&file)).chain(mode).collect()
        })
    }

    fn on_some_port(
        address: Ipv4Addr,
        known: Known,
        mut args: impl FnMut(u16) -> Vec<String>,
    ) -> Server {
        // Between finding a free port and using it somebody else may take it: then another one.
        for _ in 0..20 {
            let port = free_port();
            let args = args(port);
            if let Some(running) = Running::launch(&args) {
                return Server {
                    address,
                    port,
                    args,
                    known,
                    running: Some(running),
                    _dir: None,
                };
            }
        }
        panic!("redis-server does not start; on Debian: apt-get install redis-server");
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        let scheme = tls::scheme(self.known.socket.is_some());
        format!("{scheme}://{}:{}", self.address, self.port)
    }

    /// The address that it listens on.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// The port that it listens on. No other server of this process has the same.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its process; none after it was killed.
    pub fn pid(&self) -> Option<u32> {
        self.running.as_ref().map(Running::pid)
    }

    /// Kills the server as `kill -9` does. All data is gone, unless it was started to keep it.
    pub fn kill(&mut self) {
        self.running = None;
    }

    /// Starts a killed server again, on the same port.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub fn restart(&mut self) {
        self.kill();
        // Somebody who looks for a free port may have this one for a moment.
        self.running = (0..50).find_map(|_| Running::launch(&self.args));
        assert!(self.running.is_some(), "redis-server does not start again");
    }

    /// Stops the server (SIGSTOP): connections stay, nothing is answered.
    pub fn freeze(&self) {
        self.signal("STOP");
    }

    /// Lets a frozen server go on.
    pub fn thaw(&self) {
        self.signal("CONT");
    }

    /// What it asks of clients.
    pub(crate) fn password(&self) -> Option<&str> {
        self.known.password.as_deref()
    }

    fn signal(&self, signal: &str) {
        if let Some(running) = &self.running {
            running.signal(signal);
        }
    }

    /// A connection to look at the server with, apart from any client under test.
    ///
    /// # Panics
    ///
    /// When the server cannot be reached.
    pub fn connection(&self) -> redis::Connection {
        self.client().get_connection().expect("a running server")
    }

    fn client(&self) -> redis::Client {
        let url = match &self.known.socket {
            Some(socket) => format!("unix://{socket}"),
            None => self.url(),
        };
        let info = redis::IntoConnectionInfo::into_connection_info(url);
        let mut info = info.expect("a valid URL");
        if let Some(password) = &self.known.password {
            let login = info.redis_settings().clone().set_password(password);
            info = info.set_redis_settings(login);
        }
        redis::Client::open(info).expect("a valid URL")
    }

    /// Runs one command, on a connection of its own.
    ///
    /// # Panics
    ///
    /// When the command fails or its answer is not of the wanted type.
    pub fn ask<T: redis::FromRedisValue>(&self, command: &[&str]) -> T {
        let answer = query(command, &mut self.connection());
        answer.unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    /// The same for a server that may be dead, frozen or unwilling.
    ///
    /// # Errors
    ///
    /// When there is no answer within two seconds, or an error.
    pub fn try_ask<T: redis::FromRedisValue>(&self, command: &[&str]) -> redis::RedisResult<T> {
        let mut connection = self.client().get_connection_with_timeout(ANSWER)?;
        connection.set_read_timeout(Some(ANSWER))?;
        query(command, &mut connection)
    }

    /// One figure out of INFO, such as `total_commands_processed`.
    ///
    /// # Panics
    ///
    /// When there is no such figure.
    pub fn info(&self, figure: &str) -> String {
        let info: String = self.ask(&["INFO", "everything"]);
        figure_of(&info, figure).unwrap_or_else(|| panic!("no {figure} in INFO"))
    }

    /// How many commands the server was sent whose names begin with `command` (in lower case; all of a name with a colon).
    pub fn calls(&self, command: &str) -> u64 {
        let statistics: String = self.ask(&["INFO", "commandstats"]);
        let begin = format!("cmdstat_{command}");
        let calls = |line: &str| line.split(['=', ',']).nth(1)?.parse::<u64>().ok();
        let lines = statistics.lines().filter(|line| line.starts_with(&begin));
        lines.filter_map(calls).sum()
    }

    /// How many connections there are besides the one that asks.
    pub fn clients(&self) -> usize {
        self.ask::<String>(&["CLIENT", "LIST"]).lines().count() - 1
    }

    /// Closes all connections from the server's side.
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

/// One figure out of the answer to INFO, or to another command that answers alike.
pub(crate) fn figure_of(info: &str, figure: &str) -> Option<String> {
    info.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name == figure).then(|| value.trim().to_owned())
    })
}

fn query<T: redis::FromRedisValue>(
    command: &[&str],
    connection: &mut redis::Connection,
) -> redis::RedisResult<T> {
    redis::cmd(command[0]).arg(&command[1..]).query(connection)
}

/// What all servers here have in common.
fn settings(address: Ipv4Addr, port: u16) -> Vec<String> {
    let (address, port) = (address.to_string(), port.to_string());
    let mut settings = vec![
        ["--port", &port],
        ["--bind", &address],
        ["--daemonize", "no"],
        ["--save", ""],
        ["--appendonly", "no"],
        // What a replica was sent is not kept: data is kept by those who were asked to.
        ["--rdb-del-sync-files", "yes"],
        ["--enable-debug-command", "yes"],
    ];
    if address != Ipv4Addr::LOCALHOST.to_string() {
        // Others know it by this address when it comes to them. The protected mode would let in
        // nobody but 127.0.0.1.
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
    fn a_server_that_cannot_start_is_noticed() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        assert!(Running::launch(&settings(Ipv4Addr::LOCALHOST, port)).is_none());
    }
}
