//! Redis and Valkey: steps as scripts, run by SHA on whichever server has their keys.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use self::fault::{Fault, Retry};
use self::link::Live;
use self::node::Node;
use self::topology::Topology;
use super::{Answer, Cursor, Lane, Sent, SharedEar, Sought};
use crate::error::{Error, Result};
use crate::step::{Args, Step};

mod access;
mod cluster;
mod facts;
mod fault;
mod link;
mod lookout;
mod node;
mod sentinel;
mod slot;
mod topology;
mod url;

/// How many attempts to acquire may be on their way at once. The rest wait here and not inside the
/// connection, where renewals and releases would have to queue behind them.
const ATTEMPTS: usize = 512;

/// Keys that SCAN looks at per round trip.
const SCANNED_AT_ONCE: usize = 500;

/// How often in a row one node of a cluster may refer to another.
const REDIRECTIONS: usize = 8;

pub(crate) struct Redis {
    topology: Topology,
    attempts: Arc<Semaphore>,
    response_timeout: Duration,
}

/// One command and its answer, with what belongs to them.
struct Exchange<'a> {
    cmd: Cmd,
    /// What to send instead when the server does not know the script.
    in_full: Option<&'a (dyn Fn() -> Cmd + Sync)>,
    /// The key that decides who is asked, and is named when something is wrong with it.
    key: &'a str,
    /// Who is asked, if not the key decides.
    node: Option<&'a Arc<Node>>,
    /// The channel to subscribe to first.
    channel: Option<&'a str>,
    /// Where to note that it was sent.
    sent: Option<&'a Sent>,
}

impl Redis {
    /// Connects, and sees whether the servers are such that we can work with.
    pub(crate) async fn connect(
        url: &str,
        connect_timeout: Duration,
        response_timeout: Duration,
        ear: SharedEar,
    ) -> Result<Redis> {
        // Not tried again: whoever starts up wants to know now what is wrong.
        let limit = connect_timeout.max(response_timeout);
        let connecting = Topology::connect(url::target(url)?, connect_timeout, ear);
        let topology = timeout(limit, connecting).await;
        let topology = topology.map_err(|_| Error::ResponseTimeout { after: limit })??;
        Ok(Redis {
            topology,
            attempts: Arc::new(Semaphore::new(ATTEMPTS)),
            response_timeout,
        })
    }

    pub(crate) fn address(&self) -> String {
        self.topology.name()
    }

    /// Which keys can be in one script: those with the same answer.
    pub(crate) fn slot(&self, key: &str) -> Option<u16> {
        self.topology.slot(key)
    }

    pub(crate) async fn run<S: Step>(
        &self,
        step: &S,
        lane: Lane,
        channel: Option<&str>,
        sent: &Sent,
    ) -> Result<Answer<S::Reply>> {
        let in_full = || self.command(step, "EVAL", false);
        let exchange = self.exchange(step, &in_full, channel, sent)?;
        let (raw, sent, repeated) = self.persist(&exchange, lane).await?;
        Ok(Answer {
            reply: step.reply(raw)?,
            sent,
            repeated,
        })
    }

    pub(crate) async fn run_once<S: Step>(
        &self,
        step: &S,
        within: Duration,
    ) -> Result<Answer<S::Reply>> {
        let in_full = || self.command(step, "EVAL", false);
        let sent = Sent::default();
        let exchange = self.exchange(step, &in_full, None, &sent)?;
        let limit = within.min(self.response_timeout);
        let (raw, sent) = self.once(&exchange, limit).await?;
        Ok(Answer {
            reply: step.reply(raw)?,
            sent,
            repeated: false,
        })
    }

    pub(crate) async fn run_unrepeated<S: Step>(
        &self,
        step: &S,
        what: &'static str,
        answered_within: Duration,
        sent: &Sent,
    ) -> Result<Answer<S::Reply>> {
        check_runtime()?;
        let in_full = || self.command(step, "EVAL", false);
        let exchange = self.exchange(step, &in_full, None, sent)?;
        let unknown = |reason| Error::OutcomeUnknown { step: what, reason };
        let mut retry = Retry::until(self.response_timeout);
        let patience = answered_within.max(self.response_timeout);
        let answered_by = Instant::now() + patience;
        loop {
            let mut sending = pin!(self.send(&exchange));
            let answered = match timeout_at(retry.give_up, &mut sending).await {
                Ok(answered) => answered,
                Err(_) if !sent.get() => return Err(retry.given_up()),
                Err(_) => match timeout_at(answered_by, sending).await {
                    Ok(answered) => answered,
                    Err(_) => return Err(unknown(format!("no answer within {patience:?}"))),
                },
            };
            match answered {
                Ok((raw, sent)) => {
                    return Ok(Answer {
                        reply: step.reply(raw)?,
                        sent,
                        repeated: false,
                    });
                }
                Err(Fault::Unanswered(reason)) => return Err(unknown(reason)),
                Err(fault) => {
                    sent.clear();
                    retry.after(fault).await?;
                    if Instant::now() >= retry.give_up {
                        return Err(retry.given_up());
                    }
                }
            }
        }
    }

