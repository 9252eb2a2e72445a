//! Starting the command, waiting for conditions, and ending started processes.

use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read, Write as _};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use redlatch_testkit::Server;
use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, Signal, kill_process};

/// Every signal that `redlatch` catches and that ends a CMD which does not handle it.
pub(crate) const ENDING: [Signal; 17] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::USR1,
    Signal::USR2,
    Signal::ALARM,
    Signal::XCPU,
    Signal::XFSZ,
    Signal::VTALARM,
    Signal::PROF,
    Signal::IO,
    Signal::ABORT,
    Signal::TRAP,
    Signal::SYS,
    Signal::POWER,
    Signal::STKFLT,
];

/// Runs the cases in parallel, a few at a time.
pub(crate) fn for_each<T: Sync>(cases: &[T], test: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    test(case);
                }
            });
        }
    });
}

/// Waits until a condition holds. The limit is far longer than anything takes, even on a busy
/// machine.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Returns `redlatch` with these arguments, without inherited settings: `REDLATCH_*`, `RUST_LOG` and the
/// configuration files of this machine.
pub(crate) fn clean_command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_redlatch"));
    command.args(args);
    for (variable, _) in std::env::vars_os() {
        if variable.to_string_lossy().starts_with("REDLATCH_") || variable == "RUST_LOG" {
            command.env_remove(variable);
        }
    }
    command.env("REDLATCH_CONFIG", "/dev/null");
    command
}

/// Returns `redlatch` with these arguments, for this server.
pub(crate) fn redlatch(server: &Server, args: &[&str]) -> Command {
    let mut command = clean_command(args);
    command.env("REDLATCH_URL", server.url());
    command
}

/// Runs a shell's `line` at a separate terminal, which `script` (util-linux) creates.
pub(crate) fn at_a_terminal(line: &str) -> Running {
    let mut command = Command::new("script");
    command.args(["-q", "-e", "-c", "exec bash -c \"$LINE\"", "/dev/null"]);
    command.env("LINE", line);
    command.env("REDLATCH_URL", redlatch_testkit::shared().url());
    command.env("REDLATCH_CONFIG", "/dev/null");
    command.env("SHELL", "/bin/bash");
    Running::start(command)
}

/// The same for `redlatch` with these arguments, in the background of a terminal that stops programs which write from there.
/// Prints `ended CODE.` when it has ended. Returns its process id, too.
pub(crate) fn in_background_of_a_terminal(args: &str) -> (Running, Pid) {
    let binary = env!("CARGO_BIN_EXE_redlatch");
    let shell = at_a_terminal(&format!(
        "set -m; stty tostop; '{binary}' {args} & echo pid $!.; wait $!; echo ended $?."
    ));
    let stdout = shell.until_stdout(".");
    let (_, pid) = stdout.split_once("pid ").unwrap();
    let (pid, _) = pid.split_once('.').unwrap();
    (shell, Pid::from_raw(pid.parse().unwrap()).unwrap())
}

/// A full pipe: a process that writes to it waits until it is read.
pub(crate) struct FullPipe {
    reader: PipeReader,
    writer: PipeWriter,
}

impl FullPipe {
    pub(crate) fn new() -> FullPipe {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        ioctl_fionbio(&writer, true).expect("a mode");
        for filler in [&[b' '; 4096][..], b" "] {
            while let Ok(1..) = writer.write(filler) {}
        }
        ioctl_fionbio(&writer, false).expect("a mode");
        FullPipe { reader, writer }
    }

    /// Starts a command with this pipe as standard error.
    pub(crate) fn start(&self, mut command: Command) -> Running {
        command.stdin(Stdio::piped());
        command.stdout(Stdio::piped());
        command.stderr(self.writer());
        Running::start_with_own_stdio(command)
    }

    pub(crate) fn writer(&self) -> PipeWriter {
        self.writer.try_clone().expect("a pipe")
    }
}

/// Waits until a thread of a process waits for the reader of a pipe.
pub(crate) fn until_writing_to_pipe(running: &Running) {
    let process = format!("/proc/{}", running.pid());
    until("it waits for the reader of a pipe", || {
        waits_in(Path::new(&process), "pipe_write")
    });
}

