//! The network: byte streams between simulated processes and servers, and everything that travels.
//!
//! All that will happen stands in one queue, ordered by time and then by the order in which it was scheduled.
//! A packet takes a random time; the packets of one direction of a connection stay in order, as with TCP.
//! Where a direction is cut, packets wait until it is whole again, as TCP sends them once more; after
//! [`PATIENCE`] the client's side breaks, as the kernel's `TCP_USER_TIMEOUT` makes it, and the server's
//! side learns of that only when the network is whole. A frozen server receives nothing until it continues.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redlatch::simulation::{Connecting, Stream};
use redlatch_robustness::random::Random;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::server::{Config, ConnectionId, Output, Server, Snapshot};
use crate::trace::Trace;

/// How long a client's kernel goes without a sign from the other side.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The wall clock of the servers at the beginning: some day in 2026.
const EPOCH: Duration = Duration::from_secs(1_790_000_000);

/// Which simulated process.
pub type ProcessId = usize;

/// Which server.
pub type HostId = usize;

/// The whole network. Clones are the same network.
#[derive(Debug, Clone)]
pub struct Network {
    state: Arc<Mutex<State>>,
    /// Something was scheduled.
    scheduled: Arc<Notify>,
}

/// The two directions between a process and a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// From the process to the server.
    Up,
    /// From the server to the process.
    Down,
}

#[derive(Debug)]
struct State {
    begun: Instant,
    random: Random,
    /// The longest time that a packet takes.
    latency: Duration,
    hosts: Vec<Host>,
    links: BTreeMap<u64, Link>,
    next_link: u64,
    queue: BTreeMap<(Duration, u64), Event>,
    scheduled: u64,
    cut: BTreeSet<(ProcessId, HostId, Direction)>,
    /// What waits for a direction to be whole again.
    held: Vec<(ProcessId, HostId, Direction, Event)>,
    trace: Trace,
    /// Why the run cannot go on.
    failure: Option<String>,
}

#[derive(Debug)]
struct Host {
    name: String,
    port: u16,
    /// `None`: it is down.
    server: Option<Server>,
    starts: u64,
    frozen: bool,
    /// What arrived while it was frozen.
    backlog: Vec<Event>,
    /// By how much its wall clock is ahead.
    ahead: Duration,
}

