//! A real Redis, for as long as it is needed.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// A `redis-server` on a free loopback port, without persistence. Ends when dropped, and also when
/// the process that started it dies in any way: it hangs on a pipe of that process.
#[derive(Debug)]
pub struct Server {
    port: u16,
    args: Vec<String>,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    shell: Child,
    pid: u32,
}

/// Starts the server, says its process id, and kills it when standard input ends. Leaves standard
/// output to the server alone, so that it ends with it: also when it could not start.
const KEEPER: &str = r#"
redis-server "$@" </dev/null &
echo "pid $!"
exec >/dev/null
read -r _
kill -9 $! 2>/dev/null
wait
"#;

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
        let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        // Between finding a free port and using it somebody else may take it: then another one.
        for _ in 0..20 {
            let port = free_port();
            if let Some(running) = launch(port, &args) {
                return Server {
                    port,
                    args,
                    running: Some(running),
                };
            }
        }
        panic!("redis-server does not start; on Debian: apt-get install redis-server");
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Kills the server as `kill -9` does. All data is gone.
    pub fn kill(&mut self) {
        if let Some(mut running) = self.running.take() {
            drop(running.shell.stdin.take());
            let _ = running.shell.wait();
        }
    }

    /// Starts a killed server again, on the same port.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub fn restart(&mut self) {
        self.kill();
        // Somebody's outgoing connection may have the port for a moment.
        self.running = (0..50).find_map(|_| launch(self.port, &self.args));
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

    fn signal(&self, signal: &str) {
        if let Some(running) = &self.running {
            let pid = running.pid.to_string();
            let sent = Command::new("kill").args(["-s", signal, &pid]).status();
            assert!(sent.is_ok_and(|status| status.success()), "kill {signal}");
        }
    }

    /// A connection to look at the server with, apart from any client under test.
    ///
    /// # Panics
    ///
    /// When the server cannot be reached.
    pub fn connection(&self) -> redis::Connection {
        let client = redis::Client::open(self.url()).expect("a valid URL");
        client.get_connection().expect("a running server")
    }

    /// Runs one command, on a connection of its own.
    ///
    /// # Panics
    ///
    /// When the command fails or its answer is not of the wanted type.
    pub fn ask<T: redis::FromRedisValue>(&self, command: &[&str]) -> T {
        let mut cmd = redis::cmd(command[0]);
        for arg in &command[1..] {
            cmd.arg(arg);
        }
        let answer = cmd.query(&mut self.connection());
        answer.unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    /// One figure out of INFO, such as `total_commands_processed`.
    ///
    /// # Panics
    ///
    /// When there is no such figure.
    pub fn info(&self, figure: &str) -> String {
        let info: String = self.ask(&["INFO", "everything"]);
        let line = info.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name == figure).then(|| value.trim().to_owned())
        });
        line.unwrap_or_else(|| panic!("no {figure} in INFO"))
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

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}

/// `None` if it ended before it was ready, because the port was taken.
fn launch(port: u16, args: &[String]) -> Option<Running> {
    let port = port.to_string();
    let mut shell = Command::new("sh")
        .args(["-c", KEEPER, "redis-keeper"])
        .args(["--port", &port, "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
        .args(["--dir", &std::env::temp_dir().to_string_lossy()])
        .args(["--enable-debug-command", "yes"])
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("sh");
    let mut log = BufReader::new(shell.stdout.take().expect("a pipe")).lines();
    let mut pid = None;
    for line in log.by_ref().map_while(Result::ok) {
        if let Some(said) = line.strip_prefix("pid ") {
            pid = said.trim().parse().ok();
        } else if line.contains("Ready to accept connections") {
            // Somebody must read the rest, or the server would block on a full pipe one day.
            std::thread::spawn(move || log.for_each(drop));
            return pid.map(|pid| Running { shell, pid });
        }
    }
    drop(shell.stdin.take());
    let _ = shell.wait();
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_cannot_start_is_noticed() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        assert!(launch(port, &[]).is_none());
    }
}
