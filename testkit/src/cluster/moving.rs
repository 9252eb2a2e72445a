//! Moving slots while the cluster is running.

use redis::Value;

use super::Cluster;
use super::slots::{own_master_id, slot_ranges};
use crate::server::Server;
use crate::until::until;

impl Cluster {
    /// Moves a slot with all its keys to another master, as `redis-cli --cluster reshard` does.
    ///
    /// # Panics
    ///
    /// If a node refuses.
    pub fn move_slot(&self, slot: u16, to: usize) {
        self.move_slots(&[slot], to);
    }

    /// Step 1 of 3: from now on the master redirects requests for missing keys to `to` (`ASK`).
    ///
    /// # Panics
    ///
    /// If a node refuses.
    pub fn begin_moving(&self, slot: u16, to: usize) {
        self.set_migrating(&[slot], self.master_of_slot(slot), to);
    }

    /// Step 2 of 3: moves all keys of the slot.
    ///
    /// # Panics
    ///
    /// If a node refuses.
    pub fn move_keys(&self, slot: u16, to: usize) {
        self.migrate_keys(&[slot], self.master_of_slot(slot), to);
    }

    /// A part of step 2: moves only this key.
    ///
    /// # Panics
    ///
    /// If a node refuses.
    pub fn move_key(&self, key: impl AsRef<[u8]>, to: usize) {
        let from = self.master_of_key(key.as_ref());
        self.migrate(&[key.as_ref().to_vec()], from, to);
    }

    /// Step 3 of 3: assigns the slot to its new master, and waits until all nodes know it.
    ///
    /// # Panics
    ///
    /// If a node refuses.
    pub fn finish_moving(&self, slot: u16, to: usize) {
        self.assign_slots(&[slot], self.master_of_slot(slot), to);
    }

    /// Moves several slots, which must have the same master.
    pub(super) fn move_slots(&self, slots: &[u16], to: usize) {
        let from = self.master_of_slot(slots[0]);
        self.set_migrating(slots, from, to);
        self.migrate_keys(slots, from, to);
        self.assign_slots(slots, from, to);
    }

    fn set_migrating(&self, slots: &[u16], from: usize, to: usize) {
        let id = |index| until("an id", || self.id(index));
        // The target comes first, so that no client is redirected to a node that does not expect
        // it.
        set_slots(&self.nodes[to], slots, &["IMPORTING", &id(from)]);
        set_slots(&self.nodes[from], slots, &["MIGRATING", &id(to)]);
    }

    fn migrate_keys(&self, slots: &[u16], from: usize, to: usize) {
        /// Number of keys that one command moves.
        const BATCH: usize = 100;
        let mut connection = self.nodes[from].connection();
        for &slot in slots {
            let mut some = redis::cmd("CLUSTER");
            some.arg("GETKEYSINSLOT").arg(slot).arg(BATCH);
            loop {
                let keys: Vec<Vec<u8>> = some.query(&mut connection).expect("keys of a slot");
                if keys.is_empty() {
                    break;
                }
                self.migrate(&keys, from, to);
            }
        }
    }

    fn migrate(&self, keys: &[Vec<u8>], from: usize, to: usize) {
        let target = &self.nodes[to];
        let mut migrate = redis::cmd("MIGRATE");
        migrate
            .arg(target.address().to_string())
            .arg(target.port())
            .arg("")
            .arg(0)
            .arg(5000);
        if let Some(password) = target.password() {
            migrate.arg("AUTH").arg(password);
        }
        migrate.arg("KEYS").arg(keys);
        let moved: redis::RedisResult<Value> = migrate.query(&mut self.nodes[from].connection());
        moved.unwrap_or_else(|error| panic!("MIGRATE: {error}"));
    }

    fn assign_slots(&self, slots: &[u16], from: usize, to: usize) {
        let id = until("an id", || self.id(to));
        // The new master comes first, so that the slot has a master at every moment.
        set_slots(&self.nodes[to], slots, &["NODE", &id]);
        // The other nodes would also learn of it by gossip, but later. A node that has lost its
        // last slot may already have become a replica because of gossip.
        let from = std::iter::once(&self.nodes[from]);
        for node in from.chain(self.others(to)) {
            until("it knows", || match own_master_id(node)? {
                Some(_) => Ok(()),
                None => try_set_slots(node, slots, &["NODE", &id]),
            });
        }
        until("another master of slots", || {
            self.check_master_is_known(slots, to)
        });
    }

    fn check_master_is_known(&self, slots: &[u16], master: usize) -> Result<(), String> {
        let port = self.nodes[master].port();
        for node in self.running() {
            let served = slot_ranges(node)?;
            let its = served.iter().filter(|range| range.master == port);
            let has = |slot| its.clone().any(|range| range.slots.contains(slot));
            if !slots.iter().all(has) {
                return Err(format!("{} does not know the new master", node.port()));
            }
        }
        Ok(())
    }
}

/// Sends `CLUSTER SETSLOT` for each of the slots.
fn set_slots(node: &Server, slots: &[u16], what: &[&str]) {
    let set = try_set_slots(node, slots, what);
    set.unwrap_or_else(|error| panic!("CLUSTER SETSLOT {what:?}: {error}"));
}

fn try_set_slots(node: &Server, slots: &[u16], what: &[&str]) -> Result<(), String> {
    let mut all = redis::pipe();
    for &slot in slots {
        all.cmd("CLUSTER").arg("SETSLOT").arg(slot).arg(what);
    }
    // There may be thousands of errors; the first one is enough.
    let answers: redis::RedisResult<Vec<Value>> = all.ignore_errors().query(&mut node.connection());
    let answers = answers.map_err(|error| error.to_string())?;
    let refused = answers
        .into_iter()
        .find_map(|answer| answer.extract_error().err());
    refused.map_or(Ok(()), |error| Err(error.to_string()))
}
