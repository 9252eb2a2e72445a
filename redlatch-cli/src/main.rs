//! `redlatch`: runs a command while it holds a lock, and inspects locks.
//!
//! A file imports only from its own row and those below, and no two files import from each other:
//!
//! 1. The commands: `run/` has those that hold a lock, `cron/` the crontab, `serve/` what answers HTTP requests, `top/` the
//!    view; each other command is a file.
//! 2. `args/`: the command line and the configuration files.
//! 3. `look/`: all objects of the store at one time, for `top` and `serve`.
//! 4. `store/`: the options of the store, and connecting. `text`: how holders and times are written.
//! 5. `process/`: signals, the terminal and other processes. `output/`: what is printed.
//! 6. `exit`, `threads`, `duration`.
#![forbid(unsafe_code)]

mod args;
mod completions;
mod cron;
mod doctor;
mod duration;
mod exit;
mod jobs;
mod latch;
mod look;
#[cfg(feature = "man")]
mod man;
mod output;
mod process;
mod run;
mod serve;
mod show;
mod store;
mod text;
mod threads;
mod token;
mod top;
mod unlock;
mod watch;
mod why;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal as _};
use std::panic;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{CommandFactory as _, FromArgMatches as _, Parser as _, ValueEnum as _};

use crate::args::config::Config;
use crate::args::elect::Elect;
use crate::args::run::Run;
use crate::args::{Args, Command, InternalCommand};
use crate::exit::Failure;
use crate::output::stderr::{self, stderr};
use crate::output::stdout;
use crate::output::streams::{STDERR, WrittenAtEnd};
use crate::output::{LogFormat, Output};
use crate::store::args::{warn_if_url_has_password, without_secrets};
use crate::threads::runtime;

fn main() -> ExitCode {
    let _written = WrittenAtEnd;
    panic::set_hook(Box::new(|info| {
        stderr!("{info}");
        let backtrace = Backtrace::capture();
        if backtrace.status() == BacktraceStatus::Captured {
            stderr::usage_text(&format!("{backtrace}\n"));
        }
    }));
    let first = std::env::args_os().nth(1);
    if first.is_some_and(|first| InternalCommand::is_named(&first)) {
        return match InternalCommand::try_parse() {
            Ok(command) => run_internal(&command),
            Err(error) => print_usage_error(error),
        };
    }
    let parsed = Args::parser().try_get_matches().and_then(|matches| {
        let mut args = Args::from_arg_matches(&matches)?;
        let is_option = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let url_is_option = is_option("url");
        if url_is_option {
            args.store_args.ignore_overridden_variables(is_option);
        }
        Ok((args, url_is_option))
    });
    let (mut args, url_is_option) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return print_usage_error(error),
    };
    let config = match &args.command {
        // Also works with a wrong configuration, for example when a shell starts.
        Command::Completions(_) => Ok(Config::default()),
        _ => Config::load(args.config.as_deref()),
    };
    let config = match config {
        Ok(config) => config,
        Err(failure) => {
            output::set(args.output);
            return exit_code(Err(failure));
        }
    };
    args.output.log_format = args.output.log_format.or(config.log_format);
    output::set(args.output);
    // The view fills the terminal. Log events would be written across it.
    if !(matches!(args.command, Command::Top(_)) && std::io::stderr().is_terminal()) {
        stderr::start_log();
    }
    if url_is_option {
        warn_if_url_has_password(args.store_args.url());
    }
    config.print_warnings();
    args.store_args.fill_from(config.store_args);
    if let Command::Run(Run { cmd, .. }) | Command::Elect(Elect { cmd, .. }) = &mut args.command {
        cmd.label = cmd.label.take().or(config.label);
    }
    exit_code(dispatch(args))
}

/// Runs an internal command.
fn run_internal(command: &InternalCommand) -> ExitCode {
    match command {
        // This process becomes CMD and does not hold the lock.
        InternalCommand::Exec(exec) => run::exec::exec(exec).into(),
        InternalCommand::Job(job) => {
            STDERR.start();
            exit_code(run::of_parent::run_job(job))
        }
        #[cfg(feature = "man")]
        InternalCommand::Man(man) => exit_code(man::man(man)),
    }
}

/// Returns the exit code of a command, and prints its failure.
fn exit_code(result: Result<u8, Failure>) -> ExitCode {
    let code = result.unwrap_or_else(|failure| {
        stderr!("{}", failure.message);
        failure.code
    });
    code.into()
}

