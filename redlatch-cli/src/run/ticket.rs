//! `redlatch lock`, `redlatch renew` and `redlatch unlock --ticket`: a lock that is held across
//! several processes.
//!
//! 1. `lock` acquires the lock, makes a ticket of it and prints it. If it cannot be printed, or a
//!    signal arrives before it is written, `lock` releases the lock.
//! 2. `renew` and `unlock --ticket` use the ticket as it is. `run --ticket` adopts it.
//! 3. `lock --hold` makes no ticket. It waits for a signal or the loss of the lock.

use std::future::pending;
use std::io::{Error as IoError, ErrorKind};

use redlatch::kind::Revocable;
use redlatch::{
    Client, Embedded, FencedLock, Guard, HasTicket, IntoTicketError, Ticket, TicketKind,
};

use super::held_lock::{DEFAULT_WATCHDOG_LEASE, HeldLock, fenced_lock};
use super::waiting::{report_conflict, report_waiting};
use crate::args::lock::{Lock, Renew};
use crate::exit::{self, Failure};
use crate::output::stderr::{detail, note, stderr};
use crate::output::stdout;
use crate::process::signals::Signals;
use crate::store::args::StoreArgs;
use crate::store::{self, WaitLimits};
use crate::threads::run_in_thread;

/// The longest text that is read from standard input. The library refuses tickets that are much
/// shorter.
const MAX_INPUT: usize = 4096;

/// Evaluates `$body` with a handle of the lock `$name` of this kind.
macro_rules! with_lock {
    ($client:expr, $kind:expr, $name:expr, $lock:ident => $body:expr) => {
        match $kind {
            TicketKind::Fair => {
                // A waiter that hangs delays the others as long as a holder that dies.
                let $lock = $client.fair_lock($name).wait_time(DEFAULT_WATCHDOG_LEASE);
                $body
            }
            TicketKind::Fenced => {
                let $lock = $client.fenced_lock($name);
                $body
            }
            TicketKind::Spin => {
                let $lock = $client.spin_lock($name);
                $body
            }
            TicketKind::Write => {
                let $lock = $client.read_write_lock($name).write();
                $body
            }
            // The other kinds have been parsed before.
            _ => {
                let $lock = $client.lock($name);
                $body
            }
        }
    };
}

pub(crate) async fn lock(store_args: &StoreArgs, args: &Lock) -> Result<u8, Failure> {
    let mut signals = Signals::catch_ending()?;
    let (name, kind) = (&args.name, args.kind());
    if !args.hold && stdout::is_closed() {
        return Err(Failure {
            code: exit::SYSTEM,
            message:
                "standard output is closed or /dev/null, so nothing would receive the ticket; \
                      the lock was not requested"
                    .into(),
        });
    }
    let mut settings = Client::builder().label("redlatch lock");
    if let Some(watchdog) = args.watchdog {
        settings = settings.watchdog_lease(watchdog);
    }
    // The library reports an invalid name or lease before any server is contacted.
    let checking = settings.clone().connect_embedded(&Embedded::new())?;
    let checked = checking.lock(name).lock().await?;
    let checked = checked.into_ticket_for(args.lease).await;
    checked.map_err(IntoTicketError::into_error)?;
    let limits = WaitLimits::new(args.waiting.outage_limit(), args.waiting.wait);
    let settings = settings.outage_limit(args.waiting.outage_limit());
    let client = tokio::select! {
        biased;
        code = signals.next_end() => return Ok(code),
        client = store::connect_within(store_args, settings, &limits) => client?,
    };
    let locked = match kind {
        TicketKind::Fenced => {
            let lock = fenced_lock(&client, name, args.clock_tokens);
            let token = |guard: &Guard<FencedLock>| Some(guard.token());
            lock_with(&client, &lock, args, &limits, &mut signals, token).await
        }
        kind => with_lock!(&client, kind, name, lock => {
            lock_with(&client, &lock, args, &limits, &mut signals, |_| None).await
        }),
    };
    // Settles an interrupted acquisition.
    store::flush(&client).await;
    locked
}

