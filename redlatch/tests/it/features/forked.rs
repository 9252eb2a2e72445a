//! Children that `fork` creates, which have a copy of all that their parent had.
//!
//! The test starts a process of its own, because the threads of other tests do not exist in a child.

use std::env;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, exit};
use std::sync::mpsc::RecvTimeoutError;

use fork::{Fork, waitpid};
use redlatch::blocking;

use crate::common::prelude::*;

/// The environment variable that makes this test the process that forks: the URL of its server.
const FORKS: &str = "REDLATCH_TEST_OF_FORK";

#[test]
fn children_of_one_process_exclude_each_other() {
    if let Ok(url) = env::var(FORKS) {
        return fork_children(&url);
    }
    let server = Server::start();
    let forking = Command::new(env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "--test-threads=1"])
        .arg("features::forked::children_of_one_process_exclude_each_other")
        .env(FORKS, server.url())
        .status();
    assert!(forking.unwrap().success());
}

fn fork_children(url: &str) {
    // One id: then only the numbers of their owners tell the children apart.
    let settings = || Client::builder().client_id("worker");
    // The parent has numbered owners, also that of its thread.
    let _ = (Owner::new(), blocking::current_thread());
    let kept = runtime();
    kept.block_on(async { Owner::new() });
    for is_first in [true, false] {
        in_child(|| {
            let client = blocking::Client::with(settings(), url).unwrap();
            let acquired = client.lock("thread").try_lock().lease(LONG).block();
            let acquired = ManuallyDrop::new(acquired.unwrap());
            assert_eq!(acquired.is_some(), is_first);
        });
        in_child(|| {
            runtime().block_on(async {
                let client = settings().connect(url).await.unwrap();
                let acquired = client.lock("task").try_lock().lease(LONG).await;
                let acquired = ManuallyDrop::new(acquired.unwrap());
                assert_eq!(acquired.is_some(), is_first);
            });
        });
        // Also in a runtime that the parent has used.
        in_child(|| {
            kept.block_on(async {
                let named = Owner::new();
                let client = settings().connect(url).await.unwrap();
                let request = |name| client.lock(name).try_lock().lease(LONG);
                for request in [request("anonymous"), request("named").owner(named)] {
                    let acquired = ManuallyDrop::new(request.await.unwrap());
                    assert_eq!(acquired.is_some(), is_first);
                }
            });
        });
    }
    child_flushes_nothing_of_its_parent(url, &kept);
    child_does_not_wait_for_threads_of_its_parent(url);
    let before = runtime();
    let lazy = before.block_on(async { settings().connect_lazy(url) });
    let clients = [before.block_on(Client::connect(url)), lazy].map(Result::unwrap);
    let embedded = Client::embedded();
    let lock = clients[0].fenced_lock("parent");
    let mut guard = Some(before.block_on(held(&lock)));
    drop(before);
    in_child(|| {
        runtime().block_on(async {
            for client in &clients {
                for error in [
                    client.fenced_lock("child").try_lock().await.err(),
                    client.lock("parent").is_locked().await.err(),
                    client.lock("parent").force_unlock().await.err(),
                    client.ping().await.err(),
                ] {
                    assert_eq!(error, Some(Error::NoRuntime));
                }
            }
            let error = embedded.lock("a").try_lock().await.unwrap_err();
            assert_eq!(error, Error::NoRuntime);
            guard.take();
            clients[0].flush().await;
        });
    });
    let guard = guard.unwrap();
    let holder = runtime().block_on(lock.holder()).unwrap();
    assert_eq!(holder.map(|holder| holder.owner), Some(guard.owner_id()));
}

/// The parent forks in a context of a runtime, in which its thread has acquired a lock: that thread knows its process then.
fn child_does_not_wait_for_threads_of_its_parent(url: &str) {
    let runtime = threaded_runtime();
    let client = runtime.block_on(Client::connect(url)).unwrap();
    let client = client.blocking().unwrap();
    let _context = runtime.enter();
    client
        .lock("in a context")
        .lock()
        .block()
        .unwrap()
        .unlock()
        .unwrap();
    in_child(|| {
        let (_ends, ended) = std::sync::mpsc::channel::<()>();
        std::thread::spawn(move || {
            if ended.recv_timeout(LONG) == Err(RecvTimeoutError::Timeout) {
                exit(2);
            }
        });
        let error = client.lock("in a context").try_lock().block().err();
        assert_eq!(error, Some(Error::NoRuntime));
    });
}

/// The registry has an entry of a hold that the parent has released just now.
fn child_flushes_nothing_of_its_parent(url: &str, undriven: &tokio::runtime::Runtime) {
    let settings = Client::builder().watchdog_lease(10 * LONG);
    let client = undriven.block_on(async {
        let client = settings.connect(url).await.unwrap();
        let guard = held(&client.lock("registered")).await;
        until("it is registered", async || {
            let state = client.inspect("registered").await.unwrap().unwrap();
            state.holders()[0].registered.is_some()
        })
        .await;
        free(guard).await;
        client
    });
    in_child(|| runtime().block_on(within_limit("flushed", client.flush())));
}

/// Runs `work` in a child process, which must succeed.
fn in_child(work: impl FnOnce()) {
    match fork::fork().unwrap() {
        Fork::Child => exit(catch_unwind(AssertUnwindSafe(work)).map_or(1, |()| 0)),
        Fork::Parent(child) => assert_eq!(waitpid(child).unwrap(), 0),
    }
}
