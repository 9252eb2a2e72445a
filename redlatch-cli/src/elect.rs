//! `redlatch elect`: runs CMD as long as this process leads, or prints who leads.
//!
//! 1. Campaigns, like `redlatch run` waits for a lock.
//! 2. When it leads, runs CMD as `run` does ([`run_cmd`]), unless the leadership is already lost. If CMD ends, resigns, and exits with CMD's code.
//! 3. If the leadership is lost, or another client asks the leader to resign, CMD was not started,
//!    or it and its children have been ended. Campaigns again, unless CMD had ended by itself, a
//!    signal has asked to end, or processes of CMD could not be ended: a second CMD would work
//!    beside them.
//!
//! With --http, an observer keeps the current leader for the responses. Whether this process leads is asked of the
//! leadership itself, at each request.

use std::convert::Infallible;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, StatusCode};
use redlatch::{Client, Election, Embedded, Error, Leader, Leadership};
use serde::Serialize;

use crate::args::Elect;
use crate::exit::{self, Failure};
use crate::held_lock::HeldLock;
use crate::run::{CmdEnd, report_waiting, run_cmd};
use crate::signals::Signals;
use crate::stderr::{note, timestamp, warning};
use crate::store::WaitLimits;
use crate::store_args::StoreArgs;
use crate::watch::reader_left;
use crate::{escape, http, stdout, store};

/// The pause before the leader is read again during an outage.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

pub(crate) async fn elect(store_args: &StoreArgs, elect: Elect) -> Result<u8, Failure> {
    // The library reports an invalid name or setting before any server is contacted.
    let checking = store::settings(&elect.cmd).connect_embedded(&Embedded::new())?;
    checking.election(&elect.name).leader().await?;
    match elect.observe {
        true => observe(store_args, &elect).await,
        false => lead(store_args, &elect).await,
    }
}

async fn lead(store_args: &StoreArgs, elect: &Elect) -> Result<u8, Failure> {
    let mut signals = Signals::catch_all()?;
    let status = Status::new(elect);
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
    let connecting = store::connect_within(store_args, store::settings(&elect.cmd), &limits);
    let client = tokio::select! {
        biased;
        signal = signals.next_end() => return Ok(exit::by_signal(signal.as_raw())),
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
            signal = signals.next_end() => return Ok(exit::by_signal(signal.as_raw())),
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
        status.lock().leadership = Arc::downgrade(&leadership);
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

/// The state behind the HTTP responses.
#[derive(Clone)]
struct Status(Arc<Mutex<State>>);

struct State {
    name: String,
    /// The value with which this process campaigns.
    value: String,
    /// The leadership of this process, while it has one.
    leadership: Weak<Leadership>,
    /// The current leader, or why it is unknown.
    leader: Result<Option<Leader>, String>,
}

/// The response to GET /leader.
#[derive(Serialize)]
struct Answer<'a> {
    name: &'a str,
    /// Whether this process leads.
    leads: bool,
    #[serde(flatten)]
    leader: Fields<'a>,
}

/// A leader in JSON.
#[derive(Serialize)]
struct Fields<'a> {
    epoch: Option<u64>,
    leader: Option<&'a str>,
    value: Option<&'a str>,
}

impl<'a> Fields<'a> {
    fn new(leader: Option<&'a Leader>) -> Fields<'a> {
        Fields {
            epoch: leader.map(|leader| leader.epoch),
            leader: leader.map(|leader| leader.owner.as_str()),
            value: leader.map(|leader| &*leader.value),
        }
    }
}

impl State {
    /// `leadership`: that of this process, if it has one.
    fn answer<'a>(&'a self, leadership: Option<&'a Leadership>) -> Answer<'a> {
        let observed = self.leader.as_ref().ok().and_then(Option::as_ref);
        let leadership = leadership.filter(|leadership| leadership.is_valid());
        let leader = match leadership {
            // The observer may not have read this term yet.
            Some(leadership) => {
                let observed = observed.filter(|leader| leader.epoch == leadership.epoch());
                Fields {
                    epoch: Some(leadership.epoch()),
                    leader: Some(leadership.owner_id().as_str()),
                    value: Some(observed.map_or(&*self.value, |leader| &leader.value)),
                }
            }
            None => Fields::new(observed),
        };
        Answer {
            name: &self.name,
            leads: leadership.is_some(),
            leader,
        }
    }
}

impl Status {
    fn new(elect: &Elect) -> Status {
        Status(Arc::new(Mutex::new(State {
            name: elect.name.clone(),
            value: value(elect),
            leadership: Weak::new(),
            leader: Err("the store has not answered yet".to_owned()),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the current leader up to date.
    async fn follow(&self, election: &Election) -> Infallible {
        let mut observer = election.observe();
        loop {
            let report = observer.next().await;
            let failed = report.is_err();
            self.lock().leader = report.map_err(|error| error.to_string());
            if failed {
                tokio::time::sleep(RETRY_PAUSE).await;
                // A new observer also reports a leader that is the same as before the outage.
                observer = election.observe();
            }
        }
    }

    fn respond(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let state = self.lock();
        match request.uri().path() {
            "/leader" => {
                let leadership = state.leadership.upgrade();
                let answer = state.answer(leadership.as_deref());
                let status = match answer.leads {
                    true => StatusCode::OK,
                    false => StatusCode::SERVICE_UNAVAILABLE,
                };
                let body = escape::to_json(&answer).unwrap_or_default() + "\n";
                http::response(status, "application/json", body)
            }
            "/healthz" => match &state.leader {
                Ok(_) => http::response(StatusCode::OK, http::TEXT, "ok\n"),
                Err(error) => {
                    let body = escape::line(error) + "\n";
                    http::response(StatusCode::SERVICE_UNAVAILABLE, http::TEXT, body)
                }
            },
            _ => http::response(
                StatusCode::NOT_FOUND,
                http::TEXT,
                "use /leader or /healthz\n",
            ),
        }
    }
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
    let mut reader_left = reader_left()?;
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
                    // A new observer also reports a leader that is the same as before: so the outage is over.
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
        signal = signals.next_end() => Ok(exit::by_signal(signal.as_raw())),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Between the start of its term and the next report of its observer, the leader does not name another one.
    #[tokio::test]
    async fn leader_names_itself_before_its_observer_has_read_the_term() {
        let client = Client::embedded();
        let election = client.election("e");
        let resigned = election.campaign("former").await.unwrap();
        let former = election.leader().await.unwrap();
        resigned.resign().await.unwrap();
        let leadership = election.campaign("campaigned").await.unwrap();
        let mut state = State {
            name: "e".to_owned(),
            value: "campaigned".to_owned(),
            leadership: Weak::new(),
            leader: Ok(None),
        };
        let owner = leadership.owner_id().as_str();
        for leader in [Err("an outage".to_owned()), Ok(None), Ok(former)] {
            state.leader = leader;
            let Answer { leads, leader, .. } = state.answer(Some(&leadership));
            assert!(leads);
            assert_eq!((leader.epoch, leader.leader), (Some(2), Some(owner)));
            assert_eq!(leader.value, Some("campaigned"));
        }
        leadership.proclaim("proclaimed").await.unwrap();
        state.leader = Ok(election.leader().await.unwrap());
        let answer = state.answer(Some(&leadership));
        assert_eq!(answer.leader.value, Some("proclaimed"));
    }
}
