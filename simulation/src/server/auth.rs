//! Users, their passwords and permissions.

use std::collections::BTreeSet;

use super::Server;
use super::command::{CommandError, CommandSpec, refused};
use super::connection::ConnectionId;
use super::glob::matches;
use super::resp::Bytes;
use super::state::State;

/// A user and its permissions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// `None`: any password is accepted.
    pub password: Option<String>,
    /// Commands that it may not use, in capital letters: `GET`, `CLIENT|TRACKING`.
    pub denied: BTreeSet<String>,
    /// Patterns of the keys that it may use.
    pub keys: Vec<String>,
    /// Patterns of the channels that it may use.
    pub channels: Vec<String>,
}

/// The object of a missing permission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Denied {
    Command,
    Key,
    Channel,
}

impl User {
    /// Returns a user with all permissions.
    pub fn unrestricted(password: Option<&str>) -> User {
        User {
            password: password.map(str::to_owned),
            denied: BTreeSet::new(),
            keys: vec!["*".into()],
            channels: vec!["*".into()],
        }
    }

    pub(super) fn needs_no_password(&self) -> bool {
        self.password.is_none()
    }

    fn permits(&self, spec: &CommandSpec, args: &[Bytes]) -> Result<(), Denied> {
        let is_denied = |name: &str| self.denied.contains(name);
        // Most users have no denied commands, and building the name takes time.
        if !self.denied.is_empty() && (is_denied(spec.name) || is_denied(&spec.full_name(args))) {
            return Err(Denied::Command);
        }
        let any = |patterns: &[String], name: &Bytes| {
            patterns
                .iter()
                .any(|pattern| matches(pattern.as_bytes(), name))
        };
        if !spec.keys(args).iter().all(|key| any(&self.keys, key)) {
            return Err(Denied::Key);
        }
        // A pattern to subscribe to must be one of the permitted ones, literally.
        let is_permitted = |channel: &Bytes| match spec.subscribes_to_patterns() {
            true => {
                let same = |pattern: &String| pattern == "*" || pattern.as_bytes() == *channel;
                self.channels.iter().any(same)
            }
            false => any(&self.channels, channel),
        };
        match spec.channels(args).iter().all(is_permitted) {
            true => Ok(()),
            false => Err(Denied::Channel),
        }
    }
}

impl Server {
    /// Adds a user, or changes its permissions from its next command on.
    pub fn set_user(&mut self, name: &str, user: User) {
        self.state.users.insert(name.to_owned(), user);
    }
}

impl State {
    pub(super) fn permits(
        &self,
        id: ConnectionId,
        spec: &CommandSpec,
        args: &[Bytes],
    ) -> Result<(), Denied> {
        let user = self.connections.get(&id).and_then(|it| it.user.as_ref());
        let user = user.and_then(|user| self.users.get(user));
        user.map_or(Ok(()), |user| user.permits(spec, args))
    }
}

/// Checks a password. Returns the name of the user.
pub(super) fn login(state: &State, name: &[u8], password: &[u8]) -> Result<String, CommandError> {
    let name = String::from_utf8_lossy(name).into_owned();
    let user = state.users.get(&name);
    let is_right = |wanted: &String| wanted.as_bytes() == password;
    match user.is_some_and(|user| user.password.as_ref().is_none_or(is_right)) {
        true => Ok(name),
        false => Err(refused(
            "WRONGPASS invalid username-password pair or user is disabled.",
        )),
    }
}
