//! Connections, and the commands on them.

use super::auth::login;
use super::command::{Call, CommandResult, refused};
use super::replication::PendingWait;
use super::resp::{Bytes, Protocol, Reply};
use super::tracking::{self, Tracking};

/// Identifies one connection of one server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub(super) u64);

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) protocol: Protocol,
    /// The user that has logged in.
    pub(super) user: Option<String>,
    name: Bytes,
    /// Bytes that have arrived and have not been run yet.
    pub(super) input: Bytes,
    /// The unanswered WAIT; no command behind it runs.
    pub(super) blocked: Option<PendingWait>,
    /// Replication offset after the last command.
    pub(super) offset: u64,
    /// Whether the next command was redirected here by the owner of the slot (ASKING).
    pub(super) asking: bool,
    pub(super) tracking: Option<Tracking>,
    /// Whether the server closes it after the answer.
    close_after_reply: bool,
}

impl Connection {
    pub(super) fn new(user: Option<String>) -> Connection {
        Connection {
            protocol: Protocol::default(),
            user,
            name: Bytes::new(),
            input: Bytes::new(),
            blocked: None,
            offset: 0,
            asking: false,
            tracking: None,
            close_after_reply: false,
        }
    }
}

impl super::State {
    /// Closes the connection if its last command requested that.
    pub(super) fn close_if_requested(&mut self, id: ConnectionId) {
        if self
            .connections
            .get(&id)
            .is_some_and(|connection| connection.close_after_reply)
        {
            self.close(id);
        }
    }
}

impl super::Server {
    /// Makes HELLO unknown, so that connections speak RESP2.
    pub fn remove_resp3(&mut self) {
        self.state.lacks_resp3 = true;
    }
}

impl Call<'_> {
    pub(super) fn connection(&mut self) -> &mut Connection {
        let connection = self.state.connections.get_mut(&self.from);
        connection.expect("a command comes from a connection")
    }
}

pub(super) fn hello(call: &mut Call<'_>) -> CommandResult {
    if call.state.lacks_resp3 {
        return Err(refused(
            "ERR unknown command 'HELLO', with args beginning with: ",
        ));
    }
    let protocol = match call.arg(1) {
        b"" if call.args.len() == 1 => call.connection().protocol,
        b"2" => Protocol::Resp2,
        b"3" => Protocol::Resp3,
        _ => return Err(refused("NOPROTO unsupported protocol version")),
    };
    let mut at = 2;
    while at < call.args.len() {
        match (call.word(at).as_str(), call.args.len() - at) {
            ("AUTH", 3..) => {
                let user = login(call.state, &call.args[at + 1], &call.args[at + 2])?;
                call.connection().user = Some(user);
                at += 3;
            }
            ("SETNAME", 2..) => {
                call.connection().name = call.args[at + 1].clone();
                at += 2;
            }
            _ => return Err(call.unsupported()),
        }
    }
    if call.connection().user.is_none() {
        return Err(refused(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH \
             <user> <pass> option can be used to authenticate the client and select the RESP protocol version at \
             the same time",
        ));
    }
    call.connection().protocol = protocol;
    let role = if call.state.keys.is_replica {
        "replica"
    } else {
        "master"
    };
    let facts = [
        ("server", Reply::text("redis")),
        ("version", Reply::text(&call.state.config.version)),
        (
            "proto",
            Reply::Int(if protocol == Protocol::Resp3 { 3 } else { 2 }),
        ),
        (
            "id",
            Reply::Int(i64::try_from(call.from.0).unwrap_or(i64::MAX)),
        ),
        ("mode", Reply::text(call.state.mode())),
        ("role", Reply::text(role)),
        ("modules", Reply::Array(Vec::new())),
    ];
    let facts = facts
        .into_iter()
        .map(|(name, fact)| (Reply::text(name), fact));
    Ok(Reply::Map(facts.collect()))
}

pub(super) fn auth(call: &mut Call<'_>) -> CommandResult {
    let (user, password) = match call.args {
        [_, password] => (&b"default".to_vec(), password),
        [_, user, password] => (user, password),
        _ => return Err(refused("ERR syntax error")),
    };
    let default = &call.state.users["default"];
    if call.args.len() == 2 && default.needs_no_password() {
        return Err(refused(
            "ERR AUTH <password> called without any password configured for the default user. Are you sure your \
             configuration is correct?",
        ));
    }
    let user = login(call.state, user, password)?;
    call.connection().user = Some(user);
    Ok(Reply::ok())
}

pub(super) fn quit(call: &mut Call<'_>) -> CommandResult {
    call.connection().close_after_reply = true;
    Ok(Reply::ok())
}

pub(super) fn select(call: &mut Call<'_>) -> CommandResult {
    match call.arg(1) {
        b"0" => Ok(Reply::ok()),
        _ => Err(call.unsupported()),
    }
}

pub(super) fn ping(call: &mut Call<'_>) -> CommandResult {
    match call.args {
        [_] => Ok(Reply::Status("PONG".into())),
        [_, text] => Ok(Reply::Bulk(text.clone())),
        _ => Err(refused("ERR wrong number of arguments for 'ping' command")),
    }
}

pub(super) fn echo(call: &mut Call<'_>) -> CommandResult {
    Ok(Reply::Bulk(call.args[1].clone()))
}

pub(super) fn client(call: &mut Call<'_>) -> CommandResult {
    match (call.word(1).as_str(), call.args.len()) {
        ("ID", 2) => Ok(Reply::Int(i64::try_from(call.from.0).unwrap_or(i64::MAX))),
        ("GETNAME", 2) => Ok(match call.connection().name.clone() {
            name if name.is_empty() => Reply::Nil,
            name => Reply::Bulk(name),
        }),
        ("SETNAME", 3) => {
            call.connection().name = call.args[2].clone();
            Ok(Reply::ok())
        }
        ("TRACKING", 3..) if call.connection().protocol == Protocol::Resp3 => {
            tracking::tracking(call)
        }
        ("CACHING", 3) => tracking::caching(call),
        // The client sends it to every server and ignores the refusal of one before 7.2.
        ("SETINFO", 4) if call.state.is_at_least(7, 2) => Ok(Reply::ok()),
        ("SETINFO", 4) => {
            let sub = String::from_utf8_lossy(call.arg(1));
            Err(refused(format!(
                "ERR unknown subcommand '{sub}'. Try CLIENT HELP."
            )))
        }
        _ => Err(call.unsupported()),
    }
}
