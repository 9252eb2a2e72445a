//! Signals for process trees: the next holder starts only after the last process of the tree has
//! ended, while the lease lasts.

use std::os::unix::process::CommandExt as _;

use redlatch_testkit::{Proxy, shared, unique};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::*;

/// A CMD that waits for its child. A signal ends CMD but not the child. After SIGINT, however, a
/// shell waits for its foreground child.
const FOREGROUND: &str = "CHILD";

/// The same, but SIGINT also ends CMD. Shells start such a child with SIGINT and SIGQUIT ignored.
const BACKGROUND: &str = "CHILD & wait";

/// A child of CMD that cleans up for half a second after signal `short`.
fn slow_child(short: &str) -> String {
    let clean_up = "n=0; while [ $n -lt 15 ]; do sleep 0.02; n=$((n+1)); done; exit 0";
    format!("trap '{clean_up}' {short}")
}

/// A child of CMD that ignores signal `short`.
fn stubborn_child(short: &str) -> String {
    format!("trap '' {short}")
}

/// Kills a process when dropped, in case a failed test leaves it behind.
struct KillOnDrop(Pid);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

/// A tree of `redlatch`, CMD and a child of CMD under a lock, and a waiter for the lock that checks
/// whether any process of the tree is left.
struct ProcessTree {
    name: String,
    holder: Running,
    /// `redlatch`, CMD and its child.
    pids: [Pid; 3],
    temp_dir: TempDir,
    _kill_on_drop: KillOnDrop,
}

impl ProcessTree {
    /// `cmd` runs CHILD, which `child` prepares for signals.
    fn start(at_terminal: bool, options: &[&str], cmd: &str, child: &str) -> ProcessTree {
        let name = unique("tree");
        let temp_dir = TempDir::new();
        let pids = temp_dir.path("pids");
        let written = temp_dir.path("written");
        let child_file = temp_dir.path("child");
        let cmd_file = temp_dir.path("cmd");
        let work = format!(
            "while :; do echo >>{}; sleep 0.02; done",
            temp_dir.path("work")
        );
        let child = format!("{child}\necho $$ >>{written}; mv {written} {pids}\n{work}\n");
        std::fs::write(&child_file, child).unwrap();
        let cmd = cmd.replace(FOREGROUND, &format!("sh {child_file}"));
        let cmd = format!("echo $PPID $$ >{written}\n{cmd}\nexit 3\n");
        std::fs::write(&cmd_file, cmd).unwrap();
        let args = [&["run"], options, &[&name, "--", "sh", &cmd_file]].concat();
        let holder = match at_terminal {
            true => at_a_terminal(&format!("exec {}", command_line(&args))),
            false => {
                let mut command = redlatch(shared(), &args);
                // A separate job, as in a shell: in an orphaned group SIGTSTP has no effect.
                command.process_group(0);
                Running::start(command)
            }
        };
        let mut tree = Vec::new();
        until("all processes of the tree run", || {
            let text = std::fs::read_to_string(&pids).unwrap_or_default();
            tree = text.split_whitespace().map(pid).collect();
            tree.len() == 3
        });
        let pids: [Pid; 3] = tree.try_into().unwrap();
        ProcessTree {
            name,
            holder,
            pids,
            temp_dir,
            _kill_on_drop: KillOnDrop(pids[2]),
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pids[0], signal).unwrap();
    }

    /// Starts a waiter that prints which processes of CMD are left when it acquires the lock.
    fn start_waiter(&self) -> Running {
        let check = "for pid in $2 $3; do [ ! -d /proc/$pid ] || echo left: $pid; done";
        let pids = self.pids.map(|pid| pid.to_string());
        let cmd = ["sh", "-c", check, "sh", &pids[0], &pids[1], &pids[2]];
        let args = [&["run", &self.name, "--"], &cmd[..]].concat();
        let next = Running::start(redlatch(shared(), &args));
        until("the next one waits", || waiters(shared(), &self.name) == 1);
        next
    }

