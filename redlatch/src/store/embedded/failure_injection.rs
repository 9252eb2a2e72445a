//! Failures of the embedded store for unit tests, as a server can fail.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::{Embedded, EmbeddedConnection};
use crate::error::{Error, Result};
use crate::step::Step;
use crate::store::{Answer, Confirmation, Progress, shared_oneshot};

/// Failures that a test injects.
#[derive(Default)]
pub(super) struct InjectedFailures {
    /// Failures of the next steps, in order. `None`: that step succeeds.
    next: VecDeque<Option<Failure>>,
    /// How late the answers to the next steps are, in order.
    delays: VecDeque<Duration>,
    pub(super) response_timeout: Option<Duration>,
}

/// How a step fails.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Failure {
    /// It is not sent.
    NotSent,
    /// The store refuses it: it has no effect, as long as its configuration is the same.
    Refused,
    /// It is sent and has no effect.
    NoEffect,
    /// It has its effect, but the answer is lost.
    NoAnswer,
    /// It has its effect and is answered, but it was sent before, without an answer.
    Repeated,
    /// It has its effect and is answered, but replicas do not confirm it.
    Unconfirmed,
}

impl Embedded {
    /// Makes the next steps fail like this. Later ones succeed.
    pub(crate) fn fail(&self, next: impl IntoIterator<Item: Into<Option<Failure>>>) {
        self.0.lock().injected.next = next.into_iter().map(Into::into).collect();
    }

    /// Makes the answers to the next steps this late. Only to those for which
    /// [`Store::run`](crate::store::Store::run) waits.
    pub(crate) fn delay_answers(&self, next: impl IntoIterator<Item = Duration>) {
        self.0.lock().injected.delays = next.into_iter().collect();
    }

    /// Makes all steps succeed again.
    pub(crate) fn recover(&self) {
        self.0.lock().injected.next.clear();
    }

    /// Makes requests treat the store as one that answers within this time.
    pub(crate) fn set_response_timeout(&self, timeout: Duration) {
        self.0.lock().injected.response_timeout = Some(timeout);
    }
}

impl EmbeddedConnection {
    /// Waits until the answer to the step that was just run arrives.
    pub(crate) async fn answer_arrives(&self) {
        let delay = self.store.0.lock().injected.delays.pop_front();
        if let Some(delay) = delay {
            tokio::time::sleep(delay).await;
        }
    }

    /// Returns the answer to a step that is to fail, or `None` if it is to succeed.
    pub(super) fn run_with_failure<R: Send>(
        &self,
        step: &Step<'_, R>,
        progress: &Progress,
    ) -> Option<Result<Answer<R>>> {
        let failure = self.store.0.lock().injected.next.pop_front()??;
        if !matches!(failure, Failure::NotSent) {
            progress.mark_sent();
        }
        let applied = match failure {
            Failure::NotSent | Failure::Refused | Failure::NoEffect => None,
            Failure::NoAnswer | Failure::Repeated | Failure::Unconfirmed => Some(self.apply(step)),
        };
        if let (Failure::Unconfirmed | Failure::Repeated, Some(answer)) = (failure, applied) {
            let repeated = matches!(failure, Failure::Repeated);
            if repeated {
                progress.mark_repeated();
            }
            let receiver = shared_oneshot::channel().1;
            let confirmation = Confirmation::pending(receiver);
            let confirmation = (!repeated).then_some(confirmation);
            return Some(answer.map(|answer| Answer {
                confirmation,
                ..answer
            }));
        }
        let error = match failure {
            Failure::Refused => Error::NotPermitted {
                reason: "injected".into(),
            },
            _ => Error::unavailable(format!("{failure:?}")),
        };
        progress.record_failure(Instant::now(), error.clone());
        Some(Err(error))
    }
}
