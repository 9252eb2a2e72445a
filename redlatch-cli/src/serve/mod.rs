//! What answers HTTP requests: `redlatch exporter` and `redlatch elect --http`.

pub(crate) mod exporter;
pub(crate) mod http;
mod jobs;
pub(crate) mod leader;
