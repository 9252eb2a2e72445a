//! One run of a job: `redlatch __job` (`run::of_parent`), which runs the command and ends with all of
//! its processes when the pipe to it is closed. Prints the output of the command.
//!
//! If another client asks for the lock of a run, one byte in that pipe lets the command end, and the
//! lock is held until it has.
//!
//! If the lock of a run is lost, its command takes some time to end. The next run of the job on this
//! machine, perhaps another attempt, begins its command only after that.

use std::collections::HashMap;
use std::future::pending;
use std::io::{self, PipeWriter, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::pin::pin;
use std::process::{Command, ExitStatus};
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime};

use futures_util::future::{Either, select};
use redlatch::job::{MAX_OUTPUT, Outcome, Overlap, Run};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::crontab::Line;
use crate::args::InternalCommand;
use crate::exit;
use crate::output::stderr::{detail, note, stderr};
use crate::output::stdout;
use crate::process::own_processes;
use crate::process::wrapper::{Unblock, internal_command};
use crate::threads::spawn_without_signals;
use crate::{duration, text};

/// The shell, unless the crontab sets one.
const SHELL: &str = "/bin/sh";

/// The longest line of output that is printed at once.
const MAX_LINE: usize = 8192;

/// How long the outcome waits for the end of the output after the command has ended. Processes that it leaves behind may keep
/// it open.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// How a run ends when the second signal arrives.
const SIGNALED: &str = "ended by a signal to redlatch cron";

/// The same when another client asks for its lock.
const ASKED: &str = "asked to release its lock";

/// What the commands of all jobs share.
#[derive(Clone)]
pub(crate) struct Commands {
    pub(crate) kill_after: Duration,
    /// The signals that they have to unblock.
    pub(crate) blocked: Arc<[i32]>,
    /// Becomes true when they have to end.
    pub(crate) ends: watch::Sender<bool>,
    /// Those whose processes have not all ended, and since when they run.
    pub(crate) working: watch::Sender<Working>,
}

pub(crate) type Working = HashMap<Turn, Instant>;

/// A job, of which one command works at a time: with `overlap=allow` one for each firing.
pub(crate) type Turn = (String, Option<SystemTime>);

/// Runs the command to its end. If this future is dropped, the command ends, too.
pub(crate) async fn run(line: Arc<Line>, run: Run, commands: Commands) -> Outcome {
    let (slot, attempt) = (text::utc_time(run.slot()), run.attempt());
    let name = &line.name;
    let shown = format!("{name}: {slot}, attempt {attempt}");
    let of_slot = (line.options.overlap == Overlap::Allow).then_some(run.slot());
    let turn = (name.clone(), of_slot);
    let (mut working, mut ends) = (commands.working.subscribe(), commands.ends.subscribe());
    let mut asked = Box::pin(run.asked());
    // The first and the last fail only without a sender.
    let has_to_end = tokio::select! {
        biased;
        _ = ends.wait_for(|ends| *ends) => Some(SIGNALED),
        () = &mut asked => Some(ASKED),
        _ = working.wait_for(|working| !working.contains_key(&turn)) => None,
    };
    let ended = if let Some(reason) = has_to_end {
        Ok((Err(reason.to_owned()), Vec::new()))
    } else {
        detail!("{name}: begins {slot}, attempt {attempt}");
        let asked = async {
            asked.await;
            let kill_after = duration::short(commands.kill_after);
            stderr!(
                "{shown}: asked to release its lock; ending its command: SIGTERM now, SIGKILL after \
                 {kill_after}"
            );
        };
        match start(&line, &slot, attempt, turn, shown.clone(), &commands) {
            Ok(process) => {
                let limit = line.options.timeout;
                process.until_ended(limit, ends, asked).await
            }
            Err(error) => Err(error),
        }
    };
    let failed = |error| (Err(format!("could not be started: {error}")), Vec::new());
    let (how, output) = ended.unwrap_or_else(failed);
    let outcome = match how {
        Ok(how) => Outcome::success(how),
        Err(how) => Outcome::failure(how),
    };
    outcome.output(&String::from_utf8_lossy(&output))
}

