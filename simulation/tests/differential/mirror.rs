//! Plays every command on a simulated server and on a real one, and compares all that they send.
//!
//! The simulated server says how much it sends, and to which connections; the real one must send the same
//! on the same ones, neither less, which would end in a timeout, nor more, which the next reply shows.

use std::collections::BTreeMap;
use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::time::{Duration, SystemTime};

use redis::{Parser, Value};
use redlatch_simulation::server::{Config, ConnectionId, Output, Server};

use crate::compare::Same;

/// How long the real server may take.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Mirror {
    simulated: Server,
    real: redlatch_testkit::Server,
    lines: BTreeMap<ConnectionId, Line>,
    /// How many commands were played.
    pub(crate) played: usize,
}

/// One connection to the real server.
struct Line {
    input: BufReader<TcpStream>,
    output: TcpStream,
    /// Gets what the simulated server sends.
    client: Option<TcpStream>,
}

/// Now, since 1970.
pub(crate) fn now() -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.expect("it is after 1970")
}

impl Mirror {
    pub(crate) fn new() -> Mirror {
        let real = redlatch_testkit::Server::start();
        let simulated = Server::new(Config {
            host: real.address().to_string(),
            port: real.port(),
            run_id: real.info("run_id"),
            version: real.info("redis_version"),
            password: None,
        });
        Mirror {
            simulated,
            real,
            lines: BTreeMap::new(),
            played: 0,
        }
    }

    /// Connects to both. What the simulated server sends goes to `client`.
    pub(crate) fn connect(&mut self, client: Option<TcpStream>) -> ConnectionId {
        let output = TcpStream::connect((self.real.address(), self.real.port()));
        let output = output.expect("the real server accepts connections");
        output.set_nodelay(true).expect("an option of the socket");
        let patience = Some(PATIENCE);
        output.set_read_timeout(patience).expect("a timeout");
        let input = BufReader::new(output.try_clone().expect("a second handle"));
        let id = self.simulated.connect();
        let line = Line {
            input,
            output,
            client,
        };
        self.lines.insert(id, line);
        id
    }

    /// Connects with the newer protocol.
    pub(crate) fn connect_resp3(&mut self) -> ConnectionId {
        let id = self.connect(None);
        self.play(id, &["HELLO", "3"]);
        id
    }

    pub(crate) fn disconnect(&mut self, id: ConnectionId) {
        self.simulated.disconnect(id);
        self.lines.remove(&id);
    }

    /// Plays a command, and compares by what the command is. Returns what the simulated server sent on
    /// this connection.
    pub(crate) fn play<A: AsRef<[u8]>>(&mut self, id: ConnectionId, args: &[A]) -> Vec<Value> {
        let name = String::from_utf8_lossy(args[0].as_ref()).to_ascii_uppercase();
        let same = match name.as_str() {
            "HELLO" | "INFO" | "TIME" | "CLIENT" => Same::InForm,
            "HGETALL" | "HKEYS" | "HVALS" | "KEYS" | "PUBSUB" => Same::InAnyOrder,
            "EVAL" | "EVALSHA" | "TTL" | "PTTL" | "PEXPIRETIME" => Same::InTime,
            _ => Same::Exactly,
        };
        self.play_as(id, args, same)
    }

    pub(crate) fn play_as<A: AsRef<[u8]>>(
        &mut self,
        id: ConnectionId,
        args: &[A],
        same: Same,
    ) -> Vec<Value> {
        let mut command = redis::Cmd::new();
        for arg in args {
            command.arg(arg.as_ref());
        }
        let bytes = command.get_packed_command();
        let line = self.lines.get_mut(&id).expect("a connection that is open");
        line.output
            .write_all(&bytes)
            .expect("the real server reads");
        let simulated = self.simulated.receive(id, &bytes, now());
        let outputs = simulated.unwrap_or_else(|error| panic!("{error}"));
        self.played += 1;
        let mut own = Vec::new();
        for output in outputs {
            let Output::Send { to, bytes } = output else {
                continue;
            };
            let line = self.lines.get_mut(&to).expect("a connection that is open");
            let sent = redis::parse_redis_value(&bytes).expect("a reply can be parsed");
            let real = Parser::new().parse_value(&mut line.input);
            let real = real.unwrap_or_else(|error| {
                panic!(
                    "{}: the real server does not send {sent:?}: {error}",
                    shown(args)
                )
            });
            assert!(
                same.holds(&sent, &real),
                "{}\nsimulated: {sent:?}\nreal:      {real:?}",
                shown(args)
            );
            if let Some(client) = &mut line.client {
                // The client may be gone.
                let _ = client.write_all(&bytes);
            }
            if to == id {
                own.push(sent);
            }
        }
        own
    }
}

/// A command for people.
pub(crate) fn shown<A: AsRef<[u8]>>(args: &[A]) -> String {
    let text = |arg: &A| String::from_utf8_lossy(arg.as_ref()).into_owned();
    args.iter().map(text).collect::<Vec<_>>().join(" ")
}
