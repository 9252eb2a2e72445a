//! Connecting to the store.

pub(crate) mod args;
mod credentials;

use std::time::Duration;

use redlatch::inspect::{ObjectKind, ObjectState};
use redlatch::{Client, ClientBuilder, Error, PublicUrl};
use tokio::time::Instant;

use self::args::{StoreArgs, without_secrets};
use crate::exit::Failure;
use crate::output::stderr::{note, warning};
use crate::threads::run_in_thread;
use crate::{duration, text};

/// How long to wait for pending releases before the program ends. Anything left after that ends
/// with its lease.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// The pause between two attempts during an outage.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

pub(crate) async fn connect(
    store_args: &StoreArgs,
    settings: ClientBuilder,
) -> Result<Client, Failure> {
    let limits = WaitLimits::new(Some(Duration::ZERO), None);
    connect_within(store_args, settings, &limits).await
}

/// Connects to a store, which may be unreachable for as long as `limits` allow.
pub(crate) async fn connect_within(
    store_args: &StoreArgs,
    settings: ClientBuilder,
    limits: &WaitLimits,
) -> Result<Client, Failure> {
    let url = store_args.url();
    if url == "embedded:" {
        return Err(Failure::usage(
            "an embedded store is private to this process, so its locks exclude no other process; \
             use the --url of a server",
        ));
    }
    // Another program may write the password.
    let args = store_args.clone();
    let applying = run_in_thread("files", move || args.apply_to(settings)).await;
    let settings = applying.map_err(|error| Failure::system("cannot read files", &error))??;
    let store = shown_url(store_args)?;
    let connecting =
        limits.retry_through_outage(&store, async || settings.clone().connect(url).await);
    let connected = connecting.await;
    connected.map_err(|error| connect_failure(store_args, &store, error))
}

/// Returns the URL of the store without users and passwords, for messages.
pub(crate) fn shown_url(store_args: &StoreArgs) -> Result<String, Failure> {
    match PublicUrl::parse(store_args.url()) {
        Ok(public) => Ok(public.redacted),
        Err(error) => Err(connect_failure(store_args, "", error)),
    }
}

/// Adds to an error which URL was used, and where that is from.
fn connect_failure(store_args: &StoreArgs, store: &str, error: Error) -> Failure {
    let (prefix, hint) = match (&error, &store_args.url_source) {
        (Error::InvalidUrl { .. }, Some(source)) => (format!("{source}: url: "), ""),
        (
            Error::AuthenticationFailed {
                sentinel: Some(_), ..
            },
            _,
        ) => (
            format!("{store}: "),
            " (--sentinel-user and --sentinel-password-file, or REDLATCH_SENTINEL_USERNAME and REDLATCH_SENTINEL_PASSWORD)",
        ),
        (Error::AuthenticationFailed { .. }, _) => (
            format!("{store}: "),
            " (--user and --password-file or --credentials-command, or REDLATCH_USERNAME and REDLATCH_PASSWORD)",
        ),
        // Names the store: it may be the default, or come from the environment or a file.
        (
            Error::Unavailable { .. }
            | Error::ResponseTimeout { .. }
            | Error::TlsFailed { .. }
            | Error::NotPermitted { .. }
            | Error::Refused { .. }
            | Error::UnsupportedServer { .. },
            _,
        ) => (format!("{store}: "), ""),
        _ => (String::new(), ""),
    };
    let failure = Failure::from(error);
    let mut message = failure.message;
    let StoreArgs {
        tls_ca,
        tls_cert,
        tls_key,
        ..
    } = store_args;
    for path in [tls_ca, tls_cert, tls_key].into_iter().flatten() {
        let path = path.to_string_lossy();
        message = message.replace(&*path, &without_secrets(&path));
    }
    Failure {
        message: format!("{prefix}{message}{hint}"),
        ..failure
    }
}

/// Gives pending releases time to complete before the program ends.
pub(crate) async fn flush(client: &Client) {
    let unsettled = client.flush_within(FLUSH_TIMEOUT).await;
    if !unsettled.is_empty() {
        warning!(
            "the store has not confirmed the release of {unsettled}; what it still has ends with its lease"
        );
    }
}

