//! Redis and Valkey: steps as scripts, run by SHA over one connection.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use self::fault::{Fault, Retry};
use self::link::{Link, Live};
use super::{Answer, Lane, Sent, SharedEar, Sought};
use crate::error::{Error, Result};
use crate::step::{Args, Step, unexpected};

mod fault;
mod link;
mod url;

/// How many attempts to acquire may be on their way at once. The rest wait here and not inside the
/// connection, where renewals and releases would have to queue behind them.
const ATTEMPTS: usize = 512;

/// Keys that SCAN looks at per round trip.
const SCANNED_AT_ONCE: usize = 500;

pub(crate) struct Redis {
    link: Arc<Link>,
    attempts: Arc<Semaphore>,
    response_timeout: Duration,
}

/// One command and its answer, with what belongs to them.
struct Exchange<'a> {
    cmd: Cmd,
    /// What to send instead when the server does not know the script.
    in_full: Option<&'a (dyn Fn() -> Cmd + Sync)>,
    /// The key to name when something is wrong with it.
    key: &'a str,
    /// The channel to subscribe to first.
    channel: Option<&'a str>,
    /// Where to note that it was sent.
    sent: Option<&'a Sent>,
}

impl Redis {
    /// Connects, and sees whether the server is one that we can work with.
    pub(crate) async fn connect(
        url: &str,
        connect_timeout: Duration,
        response_timeout: Duration,
        ear: SharedEar,
    ) -> Result<Redis> {
        let client =
            redis::Client::open(url::connection_info(url)?).map_err(|e| Error::InvalidUrl {
                reason: e.to_string(),
            })?;
        let redis = Redis {
            link: Arc::new(Link::new(client, connect_timeout, ear)),
            attempts: Arc::new(Semaphore::new(ATTEMPTS)),
            response_timeout,
        };
        let mut hello = redis::cmd("HELLO");
        hello.arg(3);
        // Not tried again: whoever starts up wants to know now what is wrong.
        let limit = connect_timeout.max(response_timeout);
        let (answer, _) = redis.once(&Exchange::plain(hello), limit).await?;
        check_version(&answer)?;
        Ok(redis)
    }

    pub(crate) fn address(&self) -> String {
        self.link.address()
    }

    pub(crate) async fn run<S: Step>(
        &self,
        step: &S,
        lane: Lane,
        channel: Option<&str>,
        sent: &Sent,
    ) -> Result<Answer<S::Reply>> {
        let in_full = || command(step, "EVAL", step.script().source());
        let exchange = Exchange::of(step, &in_full, channel, sent);
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
        let in_full = || command(step, "EVAL", step.script().source());
        let sent = Sent::default();
        let exchange = Exchange::of(step, &in_full, None, &sent);
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
        let in_full = || command(step, "EVAL", step.script().source());
        let exchange = Exchange::of(step, &in_full, None, sent);
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
        match timeout(self.response_timeout, self.link.unwant(channel)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(Error::Unavailable {
                reason: error.to_string(),
            }),
            Err(_) => Err(Error::ResponseTimeout {
                after: self.response_timeout,
            }),
        }
    }

