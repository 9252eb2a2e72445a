//! Signals that redlatch gets and CMD is to have.

use std::thread;

use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::origin::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use tokio::sync::mpsc;

use crate::exit::Failure;

/// From now on signals come here instead of ending the process.
pub(crate) struct Signals(mpsc::UnboundedReceiver<Caught>);

#[derive(Debug, Clone, Copy)]
pub(crate) struct Caught {
    pub(crate) signal: Signal,
    /// Whether it came from a terminal, and not from some process.
    pub(crate) of_terminal: bool,
}

impl Signals {
    pub(crate) fn catch() -> Result<Signals, Failure> {
        let refused = |error| Failure::system("cannot watch for signals", &error);
        let mut numbers = vec![SIGINT, SIGTERM, SIGQUIT];
        if !ignored(SIGHUP) {
            numbers.push(SIGHUP);
        }
        let mut caught = SignalsInfo::<WithOrigin>::new(numbers).map_err(refused)?;
        let (tell, told) = mpsc::unbounded_channel();
        let forward = move || {
            for origin in caught.forever() {
                let Some(signal) = Signal::from_named_raw(origin.signal) else {
                    continue;
                };
                // A terminal sends only these; a hang-up it may send to us alone.
                let of_keys = matches!(origin.signal, SIGINT | SIGQUIT);
                let of_terminal = of_keys && origin.cause == Cause::Kernel;
                let sent = tell.send(Caught {
                    signal,
                    of_terminal,
                });
                if sent.is_err() {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("signals".into())
            .spawn(forward)
            .map_err(refused)?;
        Ok(Signals(told))
    }

    /// The next one. Can be dropped at will.
    pub(crate) async fn next(&mut self) -> Caught {
        match self.0.recv().await {
            Some(caught) => caught,
            // The thread has ended, which it does not do before we do.
            None => std::future::pending().await,
        }
    }
}

/// Whether a signal was being ignored when we were started, as `nohup` does for CMD to inherit it.
fn ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| {
        let mask = line.strip_prefix("SigIgn:")?;
        u64::from_str_radix(mask.trim(), 16).ok()
    });
    mask.is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}
