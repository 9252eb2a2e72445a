//! The sockets of connections.

use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, tcp};
#[cfg(unix)]
use tokio::net::{UnixStream, unix};
use tokio::task::JoinSet;

use crate::sync::Mutex;

/// Time without any acknowledgment after which the kernel considers the connection broken. Without
/// it, a server that vanished (no RST) would block the one connection for minutes. A server that is
/// only stopped still acknowledges and is not affected.
const TCP_TIMEOUT: Duration = Duration::from_secs(10);

pub(in super::super) trait OtherStream:
    AsyncRead + AsyncWrite + Send + Unpin
{
}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> OtherStream for S {}

/// Both directions of a new stream.
pub(in super::super) struct Socket {
    pub(super) reader: Reader,
    pub(super) writer: Writer,
}

impl Socket {
    pub(in super::super) fn tcp(stream: TcpStream) -> Socket {
        let (reader, writer) = stream.into_split();
        Socket {
            reader: Reader::new(reader),
            writer: Writer::Tcp(writer),
        }
    }

    #[cfg(unix)]
    pub(in super::super) fn unix(stream: UnixStream) -> Socket {
        let (reader, writer) = stream.into_split();
        Socket {
            reader: Reader::new(reader),
            writer: Writer::Unix(writer),
        }
    }

    #[cfg_attr(
        not(any(feature = "tls", feature = "simulation")),
        allow(dead_code, reason = "no other streams without these features")
    )]
    pub(in super::super) fn other(stream: impl OtherStream + 'static) -> Socket {
        let stream = Shared(Arc::new(Mutex::new(Some(Box::new(stream)))));
        Socket {
            reader: Reader::new(stream.clone()),
            writer: Writer::Other(stream),
        }
    }
}

/// A stream that cannot be split into halves. `None` when it is closed.
#[derive(Clone)]
pub(super) struct Shared(Arc<Mutex<Option<Box<dyn OtherStream>>>>);

impl AsyncRead for Shared {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut *self.0.lock() {
            Some(stream) => Pin::new(stream).poll_read(cx, into),
            None => Poll::Ready(Ok(())),
        }
    }
}

/// What several tasks write to, each as long as it holds the lock of the connection.
pub(super) enum Writer {
    Tcp(tcp::OwnedWriteHalf),
    #[cfg(unix)]
    Unix(unix::OwnedWriteHalf),
    /// TLS, or simulated.
    Other(Shared),
}

impl Writer {
    /// Closes the stream, although others may still refer to it.
    pub(super) fn close(&self) {
        // It may be closed already.
        let _ = match self {
            Writer::Tcp(stream) => SockRef::from(stream.as_ref()).shutdown(Shutdown::Both),
            #[cfg(unix)]
            Writer::Unix(stream) => SockRef::from(stream.as_ref()).shutdown(Shutdown::Both),
            Writer::Other(stream) => {
                drop(stream.0.lock().take());
                Ok(())
            }
        };
    }

    /// Returns whether callers can write, too, and not only the connection's task.
    pub(super) fn is_written_by_callers(&self) -> bool {
        !matches!(self, Writer::Other(_))
    }

    /// Writes what can be written at once, if this is possible outside of the connection's task.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Writer::Tcp(stream) => stream.try_write(bytes),
            #[cfg(unix)]
            Writer::Unix(stream) => stream.try_write(bytes),
            Writer::Other(_) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Writes some bytes.
    pub(super) fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            match self {
                Writer::Tcp(stream) => ready!(stream.as_ref().poll_write_ready(cx))?,
                #[cfg(unix)]
                Writer::Unix(stream) => ready!(stream.as_ref().poll_write_ready(cx))?,
                Writer::Other(stream) => {
                    return match &mut *stream.0.lock() {
                        Some(stream) => Pin::new(stream).poll_write(cx, bytes),
                        None => Poll::Ready(Ok(0)),
                    };
                }
            }
            match self.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    /// Sends what the stream itself has buffered.
    pub(super) fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Writer::Other(stream) => match &mut *stream.0.lock() {
                Some(stream) => Pin::new(stream).poll_flush(cx),
                None => Poll::Ready(Ok(())),
            },
            _ => Poll::Ready(Ok(())),
        }
    }
}

/// What the connection's task reads, and what it has not yet decoded of it. Its memory is used
/// again, without being cleared each time.
pub(super) struct Reader {
    /// A half of its own, not a reference to the stream: only this way tokio knows after a read
    /// that filled less than the buffer that there is no more, and does not ask the kernel once
    /// more.
    stream: Box<dyn AsyncRead + Send + Unpin>,
    bytes: Vec<u8>,
    filled: usize,
}

/// Room for what is read at once. A buffer that has grown larger is freed when it is empty.
const READ_BYTES: usize = 16 * 1024;

impl Reader {
    fn new(stream: impl AsyncRead + Send + Unpin + 'static) -> Reader {
        Reader {
            stream: Box::new(stream),
            bytes: vec![0; READ_BYTES],
            filled: 0,
        }
    }

    /// Reads what has arrived: at least one byte, unless the stream has ended. The buffer grows
    /// with what has arrived.
    pub(super) async fn read(&mut self) -> io::Result<usize> {
        if self.filled == self.bytes.len() {
            self.bytes.resize(self.bytes.len() * 2, 0);
        }
        let mut free = ReadBuf::new(&mut self.bytes[self.filled..]);
        poll_fn(|cx| Pin::new(&mut self.stream).poll_read(cx, &mut free)).await?;
        let read = free.filled().len();
        self.filled += read;
        Ok(read)
    }

    pub(super) fn filled(&self) -> &[u8] {
        &self.bytes[..self.filled]
    }

    /// Removes the first bytes.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.bytes.copy_within(bytes..self.filled, 0);
        self.filled -= bytes;
        if self.filled == 0 && self.bytes.len() > READ_BYTES {
            self.bytes = vec![0; READ_BYTES];
        }
    }
}

/// Connects to all addresses of a host concurrently, and returns the first connection.
pub(in super::super) async fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut tries: JoinSet<io::Result<TcpStream>> = JoinSet::new();
    for address in tokio::net::lookup_host((host, port)).await? {
        tries.spawn(TcpStream::connect(address));
    }
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    while let Some(tried) = tries.join_next().await {
        match tried {
            Ok(Ok(stream)) => {
                set_options(&stream)?;
                return Ok(stream);
            }
            Ok(Err(error)) => last = error,
            Err(_) => {}
        }
    }
    Err(last)
}

/// Sends small commands at once, and notices a server that has vanished.
fn set_options(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new()
        .with_time(TCP_TIMEOUT / 2)
        .with_interval(TCP_TIMEOUT / 4);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(TCP_TIMEOUT))?;
    Ok(())
}
