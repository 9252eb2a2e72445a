//! The responses of `redlatch serve`.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use http_body_util::Either;
use http_body_util::channel::{Channel, Sender};
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::http::uri::Authority;
use hyper::{Request, StatusCode};
use percent_encoding::percent_decode_str;

use super::http::{self, Response, STREAM_TIME};
use super::looks::{Latest, Looks, Viewer};
use super::metrics::{Metrics, OPEN_METRICS};
use super::state;
use crate::output::escape;

/// How often a stream without news has a comment. Otherwise a client that has left is not noticed.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// How long pages share an event.
const EVENT_SHARED_FOR: Duration = Duration::from_secs(1);

/// The page: path, type and content of each file.
const PAGE: [(&str, &str, &str); 3] = [
    (
        "/",
        "text/html; charset=utf-8",
        include_str!("page/index.html"),
    ),
    (
        "/page.css",
        "text/css; charset=utf-8",
        include_str!("page/page.css"),
    ),
    (
        "/page.js",
        "text/javascript; charset=utf-8",
        include_str!("page/page.js"),
    ),
];

/// Sent with all responses. The page loads nothing from elsewhere, and is in no frame.
const HEADERS: [(HeaderName, &str); 4] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
];

pub(super) struct Site {
    looks: Looks,
    metrics: Metrics,
    /// Whether it serves only this machine.
    is_local: bool,
}

impl Site {
    pub(super) fn new(looks: Looks, metrics: Metrics, bound: SocketAddr) -> Site {
        Site {
            looks,
            metrics,
            is_local: bound.ip().is_loopback(),
        }
    }

    pub(super) fn respond(&self, request: &Request<Incoming>) -> Response {
        let host = request.headers().get(header::HOST);
        let is_foreign = self.is_local && !host.is_none_or(is_own_host);
        let query = request.uri().query().unwrap_or_default();
        let mut response = self.respond_to(request.uri().path(), query, is_foreign);
        for (name, value) in HEADERS {
            let value = HeaderValue::from_static(value);
            response.headers_mut().insert(name, value);
        }
        response
    }

    /// `is_foreign`: whether the request is for another host.
    fn respond_to(&self, path: &str, query: &str, is_foreign: bool) -> Response {
        let latest = self.looks.latest().borrow().clone();
        let file = PAGE.into_iter().find(|(file, ..)| *file == path);
        match path {
            "/metrics" => match self.metrics.text() {
                Ok(metrics) => http::response(StatusCode::OK, OPEN_METRICS, metrics),
                Err(_) => http::response(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    http::TEXT,
                    "the metrics cannot be written\n",
                ),
            },
            "/healthz" => http::health(latest.failure.as_deref()),
            _ if is_foreign && (file.is_some() || path.starts_with("/api/")) => http::response(
                StatusCode::FORBIDDEN,
                http::TEXT,
                "use an address or localhost in the URL: otherwise any web site could read this page\n",
            ),
            "/api/state" => {
                let limit = parameter(query, "limit").and_then(|limit| limit.parse().ok());
                let filter = parameter(query, "filter").unwrap_or_default();
                let limit = limit.unwrap_or(state::DEFAULT_LIMIT);
                let state = state::state(&latest, &filter, limit);
                http::json(&state, latest.failure.is_none())
            }
            "/api/events" => {
                let filter = parameter(query, "filter").unwrap_or_default();
                let (sender, body) = Channel::new(1);
                tokio::spawn(send_events(self.looks.viewer(), filter, sender));
                let body = Either::Right(body);
                http::with_body(StatusCode::OK, "text/event-stream", body)
            }
            _ => match file {
                Some((_, content_type, text)) => http::response(StatusCode::OK, content_type, text),
                None => http::response(
                    StatusCode::NOT_FOUND,
                    http::TEXT,
                    "use /, /metrics, /healthz, /api/state or /api/events\n",
                ),
            },
        }
    }
}

/// Returns whether a request with this header `Host` is for this machine. A web site can have a
/// name of its own point here, and would then be allowed to read all responses.
fn is_own_host(host: &HeaderValue) -> bool {
    let Ok(authority) = Authority::try_from(host.as_bytes()) else {
        return false;
    };
    let host = authority.host();
    let address = host.trim_start_matches('[').trim_end_matches(']');
    address.parse::<IpAddr>().is_ok() || host == "localhost"
}

/// Returns a parameter of a query.
fn parameter(query: &str, name: &str) -> Option<String> {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.find(|(one, _)| *one == name)?;
    let value = percent_decode_str(value).decode_utf8_lossy();
    Some(value.into_owned())
}

/// Sends the state after each look, until the client leaves or the time of a stream is over. Then
/// browsers connect again.
async fn send_events(mut viewer: Viewer, filter: String, mut sender: Sender<Bytes>) {
    let begun = Instant::now();
    viewer.latest.mark_changed();
    let mut event = Bytes::from("retry: 500\n");
    while sender.send_data(event).await.is_ok() && begun.elapsed() < STREAM_TIME {
        let changed = tokio::time::timeout(HEARTBEAT, viewer.latest.changed());
        event = match changed.await {
            Ok(_) => state_event(&viewer.latest.borrow_and_update(), &filter, Instant::now()),
            Err(_) => Bytes::from(":\n"),
        };
    }
}

/// Pages without a filter, most of them, share their event, unless one is opened later: the event
/// says how old the look is.
fn state_event(latest: &Latest, filter: &str, now: Instant) -> Bytes {
    let event = || {
        let state = state::state(latest, filter, state::DEFAULT_LIMIT);
        let json = escape::to_json(&state).unwrap_or_default();
        format!("data: {json}\n\n").into()
    };
    if !filter.is_empty() {
        return event();
    }
    let (sent, shared) = latest.event.get_or_init(|| (now, event()));
    match now.duration_since(*sent) < EVENT_SHARED_FOR {
        true => shared.clone(),
        false => event(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_hosts_are_addresses_and_localhost() {
        for (host, is_own) in [
            ("127.0.0.1:9187", true),
            ("[::1]:9187", true),
            ("192.168.0.7", true),
            ("localhost:9187", true),
            ("example.com", false),
            ("127.0.0.1.example.com", false),
            ("localhost.example.com", false),
            ("a b", false),
            ("", false),
        ] {
            let value = HeaderValue::from_str(host).unwrap();
            assert_eq!(is_own_host(&value), is_own, "{host}");
        }
    }

    #[test]
    fn page_that_is_opened_later_gets_an_event_of_its_own() {
        let latest = Latest::new("store".into(), "*".into());
        let now = Instant::now();
        let event = |filter, millis| {
            let event = state_event(&latest, filter, now + Duration::from_millis(millis));
            // The same memory.
            (event.as_ptr(), event)
        };
        let (first, _event) = event("", 0);
        for (filter, millis, shares) in [("", 999, true), ("", 1000, false), ("a", 0, false)] {
            let (one, _event) = event(filter, millis);
            assert_eq!(one == first, shares, "{filter} {millis}");
        }
    }

    #[test]
    fn parameters_are_decoded() {
        for (query, filter) in [
            ("filter=a%20b%2F%C3%BC", Some("a b/ü")),
            ("limit=5&filter=a=b", Some("a=b")),
            ("filter=", Some("")),
            ("filter=%ff%", Some("\u{fffd}%")),
            ("filter", None),
            ("xfilter=a", None),
            ("", None),
        ] {
            assert_eq!(parameter(query, "filter").as_deref(), filter, "{query}");
        }
    }
}
