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
use crate::worker::Worker;

/// All worker processes of one run. Processes that still run are killed when it is dropped.
pub(crate) struct Crew {
    members: Vec<Member>,
    /// Folder in which the output of the workers is kept, line by line, if requested.
    keep: Option<PathBuf>,
    history: Arc<Mutex<History>>,
}

struct Member {
    number: usize,
    /// Its own number, or the place of the process that it replaced.
    place: usize,
    child: Child,
    orders: Option<ChildStdin>,
    reading: Option<JoinHandle<()>>,
    killed: bool,
    stopped: bool,
}

impl Crew {
    pub(crate) fn new(history: Arc<Mutex<History>>, keep: Option<PathBuf>) -> Crew {
        Crew {
            members: Vec::new(),
            keep,
            history,
        }
    }

    /// Starts another process. Returns its number.
    pub(crate) fn start(&mut self, worker: &Worker) -> Result<usize> {
        self.start_at(self.members.len(), worker)
    }

    /// Starts a process that replaces a dead one: if client ids are chosen, it has the same ids. Returns its
    /// number.
    pub(crate) fn start_in_place_of(&mut self, dead: usize, worker: &Worker) -> Result<usize> {
        let place = self.members.get(dead).ok_or("no such worker")?.place;
        self.start_at(place, worker)
    }

    fn start_at(&mut self, place: usize, worker: &Worker) -> Result<usize> {
        let number = self.members.len();
        let client_id = worker.client_id.as_ref();
        let client_id = client_id.map(|id| format!("--client-id={id}-{place}"));
        let mut child = Command::new(std::env::current_exe()?)
            .arg("worker")
            .args(["--url", &worker.url, "--resource", &worker.resource])
            .args(["--names", &worker.names.join(",")])
            .args(["--tasks", &worker.tasks.to_string()])
            .args(["--sitters", &worker.sitters.to_string()])
            .args(["--fair", &worker.fair.to_string()])
            .args(["--clients", &worker.clients.to_string()])
            .args(["--owners", &worker.owners.to_string()])
            .args(["--threads", &worker.threads.to_string()])
            .args(["--few", &worker.few.join(",")])
            .args(["--held", &worker.held.to_string()])
            .args(client_id)
            .args(["--lease", &worker.lease.to_string()])
            .args(["--timeout", &worker.timeout.to_string()])
            .args(["--inside", &worker.inside.to_string()])
            .args(["--sync", worker.sync.name()])
            .args([
                "--seed",
                &worker.seed.wrapping_add(number as u64).to_string(),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take();
        let told = child.stdout.take().ok_or("no pipe")?;
        let history = self.history.clone();
        lock(&history).processes.entry(number).or_default();
        let mut kept = match &self.keep {
            Some(folder) => Some(File::create(folder.join(format!("{number}.jsonl")))?),
            None => None,
        };
        let reading = thread::spawn(move || {
            for line in BufReader::new(told).lines().map_while(|line| line.ok()) {
                if let Some(kept) = &mut kept {
                    let _ = writeln!(kept, "{line}");
                }
                // The last line of a killed process may be incomplete.
                if let Ok(event) = serde_json::from_str::<Event>(&line) {
                    lock(&history).take(number, event);
                }
            }
        });
        self.members.push(Member {
            number,
            place,
            child,
            orders,
            reading: Some(reading),
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
            .all(|one| self.look(*one, |of| of.ready))
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
        let alive = self.members.iter().filter(|member| !member.killed);
        alive.map(|member| member.number).collect()
    }

    /// Returns the numbers of the processes that were neither killed nor stopped.
    pub(crate) fn running(&self) -> Vec<usize> {
        let running = |member: &&Member| !member.killed && !member.stopped;
        let running = self.members.iter().filter(running);
        running.map(|member| member.number).collect()
    }

    /// Sends SIGSTOP.
    pub(crate) fn stop(&mut self, number: usize) -> Result<()> {
        self.signal(number, Signal::STOP)?;
        if let Some(member) = self.members.get_mut(number) {
            member.stopped = true;
        }
        self.note(number, |of| of.stopped.push((now(), None)));
        Ok(())
    }

    /// Sends SIGCONT.
    pub(crate) fn go_on(&mut self, number: usize) -> Result<()> {
        self.note(number, |of| {
            if let Some((_, on @ None)) = of.stopped.last_mut() {
                *on = Some(now());
            }
        });
        self.signal(number, Signal::CONT)?;
        if let Some(member) = self.members.get_mut(number) {
            member.stopped = false;
        }
        Ok(())
    }

    /// Sends SIGKILL.
    pub(crate) fn kill(&mut self, number: usize) -> Result<()> {
        let member = self.members.get_mut(number).ok_or("no such worker")?;
        member.child.kill()?;
        member.child.wait()?;
        member.killed = true;
        self.note(number, |of| of.killed = Some(now()));
        Ok(())
    }

    /// Tells all workers to start nothing new.
    pub(crate) fn end(&mut self) {
        for member in &mut self.members {
            if let Some(orders) = &mut member.orders {
                let _ = orders.write_all(b"end\n");
            }
        }
    }

    /// Waits until all workers have reported that they are done, or until the limit. Returns whether all have.
    pub(crate) fn wait_until_done(&mut self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            if self.alive().iter().all(|one| self.look(*one, |of| of.done)) {
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
        for member in self.members.iter_mut().filter(|member| !member.killed) {
            if let Ok(Some(status)) = member.child.try_wait() {
                crashed.push(format!("process {} has ended: {status}", member.number));
            }
        }
        crashed
    }

    /// Ends all processes, and waits until all their output is recorded.
    pub(crate) fn dismiss(&mut self) {
        for member in &mut self.members {
            member.dismiss();
        }
    }

    fn look(&self, number: usize, look: impl Fn(&crate::history::Process) -> bool) -> bool {
        lock(&self.history).processes.get(&number).is_some_and(look)
    }

    fn note(&self, number: usize, note: impl FnOnce(&mut crate::history::Process)) {
        note(lock(&self.history).processes.entry(number).or_default());
    }

    fn signal(&self, number: usize, signal: Signal) -> Result<()> {
        let member = self.members.get(number).ok_or("no such worker")?;
        Ok(kill_process(Pid::from_child(&member.child), signal)?)
    }
}

impl Member {
    fn dismiss(&mut self) {
        drop(self.orders.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reading) = self.reading.take() {
            let _ = reading.join();
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.dismiss();
    }
}

pub(crate) fn lock(history: &Mutex<History>) -> MutexGuard<'_, History> {
    history.lock().unwrap_or_else(PoisonError::into_inner)
}