/// Returns whether a thread of a process, given by its directory in `/proc`, waits in this function of the kernel.
pub(crate) fn waits_in(process: &Path, function: &str) -> bool {
    let threads = std::fs::read_dir(process.join("task"));
    let mut threads = threads.into_iter().flatten().flatten();
    threads.any(|thread| {
        let place = std::fs::read_to_string(thread.path().join("wchan"));
        place.is_ok_and(|place| place.contains(function))
    })
}

/// Makes a file that never has any content.
pub(crate) fn make_silent(path: &str) {
    let made = Command::new("mkfifo").arg(path).status();
    assert!(made.unwrap().success());
}

/// Waits until a silent file is opened. Until the writer is dropped, its readers wait.
pub(crate) fn until_opened(path: String) -> File {
    // Completes when there is a reader.
    let opening = thread::spawn(move || File::options().write(true).open(path).unwrap());
    until("the file is opened", || opening.is_finished());
    opening.join().unwrap()
}

/// Makes a client that is not registered hold a lock for this many milliseconds.
pub(crate) fn hold_unregistered(server: &Server, name: &str, millis: &str) {
    let () = server.command(&["HSET", name, "another-client:1", "1"]);
    let () = server.command(&["PEXPIRE", name, millis]);
}

/// Returns a command with a limit of the system, an option of `prlimit`.
pub(crate) fn limited(limit: &str, command: &Command) -> Command {
    let mut limited = Command::new("prlimit");
    limited.arg(limit);
    started_by(limited, command)
}

/// Returns a program that starts a command, given as its last arguments, in the environment of that command.
pub(crate) fn started_by(mut program: Command, command: &Command) -> Command {
    program.arg(command.get_program()).args(command.get_args());
    for (variable, value) in command.get_envs() {
        match value {
            Some(value) => program.env(variable, value),
            None => program.env_remove(variable),
        };
    }
    program
}

/// Runs a command to its end.
pub(crate) fn finish(command: Command) -> Finished {
    let mut running = Running::start(command);
    running.close_stdin();
    running.finish()
}

/// Starts a `redlatch run` that holds the lock until its standard input is closed; CMD then exits
/// with 0.
pub(crate) fn hold(server: &Server, options: &[&str], name: &str) -> Running {
    hold_with(server, options, name, "echo $$; exec cat")
}

/// The same with another script, which prints CMD's process id first.
pub(crate) fn hold_with(server: &Server, options: &[&str], name: &str, script: &str) -> Running {
    let args = [&["run"], options, &[name, "--", "sh", "-c", script]].concat();
    let running = Running::start(redlatch(server, &args));
    running.until_stdout("\n");
    running
}

/// Keeps a shell idle that has a trap. A shell runs its trap only between two commands. A command that starts just
/// after the signal arrived does not receive it and delays the trap, so each command is short.
pub(crate) const IDLE_SCRIPT: &str = "while :; do sleep 0.02; done";

/// Returns whether a lock is held, that is whether its key exists.
pub(crate) fn is_held(server: &Server, name: &str) -> bool {
    server.command::<i64>(&["EXISTS", name]) == 1
}

/// Returns the only owner of a held lock.
pub(crate) fn owner(server: &Server, name: &str) -> String {
    let owners: Vec<String> = server.command(&["HKEYS", name]);
    owners.into_iter().next().unwrap_or_default()
}

/// Returns the number of waiters for a lock that `redlatch run` holds. The holder subscribes, too: another client may ask for the
/// lock.
pub(crate) fn waiters(server: &Server, name: &str) -> i64 {
    subscribers(server, &format!("redisson_lock__channel:{{{name}}}")) - 1
}

/// The same for a permit.
pub(crate) fn permit_waiters(server: &Server, name: &str) -> i64 {
    subscribers(server, &format!("redisson_sc:{{{name}}}")) - 1
}

/// Returns the number of connections that are subscribed to a channel.
pub(crate) fn subscribers(server: &Server, channel: &str) -> i64 {
    let (_, subscribers): (String, i64) = server.command(&["PUBSUB", "NUMSUB", channel]);
    subscribers
}

/// Sends an HTTP request and returns the response. If the server closes the connection instead,
/// because a busy machine has delayed the request, sends it again.
pub(crate) fn request(address: &str, method_and_path: &str) -> String {
    request_for("test", address, method_and_path)
}

