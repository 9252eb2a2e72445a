//! The simulated server compared with a real one: equal replies, equal messages and equal state, for random
//! commands, for the real client, and for random calls of all its scripts.

mod clients;
mod pair;
mod random;
mod random_commands;
mod random_scripts;
mod state;
mod tolerance;
