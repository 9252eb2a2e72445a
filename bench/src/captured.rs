//! Captures the scripts that a primitive sends for one acquire/release pair, to replay them
//! directly.

use redis::Cmd;
use redis::aio::MultiplexedConnection;
use redlatch::Client;
use redlatch_testkit::{Command, Monitor, Server};
use tokio::task::JoinSet;

use crate::Result;
use crate::kinds::Kind;

/// The scripts of one acquisition and one release of one name, with all their arguments.
pub(crate) struct Captured {
    acquire: Vec<Cmd>,
    release: Vec<Cmd>,
    connection: MultiplexedConnection,
}

impl Captured {
    /// Acquires and releases once, while MONITOR reports what the server receives.
    pub(crate) async fn record(
        server: &Server,
        kind: &Kind,
        client: &Client,
        connection: &MultiplexedConnection,
        name: String,
    ) -> Result<Captured> {
        // After this pair the server knows the scripts, so that only EVALSHA is recorded.
        let acquire = (kind.acquire)(client, &name);
        acquire().await?().await?;
        let mut monitor = Monitor::start(server);
        let mut echo = connection.clone();
        let release = acquire().await?;
        redis::cmd("ECHO")
            .arg("end of acquisition")
            .exec_async(&mut echo)
            .await?;
        let acquiring = scripts(monitor.until("end of acquisition"));
        release().await?;
        redis::cmd("ECHO")
            .arg("end of release")
            .exec_async(&mut echo)
            .await?;
        let releasing = scripts(monitor.until("end of release"));
        if acquiring.is_empty() || releasing.is_empty() {
            return Err(format!("no scripts of {} were captured", kind.name).into());
        }
        Ok(Captured {
            acquire: acquiring,
            release: releasing,
            connection: connection.clone(),
        })
    }

    /// Replays them: first the acquire scripts together, then the release scripts together.
    pub(crate) async fn replay(&mut self) -> Result<()> {
        for group in [&self.acquire, &self.release] {
            if let [cmd] = group.as_slice() {
                cmd.exec_async(&mut self.connection).await?;
                continue;
            }
            let send = |cmd: &Cmd| {
                let (cmd, mut connection) = (cmd.clone(), self.connection.clone());
                async move { cmd.exec_async(&mut connection).await }
            };
            let mut together: JoinSet<_> = group.iter().map(send).collect();
            while let Some(answered) = together.join_next().await {
                answered??;
            }
        }
        Ok(())
    }
}

/// Returns the scripts among these commands, as commands that can be sent again.
fn scripts(commands: Vec<Command>) -> Vec<Cmd> {
    let sent = commands.into_iter();
    let scripts = sent.filter(|command| !command.in_script && command.name() == "evalsha");
    let to_cmd = |command: Command| {
        let mut cmd = Cmd::new();
        for word in command.words {
            cmd.arg(word);
        }
        cmd
    };
    scripts.map(to_cmd).collect()
}
