//! `redlatch run`: obtain the lock, run CMD, release the lock.

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use redlatch::{Client, Error};

use crate::args::Run;
use crate::child::Child;
use crate::exit::{self, Failure};
use crate::holding::Holding;
use crate::say::say;
use crate::signals::Signals;
use crate::store;

pub(crate) async fn run(url: &str, run: &Run) -> Result<u8, Failure> {
    let mut signals = Signals::catch()?;
    store::rehearse(run).await?;
    let client = tokio::select! {
        biased;
        caught = signals.next() => return Ok(exit::by_signal(caught.signal.as_raw())),
        client = store::connect(url, store::settings(run)) => client?,
    };
    let code = run_holding(&client, run, &mut signals).await;
    // An acquisition that was cut short, or a release that was not answered.
    store::settle(&client).await;
    code
}

async fn run_holding(client: &Client, run: &Run, signals: &mut Signals) -> Result<u8, Failure> {
    let holding = tokio::select! {
        biased;
        caught = signals.next() => return Ok(exit::by_signal(caught.signal.as_raw())),
        holding = Holding::obtain(client, run) => holding?,
    };
    let names = run.names.join(" ");
    let Some(holding) = holding else {
        match run.wait {
            Some(wait) => say!("{names}: not obtained within {wait:?}"),
            None => say!("{names}: somebody else holds it"),
        }
        return Ok(run.conflict_exit_code);
    };
    let mut child = Child::start(&run.command, &holding)
        .map_err(|error| Failure::system("cannot start a process", &error))?;
    match accompany(&mut child, &holding, signals).await {
        Some(Ok(status)) => match holding.unlock().await {
            Ok(()) => return Ok(code_of(status)),
            Err(error @ (Error::Lost { .. } | Error::WrongKind { .. })) => say!("{error}"),
            Err(error) => {
                say!("{names}: not released: {error}");
                say!("{names}: it is free when its lease ends");
                return Ok(code_of(status));
            }
        },
        Some(Err(error)) => {
            child.end(run.kill_after, signals).await;
            return Err(Failure::system("cannot wait for CMD", &error));
        }
        None => say!(
            "{names}: lost; ending CMD: SIGTERM now, SIGKILL after {:?}",
            run.kill_after
        ),
    }
    // Also when CMD itself has ended: what it left behind believes in the lock.
    child.end(run.kill_after, signals).await;
    Ok(exit::LOST)
}

/// Until CMD ends; `None` when the lock is lost before.
async fn accompany(
    child: &mut Child,
    holding: &Holding,
    signals: &mut Signals,
) -> Option<std::io::Result<ExitStatus>> {
    loop {
        tokio::select! {
            // After a pause of this process everything may have happened at once.
            biased;
            () = holding.lost() => return None,
            caught = signals.next() => child.pass_on(caught),
            status = child.wait() => return Some(status),
        }
    }
}

fn code_of(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, Some(signal)) => exit::by_signal(signal),
        (None, None) => exit::SOFTWARE,
    }
}
