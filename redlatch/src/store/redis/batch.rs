//! Batches: steps that wait to be sent on a connection are sent together, as one script.
//!
//! 1. A caller sends its step alone while few steps are in flight on the connection ([`MAX_ALONE`]). So a client with
//!    little load sends each step at once.
//! 2. Otherwise the step waits. As soon as few scripts are in flight ([`MAX_SCRIPTS`]), a task of the connection
//!    sends the steps of one kind that wait as one script ([`MAX_STEPS`]). On a slow connection it does not wait for
//!    answers ([`MAX_WAIT`]).
//! 3. The script runs the steps one after the other ([`Batchable`]). Each has a reply or an error of its own.
//! 4. If a caller is dropped before its step is sent, the step leaves the queue, and counts as not sent.
//! 5. Without an answer to a script, the outcome of each of its steps is unknown. Steps that wait when the connection
//!    ends were not sent.
//!
//! Not used in a cluster: names have different slots there. And while a slot moves, the server up to 6.2 redirects a
//! script (ASK) as soon as one of its keys is missing, even if another step's key is still there.
//!
//! What a caller sends after it has canceled a step, such as the release that settles it, must not overtake the step.
//! So steps are queued on the connection under a lock ([`Batcher::send_order`]), and only if their callers still wait.
//! Queuing never waits, because the connection has room for any number of commands.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Arg, Cmd, RedisResult, Value};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout};

use super::{add_args, sha1};
use crate::environment::{simulated_batch_limit, task};
use crate::metrics::Metrics;
use crate::step::Batchable;
use crate::sync::{Mutex, wait_for};

/// Number of steps in flight at which further ones wait. With fewer, batches cost the client more time than they save
/// the server.
const MAX_ALONE: usize = 32;

/// Number of scripts in flight at which a batch waits, for at most [`MAX_WAIT`]. More than one, so that the server runs
/// a script while the client handles an answer.
const MAX_SCRIPTS: usize = 4;

/// Steps in a script. Other clients of the server wait for all of them, about 0.1 ms.
const MAX_STEPS: usize = 32;

/// How long steps wait until fewer than [`MAX_SCRIPTS`] are in flight, and after which a batch without an answer no
/// longer counts as in flight. So neither a slow server nor a caller that stops polling its request blocks the queue.
const MAX_WAIT: Duration = Duration::from_millis(5);

/// Queues the steps of one connection, and sends them in batches.
pub(super) struct Batcher {
    /// [`MAX_ALONE`], or what a simulation sets.
    max_alone: usize,
    queue: Mutex<Queue>,
    /// Notified when steps may be sent, and when the queue is closed. Only [`BatchSender`]s wait for it.
    changed: Notify,
    /// Notified when the queue is closed.
    closed: Notify,
    /// Locked while commands are queued on the connection. A caller that cancels its step waits for that, so that
    /// what it sends afterwards is queued behind the step.
    send_order: Mutex<()>,
    metrics: Metrics,
}

#[derive(Default)]
struct Queue {
    scripts_in_flight: usize,
    /// Number of steps in the scripts in flight.
    steps_in_flight: usize,
    /// The steps that wait, by script. The next batch is for the first one.
    waiting: VecDeque<(&'static Batchable, VecDeque<WaitingStep>)>,
    latest_id: u64,
    /// Whether the connection has been replaced.
    closed: bool,
}

struct WaitingStep {
    id: u64,
    /// The command that sends it alone.
    cmd: Cmd,
    answer_sender: oneshot::Sender<SentStep>,
}

impl WaitingStep {
    /// Returns whether its caller waits for the answer.
    fn is_wanted(&self) -> bool {
        !self.answer_sender.is_closed()
    }

