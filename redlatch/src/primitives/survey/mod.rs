//! What there is under some keys, whatever it is: what listings show.

use redis::Value;
use tokio::time::Instant;

use crate::error::Result;
use crate::primitives::handle::Holder;
use crate::primitives::lock::rules::holder;
use crate::space::{Holds, Space};
use crate::step::{Args, Script, Step, unexpected};

/// Who holds each of some locks, how often, for how long.
pub(crate) struct Survey<'a> {
    pub(crate) keys: &'a [&'a str],
}

/// What [`Survey`] sees under one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Seen {
    Free,
    Held(Holder),
    Foreign(&'static str),
}

impl Step for Survey<'_> {
    type Reply = Vec<Seen>;

    fn script(&self) -> &'static Script {
        static SCRIPT: Script = Script::new(include_str!("survey.lua"));
        &SCRIPT
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        self.keys.iter().copied()
    }

    fn args(&self, _: &mut Args<'_>) {}

    fn reply(&self, raw: Value) -> Result<Vec<Seen>> {
        match raw {
            Value::Array(all) if all.len() == self.keys.len() => {
                all.into_iter().map(Seen::from_reply).collect()
            }
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<Vec<Seen>> {
        let seen = |key: &&str| match space.find::<Holds>(key, now) {
            Err(_) => Seen::Foreign(FOREIGN_TYPE),
            Ok(None) => Seen::Free,
            Ok(Some(holds)) => match holds.value.counts.first_key_value() {
                _ if holds.value.mode.is_some() => Seen::Foreign(FOREIGN_HASH),
                None => Seen::Free,
                Some((owner, count)) => Seen::Held(Holder {
                    owner: owner.clone(),
                    holds: *count,
                    remaining: Some(holds.remaining(now)),
                }),
            },
        };
        Ok(self.keys.iter().map(seen).collect())
    }
}

impl Seen {
    fn from_reply(raw: Value) -> Result<Seen> {
        match raw {
            Value::Nil => Ok(Seen::Free),
            Value::Int(-1) => Ok(Seen::Foreign(FOREIGN_HASH)),
            Value::Int(_) => Ok(Seen::Foreign(FOREIGN_TYPE)),
            other => holder(other).map(Seen::Held),
        }
    }
}

const FOREIGN_TYPE: &str = "a key of another type";
const FOREIGN_HASH: &str = "a hash of another kind";
