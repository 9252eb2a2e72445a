//! `redlatch`: runs a command while it holds a lock, and inspects locks.
#![forbid(unsafe_code)]

mod args;
mod child;
mod duration;
mod exec;
mod exit;
mod held_lock;
mod latch;
mod process_tree;
mod registered;
mod run;
mod show;
mod signals;
mod stderr;
mod store;
mod store_args;
mod terminal;
mod token;
mod why;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory as _, FromArgMatches as _};

use crate::args::{Args, Command};
use crate::exit::Failure;
use crate::stderr::stderr;

fn main() -> ExitCode {
    let parsed = Args::command().try_get_matches().and_then(|matches| {
        let args = Args::from_arg_matches(&matches)?;
        Ok((args, matches.value_source("url")))
    });
    let (args, url_source) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return print_usage_error(error),
    };
    // This process becomes CMD and does not hold the lock: it needs no log, no runtime and no
    // threads.
    if let Command::Exec(exec) = &args.command {
        return exec::exec(exec).into();
    }
    stderr::start_log(args.output);
    if url_source == Some(ValueSource::CommandLine) {
        store_args::warn_if_url_has_password(&args.store_args.url);
    }
    let code = dispatch(args).unwrap_or_else(|failure| {
        stderr!("{}", failure.message);
        failure.code
    });
    code.into()
}

fn dispatch(args: Args) -> Result<u8, Failure> {
    // CMD is killed when the thread that started it ends (see `child`). So everything runs on this
    // thread, which lives as long as the process.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::system("cannot start the tokio runtime", &error))?;
    let code = runtime.block_on(async {
        match args.command {
            Command::Run(run) => run::run(&args.store_args, run).await,
            Command::Show(show) => show::show(&args.store_args, &show).await,
            Command::Ls(ls) => show::ls(&args.store_args, &ls).await,
            Command::Why(why) => why::why(&args.store_args, &why).await,
            Command::Deadlocks(deadlocks) => why::deadlocks(&args.store_args, &deadlocks).await,
            Command::Unlock(unlock) => show::unlock(&args.store_args, &unlock).await,
            Command::Latch(latch) => latch::latch(&args.store_args, &latch).await,
            Command::Token(token) => token::token(&args.store_args, &token).await,
            Command::Exec(_) => unreachable!("handled without a runtime"),
        }
    });
    // Do not wait for a pending host name lookup.
    runtime.shutdown_background();
    code
}

/// Prints a usage error, or the requested help. Quoted parts of the command line are printed
/// without passwords.
fn print_usage_error(error: clap::Error) -> ExitCode {
    let secrets: Vec<(String, String)> = std::env::args_os()
        .map(OsString::into_string)
        .filter_map(Result::ok)
        .filter_map(|arg| {
            let shown = store::without_secrets(&arg);
            (shown != arg).then_some((arg, shown))
        })
        .collect();
    let code = if error.use_stderr() {
        exit::USAGE
    } else {
        exit::OK
    };
    let mut message = error.to_string();
    if error.kind() == ErrorKind::MissingSubcommand && message.contains("__exec") {
        // clap's own message would list the internal command.
        stderr::raw(&Args::command().render_help().to_string());
    } else if secrets.is_empty() {
        // Uses colors at a terminal. Errors are ignored: a closed pipe has no reader.
        let _ = error.print();
    } else {
        for (secret, shown) in secrets {
            message = message.replace(&secret, &shown);
        }
        stderr::raw(&message);
    }
    if error.kind() == ErrorKind::MissingRequiredArgument && message.contains("  <CMD>") {
        stderr::raw("CMD comes after --: redlatch run NAME -- CMD\n");
    }
    code.into()
}