fn dispatch(args: Args) -> Result<u8, Failure> {
    // CMD gets the signal mask of the parent.
    if !matches!(args.command, Command::Run(_) | Command::Elect(_)) {
        process::signals::unblock_ending();
    }
    // Before CMD may use up the system's threads.
    STDERR.start();
    // CMD is killed when the thread that started it ends (see `child`). So everything runs on this
    // thread, which lives as long as the process.
    let runtime = runtime()?;
    let code = runtime.block_on(async {
        match args.command {
            Command::Run(run) => run::run(&args.store_args, run).await,
            Command::Elect(elect) => run::elect::elect(&args.store_args, elect).await,
            Command::Cron(cron) => cron::cron(&args.store_args, &cron).await,
            Command::Jobs(jobs) => jobs::jobs(&args.store_args, &jobs).await,
            Command::Show(show) => show::show(&args.store_args, &show).await,
            Command::Ls(ls) => show::ls(&args.store_args, &ls).await,
            Command::Why(why) => why::why(&args.store_args, &why).await,
            Command::Deadlocks(deadlocks) => why::deadlocks(&args.store_args, &deadlocks).await,
            Command::Watch(watch) => watch::watch(&args.store_args, &watch).await,
            Command::Lock(lock) => run::ticket::lock(&args.store_args, &lock).await,
            Command::Renew(renew) => run::ticket::renew(&args.store_args, &renew).await,
            Command::Unlock(unlock) => unlock::unlock(&args.store_args, &unlock).await,
            Command::Latch(latch) => latch::latch(&args.store_args, &latch).await,
            Command::Token(token) => token::token(&args.store_args, &token).await,
            Command::Top(top) => top::top(args.store_args, top).await,
            Command::Doctor(doctor) => doctor::doctor(&args.store_args, &doctor).await,
            Command::Serve(serve) => serve::serve(args.store_args, serve).await,
            Command::Completions(completions) => completions::completions(&completions).await,
        }
    });
    // Do not wait for a pending host name lookup.
    runtime.shutdown_background();
    code
}

/// Prints a usage error, or the requested help.
fn print_usage_error(mut error: clap::Error) -> ExitCode {
    output::set(Output {
        log_format: requested_log_format(),
        ..Output::default()
    });
    if !error.use_stderr() {
        // Text of this program alone.
        let text = match output::has_colors(&io::stdout()) {
            true => error.render().ansi().to_string(),
            false => error.render().to_string(),
        };
        let printed = runtime().and_then(|runtime| runtime.block_on(stdout::raw(text)));
        return exit_code(printed.map(|_| exit::OK));
    }
    shorten_arguments(&mut error);
    let lacks = error.get(ContextKind::InvalidSubcommand);
    let is_empty = matches!(lacks, Some(ContextValue::String(command)) if command == "redlatch");
    let message = match error.kind() {
        ErrorKind::MissingSubcommand if is_empty => Args::command().render_help().to_string(),
        _ => error.to_string(),
    };
    stderr::usage_text(&message);
    if error.kind() == ErrorKind::MissingRequiredArgument && message.contains("  <CMD>") {
        let command = match message.contains("redlatch elect") {
            true => "elect",
            false => "run",
        };
        stderr::usage_text(&format!(
            "CMD comes after --: redlatch {command} NAME -- CMD\n"
        ));
    }
    exit::USAGE.into()
}

/// Shortens the arguments and variables that a usage error quotes to one line without secrets.
fn shorten_arguments(error: &mut clap::Error) {
    for kind in [
        ContextKind::InvalidArg,
        ContextKind::InvalidSubcommand,
        ContextKind::InvalidValue,
    ] {
        if let Some(ContextValue::String(quoted)) = error.get(kind) {
            let shown = output::escape::line(&without_secrets(quoted));
            if shown != *quoted {
                error.insert(kind, ContextValue::String(shown));
                // Advice that quotes it, too.
                error.remove(ContextKind::Suggested);
            }
        }
    }
}

/// Returns the format of messages that is requested on a command line that is wrong elsewhere, or
/// in the environment.
fn requested_log_format() -> Option<LogFormat> {
    let args: Vec<String> = std::env::args_os()
        .map(|arg| arg.to_string_lossy().into_owned())
        .take_while(|arg| arg != "--")
        .collect();
    let separate = args.windows(2).find_map(|pair| match pair {
        [option, value] if option == "--log-format" => Some(value.clone()),
        _ => None,
    });
    let attached = args
        .iter()
        .find_map(|arg| arg.strip_prefix("--log-format=").map(str::to_owned));
    let value = separate
        .or(attached)
        .or_else(|| std::env::var("REDLATCH_LOG_FORMAT").ok())?;
    LogFormat::from_str(&value, false).ok()
}