/// A connection.
#[derive(Debug)]
struct Link {
    process: ProcessId,
    host: HostId,
    /// The server's side, if it is open.
    server: Option<ConnectionId>,
    /// The client's side.
    state: Side,
    inbox: VecDeque<u8>,
    waker: Option<Waker>,
    /// When the latest packet of each direction arrives.
    last: [Duration; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Connecting,
    Open,
    /// The other side has ended it, perhaps with an error.
    Ended(Option<io::ErrorKind>),
    /// Dropped by the client.
    Closed,
}

#[derive(Debug)]
enum Event {
    /// A client wants to connect.
    Connect(u64),
    /// The client's side is open.
    Connected(u64),
    /// Bytes arrive at the server.
    ToServer(u64, Vec<u8>),
    /// The client's side is gone: arrives at the server.
    ClientGone(u64),
    /// Bytes arrive at the client.
    ToClient(u64, Vec<u8>),
    /// The server has ended the connection: arrives at the client.
    ServerGone(u64, Option<io::ErrorKind>),
    /// The kernel of the process gives up connections to a server that was cut off at this time.
    Impatience(ProcessId, HostId, Duration),
    /// A blocked command of this server times out.
    Deadline(HostId),
}

impl Network {
    /// Creates a network without servers, in which packets take up to `latency`.
    pub fn new(seed: u64, latency: Duration, trace: Trace) -> Network {
        let state = State {
            begun: Instant::now(),
            random: Random::new(seed),
            latency,
            hosts: Vec::new(),
            links: BTreeMap::new(),
            next_link: 0,
            queue: BTreeMap::new(),
            scheduled: 0,
            cut: BTreeSet::new(),
            held: Vec::new(),
            trace,
            failure: None,
        };
        Network {
            state: Arc::new(Mutex::new(state)),
            scheduled: Arc::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a server that runs.
    pub fn add_server(&self, name: &str, port: u16) -> HostId {
        let mut state = self.lock();
        let id = state.hosts.len();
        state.hosts.push(Host {
            name: name.to_owned(),
            port,
            server: None,
            starts: 0,
            frozen: false,
            backlog: Vec::new(),
            ahead: Duration::ZERO,
        });
        state.start(id);
        id
    }

    /// Lets everything happen in its time, until the end of the run.
    pub async fn run(self) {
        loop {
            let (next, wakers) = self.lock().advance();
            wakers.into_iter().for_each(Waker::wake);
            tokio::select! {
                biased;
                () = self.scheduled.notified() => {}
                () = async {
                    match next {
                        Some(next) => tokio::time::sleep_until(next).await,
                        None => std::future::pending().await,
                    }
                } => {}
            }
        }
    }

    /// Why the run cannot go on, if so.
    pub fn failure(&self) -> Option<String> {
        self.lock().failure.clone()
    }

    /// Does something with a server that runs, at its time.
    pub fn with_server<T>(
        &self,
        host: HostId,
        work: impl FnOnce(&mut Server, Duration) -> T,
    ) -> Option<T> {
        let mut state = self.lock();
        let now = state.wall_clock(host);
        state.hosts[host]
            .server
            .as_mut()
            .map(|server| work(server, now))
    }

    /// Connects a process to a server.
    pub fn connect(&self, process: ProcessId, host: &str, port: u16) -> Connecting {
        let mut state = self.lock();
        let is = |one: &Host| one.name == host && one.port == port;
        let Some(host) = state.hosts.iter().position(is) else {
            return Box::pin(std::future::ready(Err(
                io::ErrorKind::HostUnreachable.into()
            )));
        };
        state.next_link += 1;
        let id = state.next_link;
        let link = Link {
            process,
            host,
            server: None,
            state: Side::Connecting,
            inbox: VecDeque::new(),
            waker: None,
            last: [Duration::ZERO; 2],
        };
        state.links.insert(id, link);
        state.send(id, Direction::Up, Event::Connect(id));
        drop(state);
        self.scheduled.notify_one();
        let end = End {
            network: self.clone(),
            link: id,
        };
        Box::pin(async move {
            std::future::poll_fn(|cx| end.poll_connected(cx)).await?;
            Ok(Box::new(end) as Box<dyn Stream>)
        })
    }

    /// Cuts a direction between a process and a server, or makes it whole again.
    pub fn set_cut(&self, process: ProcessId, host: HostId, direction: Direction, cut: bool) {
        self.catch_up();
        let mut state = self.lock();
        let path = (process, host, direction);
        let now = state.now();
        if cut {
            state.cut.insert(path);
            state.schedule(now + PATIENCE, Event::Impatience(process, host, now));
        } else if state.cut.remove(&path) {
            let held = std::mem::take(&mut state.held);
            for (process, host, direction, event) in held {
                if (process, host, direction) == path {
                    state.schedule(now, event);
                } else {
                    state.held.push((process, host, direction, event));
                }
            }
        }
        drop(state);
        self.scheduled.notify_one();
    }

    /// Lets happen what is due already: otherwise it would overtake what was withheld until now.
    fn catch_up(&self) {
        let (_, wakers) = self.lock().advance();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Resets all connections between a process and a server, as a firewall does that forgets them.
    pub fn reset(&self, process: ProcessId, host: HostId) {
        let mut state = self.lock();
        let now = state.now();
        for id in state.links_between(Some(process), Some(host)) {
            state.schedule(
                now,
                Event::ServerGone(id, Some(io::ErrorKind::ConnectionReset)),
            );
            state.schedule(now, Event::ClientGone(id));
        }
        drop(state);
        self.scheduled.notify_one();
    }

    /// The process is gone: its connections are closed.
    pub fn process_died(&self, process: ProcessId) {
        let mut state = self.lock();
        for id in state.links_between(Some(process), None) {
            if let Some(link) = state.links.get_mut(&id) {
                link.state = Side::Closed;
            }
            state.send(id, Direction::Up, Event::ClientGone(id));
        }
        drop(state);
        self.scheduled.notify_one();
    }

    /// Freezes a server, or lets it go on.
    pub fn set_frozen(&self, host: HostId, frozen: bool) {
        self.catch_up();
        let mut state = self.lock();
        state.hosts[host].frozen = frozen;
        let now = state.now();
        if !frozen {
            for event in std::mem::take(&mut state.hosts[host].backlog) {
                state.schedule(now, event);
            }
            state.schedule(now, Event::Deadline(host));
        }
        drop(state);
        self.scheduled.notify_one();
    }

    /// Ends a server's process. Its connections are reset.
    pub fn kill_server(&self, host: HostId) -> Option<Server> {
        let mut state = self.lock();
        let server = state.hosts[host].server.take();
        state.hosts[host].backlog.clear();
        state.hosts[host].frozen = false;
        for id in state.links_between(None, Some(host)) {
            if let Some(link) = state.links.get_mut(&id)
                && link.server.take().is_some()
            {
                let reset = Event::ServerGone(id, Some(io::ErrorKind::ConnectionReset));
                state.send(id, Direction::Down, reset);
            }
        }
        drop(state);
        self.scheduled.notify_one();
        server
    }

    /// Starts a server again, with the data that it had before or without.
    pub fn start_server(&self, host: HostId, data: Option<Snapshot>) {
        let mut state = self.lock();
        state.start(host);
        if let (Some(server), Some(data)) = (state.hosts[host].server.as_mut(), data) {
            server.load(data);
        }
    }

    /// Sets a server's wall clock forward.
    pub fn step_clock(&self, host: HostId, by: Duration) {
        self.lock().hosts[host].ahead += by;
    }

    /// How long packets take at most from now on.
    pub fn set_latency(&self, latency: Duration) {
        self.lock().latency = latency;
    }

    /// The hash of the trace, and its lines if they are kept.
    pub fn take_trace(&self) -> (u64, Vec<String>) {
        let trace = &mut self.lock().trace;
        (trace.hash(), trace.take_lines())
    }

    /// A line for the trace.
    pub fn note(&self, text: impl FnOnce() -> String) {
        let mut state = self.lock();
        let now = state.now();
        state.trace.line(now, text);
    }
}

impl State {
    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn wall_clock(&self, host: HostId) -> Duration {
        EPOCH + self.now() + self.hosts[host].ahead
    }

    fn start(&mut self, id: HostId) {
        let host = &mut self.hosts[id];
        host.starts += 1;
        host.server = Some(Server::new(Config {
            host: host.name.clone(),
            port: host.port,
            run_id: format!("{id:020x}{:020x}", host.starts),
            version: "7.4.0".into(),
            password: None,
        }));
    }

    fn schedule(&mut self, at: Duration, event: Event) {
        self.scheduled += 1;
        self.queue.insert((at, self.scheduled), event);
    }

    /// Sends a packet of a connection.
    fn send(&mut self, id: u64, direction: Direction, event: Event) {
        let longest = self.latency.as_millis().try_into().unwrap_or(usize::MAX);
        let takes = 1 + self.random.below(longest) as u64;
        let at = self.now() + Duration::from_millis(takes);
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let last = &mut link.last[direction as usize];
        *last = at.max(*last);
        let at = *last;
        self.schedule(at, event);
    }

    fn links_between(&self, process: Option<ProcessId>, host: Option<HostId>) -> Vec<u64> {
        let between = self.links.iter().filter(|(_, link)| {
            process.is_none_or(|process| link.process == process)
                && host.is_none_or(|host| link.host == host)
        });
        between.map(|(id, _)| *id).collect()
    }

    /// Lets happen what is due. Returns when the next thing is.
    fn advance(&mut self) -> (Option<Instant>, Vec<Waker>) {
        let mut wakers = Vec::new();
        let now = self.now();
        while let Some(entry) = self.queue.first_entry()
            && entry.key().0 <= now
        {
            let event = entry.remove();
            self.happen(event, &mut wakers);
        }
        let next = self.queue.first_key_value();
        (next.map(|((at, _), _)| self.begun + *at), wakers)
    }

    fn happen(&mut self, event: Event, wakers: &mut Vec<Waker>) {
        let Some(event) = self.withhold(event) else {
            return;
        };
        match event {
            Event::Connect(id) => self.accept(id),
            Event::ToServer(id, bytes) => self.receive(id, &bytes),
            Event::ClientGone(id) => self.client_gone(id),
            Event::Connected(id) => {
                self.at_client(id, wakers, |link| link.state = Side::Open);
            }
            Event::ToClient(id, bytes) => {
                let (process, host) = self.between(id);
                let now = self.now();
                self.trace.bytes(now, &host, &process, &bytes);
                self.at_client(id, wakers, |link| link.inbox.extend(bytes));
            }
            Event::ServerGone(id, error) => {
                self.at_client(id, wakers, |link| link.state = Side::Ended(error));
            }
            Event::Impatience(process, host, since) => {
                let cut = |direction| self.cut.contains(&(process, host, direction));
                if (cut(Direction::Up) || cut(Direction::Down)) && self.now() >= since + PATIENCE {
                    for id in self.links_between(Some(process), Some(host)) {
                        let error = Some(io::ErrorKind::TimedOut);
                        self.at_client(id, wakers, |link| link.state = Side::Ended(error));
                        self.send(id, Direction::Up, Event::ClientGone(id));
                    }
                }
            }
            Event::Deadline(host) => {
                let now = self.wall_clock(host);
                let outputs = self.hosts[host].server.as_mut().map(|one| one.advance(now));
                self.take(host, outputs);
            }
        }
    }

    /// Keeps what cannot arrive now. Returns what can.
    fn withhold(&mut self, event: Event) -> Option<Event> {
        let (id, direction) = match &event {
            Event::Connect(id) | Event::ToServer(id, _) | Event::ClientGone(id) => {
                (*id, Direction::Up)
            }
            Event::Connected(id) | Event::ToClient(id, _) | Event::ServerGone(id, _) => {
                (*id, Direction::Down)
            }
            Event::Impatience(..) => return Some(event),
            Event::Deadline(host) if self.hosts[*host].frozen => return None,
            Event::Deadline(_) => return Some(event),
        };
        let link = self.links.get(&id)?;
        let path = (link.process, link.host, direction);
        if self.cut.contains(&path) {
            self.held.push((path.0, path.1, direction, event));
            return None;
        }
        let host = &mut self.hosts[link.host];
        // The kernel of a frozen server still accepts connections.
        if host.frozen && direction == Direction::Up {
            host.backlog.push(event);
            return None;
        }
        Some(event)
    }

    fn between(&self, id: u64) -> (String, String) {
        let Some(link) = self.links.get(&id) else {
            return ("?".into(), "?".into());
        };
        let host = &self.hosts[link.host].name;
        (format!("process {}#{id}", link.process), host.clone())
    }

    fn at_client(&mut self, id: u64, wakers: &mut Vec<Waker>, change: impl FnOnce(&mut Link)) {
        if let Some(link) = self.links.get_mut(&id)
            && !matches!(link.state, Side::Closed | Side::Ended(_))
        {
            change(link);
            wakers.extend(link.waker.take());
        }
    }

    fn accept(&mut self, id: u64) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let event = match self.hosts[link.host].server.as_mut() {
            Some(server) => {
                link.server = Some(server.connect());
                Event::Connected(id)
            }
            None => Event::ServerGone(id, Some(io::ErrorKind::ConnectionRefused)),
        };
        self.send(id, Direction::Down, event);
    }

    fn receive(&mut self, id: u64, bytes: &[u8]) {
        let (process, name) = self.between(id);
        let elapsed = self.now();
        self.trace.bytes(elapsed, &process, &name, bytes);
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let host = link.host;
        let Some(connection) = link.server else {
            // There is no such connection at this server: it was killed.
            let reset = Event::ServerGone(id, Some(io::ErrorKind::ConnectionReset));
            return self.send(id, Direction::Down, reset);
        };
        let now = self.wall_clock(host);
        let server = self.hosts[host].server.as_mut();
        let outputs = server.map(|server| server.receive(connection, bytes, now));
        self.take(host, outputs);
    }

    fn client_gone(&mut self, id: u64) {
        if let Some(link) = self.links.get_mut(&id) {
            let connection = link.server.take();
            let host = link.host;
            if link.state == Side::Closed {
                self.links.remove(&id);
            }
            if let (Some(connection), Some(server)) = (connection, self.hosts[host].server.as_mut())
            {
                server.disconnect(connection);
            }
        }
    }

    /// Sends what a server has to say.
    fn take(
        &mut self,
        host: HostId,
        outputs: Option<Result<Vec<Output>, crate::server::Unsupported>>,
    ) {
        let outputs = match outputs {
            Some(Ok(outputs)) => outputs,
            Some(Err(error)) => {
                self.failure.get_or_insert(error.to_string());
                return;
            }
            None => return,
        };
        for output in outputs {
            let (to, closes) = match &output {
                Output::Send { to, .. } => (*to, false),
                Output::Close { to } => (*to, true),
            };
            let is = |link: &Link| link.host == host && link.server == Some(to);
            let Some((&id, _)) = self.links.iter().find(|(_, link)| is(link)) else {
                continue;
            };
            let event = match output {
                Output::Send { bytes, .. } => Event::ToClient(id, bytes),
                Output::Close { .. } => Event::ServerGone(id, None),
            };
            self.send(id, Direction::Down, event);
            if closes && let Some(link) = self.links.get_mut(&id) {
                link.server = None;
            }
        }
        let deadline = self.hosts[host]
            .server
            .as_ref()
            .and_then(Server::next_deadline);
        if let Some(deadline) = deadline {
            let offset = EPOCH + self.hosts[host].ahead;
            self.schedule(deadline.saturating_sub(offset), Event::Deadline(host));
        }
    }
}

/// The client's end of a connection.
#[derive(Debug)]
struct End {
    network: Network,
    link: u64,
}

impl End {
    fn poll_connected(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.network.lock();
        let Some(link) = state.links.get_mut(&self.link) else {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        };
        match link.state {
            Side::Connecting => {
                link.waker = Some(cx.waker().clone());
                Poll::Pending
            }
            Side::Open => Poll::Ready(Ok(())),
            Side::Ended(error) => {
                Poll::Ready(Err(error.unwrap_or(io::ErrorKind::ConnectionReset).into()))
            }
            Side::Closed => Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into())),
        }
    }
}

impl AsyncRead for End {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.network.lock();
        let Some(link) = state.links.get_mut(&self.link) else {
            return Poll::Ready(Ok(()));
        };
        if !link.inbox.is_empty() {
            let count = link.inbox.len().min(buf.remaining());
            let bytes: Vec<u8> = link.inbox.drain(..count).collect();
            buf.put_slice(&bytes);
            return Poll::Ready(Ok(()));
        }
        match link.state {
            Side::Ended(Some(error)) => Poll::Ready(Err(error.into())),
            Side::Ended(None) | Side::Closed => Poll::Ready(Ok(())),
            Side::Connecting | Side::Open => {
                link.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl AsyncWrite for End {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.network.lock();
        let side = state.links.get(&self.link).map(|link| link.state);
        if side != Some(Side::Open) {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let bytes = Event::ToServer(self.link, buf.to_vec());
        state.send(self.link, Direction::Up, bytes);
        drop(state);
        self.network.scheduled.notify_one();
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let mut state = self.network.lock();
        if let Some(link) = state.links.get_mut(&self.link)
            && link.state != Side::Closed
        {
            link.state = Side::Closed;
            let id = self.link;
            state.send(id, Direction::Up, Event::ClientGone(id));
            drop(state);
            self.network.scheduled.notify_one();
        }
    }
}