    fn send_answer(self, sent_at: Instant, answer: RedisResult<Value>) {
        // An error means that the caller has canceled the step. Its own side handles the unknown outcome.
        let _ = self.answer_sender.send(SentStep::Sent(sent_at, answer));
    }
}

/// What became of a step that waited.
pub(super) enum SentStep {
    /// The connection was replaced before the step was sent.
    Unsent,
    Sent(Instant, RedisResult<Value>),
}

/// When a step is sent.
pub(super) enum Turn {
    /// Now, by its caller.
    Now(ScriptInFlight),
    /// With others.
    Later(QueuedStep),
}

impl Batcher {
    /// Creates the batcher of a connection, and spawns the tasks that send. Dropping the `CloseOnDrop` ends them.
    pub(super) fn new(
        connection: &MultiplexedConnection,
        metrics: Metrics,
    ) -> (Arc<Batcher>, CloseOnDrop) {
        let batcher = Arc::new(Batcher {
            max_alone: simulated_batch_limit().unwrap_or(MAX_ALONE),
            queue: Mutex::default(),
            changed: Notify::new(),
            closed: Notify::new(),
            send_order: Mutex::default(),
            metrics,
        });
        for _ in 0..MAX_SCRIPTS {
            let sender = BatchSender {
                connection: connection.clone(),
                batcher: batcher.clone(),
            };
            tokio::spawn(task(sender.run()));
        }
        (batcher.clone(), CloseOnDrop(batcher))
    }

    /// Decides when a step is sent. `cmd` sends it alone.
    pub(super) fn turn(self: &Arc<Self>, script: &'static Batchable, cmd: &Cmd) -> Turn {
        let mut queue = self.queue.lock();
        let is_idle = queue.steps_in_flight < self.max_alone && queue.waiting.is_empty();
        // A caller that still has a replaced connection learns about it from its own command.
        if is_idle || queue.closed {
            queue.scripts_in_flight += 1;
            queue.steps_in_flight += 1;
            return Turn::Now(ScriptInFlight(self.clone()));
        }
        queue.latest_id += 1;
        let (id, (answer_sender, answer_receiver)) = (queue.latest_id, oneshot::channel());
        let cmd = cmd.clone();
        let step = WaitingStep {
            id,
            cmd,
            answer_sender,
        };
        let is_first = !queue.has_steps();
        match queue.waiting.iter_mut().find(|(other, _)| *other == script) {
            Some((_, steps)) => steps.push_back(step),
            None => queue.waiting.push_back((script, VecDeque::from([step]))),
        }
        if is_first || queue.is_ready() {
            self.changed.notify_one();
        }
        Turn::Later(QueuedStep {
            batcher: self.clone(),
            script,
            id,
            answer_receiver,
        })
    }

    /// Waits until steps can be sent, and takes them. `None`: the queue is closed.
    async fn next_batch(&self) -> Option<Batch> {
        loop {
            let is_ready = self.wait_until(Queue::has_steps).await;
            let is_late = !is_ready
                && timeout(MAX_WAIT, self.wait_until(Queue::is_ready))
                    .await
                    .is_err();
            // So that tasks that the last answers woke can queue their next steps for this batch.
            tokio::task::yield_now().await;
            let mut queue = self.queue.lock();
            if queue.closed {
                return None;
            }
            if (is_late || queue.is_ready())
                && let Some(batch) = queue.take_batch()
            {
                return Some(batch);
            }
        }
    }

    /// Waits until the connection has been replaced.
    async fn until_closed(&self) {
        wait_for(&self.closed, || self.queue.lock().closed.then_some(())).await;
    }

