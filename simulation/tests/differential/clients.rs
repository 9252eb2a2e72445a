//! The real client on the simulated server, compared with a real server.
//!
//! The client talks over TCP to this process, which runs every command on both servers, one after the
//! other, and returns the answer of the simulated one. So everything that the client sends is tested:
//! handshakes, subscriptions, and every script with the client's arguments.

use std::collections::BTreeSet;
use std::future::{Future, IntoFuture as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{Parser, Value};
use redlatch::job::Cron;
use redlatch::{Client, Error, IntoTicketError, MultiLock, Owner, Result};
use tokio::sync::Notify;

use crate::pair::ServerPair;
use crate::state;
use crate::tolerance::Tolerance;

/// A lease that neither expires nor is renewed during the test.
const LONG: Duration = Duration::from_secs(100_000);

/// A lease that is renewed every second.
const SHORT: Duration = Duration::from_secs(3);

/// One command with its arguments as sent.
pub(crate) type Command = Vec<Vec<u8>>;

/// State that the clients of one test share.
#[derive(Clone)]
pub(crate) struct Bridge {
    pair: Arc<Mutex<ServerPair>>,
    recorded: Arc<Mutex<Vec<Command>>>,
}

impl Bridge {
    fn pair(&self) -> MutexGuard<'_, ServerPair> {
        // A connection that found a difference has panicked; the message is in the output.
        self.pair
            .lock()
            .expect("no connection has found a difference")
    }

    fn recorded(&self) -> MutexGuard<'_, Vec<Command>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts connections for as long as the process lives. Returns the port.
    fn listen(&self) -> u16 {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let bridge = self.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let bridge = bridge.clone();
                std::thread::spawn(move || bridge.serve(client));
            }
        });
        port
    }

    /// Runs the commands of a client until it disconnects.
    fn serve(&self, client: TcpStream) {
        client.set_nodelay(true).expect("an option of the socket");
        let mut input = client.try_clone().expect("a second handle");
        let id = self.pair().connect(Some(client));
        let mut parser = Parser::new();
        while let Ok(Value::Array(words)) = parser.parse_value(&mut input) {
            let command: Command = words.into_iter().map(bytes).collect();
            let mut pair = self.pair();
            match command[0].starts_with(b"EVAL") {
                true => pair.run_as(id, &command, Tolerance::Times),
                false => pair.run(id, &command),
            };
            drop(pair);
            self.recorded().push(command);
        }
    }
}

fn bytes(word: Value) -> Vec<u8> {
    match word {
        Value::BulkString(bytes) => bytes,
        other => panic!("a client sends only strings, not {other:?}"),
    }
}

/// Uses all features of the client, on both servers. Returns the commands that it sent, and the servers, which
/// then are without data.
pub(crate) fn run_everything() -> (Vec<Command>, Arc<Mutex<ServerPair>>) {
    let bridge = Bridge {
        pair: Arc::new(Mutex::new(ServerPair::new())),
        recorded: Arc::default(),
    };
    let port = bridge.listen();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = runtime.expect("a runtime");
    runtime.block_on(async {
        let clients = Clients {
            bridge: bridge.clone(),
            one: connect(port, LONG).await,
            other: connect(port, LONG).await,
            renewing: connect(port, SHORT).await,
        };
        for step in [
            clients.locks().await,
            clients.transfers().await,
            clients.fair_locks().await,
            clients.elections().await,
            clients.fenced_locks().await,
            clients.fair_shared().await,
            clients.read_write_locks().await,
            clients.semaphores().await,
            clients.expirable_semaphores().await,
            clients.latches().await,
            clients.multi_locks().await,
            clients.group_locks().await,
            clients.kept_locks().await,
            clients.revocations().await,
            clients.tickets().await,
            clients.jobs_that_run_once().await,
            clients.jobs_with_a_schedule().await,
            clients.renewals().await,
        ] {
            step.expect("the client can use the simulated server");
        }
    });
    let mut pair = bridge.pair();
    let id = pair.connect_resp3();
    state::compare(&mut pair, id);
    pair.run(id, &["FLUSHALL"]);
    drop(pair);
    let recorded = std::mem::take(&mut *bridge.recorded());
    (recorded, bridge.pair)
}

async fn connect(port: u16, watchdog: Duration) -> Client {
    let builder = Client::builder().watchdog_lease(watchdog);
    // Every answer takes a round trip to the real server, too.
    let builder = builder.response_timeout(Duration::from_secs(30));
    let url = format!("redis://127.0.0.1:{port}");
    builder.connect(&url).await.expect("a client connects")
}