/// A process that runs the command.
struct Process {
    /// The run in messages.
    shown: String,
    /// Whether another client has asked for the lock of the run, so that the command is being ended.
    is_asked: bool,
    /// Completes when it has ended.
    ended: oneshot::Receiver<()>,
    /// When it is closed, the process ends the command as if the lock were lost. A byte ends it while the
    /// lock is held.
    lifeline: Option<PipeWriter>,
    /// `None`: it has been awaited.
    end: Option<JoinHandle<End>>,
}

/// How a process has ended. Its output is printed, and that of processes that it leaves behind will be.
struct End {
    status: io::Result<ExitStatus>,
    /// The end of its output.
    output: Vec<u8>,
    _turn: BegunTurn,
}

/// A turn that lasts until this is dropped.
struct BegunTurn {
    turn: Turn,
    working: watch::Sender<Working>,
}

impl BegunTurn {
    fn new(turn: Turn, working: watch::Sender<Working>) -> BegunTurn {
        working.send_if_modified(|working| working.insert(turn.clone(), Instant::now()).is_none());
        BegunTurn { turn, working }
    }
}

impl Drop for BegunTurn {
    fn drop(&mut self) {
        let turn = &self.turn;
        self.working
            .send_if_modified(|working| working.remove(turn).is_some());
    }
}

fn start(
    line: &Line,
    slot: &str,
    attempt: u32,
    turn: Turn,
    shown: String,
    commands: &Commands,
) -> io::Result<Process> {
    let (input, lifeline) = io::pipe()?;
    let (output, out) = io::pipe()?;
    let output = pipe::Receiver::from_owned_fd(OwnedFd::from(output))?;
    let mut command = internal_command(InternalCommand::JOB, Unblock::These(&commands.blocked));
    command.arg(format!("--name={}", line.name));
    let kill_after = commands.kill_after.as_millis();
    command.arg(format!("--kill-after={kill_after}ms"));
    let shell = line.environment.get("SHELL").map_or(SHELL, |shell| shell);
    command.args(["--", shell, "-c", &line.command]);
    command.envs(&line.environment);
    command.env("REDLATCH_SLOT", slot);
    command.env("REDLATCH_ATTEMPT", attempt.to_string());
    command.stdin(input).stdout(out.try_clone()?).stderr(out);
    let status = spawn(&mut command)?;
    let turn = BegunTurn::new(turn, commands.working.clone());
    let (report, ended) = oneshot::channel();
    let (kept, last_output) = watch::channel(Vec::new());
    // A task of its own reads on after the end of the command: SIGPIPE would end a process that it leaves behind.
    let printing = tokio::spawn(print(output, line.name.clone(), kept));
    // A task, because `run` is dropped when the lock is lost. What the command prints while it is being ended is kept, too.
    let end = tokio::spawn(async move {
        let status = match select(pin!(status), printing).await {
            Either::Left((status, printing)) => {
                let _ = report.send(());
                let _ = timeout(LAST_OUTPUT, printing).await;
                status
            }
            Either::Right((_, status)) => {
                let status = status.await;
                let _ = report.send(());
                status
            }
        };
        End {
            status,
            output: last_output.borrow().clone(),
            _turn: turn,
        }
    });
    Ok(Process {
        shown,
        is_asked: false,
        ended,
        lifeline: Some(lifeline),
        end: Some(end),
    })
}

/// Starts the thread that waits for a process, and then the process: without the thread, no process.
/// Returns a future of its status.
fn spawn(
    command: &mut Command,
) -> io::Result<impl Future<Output = io::Result<ExitStatus>> + use<>> {
    let (started, pid) = mpsc::channel();
    let (done, status) = oneshot::channel();
    spawn_without_signals("run", move || {
        // It fails if the process could not be started.
        if let Ok(pid) = pid.recv() {
            let _ = done.send(own_processes::wait_for(pid));
        }
    })?;
    let (pid, _) = own_processes::spawn(command)?;
    let _ = started.send(pid);
    Ok(async {
        let status = status.await.map_err(io::Error::other)??;
        Ok(ExitStatus::from_raw(status.as_raw()))
    })
}

