//! Other addresses for those that servers announce.

use std::fmt;
use std::sync::Arc;

use super::endpoint::Endpoint;

type MapFn = dyn Fn(&str, u16) -> Option<(String, u16)> + Send + Sync;

/// Where to connect for an address: behind a tunnel or NAT, nodes announce addresses that cannot be reached. Each
/// address is mapped once, when a connection to it is made, so a map cannot lead in a circle. Everything else
/// (which node owns a slot, which one is the master, the name in a certificate) goes by the announced address.
#[derive(Clone, Default)]
pub(crate) struct AddressMap(Option<Arc<MapFn>>);

impl AddressMap {
    pub(crate) fn new(
        map: impl Fn(&str, u16) -> Option<(String, u16)> + Send + Sync + 'static,
    ) -> AddressMap {
        AddressMap(Some(Arc::new(map)))
    }

    /// Returns where to connect for this address.
    pub(super) fn reachable(&self, announced: &Endpoint) -> Endpoint {
        let map = self.0.as_ref();
        let mapped = map.and_then(|map| map(announced.host(), announced.port()));
        mapped.map_or_else(
            || announced.clone(),
            |(host, port)| Endpoint::new(&host, port),
        )
    }
}

impl fmt::Debug for AddressMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "set" } else { "none" })
    }
}