/// How long a command waits.
#[derive(Debug)]
pub(crate) struct WaitLimits {
    /// How long an outage of the store may last; `None`: without a limit.
    outage: Option<Duration>,
    wait: Option<Duration>,
    /// When the wait limit ends.
    end: Option<Instant>,
}

impl WaitLimits {
    pub(crate) fn new(outage: Option<Duration>, wait: Option<Duration>) -> WaitLimits {
        WaitLimits {
            outage,
            wait,
            end: wait.and_then(|wait| Instant::now().checked_add(wait)),
        }
    }

    /// Returns how long to wait for the lock. The time of an outage while connecting is subtracted,
    /// the time of a normal connection is not, so that a request with a short limit is still sent.
    pub(crate) fn wait(&self) -> Option<Duration> {
        let left = self.end.map(|end| end - Instant::now());
        self.wait.map(|wait| {
            left.filter(|left| *left + RETRY_PAUSE < wait)
                .unwrap_or(wait)
        })
    }

    /// Repeats `step` until the store answers, as long as its errors are transient. An outage
    /// begins with the first failure and ends with the next answer; both are reported.
    pub(crate) async fn retry_through_outage<T>(
        &self,
        store: &str,
        mut step: impl AsyncFnMut() -> redlatch::Result<T>,
    ) -> redlatch::Result<T> {
        let mut outage: Option<Instant> = None;
        loop {
            let begun = Instant::now();
            let error = match step().await {
                Err(error) if error.is_transient() => error,
                done => {
                    if let (Ok(_), Some(since)) = (&done, outage) {
                        let lasted = duration::rough(since.elapsed());
                        note!("{store}: the store answers again, after {lasted}");
                    }
                    return done;
                }
            };
            let since = outage.unwrap_or(begun);
            let is_over = |end: Instant| end <= Instant::now() + RETRY_PAUSE;
            let is_too_long = self.outage.is_some_and(|outage| since.elapsed() >= outage);
            if is_too_long || self.end.is_some_and(is_over) {
                return Err(error);
            }
            if outage.replace(since).is_none() {
                note!("{store}: {error}; waiting for the store");
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}

/// Converts an error of a request for `names`, which should each be a `wanted`. If one is an object
/// of another kind, the message names that kind and suggests `redlatch show`. The library's own
/// message suggests deleting the key.
pub(crate) async fn explain_error(
    client: &Client,
    names: &[String],
    wanted: &str,
    error: Error,
) -> Failure {
    if let Error::WrongKind { name, .. } = &error
        && let Some(name) = names.iter().find(|known| *known == name).or(names.first())
        && let Ok(Some(state)) = client.inspect(name).await
        && object_name(&state) != wanted
    {
        return wrong_kind_failure(name, &state, wanted);
    }
    error.into()
}

pub(crate) fn wrong_kind_failure(name: &str, state: &ObjectState, wanted: &str) -> Failure {
    let (kind, wanted) = (
        text::with_article(&object_name(state)),
        text::with_article(wanted),
    );
    let other = match state {
        // A number, as SET NX of other libraries may write it.
        ObjectState::Counter { .. } => " (or a lock of another library)",
        _ => "",
    };
    Failure::wrong_kind(format!(
        "{name} is {kind}{other}, not {wanted}: redlatch show {name}"
    ))
}

/// Returns what the object is called in messages:
/// [`Kind::object_name`](crate::args::run::Kind::object_name).
fn object_name(state: &ObjectState) -> String {
    match state {
        ObjectState::Lock { .. } => ObjectKind::Lock.to_string(),
        state => state.kind().to_string(),
    }
}

/// Checks a name in a temporary embedded store: the library reports an invalid one before any
/// server is contacted, and also without a server.
pub(crate) async fn check_name(name: &str) -> Result<(), Failure> {
    Client::embedded().lock(name).is_locked().await?;
    Ok(())
}
