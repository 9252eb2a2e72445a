//! `redlatch top` in a real terminal, that of tmux: keys are typed, and the screen is read.

use std::process::{Command, Stdio};

use redlatch_testkit::{Sentinels, Server, shared};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::*;

/// A terminal with a shell. Ended when dropped.
struct Terminal {
    /// Contains the socket of this tmux.
    dir: TempDir,
}

impl Terminal {
    /// Starts a shell in a terminal of this size. Its variable `B` is the command.
    fn start(url: &str, columns: u16, rows: u16) -> Terminal {
        let terminal = Terminal {
            dir: TempDir::new(),
        };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        let size = ["-x", &columns, "-y", &rows];
        let new = ["-f", "/dev/null", "new-session", "-d"];
        let mut command = terminal.tmux(
            &[
                &new[..],
                &size,
                &["exec env PS1='prompt: ' bash --norc --noprofile"],
            ]
            .concat(),
        );
        command.env("REDLATCH_URL", url);
        command.env("REDLATCH_CONFIG", "/dev/null");
        command.env("B", env!("CARGO_BIN_EXE_redlatch"));
        command.env_remove("NO_COLOR");
        let status = command.status();
        let status = status.unwrap_or_else(|error| {
            panic!("tmux did not start ({error}); on Debian: apt-get install tmux")
        });
        assert!(status.success(), "tmux: {status}");
        terminal.until_screen("prompt:");
        terminal
    }

    fn tmux(&self, args: &[&str]) -> Command {
        let mut command = Command::new("tmux");
        command
            .args(["-u", "-S", &self.dir.path("tmux")])
            .args(args);
        command.env("LC_ALL", "C.UTF-8");
        command.stdin(Stdio::null());
        command
    }

    /// Types keys, named as in tmux.
    fn keys(&self, keys: &[&str]) {
        let status = self.tmux(&[&["send-keys"], keys].concat()).status();
        assert!(status.is_ok_and(|status| status.success()));
    }

    /// Types a line of the shell.
    fn line(&self, line: &str) {
        self.keys(&["-l", line]);
        self.keys(&["Enter"]);
    }

    fn screen(&self) -> String {
        let captured = self.tmux(&["capture-pane", "-p"]).output().unwrap();
        String::from_utf8(captured.stdout).unwrap()
    }

    #[track_caller]
    fn until_screen(&self, what: &str) -> String {
        self.until_screen_is(what, |screen| screen.contains(what))
    }

    #[track_caller]
    fn until_screen_is(&self, what: &str, is_reached: impl Fn(&str) -> bool) -> String {
        let mut screen = String::new();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !is_reached(&screen) {
            assert!(
                std::time::Instant::now() < deadline,
                "never on the screen: {what}\n{screen}"
            );
            std::thread::sleep(std::time::Duration::from_millis(20));
            screen = self.screen();
        }
        screen
    }

    /// Asserts that the shell reads lines, and that the terminal echoes them. Returns the exit code of the latest command.
    #[track_caller]
    fn assert_usable(&self) -> String {
        self.until_screen_is("a prompt", |screen| screen.trim_end().ends_with("prompt:"));
        self.line("echo code $?; stty -a | grep -c -e ' icanon.* echo '; echo $((6 * 7))nd");
        let screen = self.until_screen("42nd");
        assert!(screen.contains("prompt: echo code $?"), "{screen}");
        assert!(screen.contains("\n1\n42nd"), "{screen}");
        assert!(!screen.contains("redlatch top  "), "{screen}");
        let code = screen.rsplit_once("\ncode ");
        let (_, code) = code.unwrap_or_else(|| panic!("no exit code\n{screen}"));
        let flags = self.tmux(&["display", "-p", "#{cursor_flag}#{alternate_on}"]);
        let flags = { flags }.output().unwrap();
        assert_eq!(flags.stdout, b"10\n", "the cursor is shown\n{screen}");
        code.lines().next().unwrap_or_default().to_owned()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]).status();
    }
}

