//! `redlatch why` and `redlatch deadlocks`: the holders of a lock, its waiters, and cycles of waits.

use std::time::Duration;

use redlatch::inspect::{Holder, WaitingOwner};
use redlatch::{Client, Error};
use serde::Serialize;

use crate::args::{Deadlocks, Why};
use crate::exit::{self, Failure};
use crate::registered::{self, Registered};
use crate::show::{self, Object, lease_text};
use crate::stderr::printable;
use crate::store;
use crate::store_args::StoreArgs;

/// Time between the two reads that must both show a deadlock.
const CONFIRM_AFTER: Duration = Duration::from_millis(200);

/// A holder or a waiter in JSON.
#[derive(Debug, Serialize)]
struct Party {
    owner: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remaining_ms: Option<u64>,
    registered: Option<Registered>,
}

/// `redlatch why --json`: the fields of `redlatch show --json`, and the waiters.
#[derive(Debug, Serialize)]
struct Explained {
    #[serde(flatten)]
    object: Object,
    /// `None`: the user may not read them.
    waiters: Option<Vec<Party>>,
}

/// A wait of a deadlock in JSON.
#[derive(Debug, Serialize)]
struct Wait {
    name: String,
    waiter: Party,
    holders: Vec<Party>,
}

/// A deadlock in JSON.
#[derive(Debug, Serialize)]
struct Deadlock {
    /// Whether it is one only if the owners of each task belong together.
    possible: bool,
    waits: Vec<Wait>,
}

impl Party {
    fn waiter(wait: &WaitingOwner) -> Party {
        Party {
            owner: wait.owner.to_string(),
            position: wait.position,
            remaining_ms: None,
            registered: wait.registered.as_ref().map(Registered::new),
        }
    }

    fn holder(holder: &Holder) -> Party {
        Party {
            owner: holder.owner.to_string(),
            position: None,
            remaining_ms: holder.remaining.duration().map(show::whole_millis),
            registered: holder.registered.as_ref().map(Registered::new),
        }
    }
}

pub(crate) async fn why(store_args: &StoreArgs, why: &Why) -> Result<u8, Failure> {
    let name = &why.name;
    store::check_name(name).await?;
    let client = store::connect(store_args, Client::builder()).await?;
    let state = client.inspect(name).await?;
    let waiters = match client.waiters(name).await {
        // The holder is known anyway.
        Err(Error::NotPermitted { .. }) => None,
        waiters => Some(waiters?),
    };
    if why.json {
        let explained = Explained {
            object: Object::new(name.clone(), state),
            waiters: waiters.map(|waiters| waiters.iter().map(Party::waiter).collect()),
        };
        return show::write(show::json_lines(&[explained])?).await;
    }
    let shown = printable(name);
    let mut text = String::new();
    let holders = state.as_ref().map(|state| state.holders());
    let holders = holders.unwrap_or_default();
    match &state {
        None => text.push_str(&format!("{shown}: free\n")),
        Some(_) if holders.is_empty() => text.push_str(&show::table_of(name, &state)),
        Some(state) => text.push_str(&format!("{shown}: {}\n", state.kind())),
    }
    for holder in holders {
        text.push_str(&format!("held by {}\n", holder_text(holder)));
    }
    match waiters.as_ref().map(Vec::len) {
        None => text.push_str("no permission to read the waiters\n"),
        Some(0) => text.push_str("no waiters known\n"),
        Some(1) => text.push_str("1 waiter:\n"),
        Some(many) => text.push_str(&format!("{many} waiters:\n")),
    }
    for (i, wait) in waiters.iter().flatten().enumerate() {
        let queued = wait.position.map_or("", |_| ", in the queue");
        text.push_str(&format!("  {}. {}{queued}\n", i + 1, waiter_text(wait)));
    }
    show::write(text).await
}

/// Describes a holder: `report@db7 (pid 4711) since 02:00:13 UTC, "reindex 42", lease 24 s left`.
fn holder_text(holder: &Holder) -> String {
    let who = match &holder.registered {
        Some(entry) => registered::text(entry),
        None => printable(holder.owner.as_str()),
    };
    who + &lease_text(holder.remaining)
}

fn waiter_text(wait: &WaitingOwner) -> String {
    match &wait.registered {
        Some(entry) => registered::text(entry),
        None => printable(wait.owner.as_str()),
    }
}

pub(crate) async fn deadlocks(store_args: &StoreArgs, args: &Deadlocks) -> Result<u8, Failure> {
    let client = store::connect(store_args, Client::builder()).await?;
    let mut graph = client.wait_graph().await?;
    let count = graph.waits.len();
    if !(graph.deadlocks().is_empty() && graph.possible_deadlocks().is_empty()) {
        tokio::time::sleep(CONFIRM_AFTER).await;
        let earlier = std::mem::replace(&mut graph, client.wait_graph().await?);
        graph.retain_unchanged(&earlier);
    }
    let (deadlocks, possible) = (graph.deadlocks(), graph.possible_deadlocks());
    let text = match args.json {
        true => {
            let wait = |wait: &&WaitingOwner| Wait {
                name: wait.name.clone(),
                waiter: Party::waiter(wait),
                holders: wait.holders.iter().map(Party::holder).collect(),
            };
            let deadlock = |(waits, possible): (&Vec<&WaitingOwner>, bool)| Deadlock {
                possible,
                waits: waits.iter().map(wait).collect(),
            };
            let certain = deadlocks.iter().map(|waits| (waits, false));
            let all = certain.chain(possible.iter().map(|waits| (waits, true)));
            show::json_lines(&all.map(deadlock).collect::<Vec<_>>())?
        }
        false if deadlocks.is_empty() && possible.is_empty() => {
            let unreadable = match graph.unreadable {
                0 => String::new(),
                some => format!(", {some} unreadable clients"),
            };
            format!("no deadlock; {count} waits{unreadable}\n")
        }
        false => {
            let texts = |kind, cycles: &[Vec<&WaitingOwner>]| -> String {
                let all = cycles.iter().enumerate();
                all.map(|(i, waits)| deadlock_text(kind, i + 1, waits))
                    .collect()
            };
            texts("deadlock", &deadlocks) + &texts("possible deadlock", &possible)
        }
    };
    show::write(text).await?;
    Ok(match deadlocks.is_empty() {
        true => exit::OK,
        false => exit::FOUND,
    })
}

fn deadlock_text(kind: &str, number: usize, waits: &[&WaitingOwner]) -> String {
    let mut text = format!("{kind} {number}:\n");
    for wait in waits {
        let holders: Vec<_> = wait.holders.iter().map(holder_text).collect();
        text.push_str(&format!(
            "  {} waits for {}, held by {}\n",
            waiter_text(wait),
            printable(&wait.name),
            holders.join(" and ")
        ));
    }
    text
}
