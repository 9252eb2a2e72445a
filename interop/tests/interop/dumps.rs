//! After the same operations on either side there are the same keys, types, fields, values and messages.

use std::collections::BTreeMap;

use redlatch_interop::{Peer, Worker};
use redlatch_testkit::{Server, unique};

use crate::both_ways;
use crate::monitor::Monitor;
use crate::stand::{LEASE, until};

/// Everything in the server and every message, step by step, with ids and times put the same way.
type Seen = Vec<(String, BTreeMap<String, String>, Vec<String>)>;

/// Plays these on a server of its own. Each is `WORKER COMMAND`; `$0` is the first permit that was taken.
fn play(peer: &Peer, server: &Server, url_of: usize, name: &str, steps: &[&str]) -> Seen {
    let _ = url_of;
    let mut permits: Vec<String> = Vec::new();
    let mut seen = Vec::new();
    let mut ids = Ids::new(peer, name);
    for step in steps {
        let (worker, command) = step.split_once(' ').expect("WORKER COMMAND");
        let worker = peer.worker(worker.parse().expect("a worker"));
        let mut command = command.replace("NAME", name);
        for (i, id) in permits.iter().enumerate() {
            command = command.replace(&format!("${i}"), id);
        }
        let monitor = Monitor::start(server);
        let said = worker.tell(&command).answer().said;
        if let Some(taken) = said.as_ref().ok().and_then(|value| value.as_array()) {
            permits.extend(taken.iter().filter_map(|id| id.as_str().map(str::to_owned)));
            ids.permits.clone_from(&permits);
        }
        let messages = messages(monitor, server, name, &ids);
        seen.push(((*step).to_owned(), dump(server, name, &ids), messages));
    }
    seen
}

/// What is called otherwise in each run.
struct Ids {
    owners: Vec<(String, String)>,
    client: String,
    name: String,
    permits: Vec<String>,
}

impl Ids {
    fn new(peer: &Peer, name: &str) -> Ids {
        let owner = |number: u64| (peer.worker(number).owner(), format!("OWNER{number}"));
        let owners: Vec<_> = (1..=3).map(owner).collect();
        let client = owners[0].0.split(':').next().unwrap_or_default().to_owned();
        Ids {
            owners,
            client,
            name: name.to_owned(),
            permits: Vec::new(),
        }
    }

    fn put(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (owner, put) in &self.owners {
            text = text.replace(owner, put);
        }
        for (i, permit) in self.permits.iter().enumerate() {
            text = text.replace(permit, &format!("PERMIT{i}"));
        }
        text.replace(&self.client, "CLIENT").replace(&self.name, "NAME")
    }
}
