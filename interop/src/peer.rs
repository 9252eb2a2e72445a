//! One peer, as a test sees it.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;

/// Longer than anything takes that works, on the slowest machine.
const LONG: Duration = Duration::from_secs(120);

/// A process that does with its library what it is told. Ends when dropped, and with this process.
#[derive(Debug)]
pub struct Peer {
    process: Child,
    stdin: Mutex<Option<ChildStdin>>,
    waiting: Arc<Mutex<HashMap<u64, Sender<Answer>>>>,
    next: AtomicU64,
    ready: String,
}

/// What a peer said.
#[derive(Debug, Clone)]
pub struct Answer {
    /// When the library was called, in ns of the machine's monotonic clock.
    pub from: i64,
    /// When it returned.
    pub at: i64,
    /// What it returned, or the error that it threw.
    pub said: Result<Value, String>,
}

/// An answer that is still to come.
#[derive(Debug)]
pub struct Pending {
    what: String,
    answer: Receiver<Answer>,
}

/// A thread or owner of a peer: does one thing after the other.
#[derive(Debug, Clone, Copy)]
pub struct Worker<'a> {
    peer: &'a Peer,
    number: u64,
}

impl Peer {
    pub(crate) fn start(mut command: Command) -> Peer {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
        let first = lines.next().and_then(Result::ok).unwrap_or_default();
        let ready = serde_json::from_str::<Value>(&first).unwrap_or_default();
        let Some(ready) = ready["ready"].as_str() else {
            panic!("{command:?} is not ready, but said {first:?}");
        };
        let waiting = Arc::<Mutex<HashMap<_, _>>>::default();
        let hears = waiting.clone();
        std::thread::spawn(move || hear(lines, &hears));
        Peer {
            stdin: Mutex::new(process.stdin.take()),
            process,
            waiting,
            next: AtomicU64::new(1),
            ready: ready.to_owned(),
        }
    }

    /// What it said when it was ready: its library, and the version of that.
    pub fn ready(&self) -> &str {
        &self.ready
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// One of its workers.
    pub fn worker(&self, number: u64) -> Worker<'_> {
        Worker { peer: self, number }
    }

    /// A worker that nobody else has.
    pub fn new_worker(&self) -> Worker<'_> {
        self.worker(1_000_000 + self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// As `kill -9`.
    ///
    /// # Panics
    ///
    /// When it cannot be killed.
    pub fn kill(&mut self) {
        self.process.kill().expect("kill -9");
        self.process.wait().expect("the end of a killed process");
    }

    /// Stops the process (SIGSTOP), or lets it go on (SIGCONT).
    ///
    /// # Panics
    ///
    /// When there is no such signal.
    pub fn signal(&self, signal: &str) {
        let sent = Command::new("kill")
            .args(["-s", signal, &self.pid().to_string()])
            .status();
        assert!(sent.is_ok_and(|status| status.success()), "kill {signal}");
    }

    fn tell(&self, worker: u64, command: &str) -> Pending {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = channel();
        lock(&self.waiting).insert(id, sender);
        if let Some(stdin) = lock(&self.stdin).as_mut() {
            // Whoever is dead does not answer, which is noticed.
            let _ = stdin.write_all(format!("{id} {worker} {command}\n").as_bytes());
        }
        Pending {
            what: format!("{} {worker} {command}", self.ready),
            answer,
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Also one that stands still, or that does not hear that its input has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Worker<'_> {
    /// Has it do something, and does not wait for it.
    pub fn tell(&self, command: &str) -> Pending {
        self.peer.tell(self.number, command)
    }

    /// Has it do something that works: what it returned.
    ///
    /// # Panics
    ///
    /// When it fails, or takes too long.
    #[track_caller]
    pub fn ask(&self, command: &str) -> Value {
        self.tell(command).value()
    }

    /// Has it do something that yields yes or no.
    ///
    /// # Panics
    ///
    /// As [`Worker::ask`], and when it yields something else.
    #[track_caller]
    pub fn does(&self, command: &str) -> bool {
        let value = self.ask(command);
        value
            .as_bool()
            .unwrap_or_else(|| panic!("{command}: {value}"))
    }

    /// Has it do something that yields a number.
    ///
    /// # Panics
    ///
    /// As [`Worker::ask`], and when it yields something else.
    #[track_caller]
    pub fn number(&self, command: &str) -> i64 {
        let value = self.ask(command);
        value
            .as_i64()
            .unwrap_or_else(|| panic!("{command}: {value}"))
    }

    /// Has it do something that fails: how.
    ///
    /// # Panics
    ///
    /// When it works, or takes too long.
    #[track_caller]
    pub fn fails(&self, command: &str) -> String {
        match self.tell(command).answer().said {
            Err(error) => error,
            Ok(value) => panic!("{command} worked: {value}"),
        }
    }

    /// This worker as it stands in Redis.
    ///
    /// # Panics
    ///
    /// When it does not say.
    #[track_caller]
    pub fn owner(&self) -> String {
        self.ask("owner").as_str().expect("an owner").to_owned()
    }
}

impl Pending {
    /// Waits for the answer.
    ///
    /// # Panics
    ///
    /// When there is none for very long.
    #[track_caller]
    pub fn answer(self) -> Answer {
        match self.answer.recv_timeout(LONG) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => panic!("{}: no answer", self.what),
            Err(RecvTimeoutError::Disconnected) => panic!("{}: the peer has ended", self.what),
        }
    }

    /// Waits for an answer that is no error.
    ///
    /// # Panics
    ///
    /// When it is one, or when there is none for very long.
    #[track_caller]
    pub fn value(self) -> Value {
        let what = self.what.clone();
        match self.answer().said {
            Ok(value) => value,
            Err(error) => panic!("{what}: {error}"),
        }
    }

    /// Whether the answer has not come yet. It can be waited for afterwards only if so.
    ///
    /// # Panics
    ///
    /// When the peer has ended.
    #[track_caller]
    pub fn is_under_way(&self) -> bool {
        match self.answer.try_recv() {
            Err(std::sync::mpsc::TryRecvError::Empty) => true,
            Err(std::sync::mpsc::TryRecvError::Disconnected) => {
                panic!("{}: the peer has ended", self.what)
            }
            Ok(_) => false,
        }
    }
}

fn hear(
    lines: std::io::Lines<BufReader<ChildStdout>>,
    waiting: &Mutex<HashMap<u64, Sender<Answer>>>,
) {
    for line in lines.map_while(Result::ok) {
        let Ok(mut said) = serde_json::from_str::<Value>(&line) else {
            eprintln!("a peer said: {line}");
            continue;
        };
        let Some(sender) = said["id"].as_u64().and_then(|id| lock(waiting).remove(&id)) else {
            eprintln!("a peer said, without being asked: {line}");
            continue;
        };
        let answer = Answer {
            from: said["from"].as_i64().unwrap_or_default(),
            at: said["at"].as_i64().unwrap_or_default(),
            said: match said["error"].as_str() {
                Some(error) => Err(error.to_owned()),
                None => Ok(said["ok"].take()),
            },
        };
        // Perhaps nobody wants to know.
        let _ = sender.send(answer);
    }
    lock(waiting).clear();
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
