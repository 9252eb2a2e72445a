//! One worker: an owner that runs commands one after the other.

use std::sync::Arc;

use redlatch::Owner;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::locks::Locks;
use crate::permits::Permits;
use crate::settings::Servers;
use crate::{Result, counted, crowd, now, permits, rates, say};

/// One input line.
pub(crate) struct Order {
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

pub(crate) fn start(servers: Arc<Servers>) -> mpsc::UnboundedSender<Order> {
    let (orders, mut inbox) = mpsc::unbounded_channel::<Order>();
    let owner = Owner::new();
    let mut worker = Worker {
        locks: Locks::new(servers.clone(), owner),
        permits: Permits::default(),
        servers,
        owner,
    };
    tokio::spawn(async move {
        while let Some(order) = inbox.recv().await {
            let words: Vec<&str> = order.words.iter().map(String::as_str).collect();
            let from = now();
            let done = worker.obey(&words).await;
            let at = now();
            let (word, what) = match done {
                Ok(value) => ("ok", value),
                Err(error) => ("error", Value::String(error.to_string())),
            };
            say(&json!({ "id": order.id, "from": from, "at": at, word: what }));
        }
    });
    orders
}

impl Worker {
    async fn obey(&mut self, words: &[&str]) -> Result<Value> {
        let [command, args @ ..] = words else {
            return Err("nothing to do".into());
        };
        match (*command, args) {
            ("owner", []) => Ok(self.servers.client(0)?.owner_id(self.owner).into()),
            ("crowd", [kind, name, key, rounds]) => {
                let lock = self.locks.handle(kind, name)?;
                let rounds = rounds.parse()?;
                crowd::count(&self.servers, &lock, self.owner, kind, key, rounds).await
            }
            ("crowd-permits", [name, key, rounds]) => {
                crowd::permits(&self.servers, name, key, rounds.parse()?).await
            }
            ("pairs" | "contend", [kind, name, threads, ms]) => {
                let (threads, ms) = (threads.parse()?, ms.parse()?);
                rates::pairs(&self.servers, kind, name, *command == "pairs", threads, ms).await
            }
            ("hold-many", [prefix, locks]) => self.locks.hold_many(prefix, locks.parse()?).await,
            ("set-count" | "count-down" | "count" | "await" | "delete-latch", _) => {
                counted::obey(self.servers.client(0)?, command, args).await
            }
            (x, _) if x.starts_with("x-") => {
                self.permits.obey(self.servers.client(0)?, x, args).await
            }
            (
                "set-permits" | "set-permits-for" | "acquire" | "release" | "release-if-exists"
                | "add-permits" | "drain" | "available",
                _,
            ) => permits::plain(self.servers.client(0)?, command, args).await,
            _ => self.locks.obey(command, args).await,
        }
    }
}
