//! Locks of all kinds, multi-locks and RedLocks.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use redlatch::kind::OwnedKind;
use redlatch::{Expiry, Guard, Lock, Member, MultiLock, Owner, RedLock};
use serde_json::{Value, json};

use crate::settings::{Servers, millis};
use crate::{Result, unknown_command};

pub(crate) type Boxed<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// A held lock, with the value that answers return for it.
pub(crate) struct HeldLock {
    value: Value,
    unlock: Box<dyn FnOnce() -> Boxed<'static, ()> + Send>,
}

impl HeldLock {
    pub(crate) async fn unlock(self) -> Result<()> {
        (self.unlock)().await
    }
}

/// Wait limit: `None` without limit.
pub(crate) type Wait = Option<Duration>;

/// A lock with its kind erased.
pub(crate) trait Handle: Send + Sync {
    fn lock(
        &self,
        owner: Owner,
        wait: Wait,
        lease: Option<Duration>,
    ) -> Boxed<'_, Option<HeldLock>>;
    /// Runs a command that inspects the lock or releases it by force.
    fn query<'a>(&'a self, owner: Owner, command: &'a str) -> Boxed<'a, Value>;
}

/// Acquires the lock, without a wait limit.
pub(crate) async fn acquire(lock: &dyn Handle, owner: Owner) -> Result<HeldLock> {
    let held = lock.lock(owner, None, None).await?;
    Ok(held.ok_or("not acquired")?)
}

/// The locks that one worker holds.
pub(crate) struct Locks {
    servers: Arc<Servers>,
    owner: Owner,
    held: Vec<(String, HeldLock)>,
}

impl Locks {
    pub(crate) fn new(servers: Arc<Servers>, owner: Owner) -> Locks {
        Locks {
            servers,
            owner,
            held: Vec::new(),
        }
    }

    pub(crate) async fn run(&mut self, command: &str, args: &[&str]) -> Result<Value> {
        match (command, args) {
            ("lock", [kind, name, wait, lease]) => {
                let wait = match *wait {
                    "-1" => None,
                    wait => Some(millis(wait)?),
                };
                let lease = match *lease {
                    "-1" => None,
                    lease => Some(millis(lease)?),
                };
                let held = self
                    .handle(kind, name)?
                    .lock(self.owner, wait, lease)
                    .await?;
                Ok(held.map_or(json!(false), |held| {
                    let value = held.value.clone();
                    self.held.push((format!("{kind} {name}"), held));
                    value
                }))
            }
            ("unlock", [kind, name]) => {
                let what = format!("{kind} {name}");
                let last = self.held.iter().rposition(|(held, _)| *held == what);
                let last = last.ok_or_else(|| format!("{what} is not held"))?;
                self.held.remove(last).1.unlock().await?;
                Ok(true.into())
            }
            ("token", [name]) => {
                let lock = self.servers.client(0)?.fenced_lock(name);
                Ok(lock.current_token().await?.into())
            }
            (command, [kind, name]) => self.handle(kind, name)?.query(self.owner, command).await,
            _ => Err(unknown_command(command, args)),
        }
    }

    pub(crate) fn handle(&self, kind: &str, name: &str) -> Result<Arc<dyn Handle>> {
        handle(&self.servers, kind, name)
    }

    /// Acquires this many locks, and keeps them.
    pub(crate) async fn hold_many(&mut self, prefix: &str, locks: usize) -> Result<Value> {
        for lock in 0..locks {
            let name = format!("{prefix}{lock}");
            let lock = self.handle("lock", &name)?;
            self.held.push((name, acquire(&*lock, self.owner).await?));
        }
        Ok(true.into())
    }
}

/// Returns a lock of this kind; on the first server, unless its name selects another.
pub(crate) fn handle(servers: &Servers, kind: &str, name: &str) -> Result<Arc<dyn Handle>> {
    if kind == "multi" || kind == "red" {
        let members: Result<Vec<Member>> = name
            .split(',')
            .map(|member| self::member(servers, member))
            .collect();
        return Ok(match kind {
            "multi" => Arc::new(MultiLock::new(members?)),
            // The default, some milliseconds, is too short on a busy machine.
            _ => Arc::new(RedLock::new(members?).member_timeout(Duration::from_secs(1))),
        });
    }
    if kind == "group" {
        let (group, values) = name.split_once(':').ok_or("a group is GROUP:VALUE")?;
        let values: Vec<_> = values
            .split(',')
            .map(|value| servers.group_value(value))
            .collect();
        let client = servers.client(0)?;
        return Ok(match &values[..] {
            // It supports all commands.
            [value] => Arc::new(client.group_lock(group, value.clone())),
            _ => Arc::new(client.multi_lock(group, values)),
        });
    }
    lock_of_kind(servers, kind, name, 0, ToHandle)
}

/// Parses `KIND:NAME[@SERVER]`.
fn member(servers: &Servers, member: &str) -> Result<Member> {
    let (kind, name) = member.split_once(':').ok_or("a member is KIND:NAME")?;
    let (name, server) = match name.rsplit_once('@') {
        Some((name, server)) => (name, server.parse()?),
        None => (name, 0),
    };
    lock_of_kind(servers, kind, name, server, ToMember)
}

/// Converts a lock of any kind.
trait Convert {
    type Output;
    fn convert<K: GuardValue>(self, lock: Lock<K>) -> Self::Output;
}

struct ToHandle;

