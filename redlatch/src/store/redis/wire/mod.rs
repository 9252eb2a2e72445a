//! A connection of our own: one socket, many callers.
//!
//! Why not that of a client library: settling relies on the order within one connection, and on
//! knowing whether a step was sent, and sent twice. Waiting relies on sending a subscription and a
//! step together. A library with queues and retries of its own hides all of that, and took half of
//! the throughput.
//!
//! [`pipeline`] decides what is sent, in which order, and which answer belongs to which caller;
//! [`codec`] knows the bytes. This is what waits:
//!
//! 1. A caller puts its command into the buffer under a mutex. If nothing is in flight, or there
//!    are several commands in the buffer, it also writes the buffer to the socket. (Not over TLS,
//!    where only the connection's task writes.)
//! 2. The connection's task reads. It stores all answers of one read under one lock, and wakes
//!    their callers. It writes what these leave in the buffer: when it is notified, behind the
//!    callers that are ready to run.
//! 3. Messages are passed on in the order of the stream: behind the answers before them, before the
//!    answers behind them.
//! 4. When the socket ends, or the task with its runtime, all callers learn at once whether their
//!    command was sent.
//! 5. Commands without an answer are limited: callers wait for [`Room`] before they come here, each
//!    within its own limit. Renewals and releases do not: a client has few, and they must not wait
//!    behind others.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use std::{fmt, io};

use smallvec::SmallVec;
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::task::AbortHandle;
use tokio::time::Instant;

pub(super) use self::codec::{Cmd, Malformed};
use self::codec::{Decoder, Frame};
pub(super) use self::pipeline::{Answered, Expects};
use self::pipeline::{Packing, Pipeline, SlotId};
use self::stream::{Reader, Writer};
pub(super) use self::stream::{Socket, connect_tcp};
use crate::environment::{simulated_number, task};
use crate::metrics::Metrics;
use crate::step::{Batchable, ScriptReply};
use crate::sync::Mutex;

mod codec;
mod pipeline;
mod stream;

/// Receives what no command asked for.
pub(super) trait OnPush: Send + Sync {
    /// Handles a message of the server. Its kind is the first element.
    fn on_push(&self, message: &[ScriptReply]);

    /// Handles the end of the connection. The callers learn of it afterwards.
    fn on_end(&self, error: &WireError);
}

pub(super) type PushHandler = Box<dyn OnPush>;

/// A caller that leaves this many bytes in the buffer writes them: about two steps. So the server
/// works while other callers add their steps, and neither side sleeps in between.
const EARLY_BYTES: usize = 400;

/// Room for a command among those without an answer.
pub(super) type Room = OwnedSemaphorePermit;

/// Why a connection has ended.
#[derive(Debug, Clone)]
pub(super) enum WireError {
    Io(Arc<io::Error>),
    Malformed(Malformed),
    Closed,
    /// By this client.
    Ended,
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireError::Io(error) => error.fmt(f),
            WireError::Malformed(malformed) => malformed.fmt(f),
            WireError::Closed => f.write_str("the server closed the connection"),
            WireError::Ended => f.write_str("the connection ended before the answer arrived"),
        }
    }
}

impl std::error::Error for WireError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            WireError::Io(error) => Some(&**error),
            _ => None,
        }
    }
}

impl From<io::Error> for WireError {
    fn from(error: io::Error) -> WireError {
        WireError::Io(Arc::new(error))
    }
}

/// A connection.
pub(super) struct Wire {
    state: Mutex<State>,
    writer: Writer,
    /// Notified when the connection's task has to write, or to end. What it has to do, it reads
    /// from the state. So it misses nothing if both are one notification: each comes behind the
    /// change of the state.
    changed: Notify,
    /// Whether a step was answered.
    answered: AtomicBool,
    metrics: Metrics,
}

struct State {
    pipeline: Pipeline,
    /// By slot.
    callers: Vec<Caller>,
    /// Whether the connection's task is going to write.
    flush_asked: bool,
    /// Whether the stream itself has bytes to write.
    unflushed: bool,
    end: Option<WireError>,
}

