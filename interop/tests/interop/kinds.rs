//! The kinds of exclusive lock.

use redlatch_interop::Worker;
use redlatch_testkit::Server;

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

/// State to detect that a worker waits.
pub(crate) struct Line<'a> {
    server: &'a Server,
    channel: Option<String>,
    /// Number of commands that the server had run before.
    commands: i64,
}

impl<'a> Line<'a> {
    /// Must be created before `waiter` is sent the request.
    pub(crate) fn of(server: &'a Server, kind: Kind, name: &str, waiter: Worker<'_>) -> Line<'a> {
        Line {
            server,
            channel: kind.channel(name, waiter),
            commands: commands(server),
        }
    }

    /// Waits until the worker waits.
    #[track_caller]
    pub(crate) fn until_waited(&self) {
        match &self.channel {
            Some(channel) => until_subscribed(self.server, channel, 1),
            None => until("a client polls", || {
                commands(self.server) > self.commands + 20
            }),
        }
    }
}

fn commands(server: &Server) -> i64 {
    let commands = server.info("total_commands_processed");
    commands.parse().expect("a number")
}

/// Runs each of these tests for each kind of exclusive lock, in both directions; `@late` as in `both_ways`.
#[macro_export]
macro_rules! each_kind {
    (
        $(fn $test:ident($pair:ident: &Pair, $kind:ident: Kind) $body:block)*
        @late $(fn $late:ident($late_pair:ident: &Pair, $late_kind:ident: Kind) $late_body:block)*
    ) => {
        $(fn $test($pair: &$crate::peers::Pair, $kind: $crate::kinds::Kind) $body)*
        $(fn $late($late_pair: &$crate::peers::Pair, $late_kind: $crate::kinds::Kind) $late_body)*

        $crate::each_kind!(@kind lock "lock" [] $($test)* [@late] $($late)*);
        $crate::each_kind!(@kind fair "fair" [] $($test)* [@late] $($late)*);
        $crate::each_kind!(@kind write "write" [] $($test)* [@late] $($late)*);
        $crate::each_kind!(@kind spin "spin" [] $($test)* [@late] $($late)*);
        // Redisson 3.16.8 has no `RFencedLock`.
        $crate::each_kind!(@kind fenced "fenced" [@late] $($test)* [] $($late)*);
        // The late 3.x version does not have these.
        $crate::each_kind!(@kind nonreentrant "nonreentrant" [@newest] $($test)* [] $($late)*);
        $crate::each_kind!(@kind nonreentrant_fair "nonreentrant-fair" [@newest] $($test)* [] $($late)*);
    };
    (@kind $kind:ident $word:literal [$($only:tt)*] $($test:ident)* [$($rest:tt)*] $($late:ident)*) => {
        mod $kind {
            $crate::both_ways! { $($only)*
                $(fn $test(pair: &Pair) { super::$test(pair, $crate::kinds::Kind($word)); })*
                $($rest)*
                $(fn $late(pair: &Pair) { super::$late(pair, $crate::kinds::Kind($word)); })*
            }
        }
    };
}
