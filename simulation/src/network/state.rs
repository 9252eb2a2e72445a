//! The state of the network, and the effect of each event.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use redlatch_robustness::random::Random;
use tokio::time::Instant;

use crate::server::{Config, ConnectionId, Effects, Output, Server, Unsupported};
use crate::trace::Trace;

/// Time after which a client's kernel closes a connection on which nothing arrives.
pub const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes that a client can write before the server has received any of them.
pub(super) const SOCKET_BUFFER: usize = 128 * 1024;

/// The wall clock of the servers at the beginning: some day in 2026.
pub(crate) const EPOCH: Duration = Duration::from_secs(1_790_000_000);

/// Number of a simulated process.
pub type ProcessId = usize;

/// Number of a server.
pub type HostId = usize;

/// The two directions between a process and a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From the process to the server.
    Up,
    /// From the server to the process.
    Down,
}

pub(super) type LinkId = u64;

/// The time of an event, and its number, which orders events of the same time.
type Key = (Duration, u64);

#[derive(Debug)]
pub(super) struct State {
    pub(super) begun: Instant,
    random: Random,
    /// Maximum latency of a packet.
    pub(super) latency: Duration,
    pub(super) hosts: Vec<Host>,
    /// Names that lead to a host.
    pub(super) names: BTreeMap<String, HostId>,
    pub(super) links: BTreeMap<LinkId, Link>,
    pub(super) next_link: LinkId,
    queue: BTreeMap<Key, Event>,
    scheduled: u64,
    /// Directions between processes and servers in which packets do not arrive.
    pub(super) cut: BTreeSet<(ProcessId, HostId, Direction)>,
    /// Pairs of servers whose packets to each other do not arrive.
    pub(super) separated: BTreeSet<(HostId, HostId)>,
    /// The process whose connections are often reset instead of answered.
    pub(super) losing_answers: Option<ProcessId>,
    /// The process whose next packet behind each signal fails.
    failing_signals: Option<ProcessId>,
    /// Whether a signal has reached it since, and how the packet that arrives now fails.
    signaled: bool,
    failing: Option<PacketFailure>,
    /// Due events whose packets cannot arrive now.
    withheld: BTreeMap<Key, Event>,
    /// Arrival time of the latest packet from one server to another.
    last: BTreeMap<(HostId, HostId), Duration>,
    /// When servers accepted connections.
    pub(super) connected: Vec<Duration>,
    pub(super) trace: Trace,
    /// Why the run has to end early.
    pub(super) failure: Option<String>,
}

#[derive(Debug)]
pub(super) struct Host {
    pub(super) name: String,
    pub(super) port: u16,
    pub(super) is_sentinel: bool,
    /// `None`: it is down.
    pub(super) server: Option<Server>,
    starts: u64,
    pub(super) frozen: bool,
    /// What its wall clock would have said when the run began.
    pub(super) clock_base: Duration,
    /// The link of each of its connections.
    links: BTreeMap<ConnectionId, LinkId>,
    /// Scheduled check of the next blocked command, if any.
    deadline: Option<Duration>,
    /// The servers that follow it, each with the number of times it has begun to follow a master.
    pub(super) replicas: BTreeMap<HostId, u64>,
    /// How often it has begun to follow a master.
    pub(super) terms: u64,
}

