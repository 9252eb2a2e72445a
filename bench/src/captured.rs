//! What a primitive sends for one pair, read off the server, to be sent again bare.

use redis::Cmd;
use redis::aio::MultiplexedConnection;
use redlatch::Client;
use redlatch_testkit::Server;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::Result;
use crate::kinds::Kind;

/// The scripts of one acquisition and one release of one name, with all they were given.
pub(crate) struct Captured {
    take: Vec<Cmd>,
    give_back: Vec<Cmd>,
    connection: MultiplexedConnection,
}

impl Captured {
    /// Takes and gives back once, while the server says what it is sent.
    pub(crate) async fn pair(
        server: &Server,
        kind: &Kind,
        client: &Client,
        connection: &MultiplexedConnection,
        name: String,
    ) -> Result<Captured> {
        // The server knows the scripts from here on.
        let take = (kind.take)(client, &name);
        take().await?().await?;
        let server = ("127.0.0.1", server.port());
        let mut monitor = BufReader::new(TcpStream::connect(server).await?).lines();
        monitor.get_mut().write_all(b"MONITOR\r\n").await?;
        monitor.next_line().await?; // "+OK"
        let mut echo = connection.clone();
        let give_back = take().await?;
        redis::cmd("ECHO")
            .arg("taken")
            .exec_async(&mut echo)
            .await?;
        give_back().await?;
        redis::cmd("ECHO")
            .arg("given back")
            .exec_async(&mut echo)
            .await?;
        let (mut taking, mut giving) = (Vec::new(), Vec::new());
        let mut echoes = 0;
        while echoes < 2
            && let Some(line) = monitor.next_line().await?
        {
            let parts = quoted(&line);
            let verb = parts.first().map(|part| part.to_ascii_uppercase());
            match verb.as_deref() {
                Some(b"ECHO") => echoes += 1,
                // Not what scripts call, which is marked as such.
                Some(b"EVALSHA") if !line.contains(" lua] ") => {
                    let mut cmd = Cmd::new();
                    for part in parts {
                        cmd.arg(part);
                    }
                    if echoes == 0 {
                        taking.push(cmd);
                    } else {
                        giving.push(cmd);
                    }
                }
                _ => {}
            }
        }
        if taking.is_empty() || giving.is_empty() {
            return Err(format!("{} was not seen at work", kind.name).into());
        }
        Ok(Captured {
            take: taking,
            give_back: giving,
            connection: connection.clone(),
        })
    }

    /// Sends them again: those that take, then those that give back, each together.
    pub(crate) async fn play(&mut self) -> Result<()> {
        for group in [&self.take, &self.give_back] {
            if let [cmd] = group.as_slice() {
                cmd.exec_async(&mut self.connection).await?;
                continue;
            }
            let send = |cmd: &Cmd| {
                let (cmd, mut connection) = (cmd.clone(), self.connection.clone());
                async move { cmd.exec_async(&mut connection).await }
            };
            let mut together: JoinSet<_> = group.iter().map(send).collect();
            while let Some(answered) = together.join_next().await {
                answered??;
            }
        }
        Ok(())
    }
}

/// The quoted parts of a line of MONITOR.
fn quoted(line: &str) -> Vec<Vec<u8>> {
    let mut parts = Vec::new();
    let mut bytes = line.bytes();
    while bytes.any(|byte| byte == b'"') {
        let mut part = Vec::new();
        while let Some(byte) = bytes.next() {
            match byte {
                b'"' => break,
                b'\\' => match bytes.next() {
                    Some(b'x') => {
                        let digits: Vec<u8> = bytes.by_ref().take(2).collect();
                        let digits = String::from_utf8_lossy(&digits);
                        part.push(u8::from_str_radix(&digits, 16).unwrap_or_default());
                    }
                    Some(b'n') => part.push(b'\n'),
                    Some(b'r') => part.push(b'\r'),
                    Some(b't') => part.push(b'\t'),
                    Some(other) => part.push(other),
                    None => {}
                },
                other => part.push(other),
            }
        }
        parts.push(part);
    }
    parts
}
