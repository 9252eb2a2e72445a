//! `redlatch cron`: runs the jobs of a crontab, each firing on one machine.
//!
//! 1. Reads the file ([`crontab`]). Each job is scheduled by the library (`redlatch::job`).
//! 2. A firing that this machine gets is a process (`cmd`), while the library holds its lock.
//! 3. SIGHUP reads the file again. Jobs whose lines have changed are replaced; what they run ends
//!    by itself. A job that the store refuses at the start ends the program. When a command has begun,
//!    or SIGHUP was received, it is tried again, or only that job is dropped.

mod cmd;
mod crontab;

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::{LocalBoxFuture, OptionFuture};
use redlatch::Client;
use rustix::process::{Signal, WaitOptions};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use self::cmd::{Commands, Turn, Working};
use self::crontab::Line;
use crate::args::cron::Cron;
use crate::exit::{self, Failure};
use crate::output::stderr::{note, stderr};
use crate::output::streams::STDOUT;
use crate::process::own_processes;
use crate::process::signals::{Caught, Signals, discard_stop};
use crate::store::args::StoreArgs;
use crate::store::{self, WaitLimits};
use crate::threads::run_in_thread;
use crate::{duration, text};

/// The pause before a job that the store has refused is tried again.
const RETRY_PAUSE: Duration = Duration::from_secs(5);

pub(crate) async fn cron(store_args: &StoreArgs, cron: &Cron) -> Result<u8, Failure> {
    let mut signals = Signals::catch_all()?;
    STDOUT.write_in_background();
    let mut settings = Client::builder().label("redlatch cron");
    if let Some(watchdog) = cron.watchdog {
        settings = settings.watchdog_lease(watchdog);
    }
    // The library reports an invalid lease before any server is contacted.
    settings
        .clone()
        .connect_embedded(&redlatch::Embedded::new())?;
    if cron.check {
        let jobs = tokio::select! {
            biased;
            code = signals.next_end() => return Ok(code),
            jobs = read(cron) => jobs?,
        };
        note!(
            "{}: {}",
            cron.file.display(),
            text::counted(jobs.len(), "job")
        );
        return Ok(exit::OK);
    }
    let blocked = signals.blocked();
    let mut requests = Requests::new(signals, cron);
    let mut jobs = match requests.next().await {
        Request::Schedule(jobs) => jobs?,
        Request::End => return Ok(exit::OK),
    };
    let limits = WaitLimits::new(None, None);
    let mut connecting = pin!(store::connect_within(store_args, settings, &limits));
    let client = loop {
        tokio::select! {
            biased;
            request = requests.next() => match request {
                Request::Schedule(read) => jobs = valid(read).unwrap_or(jobs),
                Request::End => return Ok(exit::OK),
            },
            client = &mut connecting => break client?,
        }
    };
    let mut running = Running::new(client, cron, blocked);
    running.replace(jobs);
    let code = running.until_ended(&mut requests).await;
    store::flush(&running.client).await;
    Ok(code)
}

/// Reads and checks the file. Reports all lines that are wrong.
async fn read(cron: &Cron) -> Result<Vec<Line>, Failure> {
    let (file, shown) = (cron.file.clone(), cron.file.display());
    let reading = run_in_thread("crontab", move || std::fs::read(file)).await;
    let bytes = reading.and_then(|read| read);
    let bytes = bytes.map_err(|error| Failure::system(&format!("cannot read {shown}"), &error))?;
    let text = String::from_utf8(bytes)
        .map_err(|_| Failure::usage(format!("{shown}: it is not UTF-8")))?;
    crontab::parse(&text).map_err(|wrong| {
        for (number, reason) in &wrong {
            stderr!("{shown}:{number}: {reason}");
        }
        let lines = text::counted(wrong.len(), "line");
        Failure::usage(format!("{shown}: {lines} wrong"))
    })
}

/// Returns the jobs of a file that was read again, unless the file is wrong.
fn valid(jobs: Result<Vec<Line>, Failure>) -> Option<Vec<Line>> {
    jobs.inspect_err(|failure| stderr!("{}; the jobs stay as they were", failure.message))
        .ok()
}

/// What a signal asks for.
enum Request {
    /// These jobs are in the file.
    Schedule(Result<Vec<Line>, Failure>),
    End,
}

/// Signals, and the file that is read at the start and after each SIGHUP. If that takes long, signals
/// are received meanwhile: the file may be a pipe, or on a file system that does not answer.
struct Requests<'a> {
    signals: Signals,
    cron: &'a Cron,
    reading: Option<LocalBoxFuture<'a, Result<Vec<Line>, Failure>>>,
}

