//! The network: byte streams between simulated processes and servers, and packets among the servers.
//!
//! All future events are in one queue, ordered by time and then by the order in which they were scheduled.
//! A packet takes a random time; the packets of one direction of a connection stay in order, as with TCP.
//! While a direction is cut, due packets are withheld. When it is restored, they return to the queue with the
//! time at which they were due, as TCP transmits them once more. After [`TCP_USER_TIMEOUT`] the client's side breaks,
//! as the kernel's `TCP_USER_TIMEOUT` makes it, and the server's side learns of that only when the network is
//! restored. A frozen server receives nothing until it continues.

mod client_stream;
mod state;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use redlatch::simulation::{Connecting, Stream};
use tokio::sync::Notify;

use self::client_stream::ClientStream;
pub(crate) use self::state::EPOCH;
use self::state::{ClientState, Event, Link, State};
pub use self::state::{Direction, HostId, ProcessId, TCP_USER_TIMEOUT};
use crate::server::{Output, Server, Snapshot};
use crate::trace::Trace;

/// The whole network. Clones are the same network.
#[derive(Debug, Clone)]
pub struct Network {
    state: Arc<Mutex<State>>,
    /// Notified when an event was scheduled.
    scheduled: Arc<Notify>,
}

impl Network {
    /// Creates a network without servers, in which packets take up to `latency`.
    pub fn new(seed: u64, latency: Duration, trace: Trace) -> Network {
        let state = State::new(seed, latency, trace);
        Network {
            state: Arc::new(Mutex::new(state)),
            scheduled: Arc::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the network, and wakes the driver.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.lock());
        self.scheduled.notify_one();
        changed
    }

    /// Adds a running server.
    pub fn add_server(&self, name: &str, port: u16) -> HostId {
        self.lock().add_host(name, port, false)
    }

    /// Adds a running Sentinel.
    pub fn add_sentinel(&self, name: &str, port: u16) -> HostId {
        self.lock().add_host(name, port, true)
    }

    /// Runs every event when it is due, until the end of the run.
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

    /// Returns why the run has to end early, if so.
    pub fn failure(&self) -> Option<String> {
        self.lock().failure.clone()
    }

    /// Accesses a running server, at its time.
    pub fn with_server<T>(
        &self,
        host: HostId,
        work: impl FnOnce(&mut Server, Duration) -> T,
    ) -> Option<T> {
        let mut state = self.lock();
        let now = state.wall_clock(host);
        let server = state.hosts[host].server.as_mut();
        server.map(|server| work(server, now))
    }

    /// Changes a running server, at its time, and sends the resulting output.
    pub fn change_server(
        &self,
        host: HostId,
        change: impl FnOnce(&mut Server, Duration) -> Vec<Output>,
    ) {
        self.change(|state| state.at_server(host, |server, now| Ok(change(server, now))));
    }

    /// Returns where clients reach a server.
    pub fn address(&self, host: HostId) -> (String, u16) {
        self.lock().address(host)
    }

    /// Lets a name lead to a server. Existing connections stay where they are.
    pub fn set_name(&self, name: &str, host: HostId) {
        self.note((name, host), || format!("{name} leads to server {host}"));
        self.lock().names.insert(name.to_owned(), host);
    }

    /// Returns whether a server follows this master.
    pub fn follows(&self, replica: HostId, master: HostId) -> bool {
        self.lock().hosts[master].replicas.contains_key(&replica)
    }

    /// Connects a process to a server.
    pub fn connect(&self, process: ProcessId, host: &str, port: u16) -> Connecting {
        let link = self.change(|state| {
            let mut hosts = state.hosts.iter();
            let named = state.names.get(host).copied();
            let host =
                named.or_else(|| hosts.position(|one| one.name == host && one.port == port))?;
            state.next_link += 1;
            let id = state.next_link;
            let link = Link {
                process,
                host,
                server: None,
                state: ClientState::Connecting,
                inbox: Vec::new(),
                waker: None,
                on_the_way: 0,
                last: [Duration::ZERO; 2],
            };
            state.links.insert(id, link);
            state.send(id, Direction::Up, Event::Connect(id));
            Some(id)
        });
        let stream = link.map(|link| ClientStream {
            network: self.clone(),
            link,
        });
        Box::pin(async move {
            let stream = stream.ok_or(io::ErrorKind::HostUnreachable)?;
            std::future::poll_fn(|cx| stream.poll_connected(cx)).await?;
            Ok(Box::new(stream) as Box<dyn Stream>)
        })
    }

