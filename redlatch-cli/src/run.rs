//! `redlatch run`: obtain the lock, run CMD, release the lock.

use std::collections::HashSet;
use std::convert::Infallible;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use redlatch::{Client, Error, ObjectState};

use crate::access::Access;
use crate::args::Run;
use crate::child::Child;
use crate::exit::{self, Failure};
use crate::holding::{self, Holding};
use crate::say::{printable, say};
use crate::signals::Signals;
use crate::{duration, store};

/// Whoever waits for longer than this is told for whom.
const SILENCE: Duration = Duration::from_secs(5);

pub(crate) async fn run(access: &Access, mut run: Run) -> Result<u8, Failure> {
    let mut signals = Signals::catch()?;
    store::rehearse(&run).await?;
    // Held twice is held.
    let mut named = HashSet::new();
    run.names.retain(|name| named.insert(name.clone()));
    let client = tokio::select! {
        biased;
        caught = signals.next() => return Ok(exit::by_signal(caught.signal.as_raw())),
        client = store::connect(access, store::settings(&run)) => client?,
    };
    let code = run_holding(&client, &run, &mut signals).await;
    // An acquisition that was cut short, or a release that was not answered.
    store::settle(&client).await;
    code
}

async fn run_holding(client: &Client, run: &Run, signals: &mut Signals) -> Result<u8, Failure> {
    let holding = tokio::select! {
        biased;
        caught = signals.next() => return Ok(exit::by_signal(caught.signal.as_raw())),
        holding = obtain(client, run) => holding?,
        never = tell_for_whom(client, run) => match never {},
    };
    let names = run.names.join(" ");
    let Some(holding) = holding else {
        match run.wait {
            Some(wait) => say!("{names}: not obtained within {}", duration::short(wait)),
            None if run.kind.fair => {
                say!("{names}: somebody else holds it, or is before you in the queue");
            }
            None => say!("{names}: somebody else holds it"),
        }
        return Ok(run.conflict_exit_code);
    };
    let mut child = Child::start(run, &holding)
        .map_err(|error| Failure::system("cannot start a process", &error))?;
    match accompany(&mut child, &holding, signals).await {
        Ok(Ok(status)) => match holding.unlock().await {
            Ok(()) => return Ok(code_of(status)),
            Err(error @ (Error::Lost { .. } | Error::WrongKind { .. })) => say!("{error}"),
            Err(error) => {
                say!("{names}: not released: {error}");
                say!("{names}: it is free when its lease ends");
                return Ok(code_of(status));
            }
        },
        Ok(Err(error)) => {
            child.end(run.kill_after, signals).await;
            return Err(Failure::system("cannot wait for CMD", &error));
        }
        Err(lost) => {
            let how = match lost {
                Error::Lost { reason, .. } => format!("lost: {reason}"),
                _ => "lost".into(),
            };
            let patience = duration::short(run.kill_after);
            say!("{names}: {how}; ending CMD: SIGTERM now, SIGKILL after {patience}");
        }
    }
    // Also when CMD itself has ended: what it left behind believes in the lock.
    child.end(run.kill_after, signals).await;
    Ok(exit::LOST)
}

async fn obtain(client: &Client, run: &Run) -> Result<Option<Holding>, Failure> {
    let obtaining = async {
        if let (Some(permits), [name]) = (run.kind.permits, run.names.as_slice()) {
            let others = holding::other_permits(client, name, permits, run.set_permits);
            if let Some(total) = others.await? {
                let noun = holding::permits_noun(total);
                return Ok(Err(Failure::wrong_kind(format!(
                    "{name} has {total} {noun}, not {permits}; if it is yours, change it with: \
                     redlatch run --permits {permits} --set-permits …"
                ))));
            }
        }
        Ok(Ok(Holding::obtain(client, run).await?))
    };
    match obtaining.await {
        Ok(obtained) => obtained,
        Err(error) => Err(store::explained(client, &run.names, run.kind.noun(), error).await),
    }
}

/// After a while of waiting, says once who is in the way.
async fn tell_for_whom(client: &Client, run: &Run) -> Infallible {
    tokio::time::sleep(SILENCE).await;
    for name in &run.names {
        let state = client.inspect(name).await.ok().flatten();
        if let Some(who) = state.as_ref().and_then(in_the_way) {
            say!("{name}: waiting; {who}");
        }
    }
    std::future::pending().await
}

fn in_the_way(state: &ObjectState) -> Option<String> {
    match (state, state.holders().as_slice()) {
        (_, [holder]) => Some(format!("held by {}", printable(&holder.owner))),
        (_, [holder, others @ ..]) => {
            let (owner, others) = (printable(&holder.owner), others.len());
            Some(format!("held by {owner} and {others} more"))
        }
        (ObjectState::ExpirableSemaphore { .. }, _) => Some("all permits are out".into()),
        (ObjectState::Lock { queue, .. }, _) => queue
            .first()
            .map(|next| format!("it is the turn of {}", printable(&next.owner))),
        _ => None,
    }
}

/// Until CMD ends; an error when the lock is lost before.
async fn accompany(
    child: &mut Child,
    holding: &Holding,
    signals: &mut Signals,
) -> Result<std::io::Result<ExitStatus>, Error> {
    loop {
        tokio::select! {
            // After a pause of this process everything may have happened at once.
            biased;
            lost = holding.lost() => return Err(lost),
            caught = signals.next() => child.pass_on(caught),
            status = child.wait() => return Ok(status),
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