#[test]
fn top_lists_filters_and_unlocks() {
    let server = Server::start();
    let holder = hold(
        &server,
        &["--label", "report", "--note", "reindex 42"],
        "nightly",
    );
    let args = ["run", "--label", "web", "nightly", "--", "true"];
    let waiter = Running::start(redlatch(&server, &args));
    let wide = "日本\u{1b}[31m語";
    let other = hold(&server, &["--fenced"], wide);
    let terminal = Terminal::start(&server.url(), 80, 24);
    terminal.line("$B top");
    let screen = terminal.until_screen_is("all locks with their clients", |screen| {
        let line = screen.lines().find(|line| line.contains("nightly"));
        let words: Vec<_> = line.unwrap_or_default().split_whitespace().collect();
        let counts = words.iter().rev().nth(2);
        screen.contains("report@") && screen.contains("日本") && counts == Some(&"1")
    });
    let lines: Vec<_> = screen.lines().collect();
    assert!(
        lines[0].starts_with("redlatch top  2 locks, 1 waiter"),
        "{screen}"
    );
    assert!(lines[1].starts_with("sort: waiters"), "{screen}");
    assert!(lines[3].starts_with("> nightly "), "{screen}");
    assert!(lines[4].contains("fenced"), "{screen}");
    assert!(screen.contains(r"\u{1b}"), "{screen}");

    terminal.keys(&["/", "n", "i", "g"]);
    let screen = terminal.until_screen("/nig_");
    assert!(!screen.contains("日本"), "{screen}");
    terminal.keys(&["Enter", "Enter"]);
    let screen = terminal.until_screen("Esc back");
    for part in [
        "nightly: lock",
        "held by report@",
        "\"reindex 42\"",
        "1. web@",
    ] {
        assert!(screen.contains(part), "{screen}");
    }
    terminal.keys(&["u"]);
    terminal.until_screen("Unlock nightly by force? report@");
    terminal.keys(&["n"]);
    terminal.until_screen("nightly: not unlocked");
    terminal.keys(&["u", "y"]);
    terminal.until_screen("nightly: unlocked");
    holder.finish().expect(74);
    waiter.finish().expect(0);
    terminal.until_screen("\"reindex 42\"");
    terminal.until_screen("nightly: lock, free");

    terminal.keys(&["q"]);
    assert_eq!(terminal.assert_usable(), "0");
    other.release();
}

#[test]
fn top_restores_the_terminal() {
    let server = Server::start();
    let holder = hold(&server, &[], "kept");
    let terminal = Terminal::start(&server.url(), 40, 10);
    // From the background, it waits for the foreground.
    terminal.line("$B top --no-color &");
    let view = pid_of_top(&server).as_raw_nonzero().get().unsigned_abs();
    terminal.until_screen_is("it stops", |_| is_stopped(view));
    // Before the shell has noticed that, `fg` only waits for the job, and reports that it is stopped.
    terminal.line("until [[ $(jobs) = *Stopped* ]]; do :; done; fg");
    terminal.until_screen("> kept");
    terminal.keys(&["C-z"]);
    terminal.until_screen("Stopped");
    assert_ne!(terminal.assert_usable(), "0");
    terminal.line("clear; fg");
    terminal.until_screen("> kept");
    // This signal cannot be caught. The shell restores the modes, and `fg` shows the view again.
    kill_process(pid_of_top(&server), Signal::STOP).unwrap();
    // The screen still shows the view, also below the prompt. Keys before the prompt may be lost.
    terminal.until_screen_is("a prompt of the shell", |screen| {
        screen
            .split("Stopped")
            .nth(1)
            .is_some_and(|rest| rest.contains("prompt:"))
    });
    terminal.line("clear");
    terminal.until_screen_is("cleared", |screen| screen.trim() == "prompt:");
    terminal.line("fg");
    terminal.until_screen("> kept");
    terminal.keys(&["C-c"]);
    assert_eq!(terminal.assert_usable(), "130");

    for (signal, code) in [
        (Signal::TERM, "143"),
        (Signal::HUP, "129"),
        (Signal::INT, "130"),
    ] {
        terminal.line("clear; $B top");
        terminal.until_screen("> kept");
        let pid = pid_of_top(&server);
        kill_process(pid, signal).unwrap();
        assert_eq!(terminal.assert_usable(), code);
    }
    holder.release();
}

