//! The command statistics of the server.

use std::collections::BTreeMap;

use redlatch_testkit::Server;

/// Commands that clients send during a measurement. The server's statistics also include the
/// commands that scripts call.
const SENT: [&str; 4] = ["evalsha", "eval", "subscribe", "unsubscribe"];

/// Additional commands that this program and new connections send.
const OWN_COMMANDS: [&str; 8] = [
    "info", "config", "client", "hello", "ping", "script", "dbsize", "flushall",
];

#[derive(Default)]
pub(crate) struct Stats(BTreeMap<String, CommandStats>);

struct CommandStats {
    calls: u64,
    micros: u64,
}

pub(crate) fn reset(server: &Server) {
    let () = server.command(&["CONFIG", "RESETSTAT"]);
}

/// Returns the statistics since [`reset`].
pub(crate) fn read(server: &Server) -> Stats {
    let info: String = server.command(&["INFO", "commandstats"]);
    let figure = |rest: &str, name: &str| {
        let mut parts = rest.split(',').filter_map(|part| part.split_once('='));
        let (_, value) = parts.find(|(found, _)| *found == name)?;
        value.trim().parse().ok()
    };
    let line = |line: &str| {
        let (command, rest) = line.strip_prefix("cmdstat_")?.split_once(':')?;
        let calls = figure(rest, "calls")?;
        let micros = figure(rest, "usec")?;
        Some((command.to_owned(), CommandStats { calls, micros }))
    };
    Stats(info.lines().filter_map(line).collect())
}

impl Stats {
    /// Returns the number of commands that clients sent.
    pub(crate) fn sent(&self) -> u64 {
        let sent = |(name, _): &(&String, &CommandStats)| SENT.contains(&name.as_str());
        self.0.iter().filter(sent).map(|(_, c)| c.calls).sum()
    }

    /// Returns the commands that scripts called, with their counts.
    pub(crate) fn inner(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().filter_map(|(name, counted)| {
            let (command, _) = name.split_once('|').unwrap_or((name, ""));
            let is_own_command = SENT.contains(&command) || OWN_COMMANDS.contains(&command);
            (!is_own_command).then_some((name.as_str(), counted.calls))
        })
    }

    /// Returns the run time of the scripts, including everything that they called.
    pub(crate) fn script_micros(&self) -> u64 {
        let of = |name: &str| self.0.get(name).map_or(0, |counted| counted.micros);
        of("evalsha") + of("eval")
    }
}
