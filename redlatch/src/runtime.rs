//! Checks whether the current tokio runtime has what a call needs.
//!
//! tokio cannot be asked whether a runtime has timers and sockets: creating one panics if they are not
//! enabled. So this module creates one and catches the panic. tokio's message then appears once on stderr,
//! or wherever the program's panic hook writes. The call returns [`Error::NoRuntime`].

use std::cell::Cell;
use std::future::pending;
use std::net::{Ipv4Addr, UdpSocket};
use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::runtime::{Handle, Id};
use tokio::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Capabilities of a runtime, as far as they were checked.
#[derive(Clone, Copy)]
struct Known {
    runtime: Id,
    timers: bool,
    /// `None`: not checked yet.
    sockets: Option<bool>,
}

thread_local! {
    /// Result for the runtime checked last on this thread. Cached because every call checks.
    static KNOWN: Cell<Option<Known>> = const { Cell::new(None) };
}

/// Returns the current runtime.
///
/// # Errors
///
/// [`Error::NoRuntime`] if there is none or it has no timers.
pub(crate) fn current() -> Result<Handle> {
    let handle = Handle::try_current().map_err(|_| Error::NoRuntime)?;
    match known(handle.id()).timers {
        true => Ok(handle),
        false => Err(Error::NoRuntime),
    }
}

/// Checks that connections can be made in the current runtime.
///
/// # Errors
///
/// Those of [`current`], and [`Error::NoRuntime`] if the runtime has no sockets.
pub(crate) fn check_sockets() -> Result<()> {
    let mut known = known(current()?.id());
    let sockets = known.sockets.unwrap_or_else(has_sockets);
    known.sockets = Some(sockets);
    remember(known);
    match sockets {
        true => Ok(()),
        false => Err(Error::NoRuntime),
    }
}

/// Sleeps until `at`; never returns in a runtime without timers.
pub(crate) async fn sleep_until(at: Instant) {
    match current() {
        Ok(_) => tokio::time::sleep_until(at).await,
        Err(_) => pending().await,
    }
}

fn known(runtime: Id) -> Known {
    let known = KNOWN.try_with(Cell::get).ok().flatten();
    known
        .filter(|known| known.runtime == runtime)
        .unwrap_or_else(|| {
            let known = Known {
                runtime,
                timers: catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).is_ok(),
                sockets: None,
            };
            remember(known);
            known
        })
}

fn remember(known: Known) {
    // While the thread ends there is nothing to cache.
    let _ = KNOWN.try_with(|cell| cell.set(Some(known)));
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