/// The same with this header `Host`.
pub(crate) fn request_for(host: &str, address: &str, method_and_path: &str) -> String {
    let request =
        format!("{method_and_path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let mut response = String::new();
    until(&format!("a response to {method_and_path}"), || {
        let mut stream = TcpStream::connect(address).unwrap();
        response.clear();
        let sent = stream.write_all(request.as_bytes());
        sent.and_then(|()| stream.read_to_string(&mut response))
            .is_ok()
            && !response.is_empty()
    });
    response
}

/// Returns whether a process has ended, even if its exit code has not been collected.
pub(crate) fn is_dead(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return true;
    };
    matches!(fields_of(&stat).next(), Some("Z" | "X") | None)
}

/// Returns the parent of a process.
pub(crate) fn parent_of(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    fields_of(&stat).nth(1)?.parse().ok()
}

/// Returns whether job control has stopped a process.
pub(crate) fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    fields_of(&stat).next() == Some("T")
}

/// Returns the mask of the signals that wait for a process, because it has not received them.
pub(crate) fn pending_signals(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    pending.map_or(0, |mask| u64::from_str_radix(mask.trim(), 16).unwrap())
}

/// Returns how much CPU time a process has used, also if it has ended and its exit code has not
/// been collected.
pub(crate) fn cpu_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    let times = fields_of(&stat).skip(11).take(2);
    let ticks: u64 = times
        .map(|ticks| ticks.parse::<u64>().expect("a number"))
        .sum();
    // A tick is a hundredth of a second, in all of `/proc`.
    Duration::from_millis(ticks * 10)
}

/// Returns the fields of `/proc/PID/stat` from the state on. They follow the name, which is in
/// parentheses and may contain parentheses.
fn fields_of(stat: &str) -> impl Iterator<Item = &str> {
    let (_, fields) = stat.rsplit_once(") ").unwrap_or_default();
    fields.split_ascii_whitespace()
}

/// A directory of one test, removed at the end.
pub(crate) struct TempDir(pub(crate) PathBuf);

impl TempDir {
    pub(crate) fn new() -> TempDir {
        let path = std::env::temp_dir().join(redlatch_testkit::unique("redlatch-cli"));
        std::fs::create_dir(&path).expect("a directory");
        TempDir(path)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0
            .join(name)
            .to_str()
            .expect("a path in UTF-8")
            .to_owned()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process whose output is read continuously. Killed when dropped.
pub(crate) struct Running {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Arc<CapturedOutput>,
    stderr: Arc<CapturedOutput>,
}

/// The output of a process, and how it ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) code: Option<i32>,
    /// The signal that ended it.
    pub(crate) signal: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Finished {
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Finished {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }

    /// Asserts that standard error contains this text, and that standard output is empty.
    #[track_caller]
    pub(crate) fn assert_stderr(self, what: &str) -> Finished {
        assert!(self.stderr.contains(what), "{what:?} in {self:#?}");
        assert_eq!(self.stdout, "", "{self:#?}");
        self
    }
}

#[derive(Default)]
struct CapturedOutput {
    text: Mutex<Vec<u8>>,
    ended: AtomicBool,
}

impl CapturedOutput {
    fn of(source: Option<impl Read + Send + 'static>) -> Arc<CapturedOutput> {
        let text = Arc::new(CapturedOutput::default());
        match source {
            None => text.ended.store(true, Ordering::SeqCst),
            Some(mut source) => {
                let text = text.clone();
                thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while let Ok(read @ 1..) = source.read(&mut buffer) {
                        text.text.lock().unwrap().extend(&buffer[..read]);
                    }
                    text.ended.store(true, Ordering::SeqCst);
                });
            }
        }
        text
    }

    fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().unwrap()).into_owned()
    }
}

impl Running {
    /// Starts a command with pipes for all three standard streams.
    pub(crate) fn start(mut command: Command) -> Running {
        command.stdin(Stdio::piped());
        command.stdout(Stdio::piped());
        command.stderr(Stdio::piped());
        Running::start_with_own_stdio(command)
    }

    /// Starts a command with the standard streams that it specifies.
    pub(crate) fn start_with_own_stdio(mut command: Command) -> Running {
        let mut child = command.spawn().expect("the command starts");
        Running {
            stdin: child.stdin.take(),
            stdout: CapturedOutput::of(child.stdout.take()),
            stderr: CapturedOutput::of(child.stderr.take()),
            child,
        }
    }

