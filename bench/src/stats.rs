//! What the server says it has done.

use std::collections::BTreeMap;

use redlatch_testkit::Server;

/// What clients send while something is measured. The server counts what scripts call alike.
const SENT: [&str; 4] = ["evalsha", "eval", "subscribe", "unsubscribe"];

/// What this program and new connections send besides.
const ASIDE: [&str; 8] = [
    "info", "config", "client", "hello", "ping", "script", "dbsize", "flushall",
];

#[derive(Default)]
pub(crate) struct Stats(BTreeMap<String, Counted>);

struct Counted {
    calls: u64,
    micros: u64,
}

pub(crate) fn reset(server: &Server) {
    let () = server.ask(&["CONFIG", "RESETSTAT"]);
}

/// What has been done since [`reset`].
pub(crate) fn read(server: &Server) -> Stats {
    let info: String = server.ask(&["INFO", "commandstats"]);
    let figure = |rest: &str, name: &str| {
        let mut parts = rest.split(',').filter_map(|part| part.split_once('='));
        let (_, value) = parts.find(|(found, _)| *found == name)?;
        value.trim().parse().ok()
    };
    let line = |line: &str| {
        let (command, rest) = line.strip_prefix("cmdstat_")?.split_once(':')?;
        let calls = figure(rest, "calls")?;
        let micros = figure(rest, "usec")?;
        Some((command.to_owned(), Counted { calls, micros }))
    };
    Stats(info.lines().filter_map(line).collect())
}

impl Stats {
    /// How many commands clients sent.
    pub(crate) fn sent(&self) -> u64 {
        let sent = |(name, _): &(&String, &Counted)| SENT.contains(&name.as_str());
        self.0.iter().filter(sent).map(|(_, c)| c.calls).sum()
    }

    /// What scripts called, by command.
    pub(crate) fn inner(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().filter_map(|(name, counted)| {
            let (command, _) = name.split_once('|').unwrap_or((name, ""));
            let aside = SENT.contains(&command) || ASIDE.contains(&command);
            (!aside).then_some((name.as_str(), counted.calls))
        })
    }

    /// How long scripts ran, with all that they called.
    pub(crate) fn script_micros(&self) -> u64 {
        let of = |name: &str| self.0.get(name).map_or(0, |counted| counted.micros);
        of("evalsha") + of("eval")
    }
}
