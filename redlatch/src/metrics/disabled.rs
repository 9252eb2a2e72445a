//! The same types as in `enabled`, without a function.

use std::time::Duration;

use tokio::time::Instant;

use super::Kind;
use crate::error::{Loss, Result};

#[derive(Clone, Default)]
pub(crate) struct Metrics(());

#[derive(Clone, Default)]
pub(crate) struct KindMetrics(());

#[derive(Clone, Copy)]
pub(crate) struct Timer;

pub(crate) struct RequestTimer;

pub(crate) struct GuardTimer;

pub(crate) struct SubscriptionCount;

impl Metrics {
    pub(crate) fn of(&self, _: Kind, _: Option<&str>) -> KindMetrics {
        KindMetrics::default()
    }

    pub(crate) fn renewal_ended(&self, _: Timer, _: bool) {}

    pub(crate) fn renewed(&self, _: impl FnOnce() -> Duration) {}

    pub(crate) fn acquired_after_wake(&self, _: Option<Instant>) {}

    pub(crate) fn chain_ended(&self, _: u32) {}

    pub(crate) fn batch_sent(&self, _: usize) {}

    pub(crate) fn reconnected(&self) {}

    pub(crate) fn tracking_refused(&self) {}

    pub(crate) fn subscription(&self) -> SubscriptionCount {
        SubscriptionCount
    }
}

impl KindMetrics {
    pub(crate) fn request(self) -> RequestTimer {
        RequestTimer
    }

    pub(crate) fn guard(&self) -> GuardTimer {
        GuardTimer
    }

    pub(crate) fn lost(&self, _: Loss) {}
}

impl Timer {
    pub(crate) fn start() -> Timer {
        Timer
    }
}

impl RequestTimer {
    pub(crate) fn ended<T>(self, _: &Result<Option<T>>) {}
}

impl GuardTimer {
    pub(crate) fn released(&mut self, _: &Result<()>) {}
}

impl SubscriptionCount {
    pub(crate) fn set(&self, _: bool) {}
}
