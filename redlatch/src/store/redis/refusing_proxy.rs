//! A proxy for tests: the server does not get one command, and the client gets an error for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use redlatch_testkit::Server;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

use super::Redis;
use super::connection::ReconnectingConnection;
use super::exchange::{CommandRequest, RawAnswer};
use super::exchange_error::ExchangeError;
use crate::Client;
use crate::hold::AcquireParams;
use crate::hold::HoldKind as _;
use crate::lease::Lease;
use crate::locks::Reentrant;
use crate::step::differential::hold;
use crate::store::{Delivery, Progress, Store};
use crate::sync::Mutex;

pub(super) struct RefusingProxy {
    pub(super) port: u16,
    shared: Arc<Shared>,
    accepting: AbortHandle,
}

struct Shared {
    /// As the client writes it.
    command: String,
    /// What the client gets, if anything but the server's own reply.
    error: Mutex<Option<&'static str>>,
    refused: AtomicUsize,
}

impl RefusingProxy {
    /// Starts a proxy that refuses a command with this error.
    pub(super) async fn start(server: &Server, command: &[&str], error: &'static str) -> Self {
        let args = command
            .iter()
            .map(|arg| format!("\r\n${}\r\n{arg}", arg.len()));
        let shared = Arc::new(Shared {
            command: format!("*{}{}\r\n", command.len(), args.collect::<String>()),
            error: Mutex::new(Some(error)),
            refused: AtomicUsize::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (server, of_connections) = (server.port(), shared.clone());
        let accepting = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
                tokio::spawn(forward(client, server, of_connections.clone()));
            }
        });
        RefusingProxy {
            port,
            shared,
            accepting: accepting.abort_handle(),
        }
    }

    pub(super) async fn client(&self) -> Client {
        let url = format!("redis://127.0.0.1:{}", self.port);
        Client::connect(&url).await.unwrap()
    }

    /// From now on the command is refused with this error, or not at all.
    pub(super) fn refuse(&self, error: Option<&'static str>) {
        *self.shared.error.lock() = error;
    }

    /// Returns how often the command was refused.
    pub(super) fn refused(&self) -> usize {
        self.shared.refused.load(Ordering::Relaxed)
    }
}

impl Drop for RefusingProxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Forwards all that a client sends, but PING in place of the command, and all replies.
async fn forward(mut client: TcpStream, mut server: TcpStream, shared: Arc<Shared>) {
    const PING: &str = "*2\r\n$4\r\nPING\r\n$7\r\nrefused\r\n";
    let (mut sent, mut answered) = ([0; 4096], [0; 4096]);
    loop {
        tokio::select! {
            read = client.read(&mut sent) => {
                let Ok(read @ 1..) = read else { return };
                let sent = std::str::from_utf8(&sent[..read]).unwrap();
                let sent = match *shared.error.lock() {
                    Some(_) => sent.replace(&shared.command, PING),
                    None => sent.to_owned(),
                };
                server.write_all(sent.as_bytes()).await.unwrap();
            }
            read = server.read(&mut answered) => {
                let Ok(read @ 1..) = read else { return };
                let answered = String::from_utf8_lossy(&answered[..read]);
                let error = shared.error.lock().unwrap_or_default();
                let refused = answered.replace("$7\r\nrefused\r\n", &format!("-{error}\r\n"));
                if refused != answered {
                    shared.refused.fetch_add(1, Ordering::Relaxed);
                }
                client.write_all(refused.as_bytes()).await.unwrap();
            }
        }
    }
}

/// Returns the store of a client.
pub(super) fn redis_of(client: &Client) -> &Redis {
    match &*client.session.store {
        Store::Redis(redis) => redis,
        Store::Embedded(_) => unreachable!("it is not embedded"),
    }
}

/// Returns the connection on which a client receives messages.
pub(super) fn pubsub_of(client: &Client) -> Arc<ReconnectingConnection> {
    redis_of(client)
        .topology
        .only_node()
        .unwrap()
        .pubsub()
        .clone()
}

/// Makes the first attempt to acquire the lock `a`, behind a subscription to this channel.
pub(super) async fn attempt(
    client: &Client,
    channel: &str,
    delivery: Delivery,
    progress: &Progress,
) -> Result<RawAnswer, ExchangeError> {
    let (hold, kind) = (hold(1, Reentrant::new("", "a")), Reentrant::new("", "a"));
    let step = kind.acquire(AcquireParams {
        hold: &hold,
        count: 1,
        lease: Lease::WATCHDOG,
        waits: true,
        request_number: 0,
    });
    let topology = &redis_of(client).topology;
    let request = CommandRequest::for_step(topology, &step, Some(channel), delivery, progress);
    request.unwrap().send().await
}
