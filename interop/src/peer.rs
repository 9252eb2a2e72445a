//! A peer from the point of view of a test.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

/// The longest wait for an answer: more than any successful command takes, on the slowest machine.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// A process that runs commands with its library. It ends when dropped, and with this process.
#[derive(Debug)]
pub struct Peer {
    process: Child,
    stdin: Mutex<Option<ChildStdin>>,
    waiting: Arc<Mutex<HashMap<u64, Sender<Answer>>>>,
    next: AtomicU64,
    library_version: String,
}

/// An answer of a peer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Start of the call into the library, in ns of the machine's monotonic clock.
    pub started: i64,
    /// End of the call.
    pub ended: i64,
    /// The returned value, or the error.
    pub result: Result<Value, String>,
}

/// A pending answer.
#[derive(Debug)]
pub struct Pending {
    what: String,
    answer: Receiver<Answer>,
}

/// A thread or owner of a peer, which runs its commands one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Worker<'a> {
    /// The process that runs it.
    pub peer: &'a Peer,
    number: u64,
}

impl Peer {
    /// Starts a program that speaks the protocol of the peers.
    ///
    /// # Panics
    ///
    /// If it does not start.
    pub fn start(mut command: Command) -> Peer {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
        let first = lines.next().and_then(Result::ok).unwrap_or_default();
        let ready = serde_json::from_str::<Value>(&first).unwrap_or_default();
        let Some(library_version) = ready["ready"].as_str() else {
            panic!("{command:?} is not ready, it printed {first:?}");
        };
        let waiting = Arc::<Mutex<HashMap<_, _>>>::default();
        let waiting_of_reader = waiting.clone();
        std::thread::spawn(move || read_answers(lines, &waiting_of_reader));
        Peer {
            stdin: Mutex::new(process.stdin.take()),
            process,
            waiting,
            next: AtomicU64::new(1),
            library_version: library_version.to_owned(),
        }
    }

    /// Returns the name and version of its library.
    pub fn library_version(&self) -> &str {
        &self.library_version
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns one of its workers.
    pub fn worker(&self, number: u64) -> Worker<'_> {
        Worker { peer: self, number }
    }

