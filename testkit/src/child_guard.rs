//! Child processes that must not outlive this process. A shell supervises each of them and reads
//! from a pipe of this process, so it notices when this process ends for any reason.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::config;
use crate::ports::free_port;
use crate::temp_dir::TempDir;

/// A shell that runs a script. The script cleans up when its standard input ends: when this value
/// is dropped, and when this process dies.
#[derive(Debug)]
pub(crate) struct ChildGuard(Child);

impl ChildGuard {
    /// Runs the script with these arguments (`$1` and so on).
    pub(crate) fn start(script: &str, args: &[String]) -> ChildGuard {
        let shell = Command::new("sh")
            .args(["-c", script, "redis-guard"])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn();
        ChildGuard(shell.expect("sh"))
    }

    /// Returns the script's standard output. Can be called only once.
    fn output(&mut self) -> BufReader<ChildStdout> {
        BufReader::new(self.0.stdout.take().expect("output is called only once"))
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// A running server. Killed when dropped, and when this process dies.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    pid: u32,
    _guard: ChildGuard,
}

/// Starts the server, prints its process id, and kills it when standard input ends. The shell
/// closes its own standard output, so that the pipe closes when the server exits, also if it could
/// not start.
const SERVER_SCRIPT: &str = r#"
"${REDLATCH_TEST_SERVER:-redis-server}" "$@" </dev/null &
echo "pid $!"
exec >/dev/null
read -r _
kill -9 $! 2>/dev/null
wait
"#;

/// The log text of a Redis server that is listening, of a sentinel, of PostgreSQL, and of MariaDB.
const READY: [&str; 4] = [
    "Ready to accept connections",
    "Sentinel ID is",
    "database system is ready to accept connections",
    "mariadbd: ready for connections",
];

impl ServerProcess {
    /// Starts a `redis-server`. Returns `None` if it exited before it was ready, because the port was taken.
    pub(crate) fn launch(args: &[String]) -> Option<ServerProcess> {
        ServerProcess::launch_with(SERVER_SCRIPT, args)
    }

    /// Starts a database server with a script that gets its directory and a free port. Another process may take the port before
    /// the server does; then it tries another one. Returns the port.
    pub(crate) fn launch_on_free_port(script: &str, dir: &TempDir) -> Option<(u16, ServerProcess)> {
        (0..20).find_map(|_| {
            let port = free_port();
            let args = [config::path(dir.path()), port.to_string()];
            Some((port, ServerProcess::launch_with(script, &args)?))
        })
    }

    /// Starts a server with a script that prints its process id and its log, as [`SERVER_SCRIPT`]
    /// does. Returns `None` if the server exited before it was ready.
    pub(crate) fn launch_with(script: &str, args: &[String]) -> Option<ServerProcess> {
        let mut guard = ChildGuard::start(script, args);
        let mut log = guard.output().lines();
        let mut pid = None;
        for line in log.by_ref().map_while(Result::ok) {
            if let Some(number) = line.strip_prefix("pid ") {
                pid = number.trim().parse().ok();
            } else if READY.iter().any(|ready| line.contains(ready)) {
                // Read the rest, or the server would eventually block on a full pipe.
                std::thread::spawn(move || log.for_each(drop));
                return pid.map(|pid| ServerProcess { pid, _guard: guard });
            }
        }
        None
    }

    /// Returns its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends it a signal, such as `STOP`.
    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.pid.to_string();
        let sent = Command::new("kill").args(["-s", signal, &pid]).status();
        assert!(sent.is_ok_and(|status| status.success()), "kill {signal}");
    }
}