    pub(crate) async fn turn(&self) -> Option<OwnedSemaphorePermit> {
        self.attempts.clone().acquire_owned().await.ok()
    }

    pub(crate) fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    pub(crate) async fn unsubscribe(&self, channel: &str) -> Result<()> {
        match timeout(self.response_timeout, self.topology.unsubscribe(channel)).await {
            Ok(done) => done.map_err(Fault::into_error),
            Err(_) => Err(Error::ResponseTimeout {
                after: self.response_timeout,
            }),
        }
    }

    /// One page, of one node after the other.
    pub(crate) async fn scan(
        &self,
        pattern: &str,
        sought: Sought,
        cursor: Cursor,
    ) -> Result<(Vec<String>, Option<Cursor>)> {
        let nodes = self.topology.masters().await;
        let Some(node) = nodes.get(cursor.node) else {
            return Ok((Vec::new(), None));
        };
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor.key).arg("MATCH").arg(pattern);
        scan.arg("COUNT").arg(SCANNED_AT_ONCE);
        scan.arg("TYPE").arg(match sought {
            Sought::Hashes => "hash",
            Sought::Strings => "string",
        });
        let exchange = Exchange {
            node: Some(node),
            ..Exchange::plain(scan)
        };
        let (raw, ..) = self.persist(&exchange, Lane::First).await?;
        let (next, keys): (u64, Vec<Vec<u8>>) =
            redis::from_redis_value(raw).map_err(|e| Error::Refused {
                reason: e.to_string(),
            })?;
        let keys = keys
            .into_iter()
            // Names are text; a key that is none was not made by us or by Redisson.
            .filter_map(|key| String::from_utf8(key).ok())
            .collect();
        let next = match next {
            0 => Cursor {
                node: cursor.node + 1,
                key: 0,
            },
            key => Cursor { key, ..cursor },
        };
        Ok((keys, (next.node < nodes.len()).then_some(next)))
    }

    /// Exchanges until there is an answer or the response timeout has passed; also says when what
    /// was answered had been sent, and whether it may be the answer to a repetition.
    async fn persist(&self, exchange: &Exchange<'_>, lane: Lane) -> Result<(Value, Instant, bool)> {
        check_runtime()?;
        // Waiting for a turn is no fault of the server's: its time counts from here.
        let _turn = match lane {
            Lane::Attempt => self.attempts.acquire().await.ok(),
            Lane::First => None,
        };
        let mut retry = Retry::until(self.response_timeout);
        let answered = timeout_at(retry.give_up, async {
            loop {
                match self.send(exchange).await {
                    Ok(answer) => return Ok(answer),
                    Err(fault) => retry.after(fault).await?,
                }
            }
        });
        match answered.await {
            Ok(answer) => answer.map(|(raw, sent)| (raw, sent, retry.repeated)),
            Err(_) => {
                self.topology.suspect();
                Err(retry.given_up())
            }
        }
    }

    async fn once(&self, exchange: &Exchange<'_>, limit: Duration) -> Result<(Value, Instant)> {
        check_runtime()?;
        match timeout(limit, self.send(exchange)).await {
            Ok(answer) => answer.map_err(Fault::into_error),
            Err(_) => {
                self.topology.suspect();
                Err(Error::ResponseTimeout { after: limit })
            }
        }
    }

    /// Exchanges once, with whichever node the cluster refers to; also says when what was answered
    /// had been sent.
    async fn send(&self, exchange: &Exchange<'_>) -> Result<(Value, Instant), Fault> {
        let mut node = match exchange.node {
            Some(node) => node.clone(),
            None => self.topology.node(exchange.key).await?,
        };
        let mut importing = false;
        for _ in 0..REDIRECTIONS {
            let fault = match self.send_to(&node, exchange, importing).await {
                Ok(answer) => return Ok(answer),
                Err(fault) => fault,
            };
            let other = match &fault {
                Fault::Moved(to) => self.topology.moved(exchange.key, to),
                Fault::Asked(to) => self.topology.asked(exchange.key, to),
                Fault::Deposed(_) => {
                    node.give_up();
                    None
                }
                Fault::NotSent(_) | Fault::Unanswered(_) | Fault::Final(_) => None,
            };
            let Some(other) = other else {
                if !matches!(fault, Fault::Final(_)) {
                    self.topology.suspect();
                }
                return Err(fault);
            };
            (node, importing) = (other, matches!(fault, Fault::Asked(_)));
        }
        Err(Fault::NotSent(
            "the nodes of the cluster keep referring to each other".into(),
        ))
    }

    /// Exchanges once with this node.
    async fn send_to(
        &self,
        node: &Node,
        exchange: &Exchange<'_>,
        importing: bool,
    ) -> Result<(Value, Instant), Fault> {
        let together = Arc::ptr_eq(&node.commands, &node.messages);
        if let Some(channel) = exchange.channel {
            node.messages.want(channel);
            if !together {
                let mut live = node.messages.live().await?;
                node.messages.subscribe(&mut live, channel).await?;
            }
        }
        let mut live = node.commands.live().await?;
        if let Some(sent) = exchange.sent {
            sent.set();
        }
        let sent = Instant::now();
        let sending = Sending { node, importing };
        let answer = match exchange.channel.filter(|_| together) {
            None => sending.ask(&mut live, &exchange.cmd).await?,
            Some(channel) => {
                // One connection keeps order: the step runs after the subscription has begun.
                // Biased, or the second poll would come to the step first.
                let mut subscriber = live.clone();
                let (subscribed, answer) = tokio::join!(
                    biased;
                    node.messages.subscribe(&mut subscriber, channel),
                    sending.ask(&mut live, &exchange.cmd),
                );
                subscribed?;
                answer?
            }
        };
        let Value::ServerError(error) = answer else {
            return Ok((answer, sent));
        };
        match exchange.in_full {
            // A new or flushed server. EVAL teaches it the script for the next time.
            Some(in_full) if error.code() == "NOSCRIPT" => {
                let sent = Instant::now();
                match sending.ask(&mut live, &in_full()).await? {
                    Value::ServerError(error) => Err(Fault::answered(&error, exchange.key)),
                    answer => Ok((answer, sent)),
                }
            }
            _ => Err(Fault::answered(&error, exchange.key)),
        }
    }

    fn exchange<'a, S: Step>(
        &self,
        step: &'a S,
        in_full: &'a (dyn Fn() -> Cmd + Sync),
        channel: Option<&'a str>,
        sent: &'a Sent,
    ) -> Result<Exchange<'a>> {
        let mut keys = step.keys();
        let key = keys.next().unwrap_or_default();
        self.topology.check_together(key, keys)?;
        Ok(Exchange {
            in_full: Some(in_full),
            key,
            channel,
            sent: Some(sent),
            ..Exchange::plain(self.command(step, "EVALSHA", true))
        })
    }

    /// EVALSHA or EVAL with the keys and arguments of a step.
    fn command<S: Step>(&self, step: &S, verb: &str, by_sha: bool) -> Cmd {
        let publishing = self.topology.publishing();
        let keys = step.keys();
        // Enough for the longest that there is, with a long name: nothing is moved while it grows.
        let mut cmd = Cmd::with_capacity(16, 512);
        cmd.arg(verb);
        match by_sha {
            true => cmd.arg(step.script().sha(publishing)),
            false => cmd.arg(&*step.script().source_for(publishing)),
        };
        cmd.arg(keys.len());
        for key in keys {
            cmd.arg(key);
        }
        step.args(&mut Args(&mut cmd));
        cmd
    }
}

/// How commands are sent to a node.
struct Sending<'a> {
    node: &'a Node,
    /// The node does not own the slot yet, but was named by the one that does.
    importing: bool,
}

impl Sending<'_> {
    async fn ask(&self, live: &mut Live, cmd: &Cmd) -> Result<Value, Fault> {
        match self.importing {
            false => self.node.commands.ask(live, cmd).await,
            true => self.node.commands.ask_importing(live, cmd).await,
        }
    }
}

impl<'a> Exchange<'a> {
    fn plain(cmd: Cmd) -> Exchange<'a> {
        Exchange {
            cmd,
            in_full: None,
            key: "",
            node: None,
            channel: None,
            sent: None,
        }
    }
}

/// Timeouts and connecting would panic outside of a runtime.
fn check_runtime() -> Result<()> {
    match tokio::runtime::Handle::try_current() {
        Ok(_) => Ok(()),
        Err(_) => Err(Error::NoRuntime),
    }
}