async fn lock_with<K: HasTicket + Revocable>(
    client: &Client,
    lock: &redlatch::Lock<K>,
    args: &Lock,
    limits: &WaitLimits,
    signals: &mut Signals,
    token: impl Fn(&Guard<redlatch::Lock<K>>) -> Option<u64>,
) -> Result<u8, Failure> {
    let names = std::slice::from_ref(&args.name);
    let acquiring = async {
        match limits.wait() {
            Some(wait) => lock.try_lock().wait(wait).await,
            None if args.waiting.no_wait => lock.try_lock().await,
            None => lock.lock().await.map(Some),
        }
    };
    let acquired = tokio::select! {
        biased;
        code = signals.next_end() => return Ok(code),
        acquired = acquiring => acquired,
        never = report_waiting(client, names) => match never {},
    };
    let guard = match acquired {
        Ok(Some(guard)) => guard,
        Ok(None) => {
            report_conflict(client, names, args.waiting.wait).await;
            return Ok(args.conflict_exit_code);
        }
        Err(error) => {
            let wanted = match args.kind() {
                TicketKind::Write => "read-write lock",
                _ => "lock",
            };
            return Err(store::explain_error(client, names, wanted, error).await);
        }
    };
    let name = &args.name;
    detail!("{name}: acquired by {}", guard.owner_id());
    if args.hold {
        let token = token(&guard);
        let held = HeldLock::from_revocable(guard, token);
        return hold(name, held, signals).await;
    }
    let made = tokio::select! {
        biased;
        code = signals.next_end() => return Ok(code),
        made = guard.into_ticket_for(args.lease) => made,
    };
    let ticket = made.map_err(IntoTicketError::into_error)?;
    let printed = tokio::select! {
        biased;
        code = signals.next_end() => Ok(Some(code)),
        printed = print(&ticket) => printed.map(|()| None),
    };
    if let Ok(None) = printed {
        return Ok(exit::OK);
    }
    lock.unlock_ticket(&ticket).await?;
    Ok(printed?.unwrap_or(exit::OK))
}

/// Prints a ticket. A reader that has gone is an error: nothing else has the ticket.
async fn print(ticket: &Ticket) -> Result<(), Failure> {
    match stdout::lines_if_open([ticket.to_string()]).await? {
        true => Ok(()),
        false => Err(Failure::system(
            "cannot write the ticket to standard output, so the lock was released",
            &ErrorKind::BrokenPipe.into(),
        )),
    }
}

/// Holds the lock until a signal asks to release it, or it is lost.
async fn hold(name: &str, mut held: HeldLock, signals: &mut Signals) -> Result<u8, Failure> {
    let line = match held.token() {
        Some(token) => format!("{} {token}", held.owner()),
        None => held.owner().to_owned(),
    };
    let asked = held.take_asked();
    let unwritten = async {
        match stdout::lines([line]).await {
            Ok(_) => pending().await,
            Err(failure) => failure,
        }
    };
    tokio::select! {
        biased;
        loss = held.lost() => {
            stderr!("{name}: lost: {loss}");
            return Ok(exit::LOST);
        }
        _ = signals.next_end() => {}
        () = asked => note!("{name}: asked to release it"),
        failure = unwritten => return Err(failure),
    }
    held.unlock().await?;
    detail!("{name}: released");
    Ok(exit::OK)
}

pub(crate) async fn renew(store_args: &StoreArgs, args: &Renew) -> Result<u8, Failure> {
    let ticket = read(&args.ticket).await?;
    let client = store::connect(store_args, Client::builder()).await?;
    let lease = args.lease.unwrap_or(ticket.lease());
    with_lock!(client, ticket.kind(), ticket.name(), lock => {
        lock.renew_ticket(&ticket, lease).await?;
    });
    Ok(exit::OK)
}

/// Releases the lock of a ticket.
pub(crate) async fn unlock(store_args: &StoreArgs, text: &str) -> Result<u8, Failure> {
    let ticket = read(text).await?;
    let client = store::connect(store_args, Client::builder()).await?;
    with_lock!(client, ticket.kind(), ticket.name(), lock => {
        lock.unlock_ticket(&ticket).await?;
    });
    detail!("{}: released", ticket.name());
    Ok(exit::OK)
}

/// Continues the hold of a ticket in this process.
pub(crate) async fn adopt(
    client: &Client,
    limits: &WaitLimits,
    ticket: &Ticket,
) -> redlatch::Result<HeldLock> {
    with_lock!(client, ticket.kind(), ticket.name(), lock => {
        let adopting = limits.retry_through_outage(ticket.name(), async || lock.adopt(ticket).await);
        Ok(HeldLock::from_revocable(adopting.await?, ticket.token()))
    })
}

/// Parses a ticket from the command line, or with `-` the first line of standard input.
pub(crate) async fn read(text: &str) -> Result<Ticket, Failure> {
    if text != "-" {
        return Ok(text.trim_ascii().parse()?);
    }
    let read = run_in_thread("ticket", first_line).await;
    let line = read
        .and_then(|read| read)
        .map_err(|error| Failure::system("cannot read the ticket", &error))?;
    Ok(line.trim_ascii().parse()?)
}

/// Reads the first line of standard input and nothing behind it, which may be for CMD.
fn first_line() -> Result<String, IoError> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.len() < MAX_INPUT {
        match rustix::io::read(rustix::stdio::stdin(), &mut byte) {
            Ok(1) if byte != *b"\n" => line.extend(byte),
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(String::from_utf8_lossy(&line).into_owned())
}