    /// Reads a pipe that this process has as standard output.
    pub(crate) fn read_stdout(&mut self, pipe: FullPipe) {
        self.stdout = CapturedOutput::of(Some(pipe.reader));
    }

    /// Reads a pipe that this process has as standard error.
    pub(crate) fn read_stderr(&mut self, pipe: FullPipe) {
        self.stderr = CapturedOutput::of(Some(pipe.reader));
    }

    /// Returns the standard output so far.
    pub(crate) fn stdout(&self) -> String {
        self.stdout.so_far()
    }

    /// Returns the standard error so far.
    pub(crate) fn stderr(&self) -> String {
        self.stderr.so_far()
    }

    /// Waits for a text on standard output. Returns the output so far.
    pub(crate) fn until_stdout(&self, what: &str) -> String {
        until(&format!("{what:?} on standard output"), || {
            let ended = self.stdout.ended.load(Ordering::SeqCst);
            let so_far = self.stdout.so_far();
            assert!(
                so_far.contains(what) || !ended,
                "ended without {what:?}: {so_far}{}",
                self.stderr.so_far()
            );
            so_far.contains(what)
        });
        self.stdout.so_far()
    }

    /// Waits for the first line on standard output. `None`: it has ended without one.
    pub(crate) fn first_line(&self) -> Option<String> {
        until("a line, or the end of the output", || {
            let ended = self.stdout.ended.load(Ordering::SeqCst);
            ended || self.stdout.so_far().contains('\n')
        });
        self.stdout.so_far().lines().next().map(str::to_owned)
    }

    /// Waits for a text on standard error. Returns the output so far.
    pub(crate) fn until_stderr(&self, what: &str) -> String {
        until(&format!("{what:?} on standard error"), || {
            let ended = self.stderr.ended.load(Ordering::SeqCst);
            let so_far = self.stderr.so_far();
            assert!(
                so_far.contains(what) || !ended,
                "ended without {what:?}: {so_far}"
            );
            so_far.contains(what)
        });
        self.stderr.so_far()
    }

    /// Returns the process id that CMD printed first.
    pub(crate) fn cmd_pid(&self) -> u32 {
        let output = self.until_stdout("\n");
        output
            .lines()
            .next()
            .and_then(|pid| pid.parse().ok())
            .expect("a process id")
    }

    /// Returns the process id of `redlatch` itself.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a process id");
        kill_process(pid, signal).expect("it can be signalled");
    }

    pub(crate) fn write(&mut self, text: &str) {
        let stdin = self.stdin.as_mut().expect("standard input is open");
        std::io::Write::write_all(stdin, text.as_bytes()).expect("it is read");
    }

    /// Waits until everything that was written to standard input has been read.
    pub(crate) fn until_read(&self) {
        let stdin = self.stdin.as_ref().expect("standard input is open");
        until("the input is read", || {
            rustix::io::ioctl_fionread(stdin).expect("a pipe") == 0
        });
    }

    pub(crate) fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Closes standard input, so that a holder ends, and asserts that it succeeds.
    pub(crate) fn release(mut self) {
        self.close_stdin();
        self.finish().expect(0);
    }

    /// Waits until the command has ended. Does not close its standard input.
    pub(crate) fn finish(mut self) -> Finished {
        let mut status = None;
        until("the end of the command", || {
            status = self.child.try_wait().expect("a child of this process");
            status.is_some()
        });
        until("the end of its output", || {
            let ended = |text: &CapturedOutput| text.ended.load(Ordering::SeqCst);
            ended(&self.stdout) && ended(&self.stderr)
        });
        Finished {
            code: status.and_then(|status| status.code()),
            signal: status.and_then(|status| status.signal()),
            stdout: self.stdout.so_far(),
            stderr: self.stderr.so_far(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a command that serves HTTP. Returns the address of the URL that it prints, which ends with this path.
pub(crate) fn start_serving(command: Command, path: &str) -> (Running, String) {
    let running = Running::start(command);
    let stderr = running.until_stderr(&format!("{path}\n"));
    let (_, rest) = stderr.split_once("http://").unwrap();
    let (address, _) = rest.split_once('/').unwrap();
    (running, address.to_owned())
}

pub(crate) fn current_thread_runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}