impl Wire {
    /// Spawns the connection's task.
    ///
    /// `replies_are_messages`: replies can be messages, because the connection carries only
    /// subscriptions (RESP2).
    pub(super) fn spawn(
        socket: Socket,
        metrics: Metrics,
        on_push: PushHandler,
        replies_are_messages: bool,
    ) -> WireGuard {
        let Socket { reader, writer } = socket;
        let packing = Packing::new(writer.is_written_by_callers());
        let wire = Arc::new(Wire {
            state: Mutex::new(State {
                pipeline: Pipeline::new(simulated_packing().unwrap_or(packing)),
                callers: Vec::new(),
                flush_asked: false,
                unflushed: false,
                end: None,
            }),
            writer,
            changed: Notify::new(),
            answered: AtomicBool::new(false),
            metrics,
        });
        let driver = Driver {
            wire: wire.clone(),
            on_push,
            replies_are_messages,
        };
        tokio::spawn(task(driver.run(reader)));
        WireGuard { wire, task: None }
    }

    /// Sends a command.
    pub(super) fn send(self: &Arc<Self>, cmd: &Cmd) -> Pending {
        let [pending] = self.send_all([(cmd, Expects::Reply)], None);
        pending
    }

    /// Sends commands one directly behind the other. The last one takes the room until it is
    /// answered.
    pub(super) fn send_all<const N: usize>(
        self: &Arc<Self>,
        commands: [(&Cmd, Expects); N],
        room: Option<Room>,
    ) -> [Pending; N] {
        self.put(room, |pipeline, now| {
            commands.map(|(cmd, expects)| pipeline.send(cmd, expects, now))
        })
    }

    /// Sends a step alone or in a script with others.
    pub(super) fn send_step(
        self: &Arc<Self>,
        cmd: &Cmd,
        script: &'static Batchable,
        room: Option<Room>,
    ) -> Pending {
        let [step] = self.put(room, |pipeline, now| [pipeline.send_step(cmd, script, now)]);
        step
    }

    /// Puts commands into the pipeline. The last one takes the room until it is answered.
    fn put<const N: usize>(
        self: &Arc<Self>,
        mut room: Option<Room>,
        put: impl FnOnce(&mut Pipeline, Instant) -> [SlotId; N],
    ) -> [Pending; N] {
        let now = Instant::now();
        let mut state = self.state.lock();
        let was_idle = state.pipeline.is_idle();
        let slots = put(&mut state.pipeline, now);
        if let Some(&last) = slots.last()
            && room.is_some()
            // Else it is answered already.
            && state.pipeline.is_unanswered(last)
        {
            state.caller(last).room = room.take();
        }
        self.write_soon(&mut state, was_idle);
        drop(state);
        slots.map(|slot| Pending {
            wire: self.clone(),
            slot: Some(slot),
        })
    }

    /// Writes what is in the buffer, or lets the connection's task do it.
    fn write_soon(&self, state: &mut State, was_idle: bool) {
        let bytes = state.pipeline.output().len();
        if (was_idle && bytes > 0) || bytes >= EARLY_BYTES {
            // What fails here, fails again in the connection's task.
            if let Ok(written) = self.writer.try_write(state.pipeline.output()) {
                state.pipeline.wrote(written);
            }
        }
        if !state.flush_asked && state.pipeline.has_output() {
            state.flush_asked = true;
            self.changed.notify_one();
        }
    }

    /// Records that a step was answered. Returns whether it is the first one.
    pub(super) fn record_answer(&self) -> bool {
        !self.answered.load(Ordering::Relaxed) && !self.answered.swap(true, Ordering::Relaxed)
    }

    /// Ends the connection. All callers that wait get an error, and nothing is sent any more.
    pub(super) fn end(&self, error: WireError) {
        let mut state = self.state.lock();
        state.end.get_or_insert(error);
        state.pipeline.end();
        State::wake_answered(state);
        self.changed.notify_one();
    }

    /// Returns whether nothing is waiting to be sent or answered.
    pub(super) fn is_idle(&self) -> bool {
        self.state.lock().pipeline.is_idle()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().end.is_some()
    }

