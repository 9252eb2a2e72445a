//! The worker processes of a run: starts, stops, kills and ends them.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Result;
use crate::clock::now;
use crate::history::{Event, History};
use crate::worker::WorkerOptions;

/// All worker processes of one run. Processes that still run are killed when it is dropped.
pub(crate) struct Processes {
    processes: Vec<WorkerProcess>,
    /// Folder in which the output of the workers is kept, line by line, if requested.
    keep: Option<PathBuf>,
    history: Arc<Mutex<History>>,
}

struct WorkerProcess {
    number: usize,
    /// Its own number, or the place of the process that it replaced.
    place: usize,
    child: Child,
    stdin: Option<ChildStdin>,
    reader: Option<JoinHandle<()>>,
    killed: bool,
    stopped: bool,
}

impl Processes {
    pub(crate) fn new(history: Arc<Mutex<History>>, keep: Option<PathBuf>) -> Processes {
        Processes {
            processes: Vec::new(),
            keep,
            history,
        }
    }

    /// Starts another process. Returns its number.
    pub(crate) fn start(&mut self, worker: &WorkerOptions) -> Result<usize> {
        self.start_at(self.processes.len(), worker)
    }

    /// Starts a process that replaces a dead one: if client ids are chosen, it has the same ids. Returns its
    /// number.
    pub(crate) fn start_replacement(
        &mut self,
        dead: usize,
        worker: &WorkerOptions,
    ) -> Result<usize> {
        let place = self.processes.get(dead).ok_or("no such worker")?.place;
        self.start_at(place, worker)
    }

    fn start_at(&mut self, place: usize, worker: &WorkerOptions) -> Result<usize> {
        let number = self.processes.len();
        let client_id = worker.client_id.as_ref();
        let client_id = client_id.map(|id| format!("--client-id={id}-{place}"));
        let password_file = worker.password_file.as_ref();
        let password_file = password_file.map(|file| format!("--password-file={}", file.display()));
        let jobs = (!worker.jobs.is_empty()).then(|| format!("--jobs={}", worker.jobs.join(",")));
        let mut child = Command::new(std::env::current_exe()?)
            .arg("worker")
            .args(["--url", &worker.url, "--resource", &worker.resource])
            .args(["--names", &worker.names.join(",")])
            .args(["--tasks", &worker.tasks.to_string()])
            .args(["--long-holders", &worker.long_holders.to_string()])
            .args(["--fair", &worker.fair.to_string()])
            .args(["--clients", &worker.clients.to_string()])
            .args(["--owners", &worker.owners.to_string()])
            .args(["--threads", &worker.threads.to_string()])
            .args(["--contended-names", &worker.contended_names.join(",")])
            .args(["--permanent-locks", &worker.permanent_locks.to_string()])
            .args(jobs)
            .args(client_id)
            .args(password_file)
            .args(["--lease", &worker.lease.to_string()])
            .args(["--timeout", &worker.timeout.to_string()])
            .args(["--max-hold-ms", &worker.max_hold_ms.to_string()])
            .args(worker.uses_tickets.then_some("--uses-tickets"))
            .args(["--sync", worker.sync.name()])
            .args([
                "--seed",
                &worker.seed.wrapping_add(number as u64).to_string(),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().ok_or("no pipe")?;
        let history = self.history.clone();
        lock(&history).processes.entry(number).or_default();
        let mut kept = match &self.keep {
            Some(folder) => Some(File::create(folder.join(format!("{number}.jsonl")))?),
            None => None,
        };
        let reader = thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(|line| line.ok()) {
                if let Some(kept) = &mut kept {
                    let _ = writeln!(kept, "{line}");
                }
                // The last line of a killed process may be incomplete.
                if let Ok(event) = serde_json::from_str::<Event>(&line) {
                    lock(&history).record(number, event);
                }
            }
        });
        self.processes.push(WorkerProcess {
            number,
            place,
            child,
            stdin,
            reader: Some(reader),
            killed: false,
            stopped: false,
        });
        Ok(number)
    }

