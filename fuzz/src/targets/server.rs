//! Servers that send what the input says, in simulated time.
//!
//! [`Replies`] replies to scripts with the input. It has one item on each line, so that a change of it gives well-formed replies: `$text` is a string, `:7` a number, `_`
//! null, `-ERR text` an error, `*2` a list of the next two items (`%`: a map, `~`: a set), and `>3` a push message of the next three,
//! which arrives before the reply. Any other line is sent as it is.
//!
//! A subscription, and normally a handshake, get the replies of a real server. When the input has ended, the server closes its
//! connections.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use redlatch::simulation::{Connecting, Inside, Process, Stream, Task};
use tokio::io::{
    AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, DuplexStream,
};

/// Largest number of elements of a list, for each level.
const MAX_ELEMENTS: usize = 64;

/// Limit of the simulated time: more than the response timeout, and than a renewal of a lease.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// The bytes that a connection can contain in one direction.
const BUFFER: usize = 1 << 16;

/// The reply to HELLO.
const HELLO: &str = "%3\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n7.4.0\r\n\
                     $4\r\nmode\r\n$10\r\nstandalone\r\n";

/// What a server sends.
pub(super) trait Server: Send + 'static {
    /// Returns whether connections are accepted.
    fn is_open(&self) -> bool;

    /// Returns what the server sends for a command. `None`: it closes the connection.
    fn answer(&mut self, command: &[String]) -> Option<Vec<u8>>;

    /// Returns the size of the pieces in which the next answer arrives.
    fn piece(&mut self) -> usize {
        usize::MAX
    }
}

/// The replies that are left.
#[derive(Debug, Default)]
pub(super) struct Replies {
    lines: VecDeque<String>,
    /// Whether the input also has the replies of the handshake.
    has_handshake: bool,
}

impl Replies {
    /// Creates the replies from the lines of an input.
    pub(super) fn new<'a>(lines: impl Iterator<Item = &'a str>, has_handshake: bool) -> Replies {
        Replies {
            lines: lines.map(str::to_owned).collect(),
            has_handshake,
        }
    }

    /// Returns the next reply as a server sends it, behind the push messages before it. `None`: there is none.
    fn next(&mut self) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        loop {
            let is_push = self.lines.front()?.starts_with('>');
            self.append_item(&mut bytes);
            if !is_push {
                return Some(bytes);
            }
        }
    }

    fn append_item(&mut self, bytes: &mut Vec<u8>) {
        let line = self.lines.pop_front().unwrap_or_else(|| "_".to_owned());
        let (kind, rest) = line.split_at_checked(1).unwrap_or((&line, ""));
        let items_of_one = match kind {
            "*" | "~" | ">" => 1,
            "%" => 2,
            "$" => {
                bytes.extend(format!("${}\r\n{rest}\r\n", rest.len()).as_bytes());
                return;
            }
            _ => {
                bytes.extend(format!("{line}\r\n").as_bytes());
                return;
            }
        };
        let elements = rest
            .parse()
            .map_or(0, |count: usize| count.min(MAX_ELEMENTS));
        bytes.extend(format!("{kind}{elements}\r\n").as_bytes());
        (0..elements * items_of_one).for_each(|_| self.append_item(bytes));
    }
}

impl Server for Replies {
    fn is_open(&self) -> bool {
        !self.lines.is_empty()
    }

    fn answer(&mut self, command: &[String]) -> Option<Vec<u8>> {
        match command.first()?.to_ascii_uppercase().as_str() {
            "HELLO" | "INFO" | "ROLE" if self.has_handshake => self.next(),
            _ => handshake(command).or_else(|| self.next()),
        }
    }
}

/// Returns the replies of a real server to a handshake or a subscription. `None`: the command is neither.
pub(super) fn handshake(command: &[String]) -> Option<Vec<u8>> {
    Some(match &*command.first()?.to_ascii_uppercase() {
        "HELLO" => HELLO.into(),
        "INFO" => "$10\r\nrun_id:abc\r\n".into(),
        "ROLE" => "*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n".into(),
        "CLIENT" => "+OK\r\n".into(),
        name @ ("SUBSCRIBE" | "SSUBSCRIBE" | "UNSUBSCRIBE" | "SUNSUBSCRIBE") => {
            let channel = command.get(1)?;
            let (kind, length) = (name.to_ascii_lowercase(), name.len());
            let channel = format!("${}\r\n{channel}\r\n", channel.len());
            format!(">3\r\n${length}\r\n{kind}\r\n{channel}:1\r\n").into()
        }
        _ => return None,
    })
}

/// Runs work in a process all of whose servers are this one. `None`: it did not end in time.
pub(super) fn in_process<T: Send + 'static>(
    server: impl Server,
    work: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without sockets can be built");
    let process: Arc<dyn Process> = Arc::new(FuzzProcess {
        server: Arc::new(Mutex::new(server)),
        numbers: AtomicU64::new(1),
    });
    let work = Inside::new(Some(process), work);
    runtime.block_on(async { tokio::time::timeout(TIME_LIMIT, work).await.ok() })
}

struct FuzzProcess {
    server: Arc<Mutex<dyn Server>>,
    numbers: AtomicU64,
}

impl Process for FuzzProcess {
    fn connect(&self, _host: &str, _port: u16) -> Connecting {
        let server = self.server.clone();
        Box::pin(async move {
            if !lock(&server).is_open() {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let (client, stream) = tokio::io::duplex(BUFFER);
            tokio::spawn(serve(stream, server));
            Ok(Box::new(client) as Box<dyn Stream>)
        })
    }

    fn random(&self) -> u128 {
        self.owner_number().into()
    }

    fn owner_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    fn poll_runs(&self, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Ready(())
    }

    /// The runtime drops the tasks.
    fn spawned(&self, _task: Weak<dyn Task>) {}
}

fn lock(server: &Mutex<dyn Server>) -> MutexGuard<'_, dyn Server> {
    server.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves a connection until the server closes it, or the client.
async fn serve(stream: DuplexStream, server: Arc<Mutex<dyn Server>>) -> Option<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let command = read_command(&mut stream).await?;
        let (answer, piece) = {
            let mut server = lock(&server);
            (server.answer(&command)?, server.piece().max(1))
        };
        for piece in answer.chunks(piece) {
            stream.write_all(piece).await.ok()?;
            // The client reads it.
            tokio::task::yield_now().await;
        }
    }
}

/// Reads a command: a list of strings.
async fn read_command(stream: &mut BufReader<DuplexStream>) -> Option<Vec<String>> {
    let count = read_number(stream).await?;
    let mut words = Vec::new();
    for _ in 0..count {
        let length = read_number(stream).await?;
        let mut word = vec![0; length + 2];
        stream.read_exact(&mut word).await.ok()?;
        word.truncate(length);
        words.push(String::from_utf8_lossy(&word).into_owned());
    }
    Some(words)
}

/// Reads a line such as `*3` or `$7`.
async fn read_number(stream: &mut BufReader<DuplexStream>) -> Option<usize> {
    let mut line = String::new();
    stream.read_line(&mut line).await.ok()?;
    line.get(1..)?.trim_end().parse().ok()
}
