//! The storages behind one interface, for the tests.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::Path;

use rusqlite::Connection;
use sqlx::{Connection as _, MySqlConnection, PgConnection};
use tokio_postgres::NoTls;

use crate::{mariadb, postgresql, postgresql_sqlx, sqlite};

/// A connection to a storage.
#[derive(Debug)]
pub enum Storage {
    /// A PostgreSQL server.
    Postgresql(tokio_postgres::Client),
    /// The same, with sqlx.
    PostgresqlSqlx(PgConnection),
    /// A MariaDB server, with sqlx.
    Mariadb(MySqlConnection),
    /// An SQLite file.
    Sqlite(Connection),
    /// `host:port` of a service.
    Http(String),
}

/// The answer of a storage to a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The entry is in the ledger.
    Written,
    /// The token was too old.
    Refused,
}

impl Storage {
    /// Opens a storage: `postgresql://…`, `sqlx:postgresql://…`, `mysql://…`, `http://host:port`, or the path of an SQLite file.
    ///
    /// # Errors
    ///
    /// If the storage cannot be opened.
    pub async fn open(url: &str) -> io::Result<Storage> {
        if url.starts_with("postgresql:") {
            let (client, connection) = tokio_postgres::connect(url, NoTls)
                .await
                .map_err(io::Error::other)?;
            // Ends with the client. An error also reaches the statement in flight.
            tokio::spawn(connection);
            return Ok(Storage::Postgresql(client));
        }
        if let Some(url) = url.strip_prefix("sqlx:") {
            let connection = PgConnection::connect(url).await;
            return connection
                .map(Storage::PostgresqlSqlx)
                .map_err(io::Error::other);
        }
        if url.starts_with("mysql:") {
            let connection = MySqlConnection::connect(url).await;
            return connection.map(Storage::Mariadb).map_err(io::Error::other);
        }
        if let Some(address) = url.strip_prefix("http://") {
            return Ok(Storage::Http(address.to_owned()));
        }
        let file = Connection::open(Path::new(url)).map_err(io::Error::other)?;
        Ok(Storage::Sqlite(file))
    }

    /// Adds an entry of one to the ledger.
    ///
    /// # Errors
    ///
    /// If the storage fails; the entry may then be there or not.
    pub async fn write(&mut self, account: &str, token: u64) -> io::Result<Outcome> {
        match self {
            Storage::Postgresql(client) => {
                let written = postgresql::book(client, account, 1, token).await;
                outcome(written, postgresql::is_stale)
            }
            Storage::PostgresqlSqlx(connection) => {
                let written = postgresql_sqlx::book(connection, account, 1, token).await;
                outcome(written, postgresql_sqlx::is_stale)
            }
            Storage::Mariadb(connection) => {
                let written = mariadb::book(connection, account, 1, token).await;
                outcome(written, mariadb::is_stale)
            }
            Storage::Sqlite(file) => {
                let written = sqlite::book(file, account, 1, token);
                outcome(written, sqlite::is_stale)
            }
            Storage::Http(address) => {
                let token = format!("Fencing-Token: {token}\r\n");
                match post(address, account, &token, "1")?.as_str() {
                    "204" => Ok(Outcome::Written),
                    "412" => Ok(Outcome::Refused),
                    other => Err(io::Error::other(format!("status {other}"))),
                }
            }
        }
    }
}

fn outcome<E: std::error::Error + Send + Sync + 'static>(
    written: Result<(), E>,
    is_stale: impl FnOnce(&E) -> bool,
) -> io::Result<Outcome> {
    match written {
        Ok(()) => Ok(Outcome::Written),
        Err(error) if is_stale(&error) => Ok(Outcome::Refused),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Sends a request with these header lines. Returns the status code.
///
/// # Errors
///
/// If the service cannot be reached or does not answer.
pub fn post(address: &str, account: &str, headers: &str, body: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    let length = body.len();
    write!(
        stream,
        "POST /{account} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
    )?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    let status = response.split(' ').nth(1);
    status
        .map(str::to_owned)
        .ok_or_else(|| io::Error::other(response))
}