impl<'a> Requests<'a> {
    fn new(signals: Signals, cron: &'a Cron) -> Requests<'a> {
        Requests {
            signals,
            cron,
            reading: Some(Box::pin(read(cron))),
        }
    }

    /// Waits for the next request. Meanwhile reaps processes that have ended: as process 1 of a
    /// container, this process adopts what commands leave behind. Cancel safe.
    async fn next(&mut self) -> Request {
        loop {
            tokio::select! {
                biased;
                caught = self.signals.next() => match caught {
                    Caught::End(Signal::HUP) => self.reading = Some(Box::pin(read(self.cron))),
                    Caught::Other(Signal::WINCH) => {}
                    Caught::End(_) | Caught::Other(_) => {
                        self.reading = None;
                        return Request::End;
                    }
                    // A stopped process renews no lock.
                    Caught::Stop => discard_stop(),
                    Caught::Child => {
                        while let Ok(Some(_)) = own_processes::wait_for_any(WaitOptions::NOHANG) {}
                    }
                },
                Some(jobs) = OptionFuture::from(self.reading.as_mut()) => {
                    self.reading = None;
                    return Request::Schedule(jobs);
                }
            }
        }
    }
}

/// A job that is scheduled until this is dropped.
struct Job {
    line: Line,
    /// Since when it has had the schedule of its line.
    since: SystemTime,
    stop: oneshot::Sender<()>,
}

/// The jobs that are scheduled.
struct Running<'a> {
    client: Client,
    cron: &'a Cron,
    jobs: HashMap<String, Job>,
    /// Each with its name, and the pause after which it was started.
    schedulers: JoinSet<(String, Duration, redlatch::Result<()>)>,
    commands: Commands,
    /// Has changed when a command has begun.
    begun: watch::Receiver<Working>,
}

