//! Standard output and standard error that are not read: redlatch acts all the same.

use std::process::Stdio;
use std::time::Duration;

use redlatch_testkit::{Server, shared, unique};
use rustix::process::Signal;

use crate::support::*;

/// CMD writes a line at this interval.
const LINE_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy)]
enum Unread {
    FullPipe,
    /// Its output was stopped with Ctrl-S.
    Terminal,
}

/// A `redlatch run` whose messages are not read. CMD is a shell script that writes into a file.
struct UnreadRun {
    name: String,
    running: Running,
    cmd: u32,
    temp_dir: TempDir,
    _unread: FullPipe,
}

impl UnreadRun {
    fn start(unread: Unread, options: &[&str], script: &str) -> UnreadRun {
        let (name, temp_dir, pipe) = (unique("unread"), TempDir::new(), FullPipe::new());
        let [file, log, pid] = ["cmd", "log", "pid"].map(|name| temp_dir.path(name));
        let text = format!(
            "exec >>{log} 2>/dev/null\nread go; echo $$ >{pid}.new; mv {pid}.new {pid}\n{script}"
        );
        std::fs::write(&file, text).unwrap();
        let args = [&["run"], options, &[&name, "--", "sh", &file]].concat();
        let mut running = match unread {
            Unread::FullPipe => pipe.start(redlatch(shared(), &args)),
            Unread::Terminal => {
                let binary = env!("CARGO_BIN_EXE_redlatch");
                let terminal =
                    at_a_terminal(&format!("echo ready; exec '{binary}' {}", args.join(" ")));
                terminal.until_stdout("ready");
                terminal
            }
        };
        // A terminal handles its keys in this order, and Ctrl-S at once.
        running.write(match unread {
            Unread::FullPipe => "go\n",
            Unread::Terminal => "\x13go\n",
        });
        let mut cmd = None;
        until("CMD runs", || {
            cmd = std::fs::read_to_string(&pid).ok();
            cmd.is_some()
        });
        let cmd = cmd.unwrap().trim().parse().unwrap();
        UnreadRun {
            name,
            running,
            cmd,
            temp_dir,
            _unread: pipe,
        }
    }

    /// Starts a run that writes a line into the file of CMD.
    fn start_next(&self) -> Running {
        let script = format!("echo next >>{}", self.temp_dir.path("log"));
        Running::start(redlatch(
            shared(),
            &["run", &self.name, "--", "sh", "-c", &script],
        ))
    }

    /// Returns the number of lines that CMD has written behind the line of the next owner.
    fn lines_behind_next(&self) -> usize {
        let log = std::fs::read_to_string(self.temp_dir.path("log")).unwrap();
        let lines: Vec<_> = log.lines().collect();
        assert_eq!(lines.first(), Some(&"cmd"), "CMD has worked");
        let next = lines.iter().position(|line| *line == "next");
        lines.len() - 1 - next.expect("the next owner has worked")
    }

    fn until_cmd_works(&self) {
        until("CMD works", || {
            std::fs::metadata(self.temp_dir.path("log")).is_ok_and(|log| log.len() > 0)
        });
    }
}

fn works() -> String {
    let pause = LINE_INTERVAL.as_secs_f32();
    format!("while :; do echo cmd; sleep {pause}; done")
}

fn unlock(name: &str) {
    finish(redlatch(shared(), &["unlock", "--force", name])).expect(0);
}

#[test]
fn lost_lock_ends_cmd() {
    for unread in [Unread::FullPipe, Unread::Terminal] {
        let options = ["--watchdog", "6s", "--kill-after", "1h"];
        let holder = UnreadRun::start(unread, &options, &works());
        holder.until_cmd_works();
        unlock(&holder.name);
        holder.start_next().finish().expect(0);
        until("CMD has ended", || is_dead(holder.cmd));
        // The next owner may start before this one has learned of its loss, but not for long.
        let limit = Duration::from_secs(5).div_duration_f32(LINE_INTERVAL);
        let lines = holder.lines_behind_next();
        assert!(lines as f32 <= limit, "{unread:?}: {lines} lines");
        holder.running.finish().expect(74);
    }
}

#[test]
fn asked_holder_ends_cmd_before_the_next_owner_starts() {
    for unread in [Unread::FullPipe, Unread::Terminal] {
        let options = ["--watchdog", "6s", "--kill-after", "1h"];
        let holder = UnreadRun::start(unread, &options, &works());
        holder.until_cmd_works();
        let next = holder.start_next();
        until("the next one waits", || {
            waiters(shared(), &holder.name) == 1
        });
        let args = ["unlock", "--revoke", "1h", "--wait", "1m", &holder.name];
        finish(redlatch(shared(), &args)).expect(0);
        next.finish().expect(0);
        assert_eq!(holder.lines_behind_next(), 0, "{unread:?}");
        holder.running.finish().expect(143);
    }
}