    /// Waits until `redlatch` has stopped, which it does last. A shell in `vfork` then waits (D)
    /// for its stopped child to continue.
    fn until_stopped(&self) {
        until("all are stopped", || {
            let [redlatch, others @ ..] = self.pids.map(state_of);
            redlatch == 'T' && others.iter().all(|state| matches!(state, 'T' | 'D'))
        });
    }

    fn until_continued(&self) {
        until("all continue", || {
            self.pids.iter().all(|pid| state_of(*pid) != 'T')
        });
    }
}

fn pid(text: &str) -> Pid {
    Pid::from_raw(text.parse().unwrap()).unwrap()
}

fn state_of(pid: Pid) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let rest = stat.rsplit_once(") ").map(|(_, rest)| rest);
    rest.and_then(|rest| rest.chars().next()).unwrap_or('X')
}

fn command_line(args: &[&str]) -> String {
    let binary = env!("CARGO_BIN_EXE_redlatch");
    args.iter()
        .fold(format!("'{binary}'"), |line, arg| format!("{line} '{arg}'"))
}

fn ends_before_the_next_holder_starts(at_terminal: bool) {
    let mut cases = Vec::new();
    for signal in ENDING {
        // Shells know the signals by their numbers, too.
        let number = signal.as_raw().to_string();
        cases.push((signal, BACKGROUND, stubborn_child(&number), "200ms"));
        cases.push((signal, FOREGROUND, slow_child(&number), "1h"));
    }
    for_each(&cases, |(signal, cmd, child, kill_after)| {
        let tree = ProcessTree::start(at_terminal, &["--kill-after", kill_after], cmd, child);
        let next = tree.start_waiter();
        tree.signal(*signal);
        let left = next.finish().expect(0).stdout;
        assert_eq!(left, "", "{signal:?} with a child that does {child}");
        tree.holder.finish().expect(128 + signal.as_raw());
    });
}

#[test]
fn tree_ends_before_the_next_holder_starts() {
    ends_before_the_next_holder_starts(false);
}

#[test]
fn tree_at_a_terminal_ends_before_the_next_holder_starts() {
    ends_before_the_next_holder_starts(true);
}

#[test]
fn keys_end_the_tree_before_the_next_holder_starts() {
    let cases = [
        ("\x03", 130, BACKGROUND, stubborn_child("INT"), "200ms"),
        ("\x03", 130, FOREGROUND, slow_child("INT"), "1h"),
        ("\x1c", 131, BACKGROUND, stubborn_child("QUIT"), "200ms"),
        ("\x1c", 131, FOREGROUND, slow_child("QUIT"), "1h"),
    ];
    for_each(&cases, |(key, code, cmd, child, kill_after)| {
        let mut tree = ProcessTree::start(true, &["--kill-after", kill_after], cmd, child);
        let next = tree.start_waiter();
        tree.holder.write(key);
        let left = next.finish().expect(0).stdout;
        assert_eq!(left, "", "{key:?} with a child that does {child}");
        tree.holder.finish().expect(*code);
    });
}

/// A child with a separate session receives no signal for CMD's group.
#[test]
fn daemons_end_before_the_next_holder_starts() {
    for at_terminal in [false, true] {
        let options = ["--kill-after", "200ms"];
        let tree = ProcessTree::start(at_terminal, &options, "setsid -w CHILD", "");
        let next = tree.start_waiter();
        tree.signal(Signal::TERM);
        assert_eq!(next.finish().expect(0).stdout, "");
        tree.holder.finish().expect(143);
    }
}

/// CMD handles the signal and exits while its child is still working.
#[test]
fn cmd_that_handles_the_signal_ends_before_its_child() {
    let cmd = "trap 'exit 7' TERM; CHILD & wait";
    let tree = ProcessTree::start(false, &["--kill-after", "1h"], cmd, &slow_child("TERM"));
    let next = tree.start_waiter();
    tree.signal(Signal::TERM);
    assert_eq!(next.finish().expect(0).stdout, "");
    tree.holder.finish().expect(7);
}

