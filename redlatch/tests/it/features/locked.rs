//! The attribute `locked`, on the embedded store and the paused clock.

use std::fmt::Display;
use std::sync::atomic::Ordering::SeqCst;

use redlatch::{Result, locked};
use tokio::time::Instant;

use crate::common::prelude::*;

/// The error of a program.
#[derive(Debug)]
enum ShopError {
    Busy(String),
    Invalid(std::num::ParseIntError),
    Lock(Error),
}

impl From<Error> for ShopError {
    fn from(error: Error) -> ShopError {
        ShopError::Lock(error)
    }
}

impl From<std::num::ParseIntError> for ShopError {
    fn from(error: std::num::ParseIntError) -> ShopError {
        ShopError::Invalid(error)
    }
}

struct Shop {
    locks: Client,
    /// Number of bodies that run at the same time, and the largest such number.
    running: AtomicU32,
    most: AtomicU32,
}

impl Shop {
    fn new() -> Shop {
        Shop {
            locks: Client::embedded(),
            running: AtomicU32::new(0),
            most: AtomicU32::new(0),
        }
    }

    #[locked(client = self.locks, name = "order:{id}")]
    async fn pay(&self, id: u32) -> Result<()> {
        let running = self.running.fetch_add(1, SeqCst) + 1;
        self.most.fetch_max(running, SeqCst);
        sleep(SECOND).await;
        self.running.fetch_sub(1, SeqCst);
        Ok(())
    }

