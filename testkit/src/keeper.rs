//! What must not outlive this process: a shell keeps it that hangs on a pipe of this process, so it
//! ends when this process ends, in whatever way.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

/// A shell that runs a script, which tidies up when its standard input ends. That is when this is
/// dropped, and when this process dies.
#[derive(Debug)]
pub(crate) struct Keeper(Child);

impl Keeper {
    /// Runs the script; its arguments are `$1` and so on.
    pub(crate) fn start(script: &str, args: &[String]) -> Keeper {
        let shell = Command::new("sh")
            .args(["-c", script, "redis-keeper"])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn();
        Keeper(shell.expect("sh"))
    }

    /// What the script says. To be asked for once.
    fn output(&mut self) -> BufReader<ChildStdout> {
        BufReader::new(self.0.stdout.take().expect("not asked for before"))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// A running `redis-server`. Killed when dropped, and when this process dies.
#[derive(Debug)]
pub(crate) struct Running {
    pid: u32,
    _keeper: Keeper,
}

/// Starts the server, says its process id, and kills it when standard input ends. Leaves standard
/// output to the server alone, so that it ends with it: also when it could not start.
const SERVER: &str = r#"
redis-server "$@" </dev/null &
echo "pid $!"
exec >/dev/null
read -r _
kill -9 $! 2>/dev/null
wait
"#;

/// What a server says when it listens, and what a sentinel says.
const READY: [&str; 2] = ["Ready to accept connections", "Sentinel ID is"];

impl Running {
    /// `None` if it ended before it was ready, because the port was taken.
    pub(crate) fn launch(args: &[String]) -> Option<Running> {
        let mut keeper = Keeper::start(SERVER, args);
        let mut log = keeper.output().lines();
        let mut pid = None;
        for line in log.by_ref().map_while(Result::ok) {
            if let Some(said) = line.strip_prefix("pid ") {
                pid = said.trim().parse().ok();
            } else if READY.iter().any(|ready| line.contains(ready)) {
                // Somebody must read the rest, or the server would block on a full pipe one day.
                std::thread::spawn(move || log.for_each(drop));
                return pid.map(|pid| Running {
                    pid,
                    _keeper: keeper,
                });
            }
        }
        None
    }

    /// Its process.
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