    /// Cuts a direction between a process and a server, or restores it.
    pub fn set_cut(&self, process: ProcessId, host: HostId, direction: Direction, cut: bool) {
        self.change(|state| {
            let path = (process, host, direction);
            if cut {
                let now = state.now();
                state.cut.insert(path);
                state.schedule(
                    now + TCP_USER_TIMEOUT,
                    Event::UserTimeout(process, host, now),
                );
            } else if state.cut.remove(&path) {
                state.requeue_withheld();
            }
        });
    }

    /// Cuts both directions between two servers, or restores them.
    pub fn set_separated(&self, one: HostId, other: HostId, separated: bool) {
        self.change(|state| {
            for pair in [(one, other), (other, one)] {
                match separated {
                    true => state.separated.insert(pair),
                    false => state.separated.remove(&pair),
                };
            }
            state.requeue_withheld();
        });
    }

    /// Resets all connections between a process (or all of them) and a server, like a firewall that loses its
    /// state.
    pub fn reset(&self, process: Option<ProcessId>, host: HostId) {
        self.change(|state| {
            for id in state.links_between(process, Some(host)) {
                state.reset(id);
            }
        });
    }

    /// Loses answers to this process: servers handle one in eight packets and then reset the connection. `None`
    /// ends that.
    pub fn set_answer_loss(&self, process: Option<ProcessId>) {
        self.lock().losing_answers = process;
    }

    /// Makes the next packet of this process behind each message and each report of changed keys fail once: it is lost, or
    /// its answer, or it is late. `None` ends that.
    pub fn set_failing_signals(&self, process: Option<ProcessId>) {
        self.lock().set_failing_signals(process);
    }

    /// Closes the connections of a process that has died.
    pub fn process_died(&self, process: ProcessId) {
        self.change(|state| {
            for id in state.links_between(Some(process), None) {
                if let Some(link) = state.links.get_mut(&id) {
                    link.state = ClientState::Closed;
                }
                state.send(id, Direction::Up, Event::ClientGone(id));
            }
        });
    }

    /// Freezes a server, or lets it continue.
    pub fn set_frozen(&self, host: HostId, frozen: bool) {
        self.change(|state| {
            state.hosts[host].frozen = frozen;
            state.requeue_withheld();
        });
    }

    /// Ends a server's process. Its connections are reset.
    pub fn kill_server(&self, host: HostId) -> Option<Server> {
        self.change(|state| state.kill(host))
    }

    /// Restarts a server as a master, with its previous data or without.
    pub fn start_server(&self, host: HostId, data: Option<Snapshot>) {
        let mut state = self.lock();
        state.start(host);
        if let (Some(server), Some(data)) = (state.hosts[host].server.as_mut(), data) {
            server.load(data);
        }
    }

    /// Makes a server follow a running master, with the master's data.
    pub fn follow(&self, replica: HostId, master: HostId) {
        self.change(|state| {
            state.leave_masters(replica);
            let (name, port) = state.address(replica);
            let (master_name, master_port) = state.address(master);
            let host = &mut state.hosts[master];
            let Some(server) = host.server.as_mut() else {
                return;
            };
            let data = server.attach_replica(&name, port);
            let term = state.hosts[replica].terms;
            state.hosts[master].replicas.insert(replica, term);
            state.hosts[replica].replicas.clear();
            state.at_server(replica, |server, _| {
                server.become_replica(&master_name, master_port, data)
            });
        });
    }

    /// Makes a replica a master that accepts writes.
    pub fn promote(&self, replica: HostId) {
        self.change(|state| {
            state.leave_masters(replica);
            state.at_server(replica, |server, _| {
                server.become_master();
                Ok(Vec::new())
            });
        });
    }

    /// Sets a server's wall clock forward.
    pub fn step_clock(&self, host: HostId, by: Duration) {
        self.lock().hosts[host].clock_base += by;
    }

    /// Sets a server's wall clock back.
    pub fn step_clock_back(&self, host: HostId, by: Duration) {
        self.lock().hosts[host].clock_base -= by;
    }

    /// Sets the maximum latency of packets from now on.
    pub fn set_latency(&self, latency: Duration) {
        self.lock().latency = latency;
    }

    /// Returns when servers accepted connections, counted from the time when the network was made.
    pub fn take_connected(&self) -> Vec<Duration> {
        std::mem::take(&mut self.lock().connected)
    }

    /// Returns the hash of the trace, and its lines if they are kept.
    pub fn take_trace(&self) -> (u64, Vec<String>) {
        let trace = &mut self.lock().trace;
        (trace.hash(), trace.take_lines())
    }

    /// Adds a fact to the trace, with a text that describes it.
    pub fn note(&self, fact: impl std::hash::Hash, text: impl FnOnce() -> String) {
        let mut state = self.lock();
        let now = state.now();
        state.trace.add(now, fact, text);
    }
}