    /// Waits until all are connected.
    pub(crate) fn wait_until_ready(&self, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        while !self
            .alive()
            .iter()
            .all(|one| self.check_state(*one, |of| of.ready))
        {
            if Instant::now() > end {
                return Err("the workers did not connect".into());
            }
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Returns the numbers of the processes that were not killed.
    pub(crate) fn alive(&self) -> Vec<usize> {
        let alive = self.processes.iter().filter(|process| !process.killed);
        alive.map(|process| process.number).collect()
    }

    /// Returns the numbers of the processes that were neither killed nor stopped.
    pub(crate) fn running(&self) -> Vec<usize> {
        let running = |process: &&WorkerProcess| !process.killed && !process.stopped;
        let running = self.processes.iter().filter(running);
        running.map(|process| process.number).collect()
    }

    /// Sends SIGSTOP.
    pub(crate) fn stop(&mut self, number: usize) -> Result<()> {
        self.signal(number, Signal::STOP)?;
        if let Some(process) = self.processes.get_mut(number) {
            process.stopped = true;
        }
        self.update_state(number, |of| of.stopped.push((now(), None)));
        Ok(())
    }

    /// Sends SIGCONT.
    pub(crate) fn resume(&mut self, number: usize) -> Result<()> {
        self.update_state(number, |of| {
            if let Some((_, on @ None)) = of.stopped.last_mut() {
                *on = Some(now());
            }
        });
        self.signal(number, Signal::CONT)?;
        if let Some(process) = self.processes.get_mut(number) {
            process.stopped = false;
        }
        Ok(())
    }

    /// Sends SIGKILL.
    pub(crate) fn kill(&mut self, number: usize) -> Result<()> {
        let process = self.processes.get_mut(number).ok_or("no such worker")?;
        process.child.kill()?;
        process.child.wait()?;
        process.killed = true;
        self.update_state(number, |of| of.killed = Some(now()));
        Ok(())
    }

    /// Tells all workers to start nothing new.
    pub(crate) fn request_shutdown(&mut self) {
        for process in &mut self.processes {
            if let Some(stdin) = &mut process.stdin {
                let _ = stdin.write_all(b"end\n");
            }
        }
    }

    /// Waits until all workers have reported that they are done, or until the limit. Returns whether all have.
    pub(crate) fn wait_until_done(&mut self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            if self
                .alive()
                .iter()
                .all(|one| self.check_state(*one, |of| of.done))
            {
                return true;
            }
            if Instant::now() > end || !self.crashed().is_empty() {
                return false;
            }
            sleep(Duration::from_millis(10));
        }
    }

    /// Returns the processes that have ended unrequested, and how.
    pub(crate) fn crashed(&mut self) -> Vec<String> {
        let mut crashed = Vec::new();
        for process in self.processes.iter_mut().filter(|process| !process.killed) {
            if let Ok(Some(status)) = process.child.try_wait() {
                crashed.push(format!("process {} has ended: {status}", process.number));
            }
        }
        crashed
    }

    /// Ends all processes, and waits until all their output is recorded.
    pub(crate) fn terminate(&mut self) {
        for process in &mut self.processes {
            process.terminate();
        }
    }

    fn check_state(&self, number: usize, check: impl Fn(&crate::history::Process) -> bool) -> bool {
        lock(&self.history)
            .processes
            .get(&number)
            .is_some_and(check)
    }

    fn update_state(&self, number: usize, update: impl FnOnce(&mut crate::history::Process)) {
        update(lock(&self.history).processes.entry(number).or_default());
    }

    fn signal(&self, number: usize, signal: Signal) -> Result<()> {
        let process = self.processes.get(number).ok_or("no such worker")?;
        Ok(kill_process(Pid::from_child(&process.child), signal)?)
    }
}

impl WorkerProcess {
    fn terminate(&mut self) {
        drop(self.stdin.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.terminate();
    }
}

/// Locks a mutex, also after a panic of a thread that had locked it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
