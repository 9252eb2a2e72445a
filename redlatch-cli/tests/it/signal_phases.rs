//! Each signal in each phase of `redlatch run`: a row of [`PHASES`] and an element of [`storms`]
//! make a case. In each:
//!
//! 1. The signals end the process, with the documented exit code. After stop signals, it needs one
//!    SIGCONT.
//! 2. The process uses little CPU time.
//! 3. CMD writes no line after the first line of the next owner.

use std::any::Any;
use std::cell::Cell;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use redlatch_testkit::{Proxy, shared, unique};
use rustix::process::Signal;

use crate::support::*;

/// A process without a busy loop needs a tenth of it.
const MAX_CPU_TIME: Duration = Duration::from_secs(2);

struct Phase {
    name: &'static str,
    /// Starts `redlatch run`. Returns when it is in this phase, with what keeps it there.
    enter: fn(&Case) -> (Running, Box<dyn Any>),
    /// Whether stop signals stop the process.
    stops: bool,
    /// The signal that began the phase, and decides about the exit code.
    begun_by: Option<Signal>,
}

const BEFORE_CMD: Phase = Phase {
    name: "",
    enter: run,
    stops: true,
    begun_by: None,
};

#[rustfmt::skip]
const PHASES: [Phase; 8] = [
    Phase { name: "start", enter: start, ..BEFORE_CMD },
    Phase { name: "input", enter: input, ..BEFORE_CMD },
    Phase { name: "password", enter: password, ..BEFORE_CMD },
    Phase { name: "connect", enter: connect, ..BEFORE_CMD },
    Phase { name: "wait", enter: wait, ..BEFORE_CMD },
    Phase { name: "run", enter: run, ..BEFORE_CMD },
    Phase { name: "clean-up", enter: clean_up, stops: false, begun_by: Some(Signal::TERM) },
    Phase { name: "release", enter: release, ..BEFORE_CMD },
];

/// Signals that are sent as fast as possible.
#[derive(Debug)]
struct Storm {
    first: Vec<Signal>,
    /// Ends the process. If the first ones have stopped it, it is continued before.
    last: Signal,
}

const STOPPING: [Signal; 3] = [Signal::TSTP, Signal::TTIN, Signal::TTOU];

const HARMLESS: [Signal; 3] = [Signal::WINCH, Signal::CONT, Signal::CHILD];

fn storms() -> Vec<Storm> {
    let mut storms = Vec::new();
    let mut add = |first: &[Signal], last| {
        let first = first.to_vec();
        storms.push(Storm { first, last });
    };
    for signal in ENDING {
        add(&[], signal);
    }
    for signal in STOPPING {
        add(&[signal], Signal::TERM);
        add(&[signal; 4], Signal::TERM);
        // SIGCONT discards it.
        add(&[signal, Signal::CONT].repeat(5), Signal::TERM);
    }
    for signal in HARMLESS {
        add(&[signal; 50], Signal::TERM);
    }
    add(&STOPPING.repeat(10), Signal::INT);
    add(&[Signal::INT; 50], Signal::INT);
    add(&[Signal::TERM, Signal::HUP, Signal::INT], Signal::QUIT);
    add(&[Signal::USR1, Signal::WINCH].repeat(20), Signal::TERM);
    storms
}

struct Case {
    /// Of the lock.
    name: String,
    dir: TempDir,
    /// The next owner, if it waits for the process.
    next: Cell<Option<Running>>,
}

impl Case {
    /// Returns `redlatch run` with a CMD that writes lines.
    fn command(&self, options: &[&str], cmd: &str) -> Command {
        let cmd = cmd.replace("WORK", "while :; do echo cmd >>lines; sleep 0.02; done");
        let args = [&["run"], options, &["--", "sh", "-c", &cmd]].concat();
        let mut command = redlatch(shared(), &args);
        command.current_dir(&self.dir.0);
        // A job of its own: in an orphaned group, stop signals have no effect.
        command.process_group(0);
        command
    }

    fn lines(&self) -> String {
        std::fs::read_to_string(self.dir.path("lines")).unwrap_or_default()
    }

    fn next_owner(&self) -> Running {
        let cmd = "echo next >>lines; sleep 0.1; echo next >>lines";
        Running::start(self.command(&[&self.name], cmd))
    }

    /// Returns when CMD works and the next owner waits.
    fn until_contended(&self) {
        until("CMD works", || !self.lines().is_empty());
        self.next.set(Some(self.next_owner()));
        until("the next owner waits", || {
            waiters(shared(), &self.name) == 1
        });
    }

    /// Starts a command that opens a file which never has any content.
    fn open_silent_file(&self, command: impl FnOnce(&str) -> Command) -> (Running, Box<dyn Any>) {
        let path = self.dir.path("silent");
        make_silent(&path);
        let running = Running::start(command(&path));
        (running, Box::new(until_opened(path)))
    }
}

/// Waits until `redlatch` has noticed the end of CMD.
fn until_reaped(cmd: u32) {
    until("the end of CMD is noticed", || {
        !Path::new(&format!("/proc/{cmd}")).exists()
    });
}

fn start(case: &Case) -> (Running, Box<dyn Any>) {
    case.open_silent_file(|path| {
        let mut command = case.command(&[&case.name], "WORK");
        command.env("REDLATCH_CONFIG", path);
        command
    })
}

