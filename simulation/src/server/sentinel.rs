//! A Sentinel: the same server with other commands. It reports which server is the master, and publishes a
//! change of the master.

use std::collections::BTreeMap;

use super::Server;
use super::command::{Call, CommandResult, refused};
use super::resp::Reply;
use super::state::{Config, Output};

/// A Sentinel's view of one master.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Master {
    host: String,
    port: u16,
    epoch: u64,
}

/// The masters that a Sentinel watches, by name.
pub(super) type Masters = BTreeMap<String, Master>;

impl Server {
    /// Creates a Sentinel that watches nothing yet.
    pub fn sentinel(config: Config) -> Server {
        let mut server = Server::new(config);
        server.state.sentinel = Some(Masters::new());
        server
    }

    /// Sets the master of this name at a Sentinel, since the failover with this epoch. If it was another one before,
    /// subscribers receive a message.
    pub fn set_master(&mut self, name: &str, host: &str, port: u16, epoch: u64) -> Vec<Output> {
        let master = Master {
            host: host.to_owned(),
            port,
            epoch,
        };
        let masters = self.state.sentinel.get_or_insert_default();
        let before = masters.insert(name.to_owned(), master);
        if let Some(before) = before
            && (before.host.as_str(), before.port) != (host, port)
        {
            let message = format!("{name} {} {} {host} {port}", before.host, before.port);
            self.state
                .deliver(false, b"+switch-master", message.as_bytes());
        }
        std::mem::take(&mut self.state.outputs)
    }
}

pub(super) fn sentinel(call: &mut Call<'_>) -> CommandResult {
    let Some(masters) = &call.state.sentinel else {
        return Err(call.unsupported());
    };
    let name = String::from_utf8_lossy(call.arg(2)).into_owned();
    let master = masters.get(&name);
    match (call.word(1).as_str(), call.args.len(), master) {
        ("GET-MASTER-ADDR-BY-NAME", 3, None) => Ok(Reply::Nil),
        ("GET-MASTER-ADDR-BY-NAME", 3, Some(master)) => Ok(Reply::Array(vec![
            Reply::text(&master.host),
            Reply::text(master.port.to_string()),
        ])),
        ("MASTER", 3, None) => Err(refused("ERR No such master with that name")),
        ("MASTER", 3, Some(master)) => {
            let facts = [
                ("name", name),
                ("ip", master.host.clone()),
                ("port", master.port.to_string()),
                ("flags", "master".to_owned()),
                ("config-epoch", master.epoch.to_string()),
            ];
            let facts = facts.map(|(name, fact)| (Reply::text(name), Reply::text(fact)));
            Ok(Reply::Map(facts.into()))
        }
        _ => Err(call.unsupported()),
    }
}
