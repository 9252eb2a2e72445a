//! The owners in the queue of a fair lock, as the steps of other locks with the same key see them: they do not queue, and no
//! subscription to the channel of the lock shows them.

use std::collections::VecDeque;

use crate::keyspace::Keyspace;
use crate::name::FairKeys;
use crate::name::ObjectKeys;

/// How many owners of the queue are counted.
const MAX_COUNTED: usize = 10;

/// Returns how many of the first owners in the queue wait: a waiter subscribes to a channel of its own. A key of another type
/// counts as an empty queue.
pub(crate) fn count(keyspace: &mut Keyspace, object: &ObjectKeys) -> usize {
    let Some(queue) = FairKeys::queue_of(object) else {
        return 0;
    };
    let Ok(Some(owners)) = keyspace.find::<VecDeque<String>>(&queue) else {
        return 0;
    };
    let first: Vec<_> = owners.value.iter().take(MAX_COUNTED).cloned().collect();
    let waits = |owner: &&String| {
        let channel = [object.channel(), ":", owner].concat();
        keyspace.subscriber_count(&channel) > 0
    };
    first.iter().filter(waits).count()
}
