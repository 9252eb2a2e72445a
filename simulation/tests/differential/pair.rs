//! Runs every command on a simulated server and on a real one, and compares all their output.
//!
//! The simulated server determines how much is sent, and to which connections. The real one must send the same
//! on the same connections: less would end in a timeout, and more would show in the next reply.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, SystemTime};

use redis::{Parser, Value};
use redlatch_simulation::server::{Config, ConnectionId, Output, Server};

use crate::tolerance::Tolerance;

/// The longest time for an answer of the real server.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct ServerPair {
    simulated: Server,
    real: redlatch_testkit::Server,
    connections: BTreeMap<ConnectionId, RealConnection>,
    /// Commands not yet sent to the real server, all for one connection.
    pending: Option<(ConnectionId, Vec<u8>)>,
    /// Expected output of the real server.
    expected: Vec<Sent>,
    /// The comparisons since the data was last removed.
    history: Vec<String>,
    /// Number of commands run.
    pub(crate) commands_run: usize,
    /// Number of replies that were errors.
    pub(crate) refused: usize,
}

/// Output of the simulated server.
struct Sent {
    to: ConnectionId,
    bytes: Vec<u8>,
    value: Value,
    /// The command that caused it.
    command: String,
    tolerance: Tolerance,
}

/// One connection to the real server.
struct RealConnection {
    input: TcpStream,
    /// Keeps the bytes after one reply.
    parser: Parser,
    output: TcpStream,
    /// Receives the output of the simulated server.
    client: Option<TcpStream>,
}

/// Number of earlier commands that are shown with a difference.
const SHOWN: usize = 150;

/// Returns the current time since 1970.
pub(crate) fn now() -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.expect("it is after 1970")
}

impl ServerPair {
    pub(crate) fn new() -> ServerPair {
        let real = redlatch_testkit::Server::start();
        let simulated = Server::new(Config {
            host: real.address().to_string(),
            port: real.port(),
            run_id: real.info("run_id"),
            version: real.info("redis_version"),
            password: None,
        });
        ServerPair {
            simulated,
            real,
            connections: BTreeMap::new(),
            pending: None,
            expected: Vec::new(),
            history: Vec::new(),
            commands_run: 0,
            refused: 0,
        }
    }

    /// Connects to both. The output of the simulated server goes to `client`.
    pub(crate) fn connect(&mut self, client: Option<TcpStream>) -> ConnectionId {
        let output = TcpStream::connect((self.real.address(), self.real.port()));
        let output = output.expect("the real server accepts connections");
        output.set_nodelay(true).expect("an option of the socket");
        let timeout = Some(READ_TIMEOUT);
        output.set_read_timeout(timeout).expect("a timeout");
        let input = output.try_clone().expect("a second handle");
        let id = self.simulated.connect();
        let connection = RealConnection {
            input,
            parser: Parser::new(),
            output,
            client,
        };
        self.connections.insert(id, connection);
        id
    }

    /// Connects with RESP3.
    pub(crate) fn connect_resp3(&mut self) -> ConnectionId {
        let id = self.connect(None);
        self.run(id, &["HELLO", "3"]);
        id
    }

    /// Runs a command, and compares the output as suits the command. Returns the output of the simulated server on
    /// this connection.
    pub(crate) fn run<A: AsRef<[u8]>>(&mut self, id: ConnectionId, args: &[A]) -> Vec<Value> {
        self.run_as(id, args, tolerance_of(args))
    }

    pub(crate) fn run_as<A: AsRef<[u8]>>(
        &mut self,
        id: ConnectionId,
        args: &[A],
        tolerance: Tolerance,
    ) -> Vec<Value> {
        self.compare();
        self.send_as(id, args, tolerance);
        let own = self.expected.iter().filter(|sent| sent.to == id);
        let own = own.map(|sent| sent.value.clone()).collect();
        self.compare();
        own
    }

    /// Runs a command later, together with others of the same connection, which is faster.
    pub(crate) fn send<A: AsRef<[u8]>>(&mut self, id: ConnectionId, args: &[A]) {
        self.send_as(id, args, tolerance_of(args));
    }

    fn send_as<A: AsRef<[u8]>>(&mut self, id: ConnectionId, args: &[A], tolerance: Tolerance) {
        if self.pending.as_ref().is_some_and(|(other, _)| *other != id) {
            self.compare();
        }
        let mut command = redis::Cmd::new();
        for arg in args {
            command.arg(arg.as_ref());
        }
        let bytes = command.get_packed_command();
        let (_, pending) = self.pending.get_or_insert_with(|| (id, Vec::new()));
        pending.extend_from_slice(&bytes);
        self.commands_run += 1;
        let outputs = self.simulated.receive(id, &bytes, now());
        for output in outputs.unwrap_or_else(|error| panic!("{error}")) {
            let Output::Send { to, bytes } = output else {
                continue;
            };
            let value = redis::parse_redis_value(&bytes).expect("a reply can be parsed");
            self.refused += usize::from(matches!(value, Value::ServerError(_)));
            let command = shown(args);
            self.expected.push(Sent {
                to,
                bytes,
                value,
                command,
                tolerance,
            });
        }
    }

    /// Runs the pending commands on the real server, and compares its whole output.
    pub(crate) fn compare(&mut self) {
        if let Some((id, bytes)) = self.pending.take() {
            let connection = self
                .connections
                .get_mut(&id)
                .expect("a connection that is open");
            let written = connection.output.write_all(&bytes);
            written.expect("the real server reads");
        }
        for sent in std::mem::take(&mut self.expected) {
            let connection = self
                .connections
                .get_mut(&sent.to)
                .expect("a connection that is open");
            let real = connection.parser.parse_value(&mut connection.input);
            let (command, simulated) = (&sent.command, &sent.value);
            let real = real.unwrap_or_else(|error| {
                panic!("{command}: the real server does not send {simulated:?}: {error}")
            });
            assert!(
                sent.tolerance.accepts(simulated, &real),
                "{}\n{command}\nsimulated: {simulated:?}\nreal:      {real:?}",
                self.history[self.history.len().saturating_sub(SHOWN)..].join("\n")
            );
            if let Some(client) = &mut connection.client {
                // The client may be gone.
                let _ = client.write_all(&sent.bytes);
            }
            if sent.command == "FLUSHALL" {
                self.history.clear();
            }
            self.history.push(sent.command);
        }
    }
}

/// Returns how the replies to a command are compared.
fn tolerance_of<A: AsRef<[u8]>>(args: &[A]) -> Tolerance {
    let name = String::from_utf8_lossy(args[0].as_ref()).to_ascii_uppercase();
    match name.as_str() {
        "HELLO" | "INFO" | "TIME" | "CLIENT" | "ROLE" => Tolerance::TypeOnly,
        "HGETALL" | "HKEYS" | "HVALS" | "KEYS" | "PUBSUB" | "SCAN" => Tolerance::AnyOrder,
        "EVAL" | "EVALSHA" | "TTL" | "PTTL" | "PEXPIRETIME" => Tolerance::Times,
        _ => Tolerance::Exact,
    }
}

/// Formats a command.
pub(crate) fn shown<A: AsRef<[u8]>>(args: &[A]) -> String {
    let text = |arg: &A| String::from_utf8_lossy(arg.as_ref()).into_owned();
    args.iter().map(text).collect::<Vec<_>>().join(" ")
}
