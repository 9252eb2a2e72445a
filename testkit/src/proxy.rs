//! A network that breaks to order: a TCP proxy in front of a server.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

/// A proxy on a free loopback port. Ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    refusing: bool,
    stalled: bool,
    swallowing: bool,
    swallowed: usize,
    ended: bool,
    open: Vec<TcpStream>,
}

impl Proxy {
    /// A proxy that passes everything on to `port`.
    ///
    /// # Panics
    ///
    /// When there is no free port.
    pub fn to(port: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let own = listener.local_addr().expect("its address").port();
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let of_listener = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let mut state = of_listener.lock();
                if state.ended {
                    return;
                }
                if state.refusing {
                    continue;
                }
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else {
                    continue;
                };
                let _ = client.set_nodelay(true);
                let _ = server.set_nodelay(true);
                for (from, to, replies) in [(&client, &server, false), (&server, &client, true)] {
                    let (from, to) = (clone(from), clone(to));
                    let shared = of_listener.clone();
                    thread::spawn(move || shared.pass_on(from, to, replies));
                }
                state.open.extend([client, server]);
            }
        });
        Proxy { port: own, shared }
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Closes all connections; new ones are let through.
    pub fn cut(&self) {
        for stream in self.shared.lock().open.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// From now on new connections are closed at once (or no longer).
    pub fn refuse(&self, refusing: bool) {
        self.change(|state| state.refusing = refusing);
    }

    /// From now on nothing is passed on, and nothing is closed (or everything again).
    pub fn stall(&self, stalled: bool) {
        self.change(|state| state.stalled = stalled);
    }

    /// From now on what the server answers is thrown away (or no longer).
    pub fn swallow_replies(&self, swallowing: bool) {
        self.change(|state| {
            state.swallowing = swallowing;
            state.swallowed = 0;
        });
    }

    /// Returns when an answer has been thrown away: the server has done its work.
    pub fn wait_until_swallowed(&self) {
        let mut state = self.shared.lock();
        while state.swallowed == 0 {
            state = wait(&self.shared.changed, state);
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.shared.lock());
        self.shared.changed.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.change(|state| {
            state.ended = true;
            state.stalled = false;
        });
        self.cut();
        // Lets the listener see that it has ended.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn pass_on(&self, mut from: TcpStream, mut to: TcpStream, replies: bool) {
        let mut buffer = [0; 16 * 1024];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            let mut state = self.lock();
            while state.stalled {
                state = wait(&self.changed, state);
            }
            if replies && state.swallowing {
                state.swallowed += read;
                self.changed.notify_all();
                continue;
            }
            drop(state);
            if to.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    }
}

fn wait<'a>(
    changed: &Condvar,
    state: std::sync::MutexGuard<'a, State>,
) -> std::sync::MutexGuard<'a, State> {
    changed.wait(state).unwrap_or_else(|e| e.into_inner())
}

fn clone(stream: &TcpStream) -> TcpStream {
    stream.try_clone().expect("another handle of the socket")
}