impl Process {
    /// Waits for the end of the command, and ends it after `limit`, when `ends` becomes true, or when
    /// `asked` completes. Returns how it has ended (the error is that of a failure), and the end of its
    /// output.
    async fn until_ended(
        mut self,
        limit: Option<Duration>,
        mut ends: watch::Receiver<bool>,
        asked: impl Future<Output = ()>,
    ) -> io::Result<(Result<String, String>, Vec<u8>)> {
        let mut timed_out = pin!(sleep(limit.unwrap_or(Duration::MAX)));
        let mut asked = pin!(asked);
        let mut reason = None;
        loop {
            let has_lifeline = self.lifeline.is_some();
            tokio::select! {
                biased;
                // It fails with the task.
                _ = &mut self.ended => break,
                () = &mut timed_out, if has_lifeline => {
                    let limit = limit.map(duration::short).unwrap_or_default();
                    reason = Some(format!("timed out after {limit}"));
                    self.lifeline = None;
                }
                _ = ends.wait_for(|ends| *ends), if has_lifeline => {
                    reason = Some(SIGNALED.to_owned());
                    self.lifeline = None;
                }
                () = &mut asked, if !self.is_asked => {
                    self.is_asked = true;
                    if let Some(lifeline) = &mut self.lifeline {
                        // It fails only if the process has ended.
                        let _ = lifeline.write_all(&[0]);
                    }
                }
            }
        }
        let end = match &mut self.end {
            Some(end) => end.await,
            // It is awaited here only.
            None => pending().await,
        };
        self.end = None;
        let End { status, output, .. } = end.map_err(io::Error::other)?;
        let status = status?;
        let code = status.code().map(|code| format!("exit code {code}"));
        let ended = || code.unwrap_or_else(|| status.to_string());
        let how = match reason {
            Some(reason) => reason,
            None if self.is_asked => format!("{ASKED}, {}", ended()),
            None => ended(),
        };
        let how = match status.success() {
            true => Ok(how),
            false => Err(how),
        };
        Ok((how, output))
    }
}

impl Drop for Process {
    /// The lock was lost. This process may have been stopped meanwhile, so the command may have ended
    /// before.
    fn drop(&mut self) {
        let (Some(end), Ok(runtime)) = (self.end.take(), Handle::try_current()) else {
            return;
        };
        let (shown, is_asked) = (std::mem::take(&mut self.shown), self.is_asked);
        runtime.spawn(async move {
            let Ok(End { status, _turn, .. }) = end.await else {
                return;
            };
            let code = status.ok().and_then(|status| status.code());
            if let Some(code) = code.filter(|code| *code != i32::from(exit::LOST)) {
                let how = if is_asked { "at a request to release" } else { "by itself" };
                note!("{shown}: its command had ended {how} when the loss was noticed: exit code {code}");
            }
        });
    }
}

/// Prints the lines of the output with the name of the job, and keeps its end.
async fn print(mut output: pipe::Receiver, name: String, kept: watch::Sender<Vec<u8>>) {
    let (mut buffer, mut line) = (vec![0; MAX_LINE], Vec::new());
    loop {
        let read = output.read(&mut buffer).await.unwrap_or(0);
        line.extend_from_slice(&buffer[..read]);
        kept.send_modify(|kept| {
            kept.extend_from_slice(&buffer[..read]);
            let surplus = kept.len().saturating_sub(MAX_OUTPUT);
            kept.drain(..surplus);
        });
        let complete = match line.iter().rposition(|byte| *byte == b'\n') {
            Some(end) => end + 1,
            None if read == 0 || line.len() >= MAX_LINE => line.len(),
            None => 0,
        };
        let text: Vec<u8> = line.drain(..complete).collect();
        let text = String::from_utf8_lossy(&text);
        let lines = text.lines().map(|line| format!("{name}: {line}"));
        // A reader that has gone does not end the jobs.
        let _ = stdout::lines(lines).await;
        if read == 0 {
            return;
        }
    }
}
