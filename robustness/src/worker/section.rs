//! One critical section: asked for, had, watched from inside, given back.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlatch::{Error, Guard, LockKind};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufStream};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::Worker;
use super::tell::Teller;
use crate::clock::{nanos, now};
use crate::history::{Ask, Mode, What};

/// How often the guard is asked whether it is valid.
const LOOK: Duration = Duration::from_millis(5);

/// How long whoever is inside waits to be told what the guard has said already.
const TOLD_WITHIN: Duration = Duration::from_secs(3);

/// One task that goes in and out.
pub(crate) struct Inside {
    task: usize,
    client: usize,
    /// The section that it is in.
    section: u64,
    teller: Teller,
    /// Nobody stays for longer than he has to.
    ending: Arc<AtomicBool>,
    resource: String,
    connection: Option<BufStream<TcpStream>>,
}

impl Inside {
    pub(crate) fn of_task(
        worker: &Worker,
        task: usize,
        client: usize,
        teller: Teller,
        ending: Arc<AtomicBool>,
    ) -> Inside {
        Inside {
            task,
            client,
            section: 0,
            teller,
            ending,
            resource: worker.resource.clone(),
            connection: None,
        }
    }

    /// Asks for a lock and tells what comes of it.
    pub(crate) async fn ask<K: LockKind>(
        &mut self,
        name: &str,
        mode: Mode,
        asking: impl Future<Output = Result<Option<Guard<K>>, Error>>,
    ) -> Result<Option<Guard<K>>, Error> {
        self.section = self.teller.section();
        self.tell(What::Asked(Ask {
            task: self.task,
            client: self.client,
            name: name.to_owned(),
            mode,
        }));
        let answer = asking.await;
        match &answer {
            // Told by who stays inside, with the token.
            Ok(Some(_)) => {}
            Ok(None) => self.tell(What::GaveUp),
            Err(error) => self.tell(What::Failed { error: kind(error) }),
        }
        answer
    }

    /// Stays inside for this long, as long as the lock is held, and gives it back.
    pub(crate) async fn stay<K: LockKind>(
        &mut self,
        guard: Option<Guard<K>>,
        token: Option<u64>,
        time: Duration,
    ) -> Result<(), Error> {
        let Some(guard) = guard else { return Ok(()) };
        self.tell(What::Got { token });
        let end = Instant::now() + time;
        self.look(&guard);
        let mut lost = std::pin::pin!(guard.lost());
        loop {
            tokio::select! {
                biased;
                () = &mut lost => {
                    self.tell(What::Told);
                    // Never again valid, whoever asks.
                    self.look(&guard);
                    break;
                }
                () = sleep(LOOK) => {}
            }
            if !self.look(&guard) {
                if timeout(TOLD_WITHIN, &mut lost).await.is_ok() {
                    self.tell(What::Told);
                }
                break;
            }
            if Instant::now() >= end || self.ending.load(Ordering::Relaxed) {
                break;
            }
        }
        if let Some(token) = token {
            // Also when the lock was lost: the resource is there to refuse that.
            self.write(guard.name(), token).await;
        }
        self.tell(What::Leaving);
        let freed = guard.unlock().await;
        let error = freed.as_ref().err().map(kind);
        self.tell(What::Freed { error });
        freed
    }

    /// Asks the guard whether it is valid.
    fn look<K: LockKind>(&self, guard: &Guard<K>) -> bool {
        let at = now();
        let valid = guard.is_valid();
        if valid {
            // The end as it is known now, or a moment later.
            let until = guard.valid_for();
            let until = now() + nanos(until);
            self.teller.say(at, self.section, What::Valid { until });
        }
        valid
    }

    /// Adds one to what the resource has.
    async fn write(&mut self, name: &str, token: u64) {
        let Some(read) = self.exchange(format!("read {name} {token}\n")).await else {
            return;
        };
        let written = match read.parse::<u64>() {
            Ok(value) => {
                // Somebody may come in between: that is what the token is for.
                sleep(Duration::from_millis(1)).await;
                let line = format!("write {name} {token} {}\n", value + 1);
                self.exchange(line).await
            }
            Err(_) => Some(read),
        };
        let accepted = written.as_deref() == Some("ok");
        self.tell(What::Wrote { accepted });
    }

    async fn exchange(&mut self, line: String) -> Option<String> {
        if self.connection.is_none() {
            let stream = TcpStream::connect(&self.resource).await.ok()?;
            let _ = stream.set_nodelay(true);
            self.connection = Some(BufStream::new(stream));
        }
        let connection = self.connection.as_mut()?;
        connection.write_all(line.as_bytes()).await.ok()?;
        connection.flush().await.ok()?;
        let mut answer = String::new();
        connection.read_line(&mut answer).await.ok()?;
        Some(answer.trim_end().to_owned())
    }

    fn tell(&self, what: What) {
        self.teller.say(now(), self.section, what);
    }
}

/// An error's name, and how a lock was lost.
fn kind(error: &Error) -> String {
    match error {
        Error::Lost { reason, .. } => format!("Lost({reason:?})"),
        Error::Refused { reason, .. } => {
            let code = reason.split(' ').next().unwrap_or_default();
            format!("Refused({code})")
        }
        other => {
            let said = format!("{other:?}");
            let end = said.find([' ', '{', '(']).unwrap_or(said.len());
            said[..end].to_owned()
        }
    }
}