    /// Waits until this holds or the queue is closed. Returns whether a batch can be sent at once.
    async fn wait_until(&self, condition: fn(&Queue) -> bool) -> bool {
        wait_for(&self.changed, || {
            let queue = self.queue.lock();
            (queue.closed || condition(&queue)).then(|| queue.closed || queue.is_ready())
        })
        .await
    }
}

impl Queue {
    fn has_steps(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns whether there are steps to send, and few scripts are in flight.
    fn is_ready(&self) -> bool {
        self.has_steps() && self.scripts_in_flight < MAX_SCRIPTS
    }

    /// Takes the steps of the next script.
    fn take_batch(&mut self) -> Option<Batch> {
        let (script, mut steps) = self.waiting.pop_front()?;
        self.scripts_in_flight += 1;
        self.steps_in_flight += steps.len().min(MAX_STEPS);
        let rest = steps.split_off(steps.len().min(MAX_STEPS));
        if !rest.is_empty() {
            self.waiting.push_back((script, rest));
        }
        let steps = steps.into();
        Some(Batch { script, steps })
    }

    /// Removes a step. Returns false if it has left the queue already.
    fn remove(&mut self, script: &'static Batchable, id: u64) -> bool {
        let Some(i) = self.waiting.iter().position(|(other, _)| *other == script) else {
            return false;
        };
        let steps = &mut self.waiting[i].1;
        let Ok(at) = steps.binary_search_by_key(&id, |step| step.id) else {
            return false;
        };
        steps.remove(at);
        if steps.is_empty() {
            self.waiting.remove(i);
        }
        true
    }
}

/// A script in flight. Dropping it lets the next one be sent.
pub(super) struct ScriptInFlight(Arc<Batcher>);

impl Drop for ScriptInFlight {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock();
        queue.scripts_in_flight -= 1;
        queue.steps_in_flight -= 1;
        if queue.is_ready() {
            drop(queue);
            self.0.changed.notify_one();
        }
    }
}

/// A step in the queue, or sent from there. A caller that does not wait for the answer any more must cancel it.
pub(super) struct QueuedStep {
    batcher: Arc<Batcher>,
    script: &'static Batchable,
    id: u64,
    answer_receiver: oneshot::Receiver<SentStep>,
}

impl QueuedStep {
    /// Waits for the answer. `None`: the step was sent, and there will be no answer.
    pub(super) async fn answer(&mut self) -> Option<SentStep> {
        (&mut self.answer_receiver).await.ok()
    }

    /// Takes the step out of the queue. Returns false if it may have been sent. If so, it is queued on the connection,
    /// and later commands come behind it.
    pub(super) fn cancel(&mut self) -> bool {
        if self.answer_receiver.is_terminated() {
            // It has been answered.
            return false;
        }
        // First: a step that is closed is not queued on the connection any more.
        self.answer_receiver.close();
        let was_queued = self.batcher.queue.lock().remove(self.script, self.id);
        if !was_queued {
            drop(self.batcher.send_order.lock());
        }
        was_queued
    }
}

/// Closes the queue when its connection is replaced.
pub(super) struct CloseOnDrop(Arc<Batcher>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        let unsent = {
            let mut queue = self.0.queue.lock();
            queue.closed = true;
            std::mem::take(&mut queue.waiting)
        };
        self.0.changed.notify_waiters();
        self.0.closed.notify_waiters();
        for step in unsent.into_iter().flat_map(|(_, steps)| steps) {
            // An error means that the caller has canceled the step.
            let _ = step.answer_sender.send(SentStep::Unsent);
        }
    }
}

/// Sends batches on a connection.
#[derive(Clone)]
struct BatchSender {
    connection: MultiplexedConnection,
    batcher: Arc<Batcher>,
}

/// Steps that have left the queue.
struct Batch {
    script: &'static Batchable,
    steps: Vec<WaitingStep>,
}

impl BatchSender {
    async fn run(self) {
        while let Some(batch) = self.batcher.next_batch().await {
            let step_count = batch.steps.len();
            self.batcher.metrics.batch_sent(step_count);
            let mut sending = Box::pin(self.clone().send(batch));
            if timeout(MAX_WAIT, &mut sending).await.is_err() {
                let batcher = self.batcher.clone();
                tokio::spawn(task(async move {
                    tokio::select! {
                        biased;
                        () = sending => {}
                        // So that it does not keep the connection open.
                        () = batcher.until_closed() => {}
                    }
                }));
            }
            // Nothing is notified: this task calls `next_batch` next.
            let mut queue = self.batcher.queue.lock();
            queue.scripts_in_flight -= 1;
            queue.steps_in_flight -= step_count;
        }
    }

