//! Metrics of a client, on the facade crate `metrics` (feature `metrics`). Without the feature nothing is measured, and the
//! types here are empty.

#[cfg(not(feature = "metrics"))]
mod disabled;
#[cfg(feature = "metrics")]
mod enabled;

#[cfg(not(feature = "metrics"))]
pub(crate) use disabled::{GuardTimer, KindMetrics, Metrics, SubscriptionCount, Timer};
#[cfg(feature = "metrics")]
pub(crate) use enabled::{
    GuardTimer, KindMetrics, Metrics, NameAttribute, SubscriptionCount, Timer,
};

/// What the attribute `kind` distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Lock,
    FairLock,
    Election,
    FencedLock,
    SpinLock,
    GroupLock,
    ReadLock,
    WriteLock,
    MultiLock,
    RedLock,
    Semaphore,
    ExpirableSemaphore,
    FairReadLock,
    FairWriteLock,
    FairSemaphore,
}