struct Clients {
    bridge: Bridge,
    one: Client,
    other: Client,
    renewing: Client,
}

/// Polls until the condition is true.
async fn until<F: Future<Output = bool>>(mut is_so: impl FnMut() -> F) {
    while !is_so().await {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

impl Clients {
    async fn locks(&self) -> Result<()> {
        let (lock, other) = (self.one.lock("name"), self.other.lock("name"));
        let guard = lock.lock().lease(2 * LONG).await?;
        let again = guard.reenter().lease(3 * LONG).await?;
        assert!(other.try_lock().await?.is_none());
        assert_eq!(lock.holders().await?.len(), 1);
        assert!(lock.remaining_lease().await?.is_some());
        again.unlock().await?;
        let waiting = async { other.lock().await?.unlock().await };
        let releasing = async {
            self.subscribed("{name}").await;
            guard.unlock().await
        };
        let (waited, released) = tokio::join!(waiting, releasing);
        waited.and(released)?;
        let _held = lock.lock().await?;
        assert!(other.force_unlock().await?);
        let spin = self.one.spin_lock("spin");
        spin.lock().await?.unlock().await
    }

    /// Polls until a client has subscribed to a channel of this name.
    async fn subscribed(&self, name: &str) {
        let is_it = |command: &Command| {
            let channel = command
                .get(1)
                .map(|channel| String::from_utf8_lossy(channel));
            command[0] == b"SUBSCRIBE" && channel.is_some_and(|channel| channel.contains(name))
        };
        until(|| async { self.bridge.recorded().iter().any(is_it) }).await;
    }

    async fn fair_locks(&self) -> Result<()> {
        let (lock, other) = (self.one.fair_lock("fair"), self.other.fair_lock("fair"));
        let owners = [Owner::new(), Owner::new()];
        let guard = lock.lock().lease(LONG).await?;
        let wait = |n: usize| {
            let (other, owner) = (other.clone(), owners[n]);
            async move {
                until(|| async { other.queue().await.is_ok_and(|queue| queue.len() == n) }).await;
                let guard = other
                    .try_lock()
                    .owner(owner)
                    .wait(LONG)
                    .lease(2 * LONG)
                    .await?;
                guard.expect("its turn comes").unlock().await
            }
        };
        let impatient = async {
            until(|| async { other.queue().await.is_ok_and(|queue| queue.len() == 2) }).await;
            let third = lock.try_lock().wait(Duration::from_secs(1)).await;
            let position = other.position(owners[1]).await?;
            assert_eq!(position, Some(1));
            guard.unlock().await?;
            third.map(drop)
        };
        let (one, two, three) = tokio::join!(wait(0), wait(1), impatient);
        one.and(two).and(three)?;
        let _held = lock.lock().await?;
        assert!(other.force_unlock().await?);
        Ok(())
    }

    async fn elections(&self) -> Result<()> {
        let election = self.one.election("election");
        let leadership = election.campaign("first").await?;
        leadership.proclaim("ready").await?;
        let campaign = self.other.election("election").campaign("second");
        let second = campaign.owner_id().clone();
        let waiting = async { campaign.await?.resign().await };
        let resigning = async {
            until(|| async {
                election
                    .candidates()
                    .await
                    .is_ok_and(|queue| queue.len() == 1)
            })
            .await;
            leadership.resign_to(&second).await
        };
        let (waited, resigned) = tokio::join!(waiting, resigning);
        waited.and(resigned)?;
        let leader = election.leader().await?;
        assert!(leader.is_none_or(|leader| leader.epoch == 2));
        Ok(())
    }

    async fn fenced_locks(&self) -> Result<()> {
        let lock = self.one.fenced_lock("fenced");
        let guard = lock.lock().await?;
        let token = guard.token();
        assert!(self.other.fenced_lock("fenced").try_lock().await?.is_none());
        guard.unlock().await?;
        assert_eq!(lock.current_token().await?, token);
        lock.advance_token(50).await?;
        lock.delete_token().await?;
        let lock = self.one.fenced_lock("clock").clock_tokens();
        lock.lock().await?.unlock().await?;
        lock.delete_token().await?;
        Ok(())
    }

    /// Objects that several owners hold, in the order of the requests.
    async fn fair_shared(&self) -> Result<()> {
        let [data, other] =
            [&self.one, &self.other].map(|client| client.fair_read_write_lock("fair-data"));
        let [permits, others] =
            [&self.one, &self.other].map(|client| client.fair_semaphore("fair-permits", 2));
        let (writer, both) = tokio::try_join!(
            data.write().lock().lease(LONG).into_future(),
            permits.acquire_many(2).lease(LONG).into_future(),
        )?;
        let waiting = async {
            let (reader, permit) = tokio::try_join!(
                other.read().lock().lease(LONG).into_future(),
                others.acquire().lease(LONG).into_future(),
            )?;
            reader.unlock().await?;
            permit.release().await
        };
        let releasing = async {
            until(|| async { data.queue().await.is_ok_and(|queue| queue.len() == 1) }).await;
            until(|| async { permits.queue().await.is_ok_and(|queue| queue.len() == 1) }).await;
            writer.unlock().await?;
            both.release().await
        };
        let (waited, released) = tokio::join!(waiting, releasing);
        waited.and(released)?;
        let _held = data.read().lock().await?;
        assert_eq!(other.read().holders().await?.len(), 1);
        assert!(other.read().force_unlock().await?);
        Ok(())
    }

    async fn read_write_locks(&self) -> Result<()> {
        for prefers in [false, true] {
            let both = |client: &Client| {
                let lock = client.read_write_lock("data");
                if prefers { lock.prefer_writers() } else { lock }
            };
            let (lock, other) = (both(&self.one), both(&self.other));
            let reader = lock.read().lock().lease(LONG).await?;
            let second = other.read().lock().lease(3 * LONG).await?;
            let wait = Duration::from_secs(1);
            assert!(other.write().try_lock().wait(wait).await?.is_none());
            assert_eq!(lock.read().holders().await?.len(), 2);
            reader.unlock().await?;
            second.unlock().await?;
            let writer = lock.write().lock().lease(2 * LONG).await?;
            let both = writer.reenter().await?;
            assert!(other.read().try_lock().await?.is_none());
            both.unlock().await?;
            writer.downgrade().await?.unlock().await?;
            let _held = lock.write().lock().await?;
            assert!(other.write().force_unlock().await?);
            let _held = lock.read().lock().await?;
            assert!(other.read().force_unlock().await?);
        }
        Ok(())
    }

    /// Two owners of one client take turns until a release has acquired the lock for the other, and two anonymous ones until
    /// the client has checked the hold that passes from one to the other, and has served the queue of a fair lock.
    async fn transfers(&self) -> Result<()> {
        let lock = self.one.lock("name");
        let turns = async |owner: Option<Owner>| {
            for _ in 0..10 {
                let request = lock.lock();
                let guard = match owner {
                    Some(owner) => request.owner(owner).await?,
                    None => request.await?,
                };
                // So that the other one waits when it is released, and passes on for longer than 5 ms.
                tokio::time::sleep(Duration::from_millis(1)).await;
                guard.unlock().await?;
            }
            Ok(())
        };
        let queue = async || self.other.fair_lock("name").lock().await?.unlock().await;
        let is_missing = |name: &str| {
            let missing = missing(&self.bridge.recorded());
            missing.iter().any(|script| script.ends_with(name))
        };
        for round in 0.. {
            if is_missing("reentrant/handoff.lua") {
                tokio::try_join!(turns(Some(Owner::new())), turns(Some(Owner::new())))?;
            } else if is_missing("handoff/check_handoff.lua") {
                tokio::try_join!(turns(None), turns(None))?;
            } else if is_missing("fair/serve.lua") {
                tokio::try_join!(turns(None), turns(None), queue())?;
            } else {
                break;
            }
            assert!(
                round < 1_000,
                "not sent: {:?}",
                missing(&self.bridge.recorded())
            );
        }
        Ok(())
    }

    async fn semaphores(&self) -> Result<()> {
        let semaphore = self.one.semaphore("permits");
        assert!(semaphore.try_set_permits(3).await?);
        assert!(!semaphore.try_set_permits(3).await?);
        let permits = semaphore.acquire_many(2).await?;
        assert!(semaphore.try_acquire_many(2).await?.is_none());
        drop(permits);
        semaphore.release(2).await?;
        semaphore.add_permits(-1).await?;
        assert!(semaphore.release_if_exists(1).await?);
        semaphore.available().await?;
        semaphore.drain().await?;
        assert!(semaphore.delete().await?);
        Ok(())
    }

    async fn expirable_semaphores(&self) -> Result<()> {
        let semaphore = self.one.expirable_semaphore("leased");
        assert!(semaphore.try_set_permits(3).await?);
        semaphore.set_permits(4).await?;
        semaphore.add_permits(1).await?;
        let permit = semaphore.acquire().lease(LONG).await?;
        let many = semaphore.acquire_many(3).lease(2 * LONG).await?;
        assert!(
            self.other
                .expirable_semaphore("leased")
                .try_acquire_many(3)
                .await?
                .is_none()
        );
        assert_eq!(semaphore.acquired().await?, 4);
        assert_eq!(semaphore.held_permits().await?.len(), 4);
        let id = permit.ids()[0];
        assert!(self.other.expirable_semaphore("leased").ask(id).await?);
        assert!(semaphore.lease_of(id).await?.is_some());
        assert!(semaphore.update_lease(id, 3 * LONG).await?);
        assert!(semaphore.try_release(id).await?);
        many.release().await?;
        let _held = semaphore.acquire().await?;
        assert!(semaphore.force_release().await?);
        assert!(semaphore.delete().await?);
        Ok(())
    }

    async fn latches(&self) -> Result<()> {
        let latch = self.one.count_down_latch("latch");
        assert!(latch.try_set_count(2).await?);
        latch.count_down().await?;
        let waiting = async { self.other.count_down_latch("latch").wait().await };
        let counting = async {
            self.subscribed("{latch}").await;
            latch.count().await?;
            latch.count_down().await
        };
        let (waited, counted) = tokio::join!(waiting, counting);
        waited.and(counted.map(drop))?;
        latch.try_set_count(9).await?;
        assert!(latch.delete().await?);
        Ok(())
    }

    async fn multi_locks(&self) -> Result<()> {
        let (lock, fenced) = (self.one.lock("name"), self.one.fenced_lock("fenced"));
        let data = self.one.read_write_lock("data");
        let all = MultiLock::new([&lock]).and(&fenced).and(data.write());
        let all = all
            .and(self.one.fair_lock("fair"))
            .and(self.one.spin_lock("spin"));
        let guard = all.lock().lease(LONG).await?;
        let others = MultiLock::new([&self.other.lock("free"), &self.other.lock("name")]);
        assert!(others.try_lock().await?.is_none());
        let mut listing = self.other.list("*");
        let mut listed = 0;
        while let Some(object) = listing.next().await? {
            listed += usize::from(!object.name.is_empty());
        }
        assert!(listed >= 5, "{listed} objects");
        guard.unlock().await
    }

    async fn group_locks(&self) -> Result<()> {
        let both = self.one.multi_lock("group", ["a", "b"]);
        let guard = both.lock().lease(LONG).await?;
        let others = self.other.multi_lock("group", ["c", "b"]);
        assert!(others.try_lock().await?.is_none());
        let value = self.other.group_lock("group", "b");
        assert_eq!(value.holders().await?.len(), 1);
        assert!(value.force_unlock().await?);
        match guard.unlock().await {
            Err(Error::Lost { .. }) => Ok(()),
            other => other,
        }
    }

    async fn kept_locks(&self) -> Result<()> {
        let (lock, fair) = (self.one.lock("kept"), self.one.fair_lock("kept-fair"));
        lock.lock().at_least(2 * LONG).await?.unlock().await?;
        fair.lock().at_least(2 * LONG).await?.unlock().await?;
        assert!(self.other.lock("kept").try_lock().await?.is_none());
        assert!(lock.force_unlock().await? && fair.force_unlock().await?);
        Ok(())
    }

    async fn revocations(&self) -> Result<()> {
        let (lock, other) = (self.one.lock("asked"), self.other.lock("asked"));
        let guard = lock.lock().owner(Owner::new()).await?;
        let asked = other.ask().await?;
        assert_eq!(asked, other.revoke(LONG).await?);
        guard.asked().await;
        guard.unlock().await?;
        let data = [&self.one, &self.other].map(|client| client.read_write_lock("asked-data"));
        let guard = data[0].write().lock().owner(Owner::new()).await?;
        assert!(data[1].write().revoke(LONG).await?.is_some());
        guard.asked().await;
        guard.unlock().await
    }

    async fn tickets(&self) -> Result<()> {
        let data = |client: &Client| client.read_write_lock("moved-data").write();
        let made = data(&self.one).lock().await?.into_ticket().await;
        let ticket = made.map_err(IntoTicketError::into_error)?;
        assert!(data(&self.one).adopt(&ticket).await.is_ok());
        let [lock, other] = [&self.one, &self.other].map(|client| client.fenced_lock("moved"));
        let made = lock.lock().await?.into_ticket_for(LONG).await;
        let ticket = made.map_err(IntoTicketError::into_error)?;
        other.renew_ticket(&ticket, 2 * LONG).await?;
        let adopted = other.adopt(&ticket).await?;
        assert!(lock.adopt(&ticket).await.is_err());
        let made = adopted.into_ticket().await;
        let ticket = made.map_err(IntoTicketError::into_error)?;
        lock.unlock_ticket(&ticket).await?;
        // The adopted guard was dropped.
        self.one.flush().await;
        lock.delete_token().await.map(drop)
    }

    async fn jobs_that_run_once(&self) -> Result<()> {
        let [job, again] = [&self.one, &self.other].map(|client| client.once("job", "slot"));
        assert!(again.earlier_run().await?.is_none());
        let run = job.begin().await?.expect("the first run of the slot");
        assert!(run.finish("done").await?);
        assert!(again.begin().await?.is_err());
        Ok(())
    }

    /// One firing, within a second.
    async fn jobs_with_a_schedule(&self) -> Result<()> {
        let job = self.one.job("scheduled");
        let ran = Notify::new();
        let each_second = job.clone().schedule(Cron::parse("* * * * * *")?);
        let running = each_second.run_until(ran.notified(), async |_| ran.notify_one());
        running.await?;
        assert_eq!(
            job.history().await?.map(|history| history.runs.len()),
            Some(1)
        );
        Ok(())
    }

    /// Holds one object of every kind until each has been renewed, and one until it is in the registry of clients.
    async fn renewals(&self) -> Result<()> {
        let registered = self.one.lock("registered").lock().await?;
        while !missing(&self.bridge.recorded()).is_empty() {
            self.hold_all_until_one_is_lost().await?;
        }
        registered.unlock().await?;
        // Also their entries in the registry of clients, which contain times.
        self.renewing.flush().await;
        self.one.flush().await;
        Ok(())
    }

    /// Holds one object of every kind until all scripts have been sent. On a busy machine one of them may be lost before it is
    /// renewed.
    async fn hold_all_until_one_is_lost(&self) -> Result<()> {
        let client = &self.renewing;
        let lock = client.lock("name").lock().await?;
        let fair = client.fair_lock("fair").lock().await?;
        let data = client.read_write_lock("data");
        let (reader, writer) = (data.read().lock().await?, client.read_write_lock("text"));
        let writer = writer.write().lock().await?;
        let semaphore = client.expirable_semaphore("leased");
        semaphore.set_permits(2).await?;
        let permit = semaphore.acquire().await?;
        let value = client.group_lock("group", "a").lock().await?;
        let fair_data = client.fair_read_write_lock("fair-data");
        let fair_reader = fair_data.read().lock().await?;
        let all_sent = async {
            for looks in 0.. {
                let missing = missing(&self.bridge.recorded());
                if missing.is_empty() {
                    break;
                }
                assert!(looks < 1_000, "not sent: {missing:?}");
                // Reading all scripts takes long, and the client works in the same thread.
                tokio::time::sleep(SHORT / 30).await;
            }
        };
        tokio::select! {
            () = all_sent => {}
            () = lock.lost() => {}
            () = fair.lost() => {}
            () = reader.lost() => {}
            () = writer.lost() => {}
            () = permit.lost() => {}
            () = value.lost() => {}
            () = fair_reader.lost() => {}
        }
        for released in [
            lock.unlock().await,
            fair.unlock().await,
            reader.unlock().await,
            writer.unlock().await,
            permit.release().await,
            value.unlock().await,
            fair_reader.unlock().await,
        ] {
            match released {
                Err(error) if !matches!(error, Error::Lost { .. }) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Returns the script files of the library that no client has sent.
fn missing(recorded: &[Command]) -> Vec<String> {
    let evals = recorded.iter().filter(|command| command[0] == b"EVAL");
    let sent: BTreeSet<_> = evals
        .map(|command| String::from_utf8_lossy(&command[1]))
        .collect();
    let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("../redlatch/src");
    let mut missing = Vec::new();
    let mut folders = vec![library];
    while let Some(folder) = folders.pop() {
        for file in std::fs::read_dir(folder)
            .expect("the library is beside this")
            .flatten()
        {
            let path = file.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "lua") {
                let script = std::fs::read_to_string(&path).expect("a script is text");
                if !sent.iter().any(|sent| sent.contains(&script)) {
                    missing.push(path.display().to_string());
                }
            }
        }
    }
    missing
}
