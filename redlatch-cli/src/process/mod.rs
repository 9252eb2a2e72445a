//! This process and others: signals, the terminal, CMD's descendants, and processes that `redlatch`
//! starts for itself.

pub(crate) mod own_processes;
pub(crate) mod process_tree;
pub(crate) mod signals;
pub(crate) mod terminal;
pub(crate) mod wrapper;