fn input(case: &Case) -> (Running, Box<dyn Any>) {
    let mut running = Running::start(case.command(&["--ticket", "-"], "WORK"));
    running.write("a part of a line");
    running.until_read();
    (running, Box::new(()))
}

fn password(case: &Case) -> (Running, Box<dyn Any>) {
    case.open_silent_file(|path| case.command(&["--password-file", path, &case.name], "WORK"))
}

fn connect(case: &Case) -> (Running, Box<dyn Any>) {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = case.command(&["--response-timeout", "1h", &case.name], "WORK");
    let url = format!("redis://{}", silent.local_addr().unwrap());
    command.env("REDLATCH_URL", url);
    let running = Running::start(command);
    let connection = silent.accept().unwrap();
    (running, Box::new(connection))
}

fn wait(case: &Case) -> (Running, Box<dyn Any>) {
    struct Held(String);
    impl Drop for Held {
        fn drop(&mut self) {
            let _: i64 = shared().command(&["DEL", &self.0]);
        }
    }
    hold_unregistered(shared(), &case.name, "3600000");
    let held = Held(case.name.clone());
    let running = Running::start(case.command(&[&case.name], "WORK"));
    running.until_stderr("waiting for");
    (running, Box::new(held))
}

fn run(case: &Case) -> (Running, Box<dyn Any>) {
    let running = Running::start(case.command(&["--watchdog", "1h", &case.name], "WORK"));
    case.until_contended();
    (running, Box::new(()))
}

fn clean_up(case: &Case) -> (Running, Box<dyn Any>) {
    let options = ["--kill-after", "1s", "--watchdog", "1h", &case.name];
    let cmd = "echo $$; (trap '' TERM; WORK) & wait";
    let running = Running::start(case.command(&options, cmd));
    case.until_contended();
    let cmd = running.cmd_pid();
    running.signal(Signal::TERM);
    until_reaped(cmd);
    (running, Box::new(()))
}

/// The store does not answer.
fn release(case: &Case) -> (Running, Box<dyn Any>) {
    struct Stalled(Proxy, String);
    impl Drop for Stalled {
        fn drop(&mut self) {
            // The release that it holds back never arrives: it would free the lock for the next owner, which the
            // command below would take from it.
            self.0.cut();
            finish(redlatch(shared(), &["unlock", "--force", &self.1])).expect(0);
        }
    }
    let options = ["--response-timeout", "1h", "--watchdog", "1h", &case.name];
    let mut command = case.command(&options, "echo $$; echo cmd >>lines; cat");
    let proxy = Proxy::to(shared().port());
    command.env("REDLATCH_URL", proxy.url());
    let mut running = Running::start(command);
    case.until_contended();
    let cmd = running.cmd_pid();
    proxy.stall(true);
    running.close_stdin();
    until_reaped(cmd);
    (running, Box::new(Stalled(proxy, case.name.clone())))
}

#[test]
fn signals_end_each_phase_in_time_and_without_work_after_the_next_owner_has_begun() {
    let storms = storms();
    let pairs = |phase| storms.iter().map(move |storm| (phase, storm));
    let cases: Vec<_> = PHASES.iter().flat_map(pairs).collect();
    for_each(&cases, |(phase, storm)| {
        let what = format!("{} {storm:?}", phase.name);
        let case = Case {
            name: unique(phase.name),
            dir: TempDir::new(),
            next: Cell::new(None),
        };
        let (running, phase_end) = (phase.enter)(&case);
        let pid = running.pid();
        for signal in &storm.first {
            running.signal(*signal);
        }
        if phase.stops && storm.first.last().is_some_and(|one| STOPPING.contains(one)) {
            until(&format!("{what}: it stops"), || is_stopped(pid));
            running.signal(Signal::CONT);
        }
        if storm.first.iter().all(|one| HARMLESS.contains(one)) {
            // A signal with a lower number would be received before them.
            until(&format!("{what}: it receives them"), || {
                pending_signals(pid) == 0
            });
        }
        running.signal(storm.last);
        until(&format!("{what}: it ends"), || is_dead(pid));
        let used = cpu_time(pid);
        assert!(used < MAX_CPU_TIME, "{what}: used {used:?} of the CPU");
        let finished = running.finish();
        // Shells report both in the same way.
        let code = finished.code.or(finished.signal.map(|number| 128 + number));
        let mut ending = storm.first.clone();
        ending.push(storm.last);
        ending.retain(|signal| ENDING.contains(signal));
        let ending = phase.begun_by.map_or(ending, |signal| vec![signal]);
        let is_documented = ending.iter().any(|one| code == Some(128 + one.as_raw()));
        assert!(is_documented, "{what}: {finished:#?}");

        drop(phase_end);
        let waiting = case.next.take();
        let has_begun = waiting.is_some();
        let next = waiting.unwrap_or_else(|| case.next_owner());
        next.finish().expect(0);
        let lines = case.lines();
        let (of_cmd, of_next) =
            lines.split_at(lines.find("next").expect("a line of the next owner"));
        assert_eq!(of_next, "next\nnext\n", "{what}");
        assert_eq!(!of_cmd.is_empty(), has_begun, "{what}: CMD began");
    });
}