    pub(crate) async fn scan(
        &self,
        pattern: &str,
        sought: Sought,
        cursor: u64,
    ) -> Result<(Vec<String>, Option<u64>)> {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern);
        scan.arg("COUNT").arg(SCANNED_AT_ONCE);
        scan.arg("TYPE").arg(match sought {
            Sought::Hashes => "hash",
            Sought::Strings => "string",
        });
        let (raw, ..) = self.persist(&Exchange::plain(scan), Lane::First).await?;
        let (next, keys): (u64, Vec<Vec<u8>>) =
            redis::from_redis_value(raw).map_err(|e| Error::Refused {
                reason: e.to_string(),
            })?;
        let keys = keys
            .into_iter()
            // Names are text; a key that is none was not made by us or by Redisson.
            .filter_map(|key| String::from_utf8(key).ok())
            .collect();
        Ok((keys, (next != 0).then_some(next)))
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
            Err(_) => Err(retry.given_up()),
        }
    }

    async fn once(&self, exchange: &Exchange<'_>, limit: Duration) -> Result<(Value, Instant)> {
        check_runtime()?;
        match timeout(limit, self.send(exchange)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(Fault::Final(error))) => Err(error),
            Ok(Err(Fault::NotSent(reason) | Fault::Unanswered(reason))) => {
                Err(Error::Unavailable { reason })
            }
            Err(_) => Err(Error::ResponseTimeout { after: limit }),
        }
    }

    /// Exchanges once; also says when what was answered had been sent.
    async fn send(&self, exchange: &Exchange<'_>) -> Result<(Value, Instant), Fault> {
        if let Some(channel) = exchange.channel {
            self.link.want(channel);
        }
        let mut live = self.link.live().await?;
        if let Some(sent) = exchange.sent {
            sent.set();
        }
        let sent = Instant::now();
        let answer = match exchange.channel {
            None => self.answer(&mut live, &exchange.cmd).await?,
            Some(channel) => {
                // One connection keeps order: the step runs after the subscription has begun.
                // Biased, or the second poll would come to the step first.
                let mut subscriber = live.clone();
                let (subscribed, answer) = tokio::join!(
                    biased;
                    subscriber.connection.subscribe(channel),
                    self.answer(&mut live, &exchange.cmd),
                );
                if let Err(error) = subscribed {
                    let fault = self.failed(&subscriber, &error);
                    if matches!(fault, Fault::Final(_)) {
                        // Refused, so it is not to be asked for with every new connection.
                        self.link.forget(channel);
                    }
                    return Err(fault);
                }
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
                match self.answer(&mut live, &in_full()).await? {
                    Value::ServerError(error) => Err(Fault::answered(&error, exchange.key)),
                    answer => Ok((answer, sent)),
                }
            }
            _ => Err(Fault::answered(&error, exchange.key)),
        }
    }

    async fn answer(&self, live: &mut Live, cmd: &Cmd) -> Result<Value, Fault> {
        match live.connection.send_packed_command(cmd).await {
            Ok(value) => Ok(value),
            Err(error) => Err(self.failed(live, &error)),
        }
    }

    fn failed(&self, live: &Live, error: &redis::RedisError) -> Fault {
        if link::breaks(error) {
            self.link.broken(live);
            return Fault::Unanswered(error.to_string());
        }
        Fault::Final(Error::Refused {
            reason: error.to_string(),
        })
    }
}

impl<'a> Exchange<'a> {
    fn plain(cmd: Cmd) -> Exchange<'a> {
        Exchange {
            cmd,
            in_full: None,
            key: "",
            channel: None,
            sent: None,
        }
    }

    fn of<S: Step>(
        step: &'a S,
        in_full: &'a (dyn Fn() -> Cmd + Sync),
        channel: Option<&'a str>,
        sent: &'a Sent,
    ) -> Exchange<'a> {
        Exchange {
            cmd: command(step, "EVALSHA", step.script().sha()),
            in_full: Some(in_full),
            key: step.keys().next().unwrap_or_default(),
            channel,
            sent: Some(sent),
        }
    }
}

/// EVALSHA or EVAL with the keys and arguments of a step.
fn command<S: Step>(step: &S, verb: &str, script: &str) -> Cmd {
    let keys = step.keys();
    // Enough for the longest that there is, with a long name: nothing is moved while it grows.
    let mut cmd = Cmd::with_capacity(16, 512);
    cmd.arg(verb).arg(script).arg(keys.len());
    for key in keys {
        cmd.arg(key);
    }
    step.args(&mut Args(&mut cmd));
    cmd
}

/// Timeouts and connecting would panic outside of a runtime.
fn check_runtime() -> Result<()> {
    match tokio::runtime::Handle::try_current() {
        Ok(_) => Ok(()),
        Err(_) => Err(Error::NoRuntime),
    }
}

/// 6.2 is the oldest that works: RESP3 with all that we ask of it. Valkey began at 7.2.
fn check_version(hello: &Value) -> Result<()> {
    let Value::Map(facts) = hello else {
        return Err(unexpected(hello));
    };
    let fact = |wanted: &str| {
        facts.iter().find_map(|(name, value)| match (name, value) {
            (Value::BulkString(name), Value::BulkString(value)) if name == wanted.as_bytes() => {
                std::str::from_utf8(value).ok()
            }
            _ => None,
        })
    };
    let (Some(server), Some(version)) = (fact("server"), fact("version")) else {
        return Ok(());
    };
    let mut parts = version
        .split('.')
        .map_while(|part| part.parse::<u32>().ok());
    let major_minor = (parts.next().unwrap_or(u32::MAX), parts.next().unwrap_or(0));
    if server == "redis" && major_minor < (6, 2) {
        return Err(Error::UnsupportedServer {
            reason: format!("it is {server} {version}"),
        });
    }
    if fact("mode") == Some("cluster") {
        // One object's keys are in one slot, but several objects' are not, and they are renewed
        // together: better no lock than one that is lost in silence.
        return Err(Error::UnsupportedServer {
            reason: "it is a node of a Cluster, which this version does not know".into(),
        });
    }
    tracing::debug!(server, version, "connected to the store");
    Ok(())
}