    /// Returns why the connection has ended.
    pub(super) fn end_reason(&self) -> WireError {
        self.state.lock().end.clone().unwrap_or(WireError::Ended)
    }
}

/// Returns small limits for three of four simulated connections, because few tasks reach the real
/// ones.
fn simulated_packing() -> Option<Packing> {
    if simulated_number(4)? == 0 {
        return None;
    }
    let rounds = simulated_number(3)? + 1;
    Some(Packing {
        alone: simulated_number(3)? + 1,
        rounds,
        most_rounds: rounds + simulated_number(3)?,
        steps: simulated_number(4)? + 2,
    })
}

/// Ends the connection when it is dropped.
pub(super) struct WireGuard {
    wire: Arc<Wire>,
    /// A task that ends with the connection.
    task: Option<AbortHandle>,
}

impl WireGuard {
    pub(super) fn wire(&self) -> Arc<Wire> {
        self.wire.clone()
    }

    /// Aborts a task when the connection ends.
    pub(super) fn abort_at_end(&mut self, task: AbortHandle) {
        self.task = Some(task);
    }
}

impl Drop for WireGuard {
    fn drop(&mut self) {
        self.task.iter().for_each(AbortHandle::abort);
        self.wire.end(WireError::Ended);
    }
}

/// Who waits for an answer, and the room that the command takes. Neither is woken or dropped while
/// the connection is locked: that may run code of others, which then come here.
#[derive(Default)]
struct Caller {
    waker: Option<Waker>,
    room: Option<Room>,
}

impl State {
    fn caller(&mut self, slot: SlotId) -> &mut Caller {
        if self.callers.len() <= slot {
            self.callers.resize_with(slot + 1, Caller::default);
        }
        &mut self.callers[slot]
    }

    /// Unlocks the connection, and then wakes the callers whose commands are answered.
    fn wake_answered(mut locked: MutexGuard<'_, State>) {
        let state = &mut *locked;
        let slots = state.pipeline.answered.drain(..);
        let callers = slots.filter_map(|slot| state.callers.get_mut(slot).map(std::mem::take));
        let callers: SmallVec<[Caller; 32]> = callers.collect();
        drop(locked);
        for caller in callers {
            drop(caller.room);
            caller.waker.into_iter().for_each(Waker::wake);
        }
    }
}

/// The answer to a command. A caller that drops it does not wait any more: at once, if it needs no
/// answer.
pub(super) struct Pending {
    wire: Arc<Wire>,
    /// `None` when it was taken.
    slot: Option<SlotId>,
}

impl Pending {
    /// Gives up. Returns whether the command was never sent, and will not be.
    pub(super) fn cancel(&mut self) -> bool {
        let Some(slot) = self.slot.take() else {
            return false;
        };
        let mut state = self.wire.state.lock();
        let unsent = state.pipeline.abandon(slot);
        let is_unanswered = state.pipeline.is_unanswered(slot);
        let caller = state.caller(slot);
        let (waker, room) = (caller.waker.take(), caller.room.take_if(|_| !is_unanswered));
        drop(state);
        drop((waker, room));
        unsent
    }
}

