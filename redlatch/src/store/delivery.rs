//! How a step is sent: whether it queues, on which connection, and whether replicas confirm it.

use super::nodes::ServerId;

/// How a step is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Delivery {
    /// Whether the step waits for a permit, behind other acquisitions at the node.
    pub(crate) queued: bool,
    /// Whether the step waits for room, behind others without an answer. Renewals and releases do not.
    pub(crate) waits_for_room: bool,
    pub(crate) route: Route,
    /// Whether replicas have to confirm the step. Such a step is settled if its caller drops it.
    pub(crate) replicate: bool,
    /// Whether the server reports it if another client changes the keys of the step later (client tracking).
    pub(crate) tracked: bool,
}

/// The connection on which a step is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// That of renewals, releases and inspections.
    Commands,
    /// That of acquisitions: behind those that may still be in flight.
    Acquisitions,
    /// The same, to this server only: another one may not have the acquisition.
    AcquisitionsOf(ServerId),
}

impl Delivery {
    pub(crate) const ACQUISITION: Delivery = Delivery {
        queued: true,
        waits_for_room: true,
        route: Route::Acquisitions,
        replicate: true,
        tracked: false,
    };
    /// For a waiter that inspects an object.
    pub(crate) const QUEUED_INSPECTION: Delivery = Delivery {
        replicate: false,
        ..Delivery::ACQUISITION
    };
    /// For renewals and releases, and for what they need.
    pub(crate) const IMMEDIATE: Delivery = Delivery::on(Route::Commands);
    /// For other steps of callers: inspections and settings.
    pub(crate) const REQUEST: Delivery = Delivery {
        waits_for_room: true,
        ..Delivery::IMMEDIATE
    };

    /// Returns a delivery on this route, without waiting for other steps.
    pub(crate) const fn on(route: Route) -> Delivery {
        Delivery {
            queued: false,
            waits_for_room: false,
            route,
            replicate: false,
            tracked: false,
        }
    }

    /// Returns the delivery of an acquisition. If the owner may already hold the object (`held`), the
    /// acquisition does not wait behind others.
    pub(crate) const fn acquisition(held: bool) -> Delivery {
        Delivery {
            queued: !held,
            waits_for_room: !held,
            ..Delivery::ACQUISITION
        }
    }
}
