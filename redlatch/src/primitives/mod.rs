//! One folder per primitive: its rules, its Lua, its handle and guard. `handle` is what all locks
//! have in common.

pub(crate) mod fair_lock;
pub(crate) mod fenced_lock;
pub(crate) mod handle;
pub(crate) mod lock;
pub(crate) mod spin_lock;
pub(crate) mod survey;

#[cfg(test)]
mod twin;
