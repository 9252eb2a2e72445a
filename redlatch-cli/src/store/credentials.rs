//! The command that prints a login, and is run for each new connection: `--credentials-command`.

use std::ffi::OsString;
use std::io::Read as _;
use std::sync::{Arc, Mutex, PoisonError};

use redlatch::Credentials;
use rustix::process::Pid;

use crate::process::own_processes;
use crate::process::wrapper::{Unblock, exec_command};
use crate::threads::run_in_thread;
use crate::{duration, exit};

/// No login is longer, in bytes. What a command prints beyond that is not read.
const MAX_OUTPUT: u64 = 64 * 1024;

/// Runs the command with a shell, and returns the login that it prints. If dropped, it is killed.
pub(crate) async fn ask(command: String) -> Result<Credentials, String> {
    let running = Running::default();
    let shared = running.0.clone();
    let asked = run_in_thread("credentials", move || run(&command, &shared)).await;
    let printed = asked.unwrap_or_else(|error| Err(format!("it cannot be started: {error}")));
    printed
        .and_then(|text| parse(&text))
        .map_err(|error| format!("--credentials-command: {error}"))
}

/// Kills the process when the request for credentials is dropped.
#[derive(Default)]
struct Running(Arc<Mutex<State>>);

#[derive(Default)]
enum State {
    #[default]
    NotStarted,
    Started(Pid),
    Dropped,
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::Started(pid) = *state {
            own_processes::kill(pid);
        }
        *state = State::Dropped;
    }
}

/// Runs the command in this thread, which must have received no signals. Returns what it has
/// printed.
fn run(command: &str, running: &Mutex<State>) -> Result<String, String> {
    let shell = ["sh", "-c", command].map(OsString::from);
    let command = exec_command(&shell, false, Unblock::All);
    let (pid, output) = {
        let mut state = running.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Dropped) {
            return Err("canceled".into());
        }
        let started = own_processes::start(command);
        let started = started.map_err(|error| format!("it cannot be started: {error}"))?;
        *state = State::Started(started.0);
        started
    };
    let mut text = String::new();
    let read = output.take(MAX_OUTPUT).read_to_string(&mut text);
    let status = own_processes::wait_for(pid);
    *running.lock().unwrap_or_else(PoisonError::into_inner) = State::NotStarted;
    let status = status.map_err(|error| format!("its end is not known: {error}"))?;
    match exit::by_status(status) {
        0 => read
            .map(|_| text)
            .map_err(|error| format!("its output cannot be read: {error}")),
        code => Err(format!("it failed with exit code {code}")),
    }
}

/// Reads what a command has printed: the password, and on further lines what else is to be said
/// about it.
fn parse(text: &str) -> Result<Credentials, String> {
    let mut lines = text.lines();
    let password = lines.next().unwrap_or_default();
    if password.is_empty() {
        return Err("the first line that it prints, the password, is empty".into());
    }
    let mut credentials = Credentials::new(password);
    // Not shown in errors: a line may belong to the password.
    let wrong = |line: usize, what: &str| format!("line {line} that it prints: {what}");
    for (number, line) in (2..).zip(lines).filter(|(_, line)| !line.is_empty()) {
        match line.split_once(": ") {
            Some(("user", user)) => credentials = credentials.username(user),
            Some(("valid-for", time)) => {
                let time = duration::parse(time.trim());
                let time = time.map_err(|_| wrong(number, "not a duration, such as 15m"))?;
                // Early enough for some more tries.
                credentials = credentials.renewed_after(time.mul_f64(0.75));
            }
            _ => return Err(wrong(number, "neither `user: NAME` nor `valid-for: DUR`")),
        }
    }
    Ok(credentials)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn output_is_a_password_and_what_belongs_to_it() {
        let login = || Credentials::new("s3: cret");
        assert_eq!(parse("s3: cret\n").unwrap(), login());
        assert_eq!(parse("s3: cret\r\n\r\n").unwrap(), login());
        let all = parse("s3: cret\nvalid-for: 20m\n\nuser: app\n").unwrap();
        let renewed = Duration::from_secs(15 * 60);
        assert_eq!(all, login().username("app").renewed_after(renewed));
    }

    #[test]
    fn wrong_output_is_refused_and_not_shown() {
        for (text, said) in [
            ("", "the password, is empty"),
            ("\nuser: app\n", "the password, is empty"),
            ("first\ns3cret\n", "line 2"),
            ("first\n\nuser:s3cret\n", "line 3"),
            ("first\nvalid-for: s3cret\n", "not a duration"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(said) && !error.contains("s3cret"), "{error}");
        }
    }
}
