//! The kinds of exclusive lock.

use std::time::Duration;

use redlatch_interop::{Pending, Worker};
use redlatch_testkit::Server;
use serde_json::Value;

use crate::peers::{until, until_subscribed};

/// A kind of lock, by its name in the protocol.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind(pub(crate) &'static str);

impl Kind {
    /// Returns the lock of this kind with that name, as written in commands.
    pub(crate) fn on(self, name: &str) -> String {
        format!("{} {name}", self.0)
    }

    /// Returns the channel on which a waiter receives releases; `None` if waiters retry without messages.
    pub(crate) fn channel(self, name: &str, waiter: Worker<'_>) -> Option<String> {
        match self.0 {
            "spin" => None,
            "fair" | "nonreentrant-fair" => Some(format!(
                "redisson_lock__channel:{{{name}}}:{}",
                waiter.owner()
            )),
            "read" | "write" => Some(format!("redisson_rwlock:{{{name}}}")),
            _ => Some(format!("redisson_lock__channel:{{{name}}}")),
        }
    }

    /// Returns the field of a holder in the hash.
    pub(crate) fn field(self, holder: Worker<'_>) -> String {
        match self.0 {
            "write" => format!("{}:write", holder.owner()),
            _ => holder.owner(),
        }
    }

    /// Returns whether an owner may hold it more than once.
    pub(crate) fn is_reentrant(self) -> bool {
        !self.0.starts_with("nonreentrant")
    }
}

/// Detects that a worker waits for a lock.
pub(crate) struct WaitDetector<'a> {
    server: &'a Server,
    channel: Option<String>,
    may_miss_message: bool,
    /// Number of commands that the server had run before.
    commands: i64,
}

impl<'a> WaitDetector<'a> {
    /// Must be called before the request is sent to `waiter`.
    pub(crate) fn new(
        server: &'a Server,
        kind: Kind,
        name: &str,
        waiter: Worker<'_>,
    ) -> WaitDetector<'a> {
        WaitDetector {
            server,
            channel: kind.channel(name, waiter),
            may_miss_message: kind.0 == "fenced"
                && waiter.peer.library_version().starts_with("redisson"),
            commands: commands(server),
        }
    }

    /// Waits until the worker waits.
    #[track_caller]
    pub(crate) fn until_waiting(&self) {
        match &self.channel {
            Some(channel) => until_subscribed(self.server, channel, 1),
            None => until("a client polls", || {
                commands(self.server) > self.commands + 20
            }),
        }
    }

    /// Returns the answer of the waiter, which was woken by a release.
    ///
    /// Redisson's `lockAsync`, which `lockAndGetToken` uses, can miss a message: `LockPubSub.onMessage` looks for a listener and then
    /// releases a latch, and the waiter may look at the latch after it has added its listener, both in between. So it gets another
    /// message if it does not answer.
    #[track_caller]
    pub(crate) fn woken(&self, waits: Pending) -> Value {
        let Some(channel) = self.channel.as_ref().filter(|_| self.may_miss_message) else {
            return waits.value();
        };
        waits.value_repeating(Duration::from_secs(5), || {
            let _: i64 = self.server.command(&["PUBLISH", channel, "0"]);
        })
    }
}

fn commands(server: &Server) -> i64 {
    let commands = server.info("total_commands_processed");
    commands.parse().expect("a number")
}

/// Runs each of these tests for each kind of exclusive lock, in both directions; `@not_3_16` as in `both_ways`.
#[macro_export]
macro_rules! each_kind {
    (
        $(fn $test:ident($pair:ident: &Pair, $kind:ident: Kind) $body:block)*
        @not_3_16 $(fn $not_3_16:ident($pair_not_3_16:ident: &Pair, $kind_not_3_16:ident: Kind) $body_not_3_16:block)*
    ) => {
        $(fn $test($pair: &$crate::peers::Pair, $kind: $crate::kinds::Kind) $body)*
        $(fn $not_3_16($pair_not_3_16: &$crate::peers::Pair, $kind_not_3_16: $crate::kinds::Kind) $body_not_3_16)*

        $crate::each_kind!(@kind lock "lock" [] $($test)* [@not_3_16] $($not_3_16)*);
        $crate::each_kind!(@kind fair "fair" [] $($test)* [@not_3_16] $($not_3_16)*);
        $crate::each_kind!(@kind write "write" [] $($test)* [@not_3_16] $($not_3_16)*);
        $crate::each_kind!(@kind spin "spin" [] $($test)* [@not_3_16] $($not_3_16)*);
        // Redisson 3.16.8 has no `RFencedLock`.
        $crate::each_kind!(@kind fenced "fenced" [@not_3_16] $($test)* [] $($not_3_16)*);
        // The late 3.x version does not have these.
        $crate::each_kind!(@kind nonreentrant "nonreentrant" [@newest] $($test)* [] $($not_3_16)*);
        $crate::each_kind!(@kind nonreentrant_fair "nonreentrant-fair" [@newest] $($test)* [] $($not_3_16)*);
    };
    (@kind $kind:ident $word:literal [$($only:tt)*] $($test:ident)* [$($rest:tt)*] $($not_3_16:ident)*) => {
        mod $kind {
            $crate::both_ways! { $($only)*
                $(fn $test(pair: &Pair) { super::$test(pair, $crate::kinds::Kind($word)); })*
                $($rest)*
                $(fn $not_3_16(pair: &Pair) { super::$not_3_16(pair, $crate::kinds::Kind($word)); })*
            }
        }
    };
}
