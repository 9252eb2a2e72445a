//! The client's end of a connection, as the client library reads and writes it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Network;
use super::state::{ClientState, Direction, Event, LinkId};

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
        _: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let id = self.link;
        self.network.change(|state| {
            let side = state.links.get(&id).map(|link| link.state);
            if side != Some(ClientState::Open) {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            state.send(id, Direction::Up, Event::ToServer(id, buf.to_vec()));
            Poll::Ready(Ok(buf.len()))
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
