//! What answers HTTP requests: `redlatch serve` and `redlatch elect --http`.
//!
//! `redlatch serve`:
//!
//! 1. One loop looks at all objects (`looks`): every --interval, and every --refresh while a page is
//!    open. So requests cost the store nothing, and 100 pages cost as much as one.
//! 2. The result of the latest look is served as metrics (`metrics`) and as JSON (`state`), once or
//!    as a stream of events (`routes`).
//! 3. The page shows that stream: three files, which the program contains.

pub(crate) mod http;
pub(crate) mod leader;
mod looks;
mod metrics;
mod routes;
mod state;

use std::sync::Arc;

use self::looks::Latest;
use self::metrics::Metrics;
use self::routes::Site;
use crate::args::Serve;
use crate::exit::Failure;
use crate::output::stderr::note;
use crate::process::signals::Signals;
use crate::store;
use crate::store::args::StoreArgs;

pub(crate) async fn serve(store_args: StoreArgs, serve: Serve) -> Result<u8, Failure> {
    let mut signals = Signals::catch_ending()?;
    let (listener, bound) = http::listen(serve.listen).await?;
    let latest = Latest::new(store::shown_url(&store_args)?, serve.pattern.clone());
    let looks = looks::Looks::new(latest);
    let metrics = Metrics::new(looks.latest(), serve.names);
    let site = Arc::new(Site::new(looks.clone(), metrics, bound));
    note!("serving http://{bound}/ and http://{bound}/metrics");
    let serving = http::serve(listener, move |request| site.respond(request));
    tokio::select! {
        biased;
        code = signals.next_end() => Ok(code),
        failure = looks.repeat(store_args, &serve) => Err(failure),
        never = serving => match never {},
    }
}
