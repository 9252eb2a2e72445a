//! Scans: pages of the keys of a store.

/// Start of a page of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Cursor {
    /// Index of the node in a cluster.
    pub(crate) node: usize,
    /// Cursor of SCAN.
    pub(crate) key: u64,
}

/// The keys that a scan returns: those of locks (hashes), of counters (strings), or of queues (lists).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScanType {
    Hashes,
    Strings,
    Lists,
}
