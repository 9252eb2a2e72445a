//! What others hold and wait for: the state of names, listings, events, and waits for each other.

pub(crate) mod inspect;
pub(crate) mod listing;
pub(crate) mod wait_graph;
pub(crate) mod watch;
