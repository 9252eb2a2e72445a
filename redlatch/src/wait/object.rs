//! The queues of one object, behind their lock, and what they carry.

use std::any::Any;
use std::sync::{Arc, MutexGuard};
use std::task::Waker;

use super::queue::Queues;
use crate::background::{Counted, StartedTask};
use crate::lease::Lease;
use crate::owner::Owner;
use crate::sync::Mutex;

/// The queues of one object.
#[derive(Debug)]
pub(super) struct ObjectQueues {
    pub(super) key: Box<str>,
    state: Mutex<ObjectInner>,
}

pub(super) type ClientQueues = Queues<Waker, Counted<Offer>, Claim>;

#[derive(Debug)]
pub(super) struct ObjectInner {
    pub(super) queues: ClientQueues,
    /// The task that drops offers that are not taken in time.
    pub(super) expiry: StartedTask,
}

/// Something that a request of this client passes to the next. Dropping it releases it.
pub(crate) type Offer = Box<dyn Any + Send>;

/// What a release of this client needs to know to acquire the object for a waiter.
#[derive(Debug)]
pub(crate) struct Claim {
    /// The waiter's hold.
    pub(crate) hold: Arc<dyn Any + Send + Sync>,
    pub(crate) lease: Lease,
}

/// Returns a key for the queues of one caller, which no other waiter for the object joins.
pub(crate) fn private_object(object: &str) -> String {
    format!("{object}{PRIVATE}{}", Owner::new().number())
}

/// Precedes the number of the caller. No name has a NUL, and that of a value of a group is between
/// two names.
const PRIVATE: &str = "\0\0";

impl ObjectQueues {
    pub(super) fn new(key: &str) -> ObjectQueues {
        let queues = Queues::new();
        ObjectQueues {
            key: key.into(),
            state: Mutex::new(ObjectInner {
                queues,
                expiry: StartedTask::default(),
            }),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ObjectInner> {
        self.state.lock()
    }

    pub(super) fn is_private(&self) -> bool {
        self.key.contains(PRIVATE)
    }
}
