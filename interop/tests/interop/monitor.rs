//! Every command that a server does, in its order.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use redlatch_testkit::Server;

pub(crate) struct Monitor {
    lines: std::io::Lines<BufReader<TcpStream>>,
}

impl Monitor {
    pub(crate) fn start(server: &Server) -> Monitor {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port())).expect("the server");
        stream.write_all(b"MONITOR\r\n").expect("the server");
        let mut lines = BufReader::new(stream).lines();
        let begun = lines.next().and_then(Result::ok);
        assert_eq!(begun.as_deref(), Some("+OK"));
        Monitor { lines }
    }

    /// All commands up to the one that says `end`, each as its words; the name in small letters.
    pub(crate) fn until(mut self, end: &str) -> impl Iterator<Item = Vec<String>> {
        self.up_to(end).into_iter()
    }

    /// The same for those since the last time.
    pub(crate) fn up_to(&mut self, end: &str) -> Vec<Vec<String>> {
        self.lines
            .by_ref()
            .map(|line| line.expect("the server"))
            .take_while(|line| !line.contains(end))
            .map(|line| words(&line))
            .collect()
    }
}

/// `+1700000000.000000 [0 lua] "hset" "name" "field" "1"`, where no word has an escape that matters here.
fn words(line: &str) -> Vec<String> {
    let mut words: Vec<String> = line
        .split('"')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect();
    if let Some(command) = words.first_mut() {
        command.make_ascii_lowercase();
    }
    words
}
