//! One folder per primitive: its rules, its Lua, its handle and guard.

pub(crate) mod lock;