/// Returns the process of the only view of this server. Waits until there is one.
fn pid_of_top(server: &Server) -> Pid {
    let url = format!("REDLATCH_URL={}", server.url());
    let is_view = |pid: &u32| {
        let read = |file| std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let has =
            |bytes: &[u8], part: &str| bytes.split(|b| *b == 0).any(|one| one == part.as_bytes());
        has(&read("cmdline"), "top") && has(&read("environ"), &url)
    };
    let mut found = None;
    until("there is a view", || {
        let entries = std::fs::read_dir("/proc").unwrap();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut pids = names.filter_map(|name| name.parse().ok());
        found = pids.find(is_view);
        found.is_some()
    });
    Pid::from_raw(found.unwrap() as i32).unwrap()
}

#[test]
fn top_survives_an_outage() {
    let mut server = Server::start();
    server.command::<i64>(&[
        "HSET",
        "before",
        "0195e3a2-4a4b-7c1d-9f3e-1234567890ab:1",
        "1",
    ]);
    let terminal = Terminal::start(&server.url(), 80, 24);
    terminal.line("$B top");
    terminal.until_screen("> before");
    server.kill();
    let screen = terminal.until_screen("STALE since ");
    assert!(screen.contains("> before"), "{screen}");
    terminal.keys(&["Enter"]);
    terminal.until_screen("before: lock");
    terminal.keys(&["Escape"]);
    server.restart();
    server.command::<i64>(&[
        "HSET",
        "after",
        "0195e3a2-4a4b-7c1d-9f3e-1234567890ab:1",
        "1",
    ]);
    terminal.until_screen_is("current data", |screen| {
        screen.contains(" after ") && !screen.contains("STALE")
    });
    terminal.keys(&["q"]);
    assert_eq!(terminal.assert_usable(), "0");
}

/// It shows what the new master has.
#[test]
fn top_follows_a_failover() {
    let mut sentinels = Sentinels::start();
    let url = sentinels.url();
    let hold = |name: &str| {
        let args = ["run", "--response-timeout", "1m", name, "--", "cat"];
        let mut command = clean_command(&args);
        command.env("REDLATCH_URL", &url);
        Running::start(command)
    };
    // Short, so that the view shows them whole.
    let [before, after] = ["before", "after"];
    let first = hold(before);
    let terminal = Terminal::start(&url, 80, 24);
    terminal.line("$B top");
    terminal.until_screen(before);
    let master = sentinels.master();
    sentinels.kill(master);
    sentinels.await_new_master(master);
    let second = hold(after);
    terminal.until_screen_is("both locks at the new master", |screen| {
        screen.contains(before) && screen.contains(after) && !screen.contains("STALE")
    });
    first.release();
    terminal.until_screen_is("only the second lock", |screen| {
        !screen.contains(before) && screen.contains(after) && !screen.contains("STALE")
    });
    second.release();
    terminal.keys(&["q"]);
    assert_eq!(terminal.assert_usable(), "0");
}

#[test]
fn top_needs_a_terminal() {
    finish(redlatch(shared(), &["top"]))
        .expect(2)
        .assert_stderr(
            "top needs a terminal on standard output; for scripts, use `redlatch ls --json` or",
        );
}

/// Nothing can be written any more, neither to standard output nor to standard error.
#[test]
fn top_ends_without_panic_when_its_terminal_is_gone() {
    let dir = TempDir::new();
    let (binary, code) = (env!("CARGO_BIN_EXE_redlatch"), dir.path("code"));
    // The shell outlives its terminal.
    let shell = at_a_terminal(&format!(
        "trap : HUP; stty rows 24 cols 80; '{binary}' top; echo $? > '{code}.new'; mv '{code}.new' '{code}'"
    ));
    shell.until_stdout("redlatch top");
    drop(shell);
    until("it has ended", || std::path::Path::new(&code).exists());
    let code = std::fs::read_to_string(code).unwrap();
    assert_eq!(code.trim(), "71");
}
