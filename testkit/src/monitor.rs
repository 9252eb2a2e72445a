//! Every command that a server does, in its order.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use crate::Server;

/// A connection that has said `MONITOR`.
#[derive(Debug)]
pub struct Monitor {
    lines: std::io::Lines<BufReader<TcpStream>>,
}

/// One command, as the monitor tells it.
#[derive(Debug, Clone)]
pub struct Command {
    /// Whether a script called it.
    pub in_script: bool,
    /// The command in small letters, and its arguments, escaped as the server does it.
    pub words: Vec<String>,
}

impl Monitor {
    /// From here on.
    ///
    /// # Panics
    ///
    /// When the server cannot be reached.
    pub fn start(server: &Server) -> Monitor {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port())).expect("the server");
        stream.write_all(b"MONITOR\r\n").expect("the server");
        let mut lines = BufReader::new(stream).lines();
        let begun = lines.next().and_then(Result::ok);
        assert_eq!(begun.as_deref(), Some("+OK"));
        Monitor { lines }
    }

    /// All commands since the last time, up to the one that says `end`.
    ///
    /// # Panics
    ///
    /// When the connection breaks before that.
    pub fn until(&mut self, end: &str) -> Vec<Command> {
        let mut commands = Vec::new();
        loop {
            let line = self.lines.next().expect("the server").expect("the server");
            if line.contains(end) {
                return commands;
            }
            commands.push(command(&line));
        }
    }
}

impl Command {
    /// The command itself.
    pub fn name(&self) -> &str {
        self.words.first().map_or("", String::as_str)
    }
}

/// `+1700000000.000000 [0 lua] "hset" "name" "field" "1"`. Words with quotes in them are not told apart.
fn command(line: &str) -> Command {
    let mut words: Vec<String> = line
        .split('"')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect();
    if let Some(name) = words.first_mut() {
        name.make_ascii_lowercase();
    }
    let from = line.split('"').next().unwrap_or_default();
    Command {
        in_script: from.contains("lua]"),
        words,
    }
}