impl Future for Pending {
    type Output = Answered;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answered> {
        let Some(slot) = self.slot else {
            return Poll::Pending;
        };
        let mut state = self.wire.state.lock();
        if let Some(answered) = state.pipeline.take(slot) {
            drop(state);
            self.slot = None;
            return Poll::Ready(answered);
        }
        let waker = &mut state.caller(slot).waker;
        let former = match waker {
            Some(waker) if waker.will_wake(cx.waker()) => None,
            waker => waker.replace(cx.waker().clone()),
        };
        drop(state);
        drop(former);
        Poll::Pending
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// How long a connection that cannot be written to is read.
const REST_LIMIT: Duration = Duration::from_millis(100);

/// The connection's task.
struct Driver {
    wire: Arc<Wire>,
    on_push: PushHandler,
    replies_are_messages: bool,
}

impl Driver {
    async fn run(self, mut reader: Reader) {
        if let Err(error) = self.drive(&mut reader).await {
            self.wire.state.lock().end.get_or_insert(error);
        }
    }

    async fn drive(&self, reader: &mut Reader) -> Result<(), WireError> {
        let wire = &*self.wire;
        let mut decoder = Decoder::default();
        loop {
            let has_output = {
                let state = wire.state.lock();
                if state.end.is_some() {
                    return Ok(());
                }
                state.unflushed || state.pipeline.has_output()
            };
            tokio::select! {
                biased;
                wrote = self.write_all(), if has_output => if let Err(error) = wrote {
                    self.receive_rest(reader, &mut decoder).await;
                    return Err(error.into());
                },
                read = reader.read() => {
                    if read? == 0 {
                        return Err(WireError::Closed);
                    }
                    self.receive(reader, &mut decoder)?;
                }
                () = wire.changed.notified() => {
                    // More callers add their commands, and write some of them.
                    tokio::task::yield_now().await;
                    // Also if nothing is left to write, because a caller has gone.
                    wire.state.lock().flush_asked = false;
                }
            }
        }
    }

    /// Handles what arrived before a write failed: the server may have answered, and then closed
    /// the connection.
    async fn receive_rest(&self, reader: &mut Reader, decoder: &mut Decoder) {
        let rest = async {
            while let Ok(1..) = reader.read().await
                && self.receive(reader, decoder).is_ok()
                && !self.wire.has_ended()
            {}
        };
        // A broken connection ends at once.
        let _ = tokio::time::timeout(REST_LIMIT, rest).await;
    }

    /// Handles all that was read.
    fn receive(&self, reader: &mut Reader, decoder: &mut Decoder) -> Result<(), WireError> {
        let mut at = 0;
        let decoded = loop {
            match self.receive_replies(reader.filled(), &mut at, decoder) {
                Ok(Some(message)) => {
                    self.on_push.on_push(&message);
                    let mut state = self.wire.state.lock();
                    state.pipeline.confirm(&message);
                    State::wake_answered(state);
                }
                Ok(None) => break Ok(()),
                Err(malformed) => break Err(WireError::Malformed(malformed)),
            }
        };
        reader.consume(at);
        decoded
    }

    /// Stores the answers up to the next message, which is returned, and wakes their callers.
    fn receive_replies(
        &self,
        bytes: &[u8],
        at: &mut usize,
        decoder: &mut Decoder,
    ) -> Result<Option<Vec<ScriptReply>>, Malformed> {
        let now = Instant::now();
        let mut state = self.wire.state.lock();
        if state.end.is_some() {
            // What arrives afterwards is for nobody: not even a message.
            return Ok(None);
        }
        let received = loop {
            match decoder.decode(bytes, at) {
                Ok(Some(Frame::Reply(ScriptReply::List(list))))
                    if self.replies_are_messages && is_message(&list) =>
                {
                    break Ok(Some(list));
                }
                Ok(Some(Frame::Reply(reply))) => {
                    if let Err(malformed) = state.pipeline.receive(reply, now) {
                        break Err(malformed);
                    }
                }
                Ok(Some(Frame::Push(message))) => break Ok(Some(message)),
                Ok(None) => break Ok(None),
                Err(malformed) => break Err(malformed),
            }
        };
        State::wake_answered(state);
        received
    }

    /// Writes until the buffer is empty.
    async fn write_all(&self) -> io::Result<()> {
        let wire = &*self.wire;
        std::future::poll_fn(|cx| {
            let state = &mut *wire.state.lock();
            state.flush_asked = false;
            state.pipeline.pack(Instant::now(), |steps| {
                if steps > 1 {
                    wire.metrics.batch_sent(steps);
                }
            });
            while !state.pipeline.output().is_empty() {
                match wire.writer.poll_write(cx, state.pipeline.output()) {
                    Poll::Ready(Ok(0)) => {
                        return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                    }
                    Poll::Ready(Ok(written)) => state.pipeline.wrote(written),
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => return Poll::Pending,
                }
            }
            let flushed = wire.writer.poll_flush(cx);
            state.unflushed = flushed.is_pending();
            flushed
        })
        .await
    }
}

/// Returns whether a reply on a connection with subscriptions is a message or the confirmation of a
/// subscription.
fn is_message(reply: &[ScriptReply]) -> bool {
    let kind = reply.first().and_then(ScriptReply::as_text);
    matches!(kind, Some("message" | "subscribe" | "unsubscribe"))
}

/// However the task ends, also with its runtime.
impl Drop for Driver {
    fn drop(&mut self) {
        let mut state = self.wire.state.lock();
        let error = state.end.get_or_insert(WireError::Ended).clone();
        drop(state);
        self.on_push.on_end(&error);
        self.wire.end(error);
        self.wire.writer.close();
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::AtomicUsize;

    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
    use tokio::sync::Semaphore;

    use super::*;
    use crate::sync::Mutex;

    /// A stream that buffers, as TLS does: what is written has to be flushed.
    #[derive(Clone, Default)]
    struct Buffering(Arc<Mutex<Buffers>>);

    #[derive(Default)]
    struct Buffers {
        written: usize,
        flushed: usize,
        /// Whether the network accepts no more bytes.
        is_full: bool,
        /// Whether the server has closed the connection: writing fails.
        is_closed: bool,
        received: Vec<u8>,
        flusher: Option<Waker>,
        reader: Option<Waker>,
    }

    impl AsyncRead for Buffering {
        fn poll_read(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            into: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            let mut buffers = self.0.lock();
            if buffers.received.is_empty() {
                buffers.reader = Some(cx.waker().clone());
                return Poll::Pending;
            }
            into.put_slice(&std::mem::take(&mut buffers.received));
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Buffering {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            let mut buffers = self.0.lock();
            if buffers.is_closed {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            buffers.written += bytes.len();
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            let mut buffers = self.0.lock();
            if buffers.is_full {
                buffers.flusher = Some(cx.waker().clone());
                return Poll::Pending;
            }
            buffers.flushed = buffers.written;
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    struct Ignored;

    impl OnPush for Ignored {
        fn on_push(&self, _: &[ScriptReply]) {}

        fn on_end(&self, _: &WireError) {}
    }

    /// Waits for something that other tasks do as soon as they run.
    async fn until(what: impl Fn() -> bool) {
        for _ in 0..1000 {
            if what() {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("it does not happen");
    }

    fn connect(stream: &Buffering) -> WireGuard {
        let socket = Socket::other(stream.clone());
        Wire::spawn(socket, Metrics::default(), Box::new(Ignored), false)
    }

    /// Lets the server send this.
    fn reply(stream: &Buffering, bytes: &[u8]) {
        let reader = {
            let mut buffers = stream.0.lock();
            buffers.received.extend_from_slice(bytes);
            buffers.reader.take()
        };
        reader.into_iter().for_each(Waker::wake);
    }

    /// Until the answer, whether its caller has gone, does something else or waits. Else callers
    /// that give up and start again would fill the memory while a server does not answer.
    #[tokio::test]
    async fn commands_take_room_until_they_are_answered() {
        let (stream, rooms) = (Buffering::default(), Arc::new(Semaphore::new(4)));
        let guard = connect(&stream);
        let wire = guard.wire();
        let send = || {
            let room = rooms.clone().try_acquire_owned().ok();
            let ping = Cmd::of(&["PING"]);
            let [sent] = wire.send_all([(&ping, Expects::Reply)], room);
            sent
        };
        drop(send());
        let unpolled = send();
        drop((send(), send()));
        assert_eq!(rooms.available_permits(), 0);
        until(|| stream.0.lock().reader.is_some()).await;
        for answered in 1..=2 {
            reply(&stream, b"+PONG\r\n");
            until(|| rooms.available_permits() == answered).await;
        }
        assert!(unpolled.await.reply.is_some());
        wire.end(WireError::Closed);
        assert_eq!(rooms.available_permits(), 4);
        drop(send());
        assert_eq!(rooms.available_permits(), 4, "nothing is sent any more");
    }

    /// The server answers and closes the connection, and the next command is written before the
    /// answer is read.
    #[tokio::test]
    async fn answer_before_a_failed_write_is_received() {
        let stream = Buffering::default();
        let guard = connect(&stream);
        let wire = guard.wire();
        let answered = wire.send(&Cmd::of(&["PING"]));
        until(|| stream.0.lock().flushed > 0).await;
        {
            let mut buffers = stream.0.lock();
            buffers.received = b"+PONG\r\n".to_vec();
            buffers.is_closed = true;
        }
        let unanswered = wire.send(&Cmd::of(&["PING"]));
        assert!(answered.await.reply.is_some());
        assert!(unanswered.await.reply.is_none());
        assert!(
            matches!(wire.end_reason(), WireError::Io(error) if error.kind() == io::ErrorKind::BrokenPipe)
        );
    }

    /// A reply arrives while the stream waits to send what it has buffered.
    #[tokio::test]
    async fn buffered_bytes_are_flushed_although_a_reply_arrives_meanwhile() {
        let stream = Buffering::default();
        let guard = connect(&stream);
        let wire = guard.wire();
        let first = wire.send(&Cmd::of(&["PING"]));
        until(|| stream.0.lock().flushed > 0).await;
        stream.0.lock().is_full = true;
        let mut second = wire.send(&Cmd::of(&["PING"]));
        until(|| stream.0.lock().flusher.is_some()).await;
        reply(&stream, b"+PONG\r\n");
        assert!(first.await.reply.is_some());
        let pending = poll_fn(|cx| Poll::Ready(Pin::new(&mut second).poll(cx).is_pending()));
        assert!(pending.await);
        let flusher = {
            let mut buffers = stream.0.lock();
            buffers.is_full = false;
            buffers.flusher.take()
        };
        flusher.into_iter().for_each(Waker::wake);
        until(|| {
            let buffers = stream.0.lock();
            buffers.flushed == buffers.written
        })
        .await;
    }

    /// Counts messages.
    #[derive(Clone, Default)]
    struct Messages(Arc<AtomicUsize>);

    impl OnPush for Messages {
        fn on_push(&self, _: &[ScriptReply]) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn on_end(&self, _: &WireError) {}
    }

    /// A connection that carries only subscriptions, with RESP2.
    #[tokio::test]
    async fn replies_that_are_messages_are_not_taken_for_other_replies() {
        let (stream, messages) = (Buffering::default(), Messages::default());
        let socket = Socket::other(stream.clone());
        let guard = Wire::spawn(socket, Metrics::default(), Box::new(messages.clone()), true);
        let wire = guard.wire();
        let confirmed = Expects::Confirmations("subscribe", 1);
        let [subscribed] = wire.send_all([(&Cmd::of(&["SUBSCRIBE", "c"]), confirmed)], None);
        let ping = wire.send(&Cmd::of(&["PING"]));
        let replies = [
            "*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n",
            "*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\n0\r\n",
            "*2\r\n$4\r\npong\r\n$0\r\n\r\n",
        ];
        until(|| stream.0.lock().reader.is_some()).await;
        reply(&stream, replies.concat().as_bytes());
        assert_eq!(subscribed.await.reply, Some(ScriptReply::Nil));
        let pong = ping.await.reply.unwrap();
        assert_eq!(pong.elements().unwrap().len(), 2);
        assert_eq!(messages.0.load(Ordering::Relaxed), 2);
    }

    /// It may say that a subscription has ended which there is again, on the next connection.
    #[tokio::test]
    async fn message_behind_the_end_is_not_handled() {
        let (stream, messages) = (Buffering::default(), Messages::default());
        let socket = Socket::other(stream.clone());
        let guard = Wire::spawn(
            socket,
            Metrics::default(),
            Box::new(messages.clone()),
            false,
        );
        for received in 0..2 {
            until(|| stream.0.lock().reader.is_some()).await;
            assert_eq!(messages.0.load(Ordering::Relaxed), received);
            if received == 1 {
                guard.wire().end(WireError::Ended);
            }
            reply(&stream, b">3\r\n+sunsubscribe\r\n+a\r\n:0\r\n");
        }
        until(|| Arc::strong_count(&messages.0) == 1).await;
        assert_eq!(messages.0.load(Ordering::Relaxed), 1);
    }
}
