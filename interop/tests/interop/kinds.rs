//! The kinds of exclusive lock.

use redlatch_interop::Worker;
use redlatch_testkit::Server;

use crate::stand::{until, until_subscribed};

/// A kind of lock, by its word in the protocol.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind(pub(crate) &'static str);

impl Kind {
    /// This kind of lock of that name, as commands say it.
    pub(crate) fn on(self, name: &str) -> String {
        format!("{} {name}", self.0)
    }

    /// Where whoever waits hears of a release; `None` where waiters look again by themselves.
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

    /// What a holder is called in the hash.
    pub(crate) fn field(self, holder: Worker<'_>) -> String {
        match self.0 {
            "write" => format!("{}:write", holder.owner()),
            _ => holder.owner(),
        }
    }

    /// Whether an owner may have it more than once.
    pub(crate) fn is_reentrant(self) -> bool {
        !self.0.starts_with("nonreentrant")
    }
}

/// What is needed to wait until somebody waits.
pub(crate) struct Line<'a> {
    server: &'a Server,
    channel: Option<String>,
    /// The messages that waiters send when they look again.
    asked: Option<i64>,
}

impl<'a> Line<'a> {
    /// Before `waiter` is told to wait.
    pub(crate) fn of(server: &'a Server, kind: Kind, name: &str, waiter: Worker<'_>) -> Line<'a> {
        let channel = kind.channel(name, waiter);
        let asked = channel.is_none().then(|| commands(server));
        Line {
            server,
            channel,
            asked,
        }
    }

    /// Until it waits.
    #[track_caller]
    pub(crate) fn until_waited(&self) {
        match (&self.channel, self.asked) {
            (Some(channel), _) => until_subscribed(self.server, channel, 1),
            (None, asked) => until("somebody looks again and again", || {
                commands(self.server) > asked.unwrap_or_default() + 20
            }),
        }
    }
}

fn commands(server: &Server) -> i64 {
    let commands = server.info("total_commands_processed");
    commands.parse().expect("a number")
}

/// Each of these tests for each kind of exclusive lock, both ways.
#[macro_export]
macro_rules! each_kind {
    ($($(#[$meta:meta])* fn $test:ident($pair:ident: &Pair, $kind:ident: Kind) $body:block)*) => {
        $($(#[$meta])* fn $test($pair: &$crate::stand::Pair, $kind: $crate::kinds::Kind) $body)*

        $crate::each_kind!(@kind lock "lock" [$($test)*]);
        $crate::each_kind!(@kind fair "fair" [$($test)*]);
        $crate::each_kind!(@kind write "write" [$($test)*]);
        $crate::each_kind!(@kind fenced "fenced" [$($test)*]);
        $crate::each_kind!(@kind spin "spin" [$($test)*]);
        $crate::each_kind!(@newest nonreentrant "nonreentrant" [$($test)*]);
        $crate::each_kind!(@newest nonreentrant_fair "nonreentrant-fair" [$($test)*]);
    };
    (@kind $kind:ident $word:literal [$($test:ident)*]) => {
        mod $kind {
            $crate::both_ways! {
                $(fn $test(pair: &Pair) { super::$test(pair, $crate::kinds::Kind($word)); })*
            }
        }
    };
    // The late 3.x does not have it.
    (@newest $kind:ident $word:literal [$($test:ident)*]) => {
        mod $kind {
            $crate::both_ways! { @newest
                $(fn $test(pair: &Pair) { super::$test(pair, $crate::kinds::Kind($word)); })*
            }
        }
    };
}
