//! The embedded store on the paused clock of tokio: hours in microseconds, and exact times.

mod at_least;
mod hold_limits;
mod leases;
