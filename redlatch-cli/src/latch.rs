//! `redlatch latch`: count down, wait, set.

use std::time::Duration;

use redlatch::Client;
use redlatch::inspect::ObjectState;

use crate::args::change::{Latch, LatchCommand};
use crate::exit::{self, Failure};
use crate::output::stderr::note;
use crate::output::stdout;
use crate::process::signals::Signals;
use crate::store::args::StoreArgs;
use crate::store::{self, WaitLimits};

pub(crate) async fn latch(store_args: &StoreArgs, latch: &Latch) -> Result<u8, Failure> {
    let name = &latch.name;
    store::check_name(name).await?;
    let mut signals = Signals::catch_ending()?;
    let (outage, wait) = match &latch.command {
        LatchCommand::Wait {
            limit,
            outage_limit,
        } => (*outage_limit, *limit),
        _ => (Some(Duration::ZERO), None),
    };
    let limits = WaitLimits::new(outage, wait);
    let settings = Client::builder().outage_limit(outage);
    let connecting = async {
        let client = store::connect_within(store_args, settings, &limits).await?;
        let state = limits.retry_through_outage(name, async || client.inspect(name).await);
        let state = state.await?;
        Ok::<_, Failure>((client, state))
    };
    let (client, state) = tokio::select! {
        biased;
        code = signals.next_end() => return Ok(code),
        connected = connecting => connected?,
    };
    // An expirable semaphore has its number of permits under the same key: counting that down would
    // take permits away.
    if let Some(state) = state
        && !matches!(state, ObjectState::Counter { .. })
    {
        return Err(store::wrong_kind_failure(name, &state, "latch"));
    }
    let handle = client.count_down_latch(name);
    let work = async {
        match latch.command {
            LatchCommand::Set { n } => {
                if handle.try_set_count(n).await? {
                    return stdout::lines([n.to_string()]).await;
                }
                let left = match handle.count().await? {
                    1 => "1 is left".to_owned(),
                    count => format!("{count} are left"),
                };
                note!("{name}: it was already set, and {left}");
                Ok(exit::NOT_ACQUIRED)
            }
            LatchCommand::CountDown { by } => {
                let left = handle.count_down_by(by).await?;
                stdout::lines([left.to_string()]).await
            }
            LatchCommand::Wait { .. } => {
                let open = match limits.wait() {
                    Some(limit) => handle.try_wait().wait(limit).await?,
                    None => handle.wait().await.map(|()| true)?,
                };
                if open {
                    return Ok(exit::OK);
                }
                note!("{name}: not open in time");
                Ok(exit::NOT_ACQUIRED)
            }
        }
    };
    tokio::select! {
        biased;
        code = signals.next_end() => Ok(code),
        done = work => done,
    }
}
