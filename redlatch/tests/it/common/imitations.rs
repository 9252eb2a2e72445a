//! Servers that are not quite Redis: a real one, behind a proxy that changes what a client sends or receives.

use redlatch_testkit::Server;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// How a server differs from Redis.
#[derive(Clone, Copy, Default)]
pub(crate) struct Imitation {
    /// Why it refuses a script with this source.
    pub(crate) refuses_script: Option<fn(&str) -> Option<&'static str>>,
    /// A connection with subscriptions runs no other commands, also with RESP3 (miniredis).
    pub(crate) subscribes_apart: bool,
    /// Messages, and confirmations of subscriptions, look like replies, also with RESP3 (fakeredis).
    pub(crate) replies_with_messages: bool,
}

/// Reads `*3` or `$5` at the start of a line. Returns the number, and what is behind the line.
fn number(bytes: &[u8], mark: u8) -> Option<(usize, &[u8])> {
    let end = bytes.windows(2).position(|two| two == b"\r\n")?;
    let text = std::str::from_utf8(bytes[..end].strip_prefix(&[mark])?).unwrap();
    Some((text.parse().unwrap(), &bytes[end + 2..]))
}

/// Takes the first request from what a client has sent, if it is complete.
fn take_request(sent: &mut Vec<u8>) -> Option<Vec<Vec<u8>>> {
    let (args, mut rest) = number(sent, b'*')?;
    let mut request = Vec::new();
    for _ in 0..args {
        let (length, text) = number(rest, b'$')?;
        request.push(text.get(..length)?.to_vec());
        rest = text.get(length + 2..)?;
    }
    let taken = sent.len() - rest.len();
    sent.drain(..taken);
    Some(request)
}

fn as_sent(request: &[Vec<u8>]) -> Vec<u8> {
    let mut sent = format!("*{}\r\n", request.len()).into_bytes();
    for arg in request {
        sent.extend(format!("${}\r\n", arg.len()).bytes());
        sent.extend_from_slice(arg);
        sent.extend(b"\r\n");
    }
    sent
}

/// Returns a command that is refused with this text.
fn refused(text: &str) -> Vec<Vec<u8>> {
    let script = format!("return redis.error_reply([[{text}]])");
    ["EVAL", &script, "0"]
        .map(|arg| arg.as_bytes().to_vec())
        .into()
}

impl Imitation {
    /// Starts the proxy in front of a server. Returns its URL.
    pub(crate) async fn start(self, server: &Server) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let port = server.port();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(self.forward(client, port));
            }
        });
        url
    }

    async fn forward(self, client: TcpStream, port: u16) {
        let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_server, mut to_server) = server.into_split();
        tokio::spawn(async move {
            let mut received = [0; 16 * 1024];
            while let Ok(read @ 1..) = from_server.read(&mut received).await {
                if self.replies_with_messages {
                    // The only pushes of a client that does not watch.
                    let pushes = received[..read].iter_mut().filter(|byte| **byte == b'>');
                    pushes.for_each(|byte| *byte = b'*');
                }
                if to_client.write_all(&received[..read]).await.is_err() {
                    return;
                }
            }
        });
        let (mut sent, mut is_subscribed) = (Vec::new(), false);
        while let Ok(1..) = from_client.read_buf(&mut sent).await {
            while let Some(mut request) = take_request(&mut sent) {
                let command = String::from_utf8_lossy(&request[0]).to_uppercase();
                let refusal = match (&*command, self.refuses_script) {
                    ("EVAL", Some(refuses)) => refuses(std::str::from_utf8(&request[1]).unwrap()),
                    _ => None,
                };
                is_subscribed |= command == "SUBSCRIBE";
                if let Some(refusal) = refusal {
                    request = refused(refusal);
                } else if self.subscribes_apart && is_subscribed && !command.contains("SUBSCRIBE") {
                    request = refused(
                        "ERR Can't execute: only (P|S)SUBSCRIBE / PING are allowed in this context",
                    );
                }
                if to_server.write_all(&as_sent(&request)).await.is_err() {
                    return;
                }
            }
        }
    }
}
