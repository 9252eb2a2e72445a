//! What the locks protect: a small server in this process, out of reach of every fault. It keeps, per
//! name, a number and the highest token that it has seen, and refuses whoever comes with a lower one.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Result, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Serves until the program ends.
#[derive(Debug)]
pub(crate) struct Resource {
    address: SocketAddr,
    records: Arc<Mutex<Records>>,
}

type Records = BTreeMap<String, Record>;

#[derive(Debug, Default)]
struct Record {
    highest: u64,
    value: u64,
    accepted: u64,
}

/// What a name has come to. Every writer adds one to what it has read, so both are the same unless a
/// write was lost.
#[derive(Debug, Clone)]
pub(crate) struct Tally {
    pub(crate) name: String,
    pub(crate) accepted: u64,
    pub(crate) value: u64,
}

impl Resource {
    pub(crate) fn start() -> Result<Resource> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let records = Arc::<Mutex<Records>>::default();
        let served = records.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let records = served.clone();
                // One that goes away takes nobody with it.
                thread::spawn(move || serve(stream, &records));
            }
        });
        Ok(Resource { address, records })
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn tallies(&self) -> Vec<Tally> {
        let records = lock(&self.records);
        let tally = |(name, record): (&String, &Record)| Tally {
            name: name.clone(),
            accepted: record.accepted,
            value: record.value,
        };
        records.iter().map(tally).collect()
    }
}

/// `read NAME TOKEN` answers the number or `stale`; `write NAME TOKEN NUMBER` answers `ok` or `stale`.
fn serve(stream: TcpStream, records: &Mutex<Records>) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream.try_clone()?;
    for line in BufReader::new(stream).lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words[..] {
            ["read", name, token] => lock(records).on(name).read(number(token)),
            ["write", name, token, value] => {
                let (token, value) = (number(token), number(value));
                lock(records).on(name).write(token, value)
            }
            _ => None,
        };
        let answer = answer.unwrap_or("stale".into());
        writeln!(out, "{answer}")?;
    }
    Ok(())
}

trait On {
    fn on(&mut self, name: &str) -> &mut Record;
}

impl On for Records {
    fn on(&mut self, name: &str) -> &mut Record {
        self.entry(name.to_owned()).or_default()
    }
}

impl Record {
    fn read(&mut self, token: u64) -> Option<String> {
        self.sees(token).then(|| self.value.to_string())
    }

    fn write(&mut self, token: u64, value: u64) -> Option<String> {
        if !self.sees(token) {
            return None;
        }
        self.value = value;
        self.accepted += 1;
        Some("ok".into())
    }

    /// Whether nobody has come with a higher one.
    fn sees(&mut self, token: u64) -> bool {
        self.highest = self.highest.max(token);
        self.highest == token
    }
}

fn number(word: &str) -> u64 {
    word.parse().unwrap_or_default()
}

fn lock(records: &Mutex<Records>) -> MutexGuard<'_, Records> {
    records.lock().unwrap_or_else(PoisonError::into_inner)
}
