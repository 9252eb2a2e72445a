//! Every command that a server executes, in order.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use crate::Server;

/// A connection in `MONITOR` mode.
#[derive(Debug)]
pub struct Monitor {
    lines: std::io::Lines<BufReader<TcpStream>>,
}

/// One command reported by `MONITOR`.
#[derive(Debug, Clone)]
pub struct Command {
    /// Whether a script called it.
    pub in_script: bool,
    /// The command and its arguments, as the client sent them.
    pub words: Vec<Vec<u8>>,
}

impl Monitor {
    /// Starts monitoring.
    ///
    /// # Panics
    ///
    /// If the server cannot be reached.
    pub fn start(server: &Server) -> Monitor {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port())).expect("the server");
        stream.write_all(b"MONITOR\r\n").expect("the server");
        let mut lines = BufReader::new(stream).lines();
        let begun = lines.next().and_then(Result::ok);
        assert_eq!(begun.as_deref(), Some("+OK"));
        Monitor { lines }
    }

    /// Returns all commands since the previous call, up to the one that contains `end`.
    ///
    /// # Panics
    ///
    /// If the connection breaks before that.
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

    /// Returns how many commands clients have sent, without those that scripts call and those of new connections.
    ///
    /// # Panics
    ///
    /// If the connection breaks before.
    pub fn count_sent(&mut self, server: &Server) -> usize {
        const END: &str = "the count ends here";
        // Sent on a connection of its own, after HELLO.
        let _: String = server.command(&["ECHO", END]);
        let aside = ["ping", "hello", "client"];
        let is_counted =
            |command: &Command| !command.in_script && !aside.contains(&&*command.name());
        self.until(END).into_iter().filter(is_counted).count()
    }
}

impl Command {
    /// Returns the name of the command in lower case.
    pub fn name(&self) -> String {
        let name = self.words.first().map_or(&[][..], Vec::as_slice);
        String::from_utf8_lossy(name).to_ascii_lowercase()
    }

    /// Returns the name of the command, followed by its arguments as text.
    pub fn text(&self) -> Vec<String> {
        let args = self.words.iter().skip(1);
        let args = args.map(|word| String::from_utf8_lossy(word).into_owned());
        std::iter::once(self.name()).chain(args).collect()
    }
}

/// Parses a line such as `+1700000000.000000 [0 lua] "hset" "name" "field" "1"`.
fn command(line: &str) -> Command {
    let from = line.split('"').next().unwrap_or_default();
    Command {
        in_script: from.contains("lua]"),
        words: quoted(line),
    }
}

/// Returns the quoted parts of a line of MONITOR.
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
