//! Commands that describe the server: TIME, INFO, CONFIG.

use std::fmt::Write;

use super::command::{Call, CommandResult};
use super::resp::Reply;
use super::state::State;

/// The settings that CONFIG GET returns.
const SETTINGS: &[(&str, &str)] = &[
    ("databases", "16"),
    ("maxmemory", "0"),
    ("maxmemory-policy", "noeviction"),
];

impl State {
    /// Returns the mode that the server reports.
    pub(super) fn mode(&self) -> &'static str {
        match (&self.cluster, &self.sentinel) {
            (Some(cluster), _) if !cluster.is_hidden => "cluster",
            (None, Some(_)) => "sentinel",
            _ => "standalone",
        }
    }

    /// Returns whether the server behaves like this version or a later one.
    pub(super) fn is_at_least(&self, major: u32, minor: u32) -> bool {
        let mut parts = self
            .config
            .version
            .split('.')
            .map(|part| part.parse().unwrap_or(0));
        let mut part = || parts.next().unwrap_or(0);
        (part(), part()) >= (major, minor)
    }
}

/// Answers TIME. The time is constant while a script runs, as since Redis 7.2.
pub(super) fn time(call: &mut Call<'_>) -> CommandResult {
    let now = call.state.now;
    let parts = [now.as_secs(), now.subsec_micros().into()];
    Ok(Reply::Array(
        parts.map(|part| Reply::text(part.to_string())).into(),
    ))
}

pub(super) fn info(call: &mut Call<'_>) -> CommandResult {
    let sections: Vec<String> = (1..call.args.len()).map(|at| call.word(at)).collect();
    let mut text = String::new();
    for section in &sections {
        match section.as_str() {
            "SERVER" => server(call.state, &mut text),
            "REPLICATION" => replication(call.state, &mut text),
            _ => return Err(call.unsupported()),
        }
    }
    if sections.is_empty() {
        server(call.state, &mut text);
        replication(call.state, &mut text);
    }
    Ok(Reply::Verbatim(text))
}

fn server(state: &State, text: &mut String) {
    let config = &state.config;
    let _ = write!(
        text,
        "# Server\r\nredis_version:{}\r\nredis_mode:{}\r\nrun_id:{}\r\ntcp_port:{}\r\n",
        config.version,
        state.mode(),
        config.run_id,
        config.port
    );
}

fn replication(state: &State, text: &mut String) {
    let replication = &state.replication;
    let _ = match replication.master() {
        None => write!(text, "# Replication\r\nrole:master\r\n"),
        Some((host, port)) => write!(
            text,
            "# Replication\r\nrole:slave\r\nmaster_host:{host}\r\nmaster_port:{port}\r\n"
        ),
    };
    let replicas = replication.replicas();
    let _ = write!(text, "connected_slaves:{}\r\n", replicas.len());
    for (index, replica) in replicas.iter().enumerate() {
        let _ = write!(
            text,
            "slave{index}:ip={},port={},state=online,offset={},lag=0\r\n",
            replica.host, replica.port, replica.acknowledged
        );
    }
    let _ = write!(text, "master_repl_offset:{}\r\n", replication.offset());
}

pub(super) fn config(call: &mut Call<'_>) -> CommandResult {
    let name = call.word(2).to_ascii_lowercase();
    let setting = SETTINGS.iter().find(|(known, _)| *known == name);
    match (call.word(1).as_str(), call.args.len(), setting) {
        ("GET", 3, Some((name, value))) => {
            Ok(Reply::Map(vec![(Reply::text(*name), Reply::text(*value))]))
        }
        _ => Err(call.unsupported()),
    }
}
