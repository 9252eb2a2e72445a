//! `redlatch elect`: runs CMD as long as this process leads, or prints who leads.
//!
//! 1. Campaigns, like `redlatch run` waits for a lock.
//! 2. When it leads, runs CMD as `run` does ([`run_cmd`]), unless the leadership is already lost.
//!    If CMD ends, resigns, and exits with CMD's code.
//! 3. If the leadership is lost, or another client asks the leader to resign, CMD was not started,
//!    or it and its children have been ended. Campaigns again, unless CMD had ended by itself, a
//!    signal has asked to end, or processes of CMD could not be ended: a second CMD would work
//!    beside them.

use std::future::pending;
use std::sync::Arc;

use redlatch::{Client, Election, Embedded, Error, Leadership};
use serde::Serialize;

use super::held_lock::HeldLock;
use super::settings;
use super::supervise::{CmdEnd, run_cmd};
use super::waiting::report_waiting;
use crate::args::elect::Elect;
use crate::exit::{self, Failure};
use crate::output::stderr::{note, warning};
use crate::output::{stdout, timestamp};
use crate::process::signals::Signals;
use crate::serve::http;
use crate::serve::leader::{Fields, RETRY_PAUSE, Status};
use crate::store::args::StoreArgs;
use crate::store::{self, WaitLimits};

pub(crate) async fn elect(store_args: &StoreArgs, elect: Elect) -> Result<u8, Failure> {
    // The library reports an invalid name or setting before any server is contacted.
    let checking = settings(&elect.cmd).connect_embedded(&Embedded::new())?;
    checking.election(&elect.name).leader().await?;
    match elect.observe {
        true => observe(store_args, &elect).await,
        false => lead(store_args, &elect).await,
    }
}

async fn lead(store_args: &StoreArgs, elect: &Elect) -> Result<u8, Failure> {
    let mut signals = Signals::catch_all()?;
    let status = Status::new(elect.name.clone(), value(elect));
    // Before the store is reached: a probe gets an answer from the start.
    let listening = match elect.http {
        Some(address) => Some(http::listen(address).await?),
        None => None,
    };
    let serving = async {
        let Some((listener, bound)) = listening else {
            return pending().await;
        };
        note!("serving http://{bound}/leader");
        let status = status.clone();
        http::serve(listener, move |request| status.respond(request)).await
    };
    tokio::select! {
        code = connect_and_run(store_args, elect, &status, &mut signals) => code,
        never = serving => match never {},
    }
}

async fn connect_and_run(
    store_args: &StoreArgs,
    elect: &Elect,
    status: &Status,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let limits = WaitLimits::new(elect.outage_limit, None);
    let connecting = store::connect_within(store_args, settings(&elect.cmd), &limits);
    let client = tokio::select! {
        biased;
        code = signals.next_end() => return Ok(code),
        client = connecting => client?,
    };
    let election = client.election(&elect.name);
    let following = async {
        match elect.http {
            Some(_) => status.follow(&election).await,
            None => pending().await,
        }
    };
    let code = tokio::select! {
        code = campaign_and_run(&client, elect, status, signals) => code,
        never = following => match never {},
    };
    // Settles an interrupted campaign, or a resignation without an answer.
    store::flush(&client).await;
    code
}

async fn campaign_and_run(
    client: &Client,
    elect: &Elect,
    status: &Status,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let names = [elect.name.clone()];
    let name = &elect.name;
    let election = client.election(&elect.name);
    loop {
        let leadership = tokio::select! {
            biased;
            code = signals.next_end() => return Ok(code),
            leadership = campaign(&election, elect) => leadership,
            never = report_waiting(client, &names) => match never {},
        };
        let leadership = match leadership {
            Ok(leadership) => Arc::new(leadership),
            // This process was stopped, and learned of its election when that had ended.
            Err(Error::Lost { .. }) => continue,
            Err(error) => return Err(store::explain_error(client, &names, "lock", error).await),
        };
        note!("{name}: elected, epoch {}", leadership.epoch());
        status.set_leadership(&leadership);
        let held = HeldLock::from_leadership(&elect.name, leadership);
        match run_cmd(client, held, None, &elect.cmd, signals).await? {
            CmdEnd::Ended { asked: true, .. }
            | CmdEnd::Lost {
                cmd_ended: false,
                end_requested: false,
                remains: false,
            } => note!("{name}: waiting to be elected again"),
            CmdEnd::Ended { code, .. } => return Ok(code),
            CmdEnd::Lost { .. } => return Ok(exit::LOST),
        }
    }
}

async fn campaign(election: &Election, elect: &Elect) -> redlatch::Result<Leadership> {
    let campaign = election.campaign(value(elect)).note(elect.cmd.note());
    campaign.outage_limit(elect.outage_limit).await
}

/// Returns the value that observers see.
fn value(elect: &Elect) -> String {
    elect.value.clone().unwrap_or_else(|| {
        let system = rustix::system::uname();
        system.nodename().to_string_lossy().into_owned()
    })
}

/// A line of `--observe --json`.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    #[serde(flatten)]
    leader: Fields<'a>,
}

async fn observe(store_args: &StoreArgs, elect: &Elect) -> Result<u8, Failure> {
    let mut signals = Signals::catch_ending()?;
    let mut reader_left = stdout::reader_left()?;
    let work = async {
        let client = store::connect(store_args, Client::builder()).await?;
        let election = client.election(&elect.name);
        let mut observer = election.observe();
        let (mut interrupted, mut printed) = (false, None);
        loop {
            let leader = match observer.next().await {
                Err(error) if error.is_transient() => {
                    if !std::mem::replace(&mut interrupted, true) {
                        warning!("changes are not seen at present: {error}");
                    }
                    tokio::time::sleep(RETRY_PAUSE).await;
                    // A new observer also reports a leader that is the same as before: so the
                    // outage is over.
                    observer = election.observe();
                    continue;
                }
                leader => leader?,
            };
            if std::mem::take(&mut interrupted) {
                note!("changes are seen again");
            }
            if printed.as_ref() == Some(&leader) {
                continue;
            }
            let line = Line {
                time: timestamp(),
                leader: Fields::new(leader.as_ref()),
            };
            let is_open = match elect.json {
                true => stdout::json_if_open(&[line]).await?,
                false => stdout::lines_if_open([text(&line)]).await?,
            };
            if !is_open {
                return Ok(exit::OK);
            }
            printed = Some(leader);
        }
    };
    tokio::select! {
        biased;
        code = signals.next_end() => Ok(code),
        _ = &mut reader_left => Ok(exit::OK),
        ended = work => ended,
    }
}

fn text(line: &Line<'_>) -> String {
    let Fields {
        epoch,
        leader,
        value,
    } = &line.leader;
    let epoch = epoch.map_or("-".to_owned(), |epoch| epoch.to_string());
    let [leader, value] = [leader, value].map(|text| text.unwrap_or("-"));
    format!("{}  {epoch}  {leader}  {value}", line.time)
}