    /// Sends the steps in one script, and distributes the answers.
    async fn send(self, mut batch: Batch) {
        if batch.steps.len() == 1 {
            return self.send_alone(batch).await;
        }
        let script = batch.script;
        let evalsha = redis::cmd("EVALSHA").arg(script.sha(sha1)).take();
        let (mut sent_at, mut answer) = self.send_script(evalsha, &mut batch).await;
        if has_code(&answer, "NOSCRIPT") {
            let eval = redis::cmd("EVAL").arg(script.batch_source()).take();
            (sent_at, answer) = self.send_script(eval, &mut batch).await;
        }
        match answer {
            Ok(Value::Array(replies)) if replies.len() == batch.steps.len() => {
                for (step, reply) in batch.steps.into_iter().zip(replies) {
                    step.send_answer(sent_at, Ok(reply));
                }
            }
            // The connection's user must not access the key of one of the steps. The server ran none.
            answer if has_code(&answer, "NOPERM") => self.send_alone(batch).await,
            answer => {
                for step in batch.steps {
                    step.send_answer(sent_at, answer.clone());
                }
            }
        }
    }

    /// Sends the steps in one script, which `cmd` names.
    fn send_script(&self, mut cmd: Cmd, batch: &mut Batch) -> Sending {
        let _send_order = self.batcher.send_order.lock();
        batch.steps.retain(WaitingStep::is_wanted);
        add_arguments(&mut cmd, batch);
        start_sending(self.connection.clone(), cmd)
    }

    /// Sends each step in a script of its own, all at once.
    async fn send_alone(&self, batch: Batch) {
        let sent: Vec<(WaitingStep, Sending)> = {
            let _send_order = self.batcher.send_order.lock();
            let wanted = batch.steps.into_iter().filter(WaitingStep::is_wanted);
            let start = |mut step: WaitingStep| {
                let cmd = std::mem::take(&mut step.cmd);
                let sending = start_sending(self.connection.clone(), cmd);
                (step, sending)
            };
            wanted.map(start).collect()
        };
        for (step, sending) in sent {
            let (sent_at, answer) = sending.await;
            step.send_answer(sent_at, answer);
        }
    }
}

/// A command in flight: when it was sent, and its answer.
type Sending = Pin<Box<dyn Future<Output = (Instant, RedisResult<Value>)> + Send>>;

/// Queues a command on the connection at once: there is always room. Returns a future for its answer.
fn start_sending(mut connection: MultiplexedConnection, cmd: Cmd) -> Sending {
    let sent_at = Instant::now();
    // Without `unconstrained`, a task whose cooperative budget is used up would return from this poll before the
    // command is queued.
    let mut sending = Box::pin(tokio::task::unconstrained(async move {
        (sent_at, connection.send_packed_command(&cmd).await)
    }));
    match sending
        .as_mut()
        .poll(&mut Context::from_waker(Waker::noop()))
    {
        Poll::Ready(sent) => Box::pin(std::future::ready(sent)),
        Poll::Pending => sending,
    }
}

/// Adds the number of keys, the keys and the arguments of all steps.
fn add_arguments(cmd: &mut Cmd, batch: &Batch) {
    let keys = batch.script.keys;
    cmd.arg(keys * batch.steps.len());
    for step in &batch.steps {
        add_args(cmd, arguments(step).take(keys));
    }
    for step in &batch.steps {
        add_args(cmd, arguments(step).skip(keys));
    }
}

/// Returns the keys and arguments of a step: behind EVALSHA, the SHA and the number of keys.
fn arguments(step: &WaitingStep) -> impl Iterator<Item = Arg<&[u8]>> {
    step.cmd.args_iter().skip(3)
}

fn has_code(answer: &RedisResult<Value>, code: &str) -> bool {
    matches!(answer, Ok(Value::ServerError(error)) if error.code() == code)
}

#[cfg(test)]
mod tests {
    use redlatch_testkit::Server;

    use super::*;
    use crate::step::Script;

    static SCRIPT: Script =
        Script::batchable("return redis.call('INCRBY', KEYS[1], ARGV[1])", 1, 1);

    struct Fixture {
        server: Server,
        batcher: Arc<Batcher>,
        close: Option<CloseOnDrop>,
        /// So many that further steps wait.
        in_flight: Vec<ScriptInFlight>,
    }