/// Also while redlatch waits for CMD to end after a loss.
#[test]
fn signals_are_forwarded_to_cmd() {
    let script = "trap 'n=x$n; echo $n; [ $n != xx ] || exit 0' TERM; echo cmd";
    for unread in [Unread::FullPipe, Unread::Terminal] {
        let options = ["--watchdog", "6s", "--kill-after", "1h"];
        let holder = UnreadRun::start(unread, &options, &format!("{script}; {IDLE_SCRIPT}"));
        holder.until_cmd_works();
        unlock(&holder.name);
        let log = || std::fs::read_to_string(holder.temp_dir.path("log")).unwrap();
        until("CMD has received the signal of redlatch", || {
            log().contains('x')
        });
        let redlatch = parent(holder.cmd);
        rustix::process::kill_process(redlatch, Signal::TERM).unwrap();
        until("CMD has ended", || is_dead(holder.cmd));
        assert_eq!(log(), "cmd\nx\nxx\n");
        holder.running.finish().expect(74);
    }
}

fn parent(pid: u32) -> rustix::process::Pid {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    rustix::process::Pid::from_raw(parent.unwrap().trim().parse().unwrap()).unwrap()
}

#[test]
fn lock_is_acquired_and_renewed() {
    let (name, unread) = (unique("renewed"), FullPipe::new());
    let mut command = redlatch(shared(), &["run", "--watchdog", "6s", &name, "--", "cat"]);
    command.env("REDLATCH_LOG", "trace");
    let holder = unread.start(command);
    until("it is held", || is_held(shared(), &name));
    let owner = owner(shared(), &name);
    // A renewal follows when a third of the lease has passed.
    let (mut renewals, mut before) = (0, i64::MAX);
    until("the lock is held for three leases", || {
        let left = shared().command::<i64>(&["PTTL", &name]);
        if left > std::mem::replace(&mut before, left) {
            renewals += 1;
        }
        renewals == 9
    });
    assert_eq!(crate::support::owner(shared(), &name), owner);
    holder.signal(Signal::TERM);
    holder.finish().expect(143);
    assert!(!is_held(shared(), &name));
}

/// Their standard output is full, too.
#[test]
fn sigterm_ends_commands_that_observe_or_wait() {
    let name = unique("observed");
    let holder = hold(shared(), &[], &name);
    for args in [
        &["watch", &name][..],
        &["watch", "--json", &name],
        &["elect", "--observe", &name],
        &["exporter", "--listen", "127.0.0.1:0", &name],
        &["run", "--verbose", &name, "--", "true"],
        &["lock", &name],
    ] {
        let unread = FullPipe::new();
        let mut command = redlatch(shared(), args);
        command.stdin(Stdio::null());
        command.stdout(unread.writer()).stderr(unread.writer());
        let running = Running::start_with_own_stdio(command);
        until_writing_to_pipe(&running);
        running.signal(Signal::TERM);
        running.finish().expect(143);
    }
    holder.release();
}

/// Some of the log events of many locks with long names are dropped.
#[test]
fn dropped_lines_are_reported_when_they_are_read_again() {
    let (name, unread) = (unique("dropped"), FullPipe::new());
    let names: Vec<_> = (0..250)
        .map(|number| format!("{name}-{number:0400}"))
        .collect();
    let names = names.iter().map(String::as_str);
    let args = ["run", "--watchdog", "1h"].into_iter().chain(names);
    let args: Vec<_> = args
        .chain(["--", "sh", "-c", "echo $$; exec cat"])
        .collect();
    let command = || {
        let mut command = redlatch(shared(), &args);
        let filter = "redlatch::locks=debug,redlatch::several=debug,redlatch::session=debug";
        command.env("REDLATCH_LOG", filter);
        command
    };
    // Here, too, lines may be dropped: the test may be slow to read them.
    let read = finish(command()).expect(0).stderr;
    let mut holder = unread.start(command());
    holder.cmd_pid();
    holder.read_stderr(unread);
    holder.until_stderr(" lines were dropped, because ");
    holder.close_stdin();
    let stderr = holder.finish().expect(0).stderr;
    let (reports, lines) = reports_and_lines(&stderr);
    // The lines of the release are too few for a second gap.
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert_eq!(lines, reports_and_lines(&read).1, "{reports:?}");
    assert_ne!(
        stderr.lines().last(),
        Some(reports[0]),
        "later lines are written"
    );
}

/// Returns the reports of dropped lines, and the number of all other lines, with those that were dropped.
fn reports_and_lines(stderr: &str) -> (Vec<&str>, usize) {
    let is_report = |line: &&str| line.contains(" lines were dropped, because ");
    let (reports, lines): (Vec<_>, Vec<_>) = stderr.lines().partition(is_report);
    let dropped = reports.iter().map(|report| {
        let mut words = report.split(' ');
        words.find_map(|word| word.parse::<usize>().ok()).unwrap()
    });
    let dropped: usize = dropped.sum();
    (reports, lines.len() + dropped)
}

/// A result is written to its end before redlatch ends, however long its reader takes.
#[test]
fn results_are_written_completely() {
    let (server, unread) = (Server::start(), FullPipe::new());
    let objects = 2_000;
    for number in 0..objects {
        let object = format!("object-{number}");
        let () = server.command(&["HSET", &object, "client:1", "1"]);
    }
    let mut command = redlatch(&server, &["ls"]);
    command.stdin(Stdio::null()).stdout(unread.writer());
    command.stderr(Stdio::piped());
    let mut listing = Running::start_with_own_stdio(command);
    until_writing_to_pipe(&listing);
    listing.read_stdout(unread);
    let finished = listing.finish().expect(0);
    assert_eq!(finished.stdout.matches("object-").count(), objects);
}
