//! One worker: an owner that runs commands one after the other.

use std::sync::Arc;

use redlatch::Owner;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::locks::Locks;
use crate::permits::Permits;
use crate::settings::Servers;
use crate::{Result, contention, latches, now, permits, print_line, throughput};

/// One input line.
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) words: Vec<String>,
}

/// State of a worker.
pub(crate) struct Worker {
    pub(crate) servers: Arc<Servers>,
    pub(crate) owner: Owner,
    pub(crate) locks: Locks,
    pub(crate) permits: Permits,
}

pub(crate) fn start(servers: Arc<Servers>) -> mpsc::UnboundedSender<Request> {
    let (requests, mut received) = mpsc::unbounded_channel::<Request>();
    let owner = Owner::new();
    let mut worker = Worker {
        locks: Locks::new(servers.clone(), owner),
        permits: Permits::default(),
        servers,
        owner,
    };
    tokio::spawn(async move {
        while let Some(request) = received.recv().await {
            let words: Vec<&str> = request.words.iter().map(String::as_str).collect();
            let started = now();
            let result = worker.run(&words).await;
            let ended = now();
            let (name, answer) = match result {
                Ok(value) => ("ok", value),
                Err(error) => ("error", Value::String(error.to_string())),
            };
            print_line(
                &json!({ "id": request.id, "started": started, "ended": ended, name: answer }),
            );
        }
    });
    requests
}

impl Worker {
    async fn run(&mut self, words: &[&str]) -> Result<Value> {
        let [command, args @ ..] = words else {
            return Err("a line without a command".into());
        };
        match (*command, args) {
            ("owner", []) => Ok(self.servers.client(0)?.owner_id(self.owner).as_str().into()),
            ("increment", [kind, name, key, rounds]) => {
                let lock = self.locks.handle(kind, name)?;
                let rounds = rounds.parse()?;
                contention::increment(&self.servers, &lock, self.owner, kind, key, rounds).await
            }
            ("count-holders", [name, key, rounds]) => {
                contention::count_holders(&self.servers, name, key, rounds.parse()?).await
            }
            ("pairs" | "contend", [kind, name, threads, ms]) => {
                let (threads, ms) = (threads.parse()?, ms.parse()?);
                throughput::pairs(&self.servers, kind, name, *command == "pairs", threads, ms).await
            }
            ("hold-many", [prefix, locks]) => self.locks.hold_many(prefix, locks.parse()?).await,
            ("set-count" | "count-down" | "count" | "await" | "delete-latch", _) => {
                latches::run(self.servers.client(0)?, command, args).await
            }
            (x, _) if x.starts_with("x-") => {
                self.permits.run(self.servers.client(0)?, x, args).await
            }
            (
                "set-permits" | "set-permits-for" | "acquire" | "release" | "release-if-exists"
                | "add-permits" | "drain" | "available",
                _,
            ) => permits::run(self.servers.client(0)?, command, args).await,
            _ => self.locks.run(command, args).await,
        }
    }
}
