//! The client's end of a connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Network;
use super::state::{ClientState, Direction, Event, LinkId, SOCKET_BUFFER};

#[derive(Debug)]
pub(super) struct ClientStream {
    pub(super) network: Network,
    pub(super) link: LinkId,
}

impl ClientStream {
    pub(super) fn poll_connected(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.network.lock();
        let Some(link) = state.links.get_mut(&self.link) else {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        };
        match link.state {
            ClientState::Connecting => {
                link.waker = Some(cx.waker().clone());
                Poll::Pending
            }
            ClientState::Open => Poll::Ready(Ok(())),
            ClientState::Ended(error) => {
                Poll::Ready(Err(error.unwrap_or(io::ErrorKind::ConnectionReset).into()))
            }
            ClientState::Closed => Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into())),
        }
    }
}

impl AsyncRead for ClientStream {
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
            buf.put_slice(&link.inbox[..count]);
            link.inbox.drain(..count);
            return Poll::Ready(Ok(()));
        }
        match link.state {
            ClientState::Ended(Some(error)) => Poll::Ready(Err(error.into())),
            ClientState::Ended(None) | ClientState::Closed => Poll::Ready(Ok(())),
            ClientState::Connecting | ClientState::Open => {
                link.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let id = self.link;
        self.network.change(|state| {
            let link = state.links.get_mut(&id);
            let Some(link) = link.filter(|link| link.state == ClientState::Open) else {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            };
            let room = SOCKET_BUFFER - link.on_the_way;
            if room == 0 {
                link.waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            let written = &buf[..buf.len().min(room)];
            link.on_the_way += written.len();
            state.send(id, Direction::Up, Event::ToServer(id, written.to_vec()));
            Poll::Ready(Ok(written.len()))
        })
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        let id = self.link;
        self.network.change(|state| {
            if let Some(link) = state.links.get_mut(&id)
                && link.state != ClientState::Closed
            {
                link.state = ClientState::Closed;
                state.send(id, Direction::Up, Event::ClientGone(id));
            }
        });
    }
}
