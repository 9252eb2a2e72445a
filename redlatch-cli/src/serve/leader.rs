//! The responses of `redlatch elect --http`: whether this process leads, and who does.
//!
//! An observer keeps the current leader for the responses. Whether this process leads is asked of
//! the leadership itself, at each request.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use redlatch::{Election, Leader, Leadership};
use serde::Serialize;

use super::http::{self, Response};

/// The pause before the leader is read again during an outage.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// The state behind the HTTP responses.
#[derive(Clone)]
pub(crate) struct Status(Arc<Mutex<State>>);

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
pub(crate) struct Fields<'a> {
    pub(crate) epoch: Option<u64>,
    pub(crate) leader: Option<&'a str>,
    pub(crate) value: Option<&'a str>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(leader: Option<&'a Leader>) -> Fields<'a> {
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
    pub(crate) fn new(name: String, value: String) -> Status {
        Status(Arc::new(Mutex::new(State {
            name,
            value,
            leadership: Weak::new(),
            leader: Err("the store has not answered yet".to_owned()),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_leadership(&self, leadership: &Arc<Leadership>) {
        self.lock().leadership = Arc::downgrade(leadership);
    }

    /// Keeps the current leader up to date.
    pub(crate) async fn follow(&self, election: &Election) -> Infallible {
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

    pub(crate) fn respond(&self, request: &Request<Incoming>) -> Response {
        let state = self.lock();
        match request.uri().path() {
            "/leader" => {
                let leadership = state.leadership.upgrade();
                let answer = state.answer(leadership.as_deref());
                http::json(&answer, answer.leads)
            }
            "/healthz" => http::health(state.leader.as_ref().err().map(String::as_str)),
            _ => http::response(
                StatusCode::NOT_FOUND,
                http::TEXT,
                "use /leader or /healthz\n",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use redlatch::Client;

    use super::*;

    /// Between the start of its term and the next report of its observer, the leader does not name
    /// another one.
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