impl Convert for ToHandle {
    type Output = Arc<dyn Handle>;
    fn convert<K: GuardValue>(self, lock: Lock<K>) -> Self::Output {
        Arc::new(lock)
    }
}

struct ToMember;

impl Convert for ToMember {
    type Output = Member;
    fn convert<K: GuardValue>(self, lock: Lock<K>) -> Self::Output {
        lock.into()
    }
}

/// Creates a lock of this kind, and converts it.
fn lock_of_kind<C: Convert>(
    servers: &Servers,
    kind: &str,
    name: &str,
    server: usize,
    target: C,
) -> Result<C::Output> {
    let client = servers.client(server)?;
    let fair = || match servers.fair_wait {
        Some(wait) => client.fair_lock(name).wait_time(wait),
        None => client.fair_lock(name),
    };
    Ok(match kind {
        "lock" => target.convert(client.lock(name)),
        "nonreentrant" => target.convert(client.lock(name).non_reentrant()),
        "fair" => target.convert(fair()),
        "nonreentrant-fair" => target.convert(fair().non_reentrant()),
        "read" => target.convert(client.read_write_lock(name).read()),
        "write" => target.convert(client.read_write_lock(name).write()),
        "fenced" if name.contains("clock") => {
            target.convert(client.fenced_lock(name).clock_tokens())
        }
        "fenced" => target.convert(client.fenced_lock(name)),
        "spin" => target.convert(client.spin_lock(name)),
        _ => return Err(format!("there is no lock of the kind {kind:?}").into()),
    })
}

/// A kind of lock, with the value that answers return for its guard.
trait GuardValue: OwnedKind {
    fn value(_: &Guard<Lock<Self>>) -> Value
    where
        Self: Sized,
    {
        true.into()
    }
}

impl GuardValue for redlatch::kind::Reentrant {}
impl GuardValue for redlatch::kind::Fair {}
impl GuardValue for redlatch::kind::Read {}
impl GuardValue for redlatch::kind::Write {}
impl GuardValue for redlatch::kind::Spin {}
impl GuardValue for redlatch::kind::Group {}
impl GuardValue for redlatch::kind::Fenced {
    fn value(guard: &Guard<Lock<Self>>) -> Value {
        guard.token().into()
    }
}

/// Sends a request with its options. The request types of locks, multi-locks and RedLocks have no common trait.
macro_rules! request {
    ($lock:expr, $owner:expr, $wait:expr, $lease:expr, $value:expr) => {
        Box::pin(async move {
            let guard = match $wait {
                None => {
                    let request = $lock.lock().owner($owner);
                    Some(match $lease {
                        Some(lease) => request.lease(lease).await?,
                        None => request.await?,
                    })
                }
                Some(wait) => {
                    let request = $lock.try_lock().owner($owner);
                    let request = match wait.is_zero() {
                        true => request,
                        false => request.wait(wait),
                    };
                    match $lease {
                        Some(lease) => request.lease(lease).await?,
                        None => request.await?,
                    }
                }
            };
            Ok(guard.map(|guard| HeldLock {
                value: $value(&guard),
                unlock: Box::new(|| Box::pin(async { Ok(guard.unlock().await?) })),
            }))
        })
    };
}

impl<K: GuardValue> Handle for Lock<K> {
    fn lock(
        &self,
        owner: Owner,
        wait: Wait,
        lease: Option<Duration>,
    ) -> Boxed<'_, Option<HeldLock>> {
        request!(self, owner, wait, lease, K::value)
    }

    fn query<'a>(&'a self, owner: Owner, command: &'a str) -> Boxed<'a, Value> {
        Box::pin(async move {
            Ok(match command {
                "force-unlock" => self.force_unlock().await?.into(),
                "is-locked" => self.is_locked().await?.into(),
                "is-held" => self.is_held_by(owner).await?.into(),
                "holds" => self.hold_count(owner).await?.into(),
                "remaining" => match self.remaining_lease().await? {
                    None => json!(-2),
                    Some(Expiry::Never) => json!(-1),
                    Some(Expiry::In(left)) => json!(left.as_millis() as u64),
                },
                _ => return Err(unknown_command(command, &[])),
            })
        })
    }
}

/// Runs a command on a multi-lock or RedLock. Only their members support the other commands.
fn query_group<'a>(
    command: &'a str,
    is_held: impl Future<Output = redlatch::Result<bool>> + Send + 'a,
) -> Boxed<'a, Value> {
    Box::pin(async move {
        match command {
            "is-held" => Ok(is_held.await?.into()),
            _ => Err(format!("{command} must be sent for each member separately").into()),
        }
    })
}

impl Handle for MultiLock {
    fn lock(
        &self,
        owner: Owner,
        wait: Wait,
        lease: Option<Duration>,
    ) -> Boxed<'_, Option<HeldLock>> {
        request!(self, owner, wait, lease, |_: &_| true.into())
    }

    fn query<'a>(&'a self, owner: Owner, command: &'a str) -> Boxed<'a, Value> {
        query_group(command, self.is_held_by(owner))
    }
}

impl Handle for RedLock {
    fn lock(
        &self,
        owner: Owner,
        wait: Wait,
        lease: Option<Duration>,
    ) -> Boxed<'_, Option<HeldLock>> {
        request!(self, owner, wait, lease, |_: &_| true.into())
    }

    fn query<'a>(&'a self, owner: Owner, command: &'a str) -> Boxed<'a, Value> {
        query_group(command, self.is_held_by(owner))
    }
}
