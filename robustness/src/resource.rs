//! The resource that the locks protect, which no fault affects.
//!
//! It stores, per name, a number and the highest token that it has seen, and refuses requests with a lower
//! token.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Result, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufStream};
use tokio::net::TcpStream;

/// The data of the resource.
#[derive(Debug, Default)]
pub struct Records(Mutex<BTreeMap<String, Record>>);

#[derive(Debug, Default)]
struct Record {
    highest: u64,
    value: u64,
    accepted: u64,
}

/// The final state of a name. Every writer adds one to the number that it has read, so number and count of
/// writes are equal unless a write was lost.
#[derive(Debug, Clone)]
pub struct Tally {
    pub name: String,
    pub accepted: u64,
    pub value: u64,
}

/// A small server in this process that runs until the program ends.
#[derive(Debug)]
pub(crate) struct Resource {
    address: SocketAddr,
    records: Arc<Records>,
}

impl Resource {
    pub(crate) fn start() -> Result<Resource> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let records = Arc::<Records>::default();
        let served = records.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let records = served.clone();
                // A client that disconnects does not affect the others.
                thread::spawn(move || serve(stream, &records));
            }
        });
        Ok(Resource { address, records })
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn tallies(&self) -> Vec<Tally> {
        self.records.tallies()
    }
}

fn serve(stream: std::net::TcpStream, records: &Records) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream.try_clone()?;
    for line in BufReader::new(stream).lines() {
        writeln!(out, "{}", records.answer(&line?))?;
    }
    Ok(())
}

impl Records {
    /// `read NAME TOKEN` answers the number or `stale`; `write NAME TOKEN NUMBER` answers `ok` or `stale`.
    fn answer(&self, line: &str) -> String {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, name, ..] = words[..] else {
            return "stale".into();
        };
        let mut records = self.lock();
        let record = records.entry(name.to_owned()).or_default();
        let answer = match words[..] {
            ["read", _, token] => record.read(number(token)),
            ["write", _, token, value] => record.write(number(token), number(value)),
            _ => None,
        };
        answer.unwrap_or("stale".into())
    }

    pub fn tallies(&self) -> Vec<Tally> {
        let records = self.lock();
        let tally = |(name, record): (&String, &Record)| Tally {
            name: name.clone(),
            accepted: record.accepted,
            value: record.value,
        };
        records.iter().map(tally).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Record>> {
        crate::processes::lock(&self.0)
    }
}

impl Record {
    fn read(&mut self, token: u64) -> Option<String> {
        self.accepts_token(token).then(|| self.value.to_string())
    }

    fn write(&mut self, token: u64, value: u64) -> Option<String> {
        if !self.accepts_token(token) {
            return None;
        }
        self.value = value;
        self.accepted += 1;
        Some("ok".into())
    }

    /// Records a token. Returns whether no higher one was seen before.
    fn accepts_token(&mut self, token: u64) -> bool {
        self.highest = self.highest.max(token);
        self.highest == token
    }
}

fn number(word: &str) -> u64 {
    word.parse().unwrap_or_default()
}

/// How a task reaches the resource.
#[derive(Debug)]
pub enum ResourceClient {
    /// At its address, over a connection that is opened on demand.
    Remote(String, Option<BufStream<TcpStream>>),
    /// In the same process.
    Local(Arc<Records>),
}

impl Clone for ResourceClient {
    /// With a connection of its own.
    fn clone(&self) -> ResourceClient {
        match self {
            ResourceClient::Remote(address, _) => ResourceClient::Remote(address.clone(), None),
            ResourceClient::Local(records) => ResourceClient::Local(records.clone()),
        }
    }
}

impl ResourceClient {
    /// Sends a line, and returns the answer, if there is one.
    pub(crate) async fn exchange(&mut self, line: &str) -> Option<String> {
        let (address, connection) = match self {
            ResourceClient::Local(records) => return Some(records.answer(line)),
            ResourceClient::Remote(address, connection) => (address, connection),
        };
        if connection.is_none() {
            let stream = TcpStream::connect(&*address).await.ok()?;
            let _ = stream.set_nodelay(true);
            *connection = Some(BufStream::new(stream));
        }
        let connection = connection.as_mut()?;
        connection.write_all(line.as_bytes()).await.ok()?;
        connection.write_all(b"\n").await.ok()?;
        connection.flush().await.ok()?;
        let mut answer = String::new();
        connection.read_line(&mut answer).await.ok()?;
        Some(answer.trim_end().to_owned())
    }
}