/// Only CMD is killed, as by the out-of-memory killer, and its child receives no signal.
#[test]
fn child_of_killed_cmd_ends_before_the_next_holder_starts() {
    for at_terminal in [false, true] {
        for (child, kill_after) in [
            (stubborn_child("TERM"), "200ms"),
            (slow_child("TERM"), "1h"),
        ] {
            let tree = ProcessTree::start(
                at_terminal,
                &["--kill-after", kill_after],
                FOREGROUND,
                &child,
            );
            let next = tree.start_waiter();
            kill_process(tree.pids[1], Signal::KILL).unwrap();
            // At a terminal, the child is also asked to end.
            assert_eq!(next.finish().expect(0).stdout, "");
            tree.holder.finish().expect(137);
        }
    }
}

#[test]
fn lost_lock_ends_the_whole_tree() {
    for at_terminal in [false, true] {
        for start in [FOREGROUND, "setsid -w CHILD"] {
            let options = ["--watchdog", "6s", "--kill-after", "200ms"];
            let tree = ProcessTree::start(at_terminal, &options, start, &stubborn_child("TERM"));
            finish(redlatch(shared(), &["unlock", "--force", &tree.name])).expect(0);
            tree.holder.finish().expect(74);
            for pid in tree.pids {
                assert!(matches!(state_of(pid), 'Z' | 'X'), "{pid} still runs");
            }
        }
    }
}

/// `exec redlatch` inherits the background commands of the shell. They do not belong to CMD.
#[test]
fn children_of_the_shell_before_exec_are_not_ended() {
    let name = unique("earlier-children");
    let script =
        r#"sleep 1000 >/dev/null 2>&1 & echo $!; exec "$0" run --kill-after 0 "$1" -- sleep 1000"#;
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_redlatch"), &name]);
    command.env("REDLATCH_URL", shared().url());
    let holder = Running::start(command);
    let earlier_child = KillOnDrop(Pid::from_raw(holder.cmd_pid() as i32).unwrap());
    until("it is held", || is_held(shared(), &name));
    holder.signal(Signal::TERM);
    holder.finish().expect(143);
    assert!(!is_dead(earlier_child.0.as_raw_nonzero().get() as u32));
}

/// A CMD that ends by itself may leave processes behind. They do not keep the lock.
#[test]
fn process_left_behind_by_a_normal_exit_does_not_hold_the_lock() {
    let name = unique("daemon");
    let script = "sleep 1000 >/dev/null 2>&1 & echo $!";
    let holder = finish(redlatch(
        shared(),
        &["run", &name, "--", "sh", "-c", script],
    ))
    .expect(0);
    let left = KillOnDrop(pid(holder.stdout.trim()));
    assert!(!is_held(shared(), &name));
    assert!(!is_dead(left.0.as_raw_nonzero().get() as u32));
}

#[test]
fn signals_for_cmd_do_not_end_redlatch() {
    let child = "trap 'echo resized >&2' WINCH; trap 'echo used >&2' USR1";
    let tree = ProcessTree::start(false, &[], "trap : WINCH USR1; CHILD", child);
    tree.signal(Signal::WINCH);
    tree.holder.until_stderr("resized");
    tree.signal(Signal::USR1);
    tree.holder.until_stderr("used");
    assert!(is_held(shared(), &tree.name));
    tree.signal(Signal::TERM);
    tree.holder.finish().expect(143);
}

#[test]
fn stop_signal_stops_the_tree_and_sigcont_continues_it() {
    for signal in [Signal::TSTP, Signal::TTIN, Signal::TTOU] {
        // A child that ignores stop signals is also stopped.
        let child = "trap '' TSTP TTIN TTOU";
        for start in [FOREGROUND, "setsid -w CHILD"] {
            let tree = ProcessTree::start(false, &["--watchdog", "1h"], start, child);
            tree.signal(signal);
            tree.until_stopped();
            tree.signal(Signal::CONT);
            tree.until_continued();
            assert!(is_held(shared(), &tree.name));
            tree.signal(Signal::TERM);
            tree.holder.finish();
        }
    }
}

