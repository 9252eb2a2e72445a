//! All checks whether the store has a hold, against all steps that put another owner in its place, in each order of their
//! answers, on a stopped clock. A new check or a new step is a new row here.

use std::future::{Future, IntoFuture as _};
use std::pin::Pin;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::error::Loss;
use crate::lease::Lease;
use crate::test_prelude::{SECOND, run_others};
use crate::{Client, Embedded, Guard, IntoTicketError, Owner, WriteLock};

const MS: Duration = Duration::from_millis(1);
/// Time for a check that is repeated in the turn of the hold, and for the watchdog's.
const CHECKED: Duration = Duration::from_secs(5);

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A check of a hold, which begins when it is polled.
#[derive(Debug, Clone, Copy)]
enum Check {
    /// Because of a message during the acquisition.
    AfterMessage,
    /// Beside the handoffs of a chain.
    OfChain,
    /// Because the holder waits for requests to release.
    ForRequests,
    /// By a request for the read side.
    ByReader,
    /// By the watchdog.
    Renewal,
}

const CHECKS: [Check; 5] = [
    Check::AfterMessage,
    Check::OfChain,
    Check::ForRequests,
    Check::ByReader,
    Check::Renewal,
];

impl Check {
    fn of(self, guard: &Guard<WriteLock>) -> Work {
        let (session, hold) = (
            guard.hold_ref().session.clone(),
            guard.hold_ref().hold.clone(),
        );
        match self {
            Check::AfterMessage => Box::pin(async move {
                session.check_hold(&hold.object, Some(&hold)).await;
            }),
            Check::OfChain => {
                Box::pin(async move { session.check_handoff(&hold.object, &hold).await })
            }
            Check::ForRequests => Box::pin(guard.asked()),
            Check::ByReader => {
                let reading = guard.reenter_read().into_future();
                Box::pin(async move { drop(reading.await) })
            }
            Check::Renewal => Box::pin(async move { session.watchdog.suspect(&hold) }),
        }
    }
}

/// A step that ends the hold, or passes it on.
#[derive(Debug, Clone, Copy)]
enum Replace {
    Ticket,
    Release,
    /// The release of a lock with a minimum time.
    Keeper,
    StoreHandoff,
    LocalHandoff,
}

const REPLACES: [Replace; 5] = [
    Replace::Ticket,
    Replace::Release,
    Replace::Keeper,
    Replace::StoreHandoff,
    Replace::LocalHandoff,
];

/// `step` and `check`: how late the answers are. The check is sent after the step.
async fn check_behind_step(replace: Replace, check: Check, step: Duration, checked: Duration) {
    let text = format!("{check:?} behind {replace:?}, {step:?} and {checked:?} late");
    let store = Embedded::new();
    let client = Client::builder().connect_embedded(&store).unwrap();
    let lock = client.read_write_lock("a").write();
    let guard = lock.lock().await.unwrap();
    if let Replace::Keeper = replace {
        let at_least = Lease::from_remaining(SECOND);
        let mut state = guard.hold_ref().hold.state();
        state.period.retain_for(at_least, Instant::now());
    }
    let waiter = match replace {
        Replace::StoreHandoff => Some(lock.lock().owner(Owner::new())),
        Replace::LocalHandoff => Some(lock.lock()),
        _ => None,
    };
    let waiter = waiter.map(|waiter| tokio::spawn(waiter.into_future()));
    run_others().await;
    let (hold, lost) = (guard.hold_ref().hold.clone(), guard.lost());
    let checking = check.of(&guard);
    store.delay_answers([step, checked]);
    let replacing = tokio::spawn(async move {
        match replace {
            Replace::Ticket => {
                let made = guard.into_ticket().await;
                made.map(drop).map_err(IntoTicketError::into_error)
            }
            _ => guard.unlock().await,
        }
    });
    run_others().await;
    let checking = tokio::spawn(checking);
    sleep(CHECKED).await;
    replacing.await.unwrap().expect(&text);
    assert_eq!(hold.loss(), None, "{text}");
    assert!(timeout(SECOND, lost).await.is_err(), "{text}");
    if let Some(waiter) = waiter {
        assert!(waiter.await.unwrap().unwrap().is_valid(), "{text}");
    }
    checking.abort();
}

#[tokio::test(start_paused = true)]
async fn no_check_ends_hold_that_step_has_replaced() {
    for replace in REPLACES {
        for check in CHECKS {
            for (step, checked) in [(0, 0), (10, 0), (10, 5), (10, 20), (0, 10)] {
                check_behind_step(replace, check, step * MS, checked * MS).await;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn each_check_ends_hold_that_the_store_has_lost() {
    for check in CHECKS {
        let store = Embedded::new();
        let clients = [(); 2].map(|()| Client::builder().connect_embedded(&store).unwrap());
        let [lock, peer] = clients.map(|client| client.read_write_lock("a").write());
        let guard = lock.lock().await.unwrap();
        let checking = check.of(&guard);
        assert!(peer.force_unlock().await.unwrap());
        let theirs = peer.lock().await.unwrap();
        let checking = tokio::spawn(checking);
        let lost = timeout(CHECKED, guard.lost()).await;
        let loss = guard.hold_ref().hold.loss();
        assert_eq!(
            (lost.is_ok(), loss),
            (true, Some(Loss::NotHeld)),
            "{check:?}"
        );
        assert!(theirs.is_valid());
        checking.abort();
    }
}