impl<'a> Running<'a> {
    fn new(client: Client, cron: &'a Cron, blocked: Vec<i32>) -> Running<'a> {
        let (working, begun) = watch::channel(Working::new());
        Running {
            client,
            cron,
            jobs: HashMap::new(),
            schedulers: JoinSet::new(),
            commands: Commands {
                kill_after: cron.kill_after,
                blocked: blocked.into(),
                ends: watch::Sender::new(false),
                working,
            },
            begun,
        }
    }

    /// Schedules these jobs instead of those from before. Jobs whose lines have not changed continue.
    /// A job whose schedule has not changed takes over the firing that waits.
    fn replace(&mut self, lines: Vec<Line>) {
        let mut former = std::mem::take(&mut self.jobs);
        for line in lines {
            let name = line.name.clone();
            let job = match former.remove(&name) {
                Some(former) if former.line == line => former,
                Some(former) if former.line.cron == line.cron => {
                    self.start(line, former.since, Duration::ZERO)
                }
                _ => self.start(line, SystemTime::now(), Duration::ZERO),
            };
            self.jobs.insert(name, job);
        }
        let count = text::counted(self.jobs.len(), "job");
        note!("{}: {count} scheduled", self.cron.file.display());
    }

    /// Schedules a job after a pause.
    fn start(&mut self, line: Line, since: SystemTime, after: Duration) -> Job {
        let (stop, stopped) = oneshot::channel();
        let (name, job) = (line.name.clone(), line.scheduled(&self.client).since(since));
        let (shared, commands) = (Arc::new(line.clone()), self.commands.clone());
        self.schedulers.spawn(async move {
            let work = |run| cmd::run(shared.clone(), run, commands.clone());
            let mut stopped = pin!(async {
                // Dropped: that ends the job, too.
                let _ = stopped.await;
            });
            tokio::select! {
                biased;
                () = &mut stopped => return (name, after, Ok(())),
                () = sleep(after) => {}
            }
            let ended = job.run_until(stopped, work).await;
            (name, after, ended)
        });
        Job { line, since, stop }
    }

    /// Runs the jobs until a signal, or at the start a job that the store refuses. Then begins no further
    /// run, and waits for those that last. Another signal ends them. Returns the exit code.
    async fn until_ended(&mut self, requests: &mut Requests<'_>) -> u8 {
        let (mut has_reloaded, mut ending, mut ended) = (false, false, exit::OK);
        while !ending || !self.schedulers.is_empty() {
            let was_ending = ending;
            tokio::select! {
                biased;
                request = requests.next() => match request {
                    Request::End if ending => drop(self.commands.ends.send_replace(true)),
                    Request::End => ending = true,
                    Request::Schedule(_) if ending => {}
                    Request::Schedule(read) => if let Some(jobs) = valid(read) {
                        has_reloaded = true;
                        self.replace(jobs);
                    },
                },
                Some(scheduler) = self.schedulers.join_next() => match scheduler {
                    Ok((_, _, Ok(()))) => {}
                    _ if ending => {}
                    Ok((name, after, Err(error))) => {
                        let failure = Failure::from(error);
                        let message = format!("{name}: {}", failure.message);
                        if has_reloaded || self.begun.has_changed().unwrap_or(true) {
                            self.refused(name, after, failure.code, &message);
                        } else {
                            stderr!("{message}");
                            (ending, ended) = (true, failure.code);
                        }
                    }
                    Err(panic) => {
                        stderr!("{panic}");
                        (ending, ended) = (true, exit::SOFTWARE);
                    }
                },
            }
            if ending && !was_ending {
                self.jobs.clear();
                self.report_ending();
            }
        }
        // Also for commands whose lock was lost.
        let mut working = self.commands.working.subscribe();
        let _ = working.wait_for(Working::is_empty).await;
        ended
    }

    /// Prints which runs last, and how long they have, the longest first.
    fn report_ending(&self) {
        let working = self.commands.working.borrow();
        let mut runs = Vec::from_iter(working.iter());
        runs.sort_by_key(|(turn, since)| (**since, *turn));
        let run = |((name, _), since): &(&Turn, &Instant)| {
            format!("{name} ({})", duration::rough(since.elapsed()))
        };
        let them = match runs.len() {
            0 => return,
            1 => "it",
            _ => "them",
        };
        let count = text::counted(runs.len(), "run");
        let runs = runs.iter().map(run).collect::<Vec<_>>().join(", ");
        note!("ending: waiting for {count}: {runs}; another signal ends {them}");
    }

    /// The store has refused a job that was started after this pause. Tries it again if the reason may
    /// pass, such as its login.
    fn refused(&mut self, name: String, after: Duration, code: u8, message: &str) {
        let (line, since) = match self.jobs.get(&name) {
            Some(job) if job.stop.is_closed() => (job.line.clone(), job.since),
            // Another one has taken its place.
            _ => return,
        };
        if code != exit::UNAVAILABLE {
            stderr!("{message}; this job is not scheduled");
            self.jobs.remove(&name);
            return;
        }
        if after.is_zero() {
            let pause = duration::short(RETRY_PAUSE);
            stderr!("{message}; it is tried again every {pause}");
        }
        let job = self.start(line, since, RETRY_PAUSE);
        self.jobs.insert(name, job);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    /// Of the settings of the command only the file is used.
    fn cron() -> Cron {
        Cron {
            check: false,
            watchdog: None,
            kill_after: Duration::ZERO,
            file: "crontab".into(),
        }
    }

    /// Its key has a value of another program. The store says so after a run of another job has begun, or before.
    #[tokio::test(start_paused = true)]
    async fn job_that_the_store_refuses_while_a_command_works_ends_no_other() {
        for has_begun in [true, false] {
            let (client, cron) = (Client::embedded(), cron());
            let other = client.semaphore("redlatch_job:{bad}");
            other.try_set_permits(1).await.unwrap();
            let mut running = Running::new(client, &cron, Vec::new());
            running.replace(crontab::parse("@yearly good true\n@yearly bad true").unwrap());
            if has_begun {
                running.commands.working.send_modify(|all| {
                    all.insert(("good".to_owned(), None), Instant::now());
                });
            }
            let mut requests = Requests::new(Signals::none(), &cron);
            requests.reading = None;
            let ended = timeout(RETRY_PAUSE, running.until_ended(&mut requests)).await;
            assert_eq!(ended.ok(), (!has_begun).then_some(65));
            let expected: &[&str] = if has_begun { &["good"] } else { &[] };
            assert_eq!(Vec::from_iter(running.jobs.keys()), expected);
        }
    }

    #[tokio::test]
    async fn changed_job_takes_over_what_waits_if_its_schedule_is_the_same() {
        let cron = cron();
        let mut running = Running::new(Client::embedded(), &cron, Vec::new());
        let mut since = |line: &str| {
            running.replace(crontab::parse(line).unwrap());
            running.jobs["a"].since
        };
        let first = since("@yearly a true");
        assert_eq!(since("@yearly a [timeout=1h] true"), first);
        assert_eq!(since("@yearly a [timeout=1h] false"), first);
        let changed = since("@monthly a [timeout=1h] false");
        assert_ne!(changed, first);
        assert_eq!(since("@monthly a true"), changed);
    }
}