/// SIGCONT arrives when `redlatch` has received the stop signal, and before it has stopped.
#[test]
fn sigcont_just_after_a_stop_signal_continues_the_tree() {
    let child = "trap 'echo used >&2' USR1";
    let tree = ProcessTree::start(false, &["--watchdog", "1h"], "trap : USR1; CHILD", child);
    let pid = tree.pids[0].as_raw_pid().cast_unsigned();
    let stop = 1 << (Signal::TSTP.as_raw() - 1);
    let is_pending = || pending_signals(pid) & stop != 0;
    for used in 1..=20 {
        tree.signal(Signal::TSTP);
        // Without pauses, to be early enough.
        while is_pending() {}
        tree.signal(Signal::CONT);
        tree.signal(Signal::USR1);
        until("the tree continues", || {
            tree.holder.stderr().matches("used").count() >= used
        });
    }
    tree.signal(Signal::TERM);
    tree.holder.finish();
}

#[test]
fn stopped_tree_that_lost_its_lock_never_continues() {
    let cases = [
        (false, String::new()),
        (true, String::new()),
        (true, stubborn_child("TERM")),
    ];
    for (by_force, child) in cases {
        let lease = if by_force { "1h" } else { "6s" };
        let options = ["--watchdog", lease, "--kill-after", "2s"];
        let tree = ProcessTree::start(false, &options, FOREGROUND, &child);
        tree.signal(Signal::TSTP);
        tree.until_stopped();
        let work = || std::fs::metadata(tree.temp_dir.path("work")).map_or(0, |file| file.len());
        let before = work();
        if by_force {
            finish(redlatch(shared(), &["unlock", "--force", &tree.name])).expect(0);
        }
        let next = hold(shared(), &[], &tree.name);
        tree.signal(Signal::CONT);
        let finished = tree.holder.finish().expect(74);
        assert_eq!(finished.stderr.matches("lost").count(), 1, "{finished:#?}");
        assert_eq!(work(), before, "the child worked without the lock");
        next.release();
    }
}

/// The store does not answer whether the lock is still held.
#[test]
fn signal_does_not_wait_for_the_check_after_a_stop() {
    let (proxy, name) = (Proxy::to(shared().port()), unique("check"));
    let script = "echo $$; exec cat";
    let options = ["--watchdog", "1h", "--response-timeout", "1h"];
    let args = [&["run"], &options[..], &[&name, "--", "sh", "-c", script]].concat();
    let mut command = clean_command(&args);
    command.env("REDLATCH_URL", proxy.url());
    command.process_group(0);
    let holder = Running::start(command);
    let pids = [holder.pid(), holder.cmd_pid()];
    let stop = |signal| {
        holder.signal(signal);
        until("both are stopped", || {
            pids.iter().all(|pid| is_stopped(*pid))
        });
        holder.signal(Signal::CONT);
        until("it continues", || !is_stopped(pids[0]));
    };
    stop(Signal::TSTP);
    until("CMD continues", || !is_stopped(pids[1]));
    proxy.hold_requests(true);
    stop(Signal::TSTP);
    until("it asks", || proxy.held_requests() > 0);
    // A second stop begins another check.
    stop(Signal::TTIN);
    assert!(
        is_stopped(pids[1]),
        "it is not known whether the lock is held"
    );
    holder.signal(Signal::TERM);
    until("CMD ends", || is_dead(pids[1]));
    proxy.hold_requests(false);
    holder.finish().expect(143);
    assert!(!is_held(shared(), &name));
}

/// Ctrl-Z, then `fg`, in a shell with job control.
#[test]
fn shell_stops_and_continues_cmd_as_a_job() {
    let name = unique("job");
    let script = r#"echo ready; read line; echo "got $line"; exit 4"#;
    let run = command_line(&["run", "--watchdog", "1h", &name, "--", "sh", "-c", script]);
    let mut shell = at_a_terminal(&format!(
        "set -m; {run}; echo \"stopped $?\"; read line; fg >/dev/null; echo \"ended $?\"; exit 9"
    ));
    shell.until_stdout("ready");
    shell.write("\x1a");
    shell.until_stdout("stopped 14");
    shell.write("go\n");
    shell.write("hello\n");
    shell.until_stdout("got hello");
    shell.until_stdout("ended 4");
    shell.finish().expect(9);
    assert!(!is_held(shared(), &name));
}

