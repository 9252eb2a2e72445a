//! Tests of behavior that the differential test cannot show: exact times, several servers, refusals.

mod cluster;
mod expiry;
mod refusals;
mod replication;
mod tracking;

use std::time::Duration;

use super::{Config, ConnectionId, Output, Server, Unsupported};

/// A server with a clock of its own, in milliseconds.
struct TestServer {
    server: Server,
    now: u64,
}

fn config() -> Config {
    Config {
        host: "127.0.0.1".into(),
        port: 7000,
        run_id: "0".repeat(40),
        version: "7.0.15".into(),
        password: None,
    }
}

fn command(words: &[&str]) -> Vec<u8> {
    let word = |word: &&str| format!("${}\r\n{word}\r\n", word.len());
    let words_sent: String = words.iter().map(word).collect();
    format!("*{}\r\n{words_sent}", words.len()).into_bytes()
}

impl TestServer {
    fn new() -> TestServer {
        TestServer {
            server: Server::new(config()),
            now: 1_000_000,
        }
    }

    fn now(&self) -> Duration {
        Duration::from_millis(self.now)
    }

    /// Opens a connection with RESP3.
    fn connect(&mut self) -> ConnectionId {
        let id = self.server.connect();
        self.run(id, "HELLO 3");
        id
    }

    fn send(&mut self, id: ConnectionId, words: &[&str]) -> Result<Vec<Output>, Unsupported> {
        self.server.receive(id, &command(words), self.now())
    }

    /// Sends a command whose arguments are separated by spaces. Returns the output to this connection.
    fn run(&mut self, id: ConnectionId, line: &str) -> String {
        let words: Vec<&str> = line.split(' ').collect();
        self.run_args(id, &words)
    }

    fn run_args(&mut self, id: ConnectionId, words: &[&str]) -> String {
        let outputs = self.send(id, words).expect("it is supported");
        sent(&outputs, id)
    }

    /// Runs a script on these keys.
    fn eval(&mut self, id: ConnectionId, source: &str, keys: &[&str]) -> String {
        let count = keys.len().to_string();
        self.run_args(id, &[&["EVAL", source, &count], keys].concat())
    }
}

/// Returns the output to a connection, in one line.
fn sent(outputs: &[Output], id: ConnectionId) -> String {
    let own = outputs.iter().filter_map(|output| match output {
        Output::Send { to, bytes } if *to == id => Some(String::from_utf8_lossy(bytes)),
        Output::Close { to } if *to == id => Some("closed".into()),
        _ => None,
    });
    let own: Vec<String> = own.map(|text| text.trim().replace("\r\n", " ")).collect();
    own.join(" | ")
}