/// A connection between a process and a server.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) process: ProcessId,
    pub(super) host: HostId,
    /// The server's side, if it is open.
    pub(super) server: Option<ConnectionId>,
    /// The client's side.
    pub(super) state: ClientState,
    pub(super) inbox: Vec<u8>,
    pub(super) waker: Option<Waker>,
    /// Number of bytes that the client has written and that have not arrived at the server.
    pub(super) on_the_way: usize,
    /// Arrival time of the latest packet in each direction.
    pub(super) last: [Duration; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientState {
    Connecting,
    Open,
    /// Ended by the other side, perhaps with an error.
    Ended(Option<io::ErrorKind>),
    /// Dropped by the client.
    Closed,
}

/// A packet between two servers.
#[derive(Debug)]
pub(super) enum Message {
    /// A master's change, for a replica that has followed it since this term.
    Change(Arc<Effects>, u64),
    /// A replica has applied the changes up to this offset.
    Applied(u64, u64),
    /// A message that was published at another node of the cluster.
    Broadcast(Vec<u8>, Vec<u8>),
}

#[derive(Debug)]
pub(super) enum Event {
    /// A connection request arrives at the server.
    Connect(LinkId),
    /// The client's side is open.
    Connected(LinkId),
    /// Bytes arrive at the server.
    ToServer(LinkId, Vec<u8>),
    /// The end of the client's side arrives at the server.
    ClientGone(LinkId),
    /// Bytes arrive at the client.
    ToClient(LinkId, Vec<u8>),
    /// The end of the server's side arrives at the client.
    ServerGone(LinkId, Option<io::ErrorKind>),
    /// A packet from the first server arrives at the second.
    ServerMessage(HostId, HostId, Message),
    /// The kernel of the process closes connections to a server that was cut off at this time.
    UserTimeout(ProcessId, HostId, Duration),
    /// Packets of the process arrive again at a server where one was late.
    Late(ProcessId, HostId),
    /// A blocked command of this server times out.
    Deadline(HostId),
}

/// How a packet of a process fails.
#[derive(Debug, Clone, Copy)]
enum PacketFailure {
    /// The connection is reset before it arrives.
    Lost,
    /// The connection is reset instead of the answer.
    Unanswered,
}

/// The longest time that a packet behind a signal is late, in multiples of the maximum latency.
const MAX_LATE: u32 = 20;

impl State {
    pub(super) fn new(seed: u64, latency: Duration, trace: Trace) -> State {
        State {
            begun: Instant::now(),
            random: Random::new(seed),
            latency,
            hosts: Vec::new(),
            names: BTreeMap::new(),
            links: BTreeMap::new(),
            next_link: 0,
            queue: BTreeMap::new(),
            scheduled: 0,
            cut: BTreeSet::new(),
            separated: BTreeSet::new(),
            losing_answers: None,
            failing_signals: None,
            connected: Vec::new(),
            signaled: false,
            failing: None,
            withheld: BTreeMap::new(),
            last: BTreeMap::new(),
            trace,
            failure: None,
        }
    }

    pub(super) fn add_host(&mut self, name: &str, port: u16, is_sentinel: bool) -> HostId {
        let id = self.hosts.len();
        self.hosts.push(Host {
            name: name.to_owned(),
            port,
            is_sentinel,
            server: None,
            starts: 0,
            frozen: false,
            clock_base: EPOCH,
            links: BTreeMap::new(),
            deadline: None,
            replicas: BTreeMap::new(),
            terms: 0,
        });
        self.start(id);
        id
    }

    pub(super) fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    pub(super) fn wall_clock(&self, host: HostId) -> Duration {
        self.hosts[host].clock_base + self.now()
    }

    pub(super) fn start(&mut self, id: HostId) {
        let host = &mut self.hosts[id];
        host.starts += 1;
        let config = Config {
            host: host.name.clone(),
            port: host.port,
            run_id: format!("{id:020x}{:020x}", host.starts),
            version: "7.4.0".into(),
            password: None,
        };
        host.server = Some(match host.is_sentinel {
            true => Server::sentinel(config),
            false => Server::new(config),
        });
    }

    /// Ends a server's process and resets its connections.
    pub(super) fn kill(&mut self, id: HostId) -> Option<Server> {
        let host = &mut self.hosts[id];
        host.frozen = false;
        host.deadline = None;
        host.links.clear();
        host.replicas.clear();
        let server = host.server.take();
        self.leave_masters(id);
        for id in self.links_between(None, Some(id)) {
            if let Some(link) = self.links.get_mut(&id)
                && link.server.take().is_some()
            {
                let reset = Event::ServerGone(id, Some(io::ErrorKind::ConnectionReset));
                self.send(id, Direction::Down, reset);
            }
        }
        self.requeue_withheld();
        server
    }

    /// Makes a server follow no master any more.
    pub(super) fn leave_masters(&mut self, replica: HostId) {
        self.hosts[replica].terms += 1;
        let (name, port) = self.address(replica);
        for host in &mut self.hosts {
            if host.replicas.remove(&replica).is_some()
                && let Some(server) = &mut host.server
            {
                server.detach_replica(&name, port);
            }
        }
    }

    pub(super) fn address(&self, host: HostId) -> (String, u16) {
        (self.hosts[host].name.clone(), self.hosts[host].port)
    }

    pub(super) fn schedule(&mut self, at: Duration, event: Event) {
        self.scheduled += 1;
        self.queue.insert((at, self.scheduled), event);
    }

    fn random_latency(&mut self) -> Duration {
        let longest = self.latency.as_millis().try_into().unwrap_or(usize::MAX);
        Duration::from_millis(1 + self.random.below(longest) as u64)
    }

    /// Sends a packet of a connection.
    pub(super) fn send(&mut self, id: LinkId, direction: Direction, event: Event) {
        let at = self.now() + self.random_latency();
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let last = &mut link.last[direction as usize];
        *last = at.max(*last);
        let at = *last;
        self.schedule(at, event);
    }

    /// Sends a packet from one server to another.
    fn send_message(&mut self, from: HostId, to: HostId, message: Message) {
        let at = self.now() + self.random_latency();
        let last = self.last.entry((from, to)).or_default();
        *last = at.max(*last);
        let at = *last;
        self.schedule(at, Event::ServerMessage(from, to, message));
    }

    pub(super) fn links_between(
        &self,
        process: Option<ProcessId>,
        host: Option<HostId>,
    ) -> Vec<LinkId> {
        let between = self.links.iter().filter(|(_, link)| {
            process.is_none_or(|process| link.process == process)
                && host.is_none_or(|host| link.host == host)
        });
        between.map(|(id, _)| *id).collect()
    }

    /// Runs all due events. Returns when the next one is due, and the tasks to wake.
    pub(super) fn advance(&mut self) -> (Option<Instant>, Vec<Waker>) {
        let mut wakers = Vec::new();
        let now = self.now();
        while let Some(entry) = self.queue.first_entry()
            && entry.key().0 <= now
        {
            let (key, event) = entry.remove_entry();
            self.fail_behind_signal(&event);
            match self.is_withheld(&event) {
                true => _ = self.withheld.insert(key, event),
                false => self.handle_event(event, &mut wakers),
            }
        }
        let next = self.queue.first_key_value();
        (next.map(|((at, _), _)| self.begun + *at), wakers)
    }

    /// Returns withheld events to the queue under their old keys. They happen before later ones, or are
    /// withheld again.
    pub(super) fn requeue_withheld(&mut self) {
        self.queue.append(&mut self.withheld);
    }

    /// Makes the packet fail with which a process reacts to a signal, or at least the next one: it is lost, or its answer, or
    /// it is late. The signal itself comes only once.
    fn fail_behind_signal(&mut self, event: &Event) {
        let Event::ToServer(id, _) = event else {
            return;
        };
        let Some(link) = self.links.get(id) else {
            return;
        };
        let (process, host) = (link.process, link.host);
        if self.failing_signals != Some(process) || !std::mem::take(&mut self.signaled) {
            return;
        }
        match self.random.below(3) {
            0 => self.failing = Some(PacketFailure::Lost),
            1 => self.failing = Some(PacketFailure::Unanswered),
            _ => {
                self.cut.insert((process, host, Direction::Up));
                let late = self.random.between(Duration::ZERO, self.latency * MAX_LATE);
                self.schedule(self.now() + late, Event::Late(process, host));
            }
        }
    }

    fn is_withheld(&self, event: &Event) -> bool {
        let (id, direction) = match event {
            Event::Connect(id) | Event::ToServer(id, _) | Event::ClientGone(id) => {
                (id, Direction::Up)
            }
            Event::Connected(id) | Event::ToClient(id, _) | Event::ServerGone(id, _) => {
                (id, Direction::Down)
            }
            Event::ServerMessage(from, to, _) => {
                return self.hosts[*to].frozen || self.separated.contains(&(*from, *to));
            }
            Event::UserTimeout(..) | Event::Late(..) => return false,
            Event::Deadline(host) => return self.hosts[*host].frozen,
        };
        self.links.get(id).is_some_and(|link| {
            self.cut.contains(&(link.process, link.host, direction))
                || direction == Direction::Up && self.hosts[link.host].frozen
        })
    }

    fn handle_event(&mut self, event: Event, wakers: &mut Vec<Waker>) {
        match event {
            Event::Connect(id) => self.accept(id),
            Event::ToServer(id, bytes) => {
                if let Some(link) = self.links.get_mut(&id) {
                    if link.on_the_way >= SOCKET_BUFFER {
                        wakers.extend(link.waker.take());
                    }
                    link.on_the_way -= bytes.len();
                }
                self.receive(id, &bytes);
            }
            Event::ClientGone(id) => self.client_gone(id),
            Event::Connected(id) => {
                self.at_client(id, wakers, |link| link.state = ClientState::Open);
            }
            Event::ToClient(id, bytes) => {
                self.trace_bytes(id, Direction::Down, &bytes);
                let process = self.links.get(&id).map(|link| link.process);
                self.signaled |=
                    process.is_some() && process == self.failing_signals && is_signal(&bytes);
                self.at_client(id, wakers, |link| link.inbox.extend_from_slice(&bytes));
            }
            Event::ServerGone(id, error) => {
                self.at_client(id, wakers, |link| link.state = ClientState::Ended(error));
            }
            Event::ServerMessage(from, to, message) => self.handle_message(from, to, message),
            Event::UserTimeout(process, host, since) => {
                let cut = |direction| self.cut.contains(&(process, host, direction));
                if (cut(Direction::Up) || cut(Direction::Down))
                    && self.now() >= since + TCP_USER_TIMEOUT
                {
                    for id in self.links_between(Some(process), Some(host)) {
                        let error = Some(io::ErrorKind::TimedOut);
                        self.at_client(id, wakers, |link| link.state = ClientState::Ended(error));
                        self.send(id, Direction::Up, Event::ClientGone(id));
                    }
                }
            }
            Event::Late(process, host) => {
                self.cut.remove(&(process, host, Direction::Up));
                self.requeue_withheld();
            }
            Event::Deadline(host) => {
                self.hosts[host].deadline = None;
                self.at_server(host, Server::advance);
            }
        }
    }

    fn trace_bytes(&mut self, id: LinkId, direction: Direction, bytes: &[u8]) {
        let now = self.now();
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let host = &self.hosts[link.host].name;
        self.trace.add(now, (id, direction, bytes), || {
            let text = String::from_utf8_lossy(bytes).replace("\r\n", " ");
            let text: String = text.chars().take(600).collect();
            let process = link.process;
            match direction {
                Direction::Up => format!("process {process}#{id} -> {host}: {text}"),
                Direction::Down => format!("{host} -> process {process}#{id}: {text}"),
            }
        });
    }

    fn at_client(&mut self, id: LinkId, wakers: &mut Vec<Waker>, change: impl FnOnce(&mut Link)) {
        if let Some(link) = self.links.get_mut(&id)
            && !matches!(link.state, ClientState::Closed | ClientState::Ended(_))
        {
            change(link);
            wakers.extend(link.waker.take());
        }
    }

    fn accept(&mut self, id: LinkId) {
        let now = self.now();
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let host = &mut self.hosts[link.host];
        let event = match host.server.as_mut() {
            Some(server) => {
                let connection = server.connect();
                host.links.insert(connection, id);
                link.server = Some(connection);
                self.connected.push(now);
                Event::Connected(id)
            }
            None => Event::ServerGone(id, Some(io::ErrorKind::ConnectionRefused)),
        };
        self.send(id, Direction::Down, event);
    }

    fn receive(&mut self, id: LinkId, bytes: &[u8]) {
        let failing = self.failing.take();
        if let Some(PacketFailure::Lost) = failing {
            return self.reset(id);
        }
        self.trace_bytes(id, Direction::Up, bytes);
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let (host, process) = (link.host, link.process);
        let Some(connection) = link.server else {
            // The server was killed meanwhile, and has no such connection.
            let reset = Event::ServerGone(id, Some(io::ErrorKind::ConnectionReset));
            return self.send(id, Direction::Down, reset);
        };
        self.at_server(host, |server, now| server.receive(connection, bytes, now));
        if self.losing_answers == Some(process) && self.random.below(8) == 0 || failing.is_some() {
            self.reset(id);
        }
    }

    /// Makes the next packet of a process behind each signal fail. `None` ends that.
    pub(super) fn set_failing_signals(&mut self, process: Option<ProcessId>) {
        self.failing_signals = process;
        self.signaled = false;
    }

    /// Resets a connection. Both sides learn of it immediately.
    pub(super) fn reset(&mut self, id: LinkId) {
        let (now, reset) = (self.now(), Some(io::ErrorKind::ConnectionReset));
        self.schedule(now, Event::ServerGone(id, reset));
        self.schedule(now, Event::ClientGone(id));
    }

    fn client_gone(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let (connection, host) = (link.server.take(), &mut self.hosts[link.host]);
        if link.state == ClientState::Closed {
            self.links.remove(&id);
        }
        if let Some(connection) = connection {
            host.links.remove(&connection);
            if let Some(server) = &mut host.server {
                server.disconnect(connection);
            }
        }
    }

    /// Handles a packet from one server to another.
    fn handle_message(&mut self, from: HostId, to: HostId, message: Message) {
        match message {
            Message::Change(effects, term) if self.hosts[to].terms == term => {
                let (offset, mut is_up) = (effects.offset, false);
                self.at_server(to, |server, now| {
                    is_up = true;
                    Ok(server.apply(&effects, now))
                });
                if is_up {
                    self.send_message(to, from, Message::Applied(offset, term));
                }
            }
            Message::Applied(offset, term) if self.hosts[to].replicas.get(&from) == Some(&term) => {
                let replica = &self.hosts[from];
                let (name, port) = (replica.name.clone(), replica.port);
                self.at_server(to, |server, now| {
                    server.acknowledge(&name, port, offset, now)
                });
            }
            // The server now follows another master.
            Message::Change(..) | Message::Applied(..) => {}
            Message::Broadcast(channel, message) => {
                self.at_server(to, |server, _| {
                    Ok(server.deliver_broadcast(&channel, &message))
                });
            }
        }
    }

    /// Accesses a running server, at its time, and sends the resulting output.
    pub(super) fn at_server(
        &mut self,
        host: HostId,
        work: impl FnOnce(&mut Server, Duration) -> Result<Vec<Output>, Unsupported>,
    ) {
        let now = self.wall_clock(host);
        let Some(server) = self.hosts[host].server.as_mut() else {
            return;
        };
        let outputs = match work(server, now) {
            Ok(outputs) => outputs,
            Err(error) => {
                self.failure.get_or_insert(error.to_string());
                return;
            }
        };
        let (effects, broadcasts) = (server.take_effects(), server.take_broadcasts());
        let deadline = server.next_deadline();
        for output in outputs {
            self.output(host, output);
        }
        for effects in effects.into_iter().map(Arc::new) {
            for (replica, term) in self.hosts[host].replicas.clone() {
                let change = Message::Change(effects.clone(), term);
                self.send_message(host, replica, change);
            }
        }
        for (channel, message) in broadcasts {
            for other in (0..self.hosts.len()).filter(|other| *other != host) {
                let broadcast = Message::Broadcast(channel.clone(), message.clone());
                self.send_message(host, other, broadcast);
            }
        }
        if let Some(deadline) = deadline {
            let at = deadline.saturating_sub(self.hosts[host].clock_base);
            if self.hosts[host].deadline.is_none_or(|known| at < known) {
                self.hosts[host].deadline = Some(at);
                self.schedule(at, Event::Deadline(host));
            }
        }
    }

    fn output(&mut self, host: HostId, output: Output) {
        let links = &mut self.hosts[host].links;
        match output {
            Output::Send { to, bytes } => {
                if let Some(&id) = links.get(&to) {
                    self.send(id, Direction::Down, Event::ToClient(id, bytes));
                }
            }
            Output::Close { to } => {
                if let Some(id) = links.remove(&to) {
                    self.send(id, Direction::Down, Event::ServerGone(id, None));
                    if let Some(link) = self.links.get_mut(&id) {
                        link.server = None;
                    }
                }
            }
        }
    }
}

/// Returns whether a packet contains a message of a channel, or a report of changed keys.
fn is_signal(bytes: &[u8]) -> bool {
    let words: [&[u8]; 3] = [
        b"\r\nmessage\r\n",
        b"\r\nsmessage\r\n",
        b"\r\ninvalidate\r\n",
    ];
    let contains = |word: &&[u8]| bytes.windows(word.len()).any(|part| part == *word);
    bytes.first() == Some(&b'>') && words.iter().any(contains)
}
