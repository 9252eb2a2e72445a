//! What most tests import.

pub(crate) use std::future::poll_fn;
pub(crate) use std::pin::pin;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Mutex};
pub(crate) use std::task::Poll;
pub(crate) use std::time::Duration;

pub(crate) use redlatch::kind::OwnedKind;
pub(crate) use redlatch::{
    Client, ClientBuilder, Embedded, Error, ExpirableSemaphore, Expiry, Guard, HasTicket, Lock,
    Loss, MAX_LEASE, MultiLock, Owner, RedLock, ReplicaSync, Semaphore,
};
pub(crate) use redlatch_testkit::{
    Cluster, ClusterPlan, Monitor, Proxy, SentinelPlan, Sentinels, Server, shared, shared_cluster,
    slot_of, unique,
};
pub(crate) use tokio::task::JoinHandle;
pub(crate) use tokio::time::{sleep, timeout};

pub(crate) use super::{
    HOUR, LONG, Random, SECOND, SHORT, TestStore, WATCHDOG, assert_idle, assert_lost, assert_took,
    assert_transient, beside_release, channels, client, client_at, connect, cut_off, done,
    done_all, drop_after_each_poll, drop_result_after_each_poll, embedded_clients, free, free_all,
    held, held_all, joined, joined_all, lease_left, long_timeout, messages, on_every_store,
    patient, poll_until, poll_until_refused, poll_until_subscribed, poll_up_to, proxied_client,
    proxied_server, pttl, renewing, response_timeout, retry_if_late, retry_if_late_blocking,
    retry_transient, runtime, runtime_without_sockets, seed, server_and_client, short_linger,
    spawn_each, subscribers, threaded_runtime, unregistered_client, until, until_idle,
    until_in_sync, until_rises, until_subscribed, until_subscribed_once, user_without_channels,
    wait_until_discarded, wait_until_lost, waiter_of, with_lost_answer, with_lost_answer_after,
    within_limit,
};
