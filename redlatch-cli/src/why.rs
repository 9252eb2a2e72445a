//! `redlatch why` and `redlatch deadlocks`: the holders of a lock, its waiters, and cycles of
//! waits.

use std::time::Duration;

use redlatch::inspect::{Holder, WaitGraph, WaitingOwner};
use redlatch::{Client, Error};
use serde::Serialize;

use crate::args::show::{Deadlocks, Why};
use crate::exit::{self, Failure};
use crate::output::stdout;
use crate::show::{self, Object, Registered};
use crate::store::args::StoreArgs;
use crate::{store, text};

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
pub(crate) struct Wait {
    name: String,
    waiter: Party,
    holders: Vec<Party>,
}

/// A deadlock in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Deadlock {
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
        return stdout::json(&[explained]).await;
    }
    let mut lines = Vec::new();
    let holders = state.as_ref().map(|state| state.holders());
    let holders = holders.unwrap_or_default();
    match &state {
        None => lines.push(format!("{name}: free")),
        Some(_) if holders.is_empty() => lines.extend(show::table_of(name, &state)),
        Some(state) => lines.push(format!("{name}: {}", text::kind(state))),
    }
    for holder in holders {
        lines.push(format!("held by {}", text::holder(holder)));
    }
    match waiters.as_ref().map(Vec::len) {
        None => lines.push("no permission to read the waiters".into()),
        Some(0) => lines.push("no waiters known".into()),
        Some(count) => lines.push(format!("{}:", text::counted(count, "waiter"))),
    }
    for (i, wait) in waiters.iter().flatten().enumerate() {
        let queued = wait.position.map_or("", |_| ", in the queue");
        lines.push(format!(
            "  {}. {}{queued}",
            i + 1,
            text::owner(&wait.owner, wait.registered.as_ref())
        ));
    }
    stdout::lines(lines).await
}

pub(crate) async fn deadlocks(store_args: &StoreArgs, args: &Deadlocks) -> Result<u8, Failure> {
    let client = store::connect(store_args, Client::builder()).await?;
    let mut graph = client.wait_graph().await?;
    let count = graph.waits.len();
    confirm(&client, &mut graph).await?;
    let (deadlocks, possible) = (graph.deadlocks(), graph.possible_deadlocks());
    match args.json {
        true => stdout::json(&in_json(&graph)).await?,
        false if deadlocks.is_empty() && possible.is_empty() => {
            let unreadable = match graph.unreadable {
                0 => String::new(),
                some => format!(", {some} unreadable clients"),
            };
            stdout::lines([format!("no deadlock; {count} waits{unreadable}")]).await?
        }
        false => {
            let texts = |kind, cycles: &[Vec<&WaitingOwner>]| -> Vec<String> {
                let all = cycles.iter().enumerate();
                all.flat_map(|(i, waits)| deadlock_lines(kind, i + 1, waits))
                    .collect()
            };
            let certain = texts("deadlock", &deadlocks);
            stdout::lines(
                certain
                    .into_iter()
                    .chain(texts("possible deadlock", &possible)),
            )
            .await?
        }
    };
    Ok(match deadlocks.is_empty() {
        true => exit::OK,
        false => exit::FOUND,
    })
}

/// If the waits contain cycles, reads them again after a moment, and keeps those that are the same.
pub(crate) async fn confirm(client: &Client, graph: &mut WaitGraph) -> Result<(), Error> {
    if !(graph.deadlocks().is_empty() && graph.possible_deadlocks().is_empty()) {
        tokio::time::sleep(CONFIRM_AFTER).await;
        let earlier = std::mem::replace(graph, client.wait_graph().await?);
        graph.retain_unchanged(&earlier);
    }
    Ok(())
}

/// Returns the deadlocks and possible deadlocks of these waits.
pub(crate) fn in_json(graph: &WaitGraph) -> Vec<Deadlock> {
    let wait = |wait: &&WaitingOwner| Wait {
        name: wait.name.clone(),
        waiter: Party::waiter(wait),
        holders: wait.holders.iter().map(Party::holder).collect(),
    };
    let deadlock = |possible| {
        move |waits: Vec<&WaitingOwner>| Deadlock {
            possible,
            waits: waits.iter().map(wait).collect(),
        }
    };
    let certain = graph.deadlocks().into_iter().map(deadlock(false));
    let possible = graph.possible_deadlocks().into_iter();
    certain.chain(possible.map(deadlock(true))).collect()
}

fn deadlock_lines(kind: &str, number: usize, waits: &[&WaitingOwner]) -> Vec<String> {
    let mut lines = vec![format!("{kind} {number}:")];
    for wait in waits {
        let holders: Vec<_> = wait.holders.iter().map(text::holder).collect();
        lines.push(format!(
            "  {} waits for {}, held by {}",
            text::owner(&wait.owner, wait.registered.as_ref()),
            wait.name,
            holders.join(" and ")
        ));
    }
    lines
}