    fn script() -> &'static Batchable {
        SCRIPT.for_batch(1, 1).unwrap()
    }

    fn increment(key: &str) -> Cmd {
        let mut cmd = redis::cmd("EVAL");
        cmd.arg(SCRIPT.source()).arg(1).arg(key).arg(7);
        cmd
    }

    impl Fixture {
        /// Connects with these credentials: `user:password@` or none.
        async fn new(server: Server, credentials: &str) -> Fixture {
            let url = format!("redis://{credentials}127.0.0.1:{}", server.port());
            let client = redis::Client::open(url).unwrap();
            let connection = client.get_multiplexed_async_connection().await.unwrap();
            let (batcher, close) = Batcher::new(&connection, Metrics::default());
            let mut fixture = Fixture {
                server,
                batcher,
                close: Some(close),
                in_flight: Vec::new(),
            };
            for _ in 0..MAX_ALONE {
                match fixture.batcher.turn(script(), &increment("alone")) {
                    Turn::Now(in_flight) => fixture.in_flight.push(in_flight),
                    Turn::Later(_) => panic!("few steps are in flight"),
                }
            }
            fixture
        }

        fn load_script(&self) {
            let script = script().batch_source();
            let _: String = self.server.command(&["SCRIPT", "LOAD", &script]);
        }

        fn queue(&self, key: &str) -> QueuedStep {
            match self.batcher.turn(script(), &increment(key)) {
                Turn::Later(step) => step,
                Turn::Now(_) => panic!("many steps are in flight"),
            }
        }

        /// Waits until no step is in the queue.
        async fn until_sent(&self) {
            while self.batcher.queue.lock().has_steps() {
                tokio::task::yield_now().await;
            }
            drop(self.batcher.send_order.lock());
        }
    }

    async fn answer(mut step: QueuedStep) -> RedisResult<Value> {
        match step.answer().await.unwrap() {
            SentStep::Sent(_, answer) => answer,
            SentStep::Unsent => panic!("the step was not sent"),
        }
    }

    #[tokio::test]
    async fn steps_that_wait_are_sent_as_one_script() {
        let mut fixture = Fixture::new(Server::start(), "").await;
        fixture.load_script();
        let () = fixture.server.command(&["SET", "b", "text"]);
        let [a, b, c] = ["a", "b", "c"].map(|key| fixture.queue(key));
        fixture.in_flight.clear();
        assert_eq!(answer(a).await, Ok(Value::Int(7)));
        assert!(matches!(answer(b).await, Ok(Value::ServerError(_))));
        assert_eq!(answer(c).await, Ok(Value::Int(7)));
        assert_eq!(fixture.server.calls("evalsha:"), 1);
    }

    #[tokio::test]
    async fn script_has_a_maximum_number_of_steps() {
        let mut fixture = Fixture::new(Server::start(), "").await;
        fixture.load_script();
        let steps: Vec<_> = (0..MAX_STEPS + 1).map(|_| fixture.queue("a")).collect();
        fixture.in_flight.clear();
        for (i, step) in steps.into_iter().enumerate() {
            let sum = 7 * (i64::try_from(i).unwrap() + 1);
            assert_eq!(answer(step).await, Ok(Value::Int(sum)));
        }
        // The last step is sent alone.
        assert_eq!(fixture.server.calls("evalsha:"), 1);
        assert_eq!(fixture.server.calls("eval:"), 1);
    }

    #[tokio::test]
    async fn canceled_step_is_not_sent() {
        let mut fixture = Fixture::new(Server::start(), "").await;
        let [mut a, b] = ["a", "b"].map(|key| fixture.queue(key));
        assert!(a.cancel());
        fixture.in_flight.clear();
        assert_eq!(answer(b).await, Ok(Value::Int(7)));
        let exists: u32 = fixture.server.command(&["EXISTS", "a"]);
        assert_eq!(exists, 0);
    }

    #[tokio::test]
    async fn step_that_was_sent_cannot_be_canceled() {
        let mut fixture = Fixture::new(Server::start(), "").await;
        fixture.load_script();
        fixture.server.freeze();
        let [mut a, mut b] = ["a", "b"].map(|key| fixture.queue(key));
        fixture.in_flight.clear();
        fixture.until_sent().await;
        assert!(!a.cancel());
        let answered_after = Instant::now();
        fixture.server.thaw();
        match b.answer().await {
            Some(SentStep::Sent(sent_at, Ok(Value::Int(7)))) => assert!(sent_at <= answered_after),
            _ => panic!("the step was sent"),
        }
        let value: u32 = fixture.server.command(&["GET", "a"]);
        assert_eq!(value, 7);
    }

    #[tokio::test]
    async fn script_is_not_repeated_for_a_caller_that_has_gone() {
        let mut fixture = Fixture::new(Server::start(), "").await;
        fixture.server.freeze();
        let [mut a, b] = ["a", "b"].map(|key| fixture.queue(key));
        fixture.in_flight.clear();
        fixture.until_sent().await;
        // The server will reply NOSCRIPT. A release that comes now must not be followed by the acquisition.
        assert!(!a.cancel());
        fixture.server.thaw();
        assert_eq!(answer(b).await, Ok(Value::Int(7)));
        let exists: u32 = fixture.server.command(&["EXISTS", "a"]);
        assert_eq!(exists, 0);
    }

    #[tokio::test]
    async fn refused_key_concerns_only_its_step() {
        let server = Server::start();
        let rule = ["ACL", "SETUSER", "bob", "on", ">secret", "+@all", "~a*"];
        let () = server.command(&rule);
        let mut fixture = Fixture::new(server, "bob:secret@").await;
        let [a1, b, a2] = ["a1", "b", "a2"].map(|key| fixture.queue(key));
        fixture.in_flight.clear();
        assert_eq!(answer(a1).await, Ok(Value::Int(7)));
        assert!(has_code(&answer(b).await, "NOPERM"));
        assert_eq!(answer(a2).await, Ok(Value::Int(7)));
    }

    #[tokio::test]
    async fn steps_that_wait_when_the_connection_is_replaced_were_not_sent() {
        let mut fixture = Fixture::new(Server::start(), "").await;
        let mut step = fixture.queue("a");
        drop(fixture.close.take());
        assert!(matches!(step.answer().await, Some(SentStep::Unsent)));
        let later = fixture.batcher.turn(script(), &increment("a"));
        assert!(matches!(later, Turn::Now(_)));
    }

    #[tokio::test]
    async fn broken_connection_is_an_error_for_each_step() {
        let mut fixture = Fixture::new(Server::start(), "").await;
        fixture.server.freeze();
        let steps = ["a", "b"].map(|key| fixture.queue(key));
        fixture.in_flight.clear();
        fixture.until_sent().await;
        fixture.server.kill();
        for step in steps {
            assert!(answer(step).await.is_err());
        }
    }

    /// The callers of steps in flight do not poll their requests any more.
    #[tokio::test]
    async fn steps_do_not_wait_for_callers_that_are_not_polled() {
        let fixture = Fixture::new(Server::start(), "").await;
        let limit = Duration::from_secs(30);
        let answered = timeout(limit, answer(fixture.queue("a"))).await;
        assert_eq!(answered.unwrap(), Ok(Value::Int(7)));
    }

    #[tokio::test]
    async fn batch_in_flight_does_not_keep_its_connection_open() {
        let mut fixture = Fixture::new(Server::start(), "").await;
        fixture.server.freeze();
        let mut steps = ["a", "b"].map(|key| fixture.queue(key));
        fixture.in_flight.clear();
        fixture.until_sent().await;
        // The server does not answer, so the batch gets a task of its own.
        while fixture.batcher.queue.lock().scripts_in_flight > 0 {
            tokio::task::yield_now().await;
        }
        drop(fixture.close.take());
        for step in &mut steps {
            let limit = Duration::from_secs(30);
            assert!(timeout(limit, step.answer()).await.unwrap().is_none());
        }
        fixture.server.thaw();
    }
}