    /// Returns a worker that is not used elsewhere.
    pub fn new_worker(&self) -> Worker<'_> {
        self.worker(1_000_000 + self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Kills the process (SIGKILL).
    ///
    /// # Panics
    ///
    /// If it cannot be killed.
    pub fn kill(&mut self) {
        self.process.kill().expect("kill -9");
        self.process.wait().expect("the end of a killed process");
    }

    /// Sends a signal: stops the process (SIGSTOP), or continues it (SIGCONT).
    ///
    /// # Panics
    ///
    /// If there is no such signal.
    pub fn signal(&self, signal: &str) {
        let sent = Command::new("kill")
            .args(["-s", signal, &self.pid().to_string()])
            .status();
        assert!(sent.is_ok_and(|status| status.success()), "kill {signal}");
    }

    fn send(&self, worker: u64, command: &str) -> Pending {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = channel();
        lock(&self.waiting).insert(id, sender);
        if let Some(stdin) = lock(&self.stdin).as_mut() {
            // An error means that the peer has ended. Waiting for the answer then reports that.
            let _ = stdin.write_all(format!("{id} {worker} {command}\n").as_bytes());
        }
        Pending {
            what: format!("{} {worker} {command}", self.library_version),
            answer,
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // A stopped peer does not notice the end of its input.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Worker<'_> {
    /// Sends a command without waiting for the answer.
    pub fn send(&self, command: &str) -> Pending {
        self.peer.send(self.number, command)
    }

    /// Runs a command that succeeds, and returns its result.
    ///
    /// # Panics
    ///
    /// If it fails, or takes too long.
    #[track_caller]
    pub fn run(&self, command: &str) -> Value {
        self.send(command).value()
    }

    /// Runs a command that returns a boolean.
    ///
    /// # Panics
    ///
    /// Like [`Worker::run`], or if the result has another type.
    #[track_caller]
    pub fn run_bool(&self, command: &str) -> bool {
        let value = self.run(command);
        value
            .as_bool()
            .unwrap_or_else(|| panic!("{command}: {value}"))
    }

    /// Runs a command that returns a number.
    ///
    /// # Panics
    ///
    /// Like [`Worker::run`], or if the result has another type.
    #[track_caller]
    pub fn run_number(&self, command: &str) -> i64 {
        let value = self.run(command);
        value
            .as_i64()
            .unwrap_or_else(|| panic!("{command}: {value}"))
    }

    /// Runs a command that fails, and returns the error.
    ///
    /// # Panics
    ///
    /// If it succeeds, or takes too long.
    #[track_caller]
    pub fn run_err(&self, command: &str) -> String {
        match self.send(command).answer().result {
            Err(error) => error,
            Ok(value) => panic!("{command} succeeded: {value}"),
        }
    }

    /// Returns the owner of this worker as written in Redis.
    ///
    /// # Panics
    ///
    /// If it does not answer.
    #[track_caller]
    pub fn owner(&self) -> String {
        self.run("owner").as_str().expect("an owner").to_owned()
    }
}

impl Pending {
    /// Waits for the answer.
    ///
    /// # Panics
    ///
    /// If there is none for a long time.
    #[track_caller]
    pub fn answer(self) -> Answer {
        let Some(answer) = self.answer_within(ANSWER_LIMIT) else {
            panic!("{}: no answer", self.what);
        };
        answer
    }

    /// Waits for an answer that is not an error.
    ///
    /// # Panics
    ///
    /// If it is an error, or if there is none for a long time.
    #[track_caller]
    pub fn value(self) -> Value {
        self.value_repeating(ANSWER_LIMIT, || ())
    }

    /// Waits for an answer that is not an error, and repeats an action in these intervals until it comes.
    ///
    /// # Panics
    ///
    /// Like [`Pending::value`].
    #[track_caller]
    pub fn value_repeating(self, interval: Duration, mut action: impl FnMut()) -> Value {
        let end = Instant::now() + ANSWER_LIMIT;
        loop {
            match self.answer_within(interval).map(|answer| answer.result) {
                Some(Ok(value)) => return value,
                Some(Err(error)) => panic!("{}: {error}", self.what),
                None => assert!(Instant::now() < end, "{}: no answer", self.what),
            }
            action();
        }
    }

    #[track_caller]
    fn answer_within(&self, limit: Duration) -> Option<Answer> {
        match self.answer.recv_timeout(limit) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("{}: the peer has ended", self.what),
        }
    }

    /// Waits for an answer that is an array of numbers.
    ///
    /// # Panics
    ///
    /// Like [`Pending::value`], or if the answer has another type.
    #[track_caller]
    pub fn numbers(self) -> Vec<u64> {
        serde_json::from_value(self.value()).expect("an array of numbers")
    }

    /// Returns whether there is no answer yet. If there is one, it is lost: await only pending answers.
    ///
    /// # Panics
    ///
    /// If the peer has ended.
    #[track_caller]
    pub fn is_pending(&self) -> bool {
        self.answer_within(Duration::ZERO).is_none()
    }
}

fn read_answers(
    lines: std::io::Lines<BufReader<ChildStdout>>,
    waiting: &Mutex<HashMap<u64, Sender<Answer>>>,
) {
    for line in lines.map_while(Result::ok) {
        let Ok(mut message) = serde_json::from_str::<Value>(&line) else {
            eprintln!("a peer printed: {line}");
            continue;
        };
        let Some(sender) = message["id"]
            .as_u64()
            .and_then(|id| lock(waiting).remove(&id))
        else {
            eprintln!("unsolicited output of a peer: {line}");
            continue;
        };
        let answer = Answer {
            started: message["started"].as_i64().unwrap_or_default(),
            ended: message["ended"].as_i64().unwrap_or_default(),
            result: match message["error"].as_str() {
                Some(error) => Err(error.to_owned()),
                None => Ok(message["ok"].take()),
            },
        };
        // The receiver may have been dropped.
        let _ = sender.send(answer);
    }
    lock(waiting).clear();
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
