//! The sockets of connections.

use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use crate::sync::Mutex;

/// Time without any acknowledgment after which the kernel considers the connection broken. Without it, a
/// server that vanished (no RST) would block the one connection for minutes. A server that is only stopped
/// still acknowledges and is not affected.
const TCP_TIMEOUT: Duration = Duration::from_secs(10);

pub(in super::super) trait OtherStream:
    AsyncRead + AsyncWrite + Send + Unpin
{
}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> OtherStream for S {}

/// What bytes are sent over, and several tasks use. Only the connection's task reads; callers write as long as they hold
/// the lock of the connection.
pub(in super::super) enum Socket {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream),
    /// TLS, or simulated. `None` when it is closed.
    Other(Mutex<Option<Box<dyn OtherStream>>>),
}

impl Socket {
    #[cfg_attr(
        not(any(feature = "tls", feature = "simulation")),
        allow(dead_code, reason = "no other streams without these features")
    )]
    pub(in super::super) fn other(stream: impl OtherStream + 'static) -> Socket {
        Socket::Other(Mutex::new(Some(Box::new(stream))))
    }

    /// Closes the stream, although others may still refer to it.
    pub(super) fn close(&self) {
        // It may be closed already.
        let _ = match self {
            Socket::Tcp(stream) => SockRef::from(stream).shutdown(Shutdown::Both),
            #[cfg(unix)]
            Socket::Unix(stream) => SockRef::from(stream).shutdown(Shutdown::Both),
            Socket::Other(stream) => {
                drop(stream.lock().take());
                Ok(())
            }
        };
    }

    /// Returns whether callers can write, too, and not only the connection's task.
    pub(super) fn is_written_by_callers(&self) -> bool {
        !matches!(self, Socket::Other(_))
    }

    /// Writes what can be written at once, if this is possible outside of the connection's task.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.try_write(bytes),
            #[cfg(unix)]
            Socket::Unix(stream) => stream.try_write(bytes),
            Socket::Other(_) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Reads what has arrived: at least one byte, unless the stream has ended.
    pub(super) async fn read(&self, buffer: &mut ReadBuffer) -> io::Result<usize> {
        std::future::poll_fn(|cx| self.poll_read(cx, buffer)).await
    }

    fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut ReadBuffer) -> Poll<io::Result<usize>> {
        let free = buffer.free();
        loop {
            let read = match self {
                Socket::Tcp(stream) => {
                    ready!(stream.poll_read_ready(cx))?;
                    stream.try_read(free)
                }
                #[cfg(unix)]
                Socket::Unix(stream) => {
                    ready!(stream.poll_read_ready(cx))?;
                    stream.try_read(free)
                }
                Socket::Other(stream) => match &mut *stream.lock() {
                    Some(stream) => {
                        let mut chunk = ReadBuf::new(free);
                        ready!(Pin::new(stream).poll_read(cx, &mut chunk))?;
                        Ok(chunk.filled().len())
                    }
                    None => Ok(0),
                },
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(read) => {
                    buffer.filled += read;
                    return Poll::Ready(Ok(read));
                }
            }
        }
    }

    /// Writes some bytes.
    pub(super) fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            let written = match self {
                Socket::Tcp(stream) => {
                    ready!(stream.poll_write_ready(cx))?;
                    stream.try_write(bytes)
                }
                #[cfg(unix)]
                Socket::Unix(stream) => {
                    ready!(stream.poll_write_ready(cx))?;
                    stream.try_write(bytes)
                }
                Socket::Other(stream) => {
                    return match &mut *stream.lock() {
                        Some(stream) => Pin::new(stream).poll_write(cx, bytes),
                        None => Poll::Ready(Ok(0)),
                    };
                }
            };
            match written {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    /// Sends what the stream itself has buffered.
    pub(super) fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Socket::Other(stream) => match &mut *stream.lock() {
                Some(stream) => Pin::new(stream).poll_flush(cx),
                None => Poll::Ready(Ok(())),
            },
            _ => Poll::Ready(Ok(())),
        }
    }
}

/// What was read and not yet decoded. Its memory is used again, without being cleared each time.
pub(super) struct ReadBuffer {
    bytes: Vec<u8>,
    filled: usize,
}

/// Room for what is read at once. A buffer that has grown larger is freed when it is empty.
const READ_BYTES: usize = 16 * 1024;

impl ReadBuffer {
    pub(super) fn new() -> ReadBuffer {
        ReadBuffer {
            bytes: vec![0; READ_BYTES],
            filled: 0,
        }
    }

    pub(super) fn filled(&self) -> &[u8] {
        &self.bytes[..self.filled]
    }

    /// Removes the first bytes.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.bytes.copy_within(bytes..self.filled, 0);
        self.filled -= bytes;
        if self.filled == 0 && self.bytes.len() > READ_BYTES {
            *self = ReadBuffer::new();
        }
    }

    /// Returns room for more. It grows with what has arrived.
    fn free(&mut self) -> &mut [u8] {
        if self.filled == self.bytes.len() {
            self.bytes.resize(self.bytes.len() * 2, 0);
        }
        &mut self.bytes[self.filled..]
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