    /// Its body moves `id`, which `or` uses, too. The value returned early has to be of the same type.
    #[locked(
        client = self.locks,
        name = "order:{id}",
        wait = "2s",
        or = Err(ShopError::Busy(id)),
    )]
    async fn ship(&self, id: String, weight: &str) -> std::result::Result<u32, ShopError> {
        let id = id.into_bytes();
        if id.is_empty() {
            return Ok(0);
        }
        let weight: u32 = weight.parse()?;
        let heavier = async { weight + 1 };
        Ok(heavier.await)
    }

    #[locked(client = self.locks, name = "lease", lease = 10 * SECOND)]
    async fn overrun(&mut self, steps: &mut Vec<u32>) -> Result<()> {
        for step in 0.. {
            steps.push(step);
            sleep(3 * SECOND).await;
        }
        Ok(())
    }

    #[locked(client = self.locks, name = "countdown")]
    async fn re_enter(&self, depth: u32) -> Result<u32> {
        match depth {
            0 => Ok(0),
            _ => Ok(Box::pin(self.re_enter(depth - 1)).await? + 1),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn bodies_with_the_same_name_run_one_after_the_other() {
    let shop = Shop::new();
    let begun = Instant::now();
    let (a, b, c) = tokio::join!(shop.pay(1), shop.pay(1), shop.pay(1));
    a.and(b).and(c).unwrap();
    assert_eq!(shop.most.load(SeqCst), 1);
    assert!(begun.elapsed() >= 3 * SECOND);

    let (a, b) = tokio::join!(shop.pay(1), shop.pay(2));
    a.and(b).unwrap();
    assert_eq!(shop.most.load(SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn or_is_returned_when_the_wait_ends() {
    let shop = Shop::new();
    assert_eq!(shop.ship("7".into(), "5").await.unwrap(), 6);
    let _other = held(&shop.locks.lock("order:7")).await;
    let begun = Instant::now();
    let refused = shop.ship("7".into(), "5").await.unwrap_err();
    assert!(matches!(&refused, ShopError::Busy(id) if id == "7"));
    assert_eq!(begun.elapsed().as_secs(), 2);
}

#[tokio::test(start_paused = true)]
async fn return_and_question_mark_end_the_body_and_release() {
    let shop = Shop::new();
    let invalid = shop.ship("7".into(), "heavy").await.unwrap_err();
    let ShopError::Invalid(invalid) = invalid else {
        panic!("{invalid:?}");
    };
    assert_eq!(invalid.kind(), &std::num::IntErrorKind::InvalidDigit);
    assert!(!shop.locks.lock("order:7").is_locked().await.unwrap());
    assert_eq!(shop.ship(String::new(), "5").await.unwrap(), 0);
    assert!(!shop.locks.lock("order:").is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn errors_of_the_lock_are_converted() {
    let shop = Shop::new();
    let invalid = shop.ship("a\nb".into(), "5").await.unwrap_err();
    let ShopError::Lock(Error::InvalidName { name, .. }) = invalid else {
        panic!("{invalid:?}");
    };
    assert_eq!(name, "order:a\nb");
}

#[tokio::test(start_paused = true)]
async fn body_is_dropped_when_the_lock_is_lost() {
    let mut shop = Shop::new();
    let locks = shop.locks.clone();
    let mut steps = Vec::new();
    let begun = Instant::now();
    let lost = within_limit("lost", shop.overrun(&mut steps)).await;
    assert_lost(lost, Loss::LeaseEnded);
    assert_eq!(begun.elapsed().as_secs(), 10);
    assert_eq!(steps, [0, 1, 2, 3]);
    assert!(!locks.lock("lease").is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn dropped_call_drops_its_body_and_releases() {
    let shop = Shop::new();
    assert!(tokio::time::timeout(SECOND / 2, shop.pay(1)).await.is_err());
    assert_eq!(shop.running.load(SeqCst), 1, "the body has not started");
    shop.locks.flush().await;
    assert!(!shop.locks.lock("order:1").is_locked().await.unwrap());
}

/// Records how many locks are held when it is dropped.
struct Transaction<'a>(&'a Client, &'a AtomicU32);

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        let holds = self.0.status().holds;
        self.1.store(holds.try_into().unwrap(), SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn arguments_are_dropped_before_the_release() {
    #[locked(client = transaction.0, name = "a")]
    async fn commit(transaction: Transaction<'_>) -> Result<u32> {
        let Transaction(_, holds) = &transaction;
        Ok(holds.load(SeqCst))
    }
    let (client, holds) = (Client::embedded(), AtomicU32::new(0));
    assert_eq!(commit(Transaction(&client, &holds)).await.unwrap(), 0);
    assert_eq!(holds.load(SeqCst), 1);
}

/// A block captures only the fields of an argument that it uses.
#[tokio::test(start_paused = true)]
async fn unused_arguments_and_fields_are_dropped_before_the_release() {
    struct Context<'a> {
        _transaction: Transaction<'a>,
        amount: u32,
    }
    #[locked(client = client, name = "a")]
    async fn commit(
        client: &Client,
        context: Context<'_>,
        _unused: Transaction<'_>,
    ) -> Result<u32> {
        Ok(context.amount)
    }
    let (client, [one, two]) = (Client::embedded(), [7, 7].map(AtomicU32::new));
    let context = Context {
        _transaction: Transaction(&client, &one),
        amount: 3,
    };
    let amount = commit(&client, context, Transaction(&client, &two)).await;
    assert_eq!(amount.unwrap(), 3);
    assert_eq!([one.load(SeqCst), two.load(SeqCst)], [1, 1]);
}

/// Adds its name to a list when it is dropped, and whether a lock was held then.
struct Dropped<'a>(&'static str, &'a Log);

struct Log {
    client: Client,
    drops: Mutex<Vec<(&'static str, bool)>>,
}

impl Log {
    fn new() -> Log {
        Log {
            client: Client::embedded(),
            drops: Mutex::default(),
        }
    }
}

impl Drop for Dropped<'_> {
    fn drop(&mut self) {
        let held = self.1.client.status().holds > 0;
        self.1.drops.lock().unwrap().push((self.0, held));
    }
}

struct Parts<'a> {
    id: u32,
    used: Dropped<'a>,
    _unused: Dropped<'a>,
}

impl<'a> Parts<'a> {
    fn new(log: &'a Log) -> Parts<'a> {
        Parts {
            id: 7,
            used: Dropped("used", log),
            _unused: Dropped("unused", log),
        }
    }
}

type Pair<'a> = (Dropped<'a>, Dropped<'a>);

/// Defines the same functions with the attribute and without it.
macro_rules! functions {
    ($module:ident, $log:ident, $id:ident $(, $attribute:meta)?) => {
        #[allow(clippy::toplevel_ref_arg, reason = "the attribute has to accept it, too")]
        mod $module {
            use super::*;

            $(#[$attribute])?
            pub(super) async fn whole(
                $log: &Log,
                $id: u32,
                a: Dropped<'_>,
                mut b: Dropped<'_>,
                _c: Dropped<'_>,
            ) -> Result<()> {
                let _local = Dropped("local", $log);
                b.0 = "changed";
                sleep(SECOND).await;
                let _ = (&a, &b, $id);
                Ok(())
            }

            $(#[$attribute])?
            pub(super) async fn unbound(
                $log: &Log,
                $id: u32,
                a: Dropped<'_>,
                _: Dropped<'_>,
                b: Dropped<'_>,
            ) -> Result<()> {
                let _local = Dropped("local", $log);
                sleep(SECOND).await;
                let _ = (&a, &b, $id);
                Ok(())
            }

            $(#[$attribute])?
            pub(super) async fn fields(
                $log: &Log,
                Parts { id: $id, mut used, .. }: Parts<'_>,
            ) -> Result<()> {
                let _local = Dropped("local", $log);
                used.0 = "changed";
                sleep(SECOND).await;
                let _ = (&used, $id);
                Ok(())
            }

            $(#[$attribute])?
            pub(super) async fn pair($log: &Log, $id: u32, (a, _): Pair<'_>) -> Result<()> {
                let _local = Dropped("local", $log);
                sleep(SECOND).await;
                let _ = (&a, $id);
                Ok(())
            }

            $(#[$attribute])?
            pub(super) async fn references(
                $log: &Log,
                $id: u32,
                ref a: Dropped<'_>,
                (ref mut b, ref c): Pair<'_>,
            ) -> Result<()> {
                let _local = Dropped("local", $log);
                b.0 = "changed";
                sleep(SECOND).await;
                let _ = (a, c, $id);
                Ok(())
            }

            pub(super) async fn method(
                log: &Log,
                parts: Parts<'_>,
                a: Dropped<'_>,
                b: Dropped<'_>,
            ) -> Result<()> {
                parts.$module(log, 7, a, b).await
            }

            impl Parts<'_> {
                $(#[$attribute])?
                async fn $module(
                    self,
                    $log: &Log,
                    $id: u32,
                    _: Dropped<'_>,
                    b: Dropped<'_>,
                ) -> Result<()> {
                    let _local = Dropped("local", $log);
                    sleep(SECOND).await;
                    let _ = (&self.used, &b, $id);
                    Ok(())
                }
            }
        }
    };
}

functions!(ordinary, log, id);
functions!(
    with_lock,
    log,
    id,
    locked(client = log.client, name = "order:{id}")
);

/// Calls one of the functions until it returns, or until it is dropped. Returns what was dropped, in order.
macro_rules! drops {
    ($module:ident, $limit:expr, $log:ident => $function:ident($($argument:expr),*)) => {{
        let all = Log::new();
        let $log = &all;
        let call = $module::$function($log, $($argument),*);
        let ended = tokio::time::timeout($limit, call).await;
        assert_eq!(ended.is_ok(), $limit == HOUR);
        all.drops.into_inner().unwrap()
    }};
}

macro_rules! assert_dropped_before_release {
    ($($call:tt)*) => {
        for limit in [HOUR, SECOND / 2] {
            let ordinary = drops!(ordinary, limit, $($call)*);
            let with_lock = drops!(with_lock, limit, $($call)*);
            assert!(with_lock.iter().all(|(_, held)| *held), "{with_lock:?}");
            let names = |drops: &[(&'static str, bool)]| -> Vec<&str> {
                drops.iter().map(|(name, _)| *name).collect()
            };
            assert_eq!(names(&with_lock), names(&ordinary));
        }
    };
}

/// However the function binds them, and whether it returns or is dropped: as if the body were that of an ordinary function.
#[tokio::test(start_paused = true)]
async fn all_arguments_are_dropped_before_the_release_in_the_usual_order() {
    assert_dropped_before_release!(log => whole(7, Dropped("a", log), Dropped("b", log), Dropped("c", log)));
    assert_dropped_before_release!(log => unbound(7, Dropped("a", log), Dropped("_", log), Dropped("b", log)));
    assert_dropped_before_release!(log => fields(Parts::new(log)));
    assert_dropped_before_release!(log => pair(7, (Dropped("a", log), Dropped("_", log))));
    assert_dropped_before_release!(
        log => references(7, Dropped("a", log), (Dropped("b", log), Dropped("c", log)))
    );
    assert_dropped_before_release!(
        log => method(Parts::new(log), Dropped("_", log), Dropped("b", log))
    );
}

/// The names reach the attribute as expressions in invisible or visible parentheses.
#[tokio::test(start_paused = true)]
async fn names_from_other_macros_are_formatted() {
    macro_rules! function {
        ($function:ident, $id:ident, $name:expr, $kind:expr) => {
            #[locked(client = client, name = $name, kind = $kind)]
            async fn $function(client: &Client, $id: u32) -> Result<bool> {
                client.fair_lock("order:7").is_locked().await
            }
        };
    }
    function!(by_macro, id, "order:{id}", fair);
    function!(in_parentheses, id, ("order:{id}"), (fair));
    let client = Client::embedded();
    assert!(by_macro(&client, 7).await.unwrap());
    assert!(in_parentheses(&client, 7).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn scope_of_an_owner_allows_re_entry() {
    let shop = Shop::new();
    let count = Owner::new().scope(shop.re_enter(3)).await;
    assert_eq!(count.unwrap(), 3);
    // Without it, the function waits for itself.
    assert!(tokio::time::timeout(HOUR, shop.re_enter(3)).await.is_err());
}

/// A function with generics, lifetimes, a pattern, a mutable argument and a hidden type in its result. Its variables have
/// the names of those that the macro adds.
#[locked(client = &client.clone(), name = name.trim(), kind = write)]
async fn first_of<'a, T, const N: usize>(
    client: &Client,
    name: &str,
    mut values: Vec<&'a T>,
    (guard, error): (&str, [u8; N]),
) -> Result<(impl Display + use<'a, T, N>, usize)>
where
    T: Display + ?Sized + 'a,
{
    let write = client.read_write_lock("report");
    assert!(write.write().is_locked().await?);
    let request = values.remove(0);
    let output = guard.len() + error.len();
    Ok((request, output))
}

#[tokio::test(start_paused = true)]
async fn signatures_of_all_kinds_are_kept() {
    let client = Client::embedded();
    let text = String::from("a");
    let (first, len) = first_of(&client, " report ", vec![text.as_str()], ("bc", [0; 3]))
        .await
        .unwrap();
    assert_eq!((first.to_string().as_str(), len), ("a", 5));
}

/// The future can be spawned.
#[tokio::test(start_paused = true)]
async fn futures_are_send() {
    let shop = std::sync::Arc::new(Shop::new());
    let task = tokio::spawn(async move { shop.pay(1).await });
    task.await.unwrap().unwrap();
}

macro_rules! holds_kind {
    ($kind:ident, $client:ident => $handle:expr) => {{
        #[locked(client = $client, name = "a", kind = $kind, wait = "0s", or = Ok(false))]
        async fn is_locked($client: &Client) -> Result<bool> {
            $handle.is_locked().await
        }
        let $client = Client::embedded();
        assert!(is_locked(&$client).await.unwrap(), stringify!($kind));
        let _other = $handle.lock().await.unwrap();
        assert!(stringify!($kind) == "read" || !is_locked(&$client).await.unwrap());
    }};
}

#[tokio::test(start_paused = true)]
async fn body_of_each_kind_runs_while_the_lock_is_held() {
    holds_kind!(fair, client => client.fair_lock("a"));
    holds_kind!(fenced, client => client.fenced_lock("a"));
    holds_kind!(spin, client => client.spin_lock("a"));
    holds_kind!(read, client => client.read_write_lock("a").read());
    holds_kind!(write, client => client.read_write_lock("a").write());
}