/// The lock was lost while the job was stopped: `fg` does not continue CMD.
#[test]
fn shell_cannot_continue_cmd_without_the_lock() {
    let name = unique("job");
    let script = r#"echo ready; trap "" INT; read line; echo "got $line""#;
    let run = command_line(&["run", "--watchdog", "1h", &name, "--", "sh", "-c", script]);
    let mut shell = at_a_terminal(&format!(
        "set -m; {run}; echo \"stopped $?\"; read line; fg >/dev/null; echo \"ended $?\"; exit 9"
    ));
    shell.until_stdout("ready");
    shell.write("\x1a");
    shell.until_stdout("stopped 14");
    finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    shell.write("go\nhello\n");
    let output = shell.until_stdout("ended 74");
    assert!(!output.contains("got hello"), "{output}");
    shell.finish().expect(9);
}

/// Another command of the pipeline may need the terminal, so CMD gets it on demand.
#[test]
fn cmd_in_a_pipeline_reads_the_terminal() {
    let name = unique("pipeline");
    let script = r#"read line </dev/tty; echo "got $line"; exit 4"#;
    let run = command_line(&["run", &name, "--", "sh", "-c", script]);
    let mut shell = at_a_terminal(&format!(
        "echo ready; true | {run} | cat; read line; echo \"then $line\""
    ));
    shell.until_stdout("ready");
    shell.write("hello\n");
    shell.until_stdout("got hello");
    // The terminal belongs to the script again.
    shell.write("more\n");
    shell.until_stdout("then more");
    shell.finish().expect(0);
    assert!(!is_held(shared(), &name));
}

/// A process of CMD that the user of redlatch may not signal, because it has become root. Users
/// other than root need `sudo` without a password to prepare that. `elect` does not start a second
/// CMD beside it. `cron` continues.
#[test]
fn processes_that_cannot_be_ended_are_named() {
    for command in ["run", "elect", "cron"] {
        process_that_cannot_be_ended_is_named(command);
    }
}

fn process_that_cannot_be_ended_is_named(command: &str) {
    let (name, temp_dir) = (unique("unkillable"), TempDir::new());
    let becomes_root = temp_dir.path("becomes-root");
    let is_root = rustix::process::geteuid().is_root();
    let as_root = if is_root { "" } else { "sudo -n" };
    let line = format!(
        r#"cp "$(command -v setpriv)" "$0" && {as_root} chown root "$0" && {as_root} chmod 4755 "$0""#
    );
    let mut prepare = std::process::Command::new("sh");
    prepare.args(["-c", &line, &becomes_root]);
    finish(prepare).expect(0);
    let own_pid = std::process::id();
    let outlasts = format!("{becomes_root} --reuid 0 tail --pid {own_pid} -f /dev/null");
    let script = format!("{outlasts} >/dev/null 2>&1 & echo $!; {IDLE_SCRIPT}");
    let (is_cron, file) = (command == "cron", temp_dir.path("crontab"));
    let text = format!("{} {name} {script}\n", crate::cron::soon(2));
    std::fs::write(&file, text).unwrap();
    let cmd = [&name, "--", "sh", "-c", &script];
    let cmd = if is_cron { &[&*file][..] } else { &cmd };
    let args = [command, "--watchdog", "6s", "--kill-after", "100ms"];
    let mut command = redlatch(shared(), &[&args, cmd].concat());
    if is_root {
        command.uid(65534).gid(65534);
    }
    let holder = Running::start(command);
    let printed = holder.until_stdout("\n");
    let pid = printed.trim().rsplit(' ').next().unwrap();
    let left = KillOnDrop(Pid::from_raw(pid.parse().unwrap()).unwrap());
    let comm = format!("/proc/{}/comm", left.0);
    until("it is root", || {
        std::fs::read_to_string(&comm).is_ok_and(|name| name == "tail\n")
    });
    finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    let remaining = format!("{} (tail)", left.0);
    let named = format!("these processes could not be ended and continue: {remaining}\n");
    if is_cron {
        // As part of the output of the command.
        holder.until_stdout(&named);
        holder.signal(Signal::TERM);
        holder.finish().expect(0);
        return;
    }
    let finished = holder.finish().expect(74);
    assert!(finished.stderr.contains(&named), "{finished:#?}");
}
