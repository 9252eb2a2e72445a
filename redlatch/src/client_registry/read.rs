//! Reads what other clients have registered. Entries that are not readable are missing in the
//! result, and an error is only logged, unless nothing can be read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::entry::{CLIENT_FIELDS, Registered, RegistryEntry, Role};
use super::step::{ClientHash, read};
use super::{ClientInfo, Registration};
use crate::error::Result;
use crate::join::join_all;
use crate::name::{CLIENT_PATTERN, client_key, client_of_key};
use crate::owner::{ClientId, OwnerId};
use crate::store::{Cursor, ScanType, Store};

/// How many hashes are read at the same time.
const CONCURRENT_READS: usize = 8;

/// Limit of fields that are read with one step.
const MAX_STEP_FIELDS: usize = 100;

/// A holder or waiter of an object, whose entry is looked up.
pub(crate) struct Sought<'a> {
    pub(crate) role: Role,
    pub(crate) key: &'a str,
    pub(crate) owner: &'a OwnerId,
    /// Whether it is the owner of a write lock.
    pub(crate) writes: bool,
    /// Where its entry belongs.
    pub(crate) entry: &'a mut Option<RegistryEntry>,
}

/// All clients in the registry.
#[derive(Debug, Default)]
pub(crate) struct AllClients {
    pub(crate) entries: Vec<Registered>,
    /// Number of hashes that are not readable.
    pub(crate) unreadable: usize,
}

impl Registration {
    /// Adds the entries of some holders and waiters, if there are any.
    pub(crate) async fn look_up(&self, store: &Store, sought: Vec<Sought<'_>>) {
        if !self.0.is_read {
            return;
        }
        let mut clients: BTreeMap<&str, Vec<(String, &mut Option<RegistryEntry>)>> =
            BTreeMap::new();
        for one in sought {
            if let Some((client, field)) = one.role.field_of(one.key, one.owner, one.writes) {
                clients.entry(client).or_default().push((field, one.entry));
            }
        }
        let clients = clients.iter_mut();
        let reads = clients.flat_map(|(client, fields)| {
            let each = fields.chunks_mut(MAX_STEP_FIELDS);
            each.map(move |some| (*client, some))
        });
        let mut reads: Vec<_> = reads.collect();
        for some in reads.chunks_mut(CONCURRENT_READS) {
            let hashes = some.iter().map(|(client, fields)| {
                let own = CLIENT_FIELDS.map(str::to_owned).into_iter();
                let fields = own.chain(fields.iter().map(|(field, _)| field.clone()));
                self.read(store, client_key(client), fields.collect())
            });
            let hashes = join_all(hashes).await;
            for ((client, fields), hash) in some.iter_mut().zip(hashes) {
                let Ok(Some(hash)) = hash else { continue };
                let Some(info) = hash.client(client) else {
                    continue;
                };
                for (field, entry) in fields.iter_mut() {
                    **entry = hash.entry(&info, field);
                }
            }
        }
    }

    /// Returns everything in the registry, page by page with SCAN. Fails if no hash could be read.
    pub(crate) async fn read_all(&self, store: &Store) -> Result<AllClients> {
        let mut all = AllClients::default();
        let mut read: BTreeSet<String> = BTreeSet::new();
        let (mut has_read, mut failure) = (false, None);
        let mut cursor = Some(Cursor::default());
        while let (Some(at), true) = (cursor, self.0.is_read) {
            let (keys, next) = store.scan(CLIENT_PATTERN, ScanType::Hashes, at).await?;
            cursor = next;
            // A key may be in two pages.
            let is_new = |key: &String| read.insert(key.clone());
            let keys: Vec<_> = keys.into_iter().filter(is_new).collect();
            for some in keys.chunks(CONCURRENT_READS) {
                let hashes = some
                    .iter()
                    .map(|key| self.read(store, key.clone(), Vec::new()));
                for (key, hash) in some.iter().zip(join_all(hashes).await) {
                    has_read |= hash.is_ok();
                    match hash.map(|hash| parse(key, &hash?)).unwrap_or_else(|error| {
                        failure = Some(error);
                        None
                    }) {
                        Some(entries) => all.entries.extend(entries),
                        None => all.unreadable += 1,
                    }
                }
            }
        }
        match failure.filter(|_| !has_read) {
            Some(error) => Err(error),
            None => Ok(all),
        }
    }

    async fn read(
        &self,
        store: &Store,
        key: String,
        fields: Vec<String>,
    ) -> Result<Option<ClientHash>> {
        let hash = store.run_idempotent(&read(&key, fields)).await;
        hash.inspect_err(
            |error| tracing::debug!(%error, "the registry of clients could not be read"),
        )
    }
}

fn parse(key: &str, hash: &ClientHash) -> Option<Vec<Registered>> {
    let id = client_of_key(key).filter(|id| ClientId::is_valid(id))?;
    let client: Arc<ClientInfo> = hash.client(id)?;
    Some(hash.entries(&client))
}
