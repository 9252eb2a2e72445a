//! Checks whether the current tokio runtime has what a call needs.
//!
//! tokio offers no query for whether a runtime has timers and sockets: creating a timer or socket panics if
//! they are not enabled. So this module creates one and catches the panic. tokio's message then appears once
//! on stderr, or wherever the program's panic hook writes. The call returns [`Error::NoRuntime`].

use std::cell::Cell;
use std::future::pending;
use std::net::{Ipv4Addr, UdpSocket};
use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::runtime::{Handle, Id};
use tokio::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Capabilities of a runtime, as far as they were checked.
#[derive(Clone, Copy)]
struct Capabilities {
    runtime: Id,
    timers: bool,
    /// `None`: not checked yet.
    sockets: Option<bool>,
}

thread_local! {
    /// Result for the runtime checked last on this thread. Cached because every call checks.
    static CACHED: Cell<Option<Capabilities>> = const { Cell::new(None) };
}

/// Returns the current runtime.
///
/// # Errors
///
/// [`Error::NoRuntime`] if there is none or it has no timers.
pub(crate) fn current() -> Result<Handle> {
    let handle = Handle::try_current().map_err(|_| Error::NoRuntime)?;
    let has_timers = capabilities(handle.id()).timers;
    has_timers.then_some(handle).ok_or(Error::NoRuntime)
}

/// Checks that connections can be made in the current runtime.
///
/// # Errors
///
/// Those of [`current`], and [`Error::NoRuntime`] if the runtime has no sockets.
pub(crate) fn check_sockets() -> Result<()> {
    let mut capabilities = capabilities(current()?.id());
    let sockets = capabilities.sockets.unwrap_or_else(has_sockets);
    capabilities.sockets = Some(sockets);
    cache(capabilities);
    sockets.then_some(()).ok_or(Error::NoRuntime)
}

/// Sleeps until `at`; never returns in a runtime without timers.
pub(crate) async fn sleep_until(at: Instant) {
    match current() {
        Ok(_) => tokio::time::sleep_until(at).await,
        Err(_) => pending().await,
    }
}

fn capabilities(runtime: Id) -> Capabilities {
    let cached = CACHED.try_with(Cell::get).ok().flatten();
    if let Some(cached) = cached.filter(|cached| cached.runtime == runtime) {
        return cached;
    }
    let capabilities = Capabilities {
        runtime,
        timers: catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).is_ok(),
        sockets: None,
    };
    cache(capabilities);
    capabilities
}

fn cache(capabilities: Capabilities) {
    // While the thread ends there is nothing to cache.
    let _ = CACHED.try_with(|cell| cell.set(Some(capabilities)));
}

fn has_sockets() -> bool {
    let bound = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0));
    let socket = bound.and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
    // If even that fails, connecting reports why.
    socket.map_or(true, |socket| {
        let used = AssertUnwindSafe(|| drop(tokio::net::UdpSocket::from_std(socket)));
        catch_unwind(used).is_ok()
    })
}
