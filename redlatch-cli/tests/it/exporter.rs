//! The metrics of `redlatch serve`, called `redlatch exporter` here, read with the parser of OpenMetrics.

use openmetrics_parser::OpenMetricsValue;
use openmetrics_parser::openmetrics::parse_openmetrics;
use redlatch_testkit::{Sentinels, Server, unique};
use rustix::process::Signal;

use crate::support::*;

/// Starts an exporter on a free port. Returns its address, too.
pub(crate) fn start(url: &str, args: &[&str]) -> (Running, String) {
    let listen = ["exporter", "--listen", "127.0.0.1:0", "--interval", "100ms"];
    let mut command = clean_command(&[&listen, args].concat());
    command.env("REDLATCH_URL", url);
    start_serving(command, "/metrics")
}

/// Returns the value of a series in the metrics, which must be well-formed.
fn value(address: &str, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let response = request(address, "GET /metrics");
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    let all = parse_openmetrics(body).unwrap_or_else(|error| panic!("{error}: {body}"));
    let family = all.families.get(name)?;
    let mut samples = family.iter_samples();
    let sample = samples.find(|sample| {
        let found = sample.get_labelset().unwrap();
        let has = |(label, value): &(&str, &str)| found.get_label_value(label) == Some(*value);
        labels.iter().all(has)
    });
    match &sample?.value {
        OpenMetricsValue::Gauge(number) => Some(number.as_f64()),
        other => panic!("{name} is {other:?}"),
    }
}

/// Their clients register them.
#[test]
fn exporter_counts_waiters_of_each_kind() {
    let server = Server::start();
    let holders = [
        ("lock", "--spin"),
        ("lock", "--"),
        ("read-write lock", "--write"),
    ];
    let (exporter, address) = start(&server.url(), &["--names"]);
    for (i, (kind, option)) in holders.into_iter().enumerate() {
        let (name, option) = (
            format!("a{i}"),
            Some(option).filter(|option| *option != "--"),
        );
        let options: Vec<_> = option.into_iter().collect();
        let holder = hold(&server, &options, &name);
        let waiters = [(); 3].map(|()| {
            let args = [&["run"], &options[..], &[&name, "--", "true"]].concat();
            Running::start(redlatch(&server, &args))
        });
        until("three waiters are counted", || {
            value(&address, "redlatch_object_waiters", &[("name", &name)]) == Some(3.0)
        });
        let of_kind = value(&address, "redlatch_waiters", &[("kind", kind)]);
        assert_eq!(of_kind, Some(3.0), "{name}");
        holder.release();
        for waiter in waiters {
            waiter.finish().expect(0);
        }
    }
    drop(exporter);
}

#[test]
fn exporter_counts_holders_and_waiters() {
    let server = Server::start();
    let holder = hold(&server, &["--fair"], "a");
    let waiter = Running::start(redlatch(&server, &["run", "--fair", "a", "--", "true"]));
    let name = "say \"hi\\";
    let other = hold(&server, &[], name);
    let (exporter, address) = start(&server.url(), &["--names"]);
    let fair = [("kind", "fair lock")];
    until("the waiter is counted", || {
        value(&address, "redlatch_waiters", &fair) == Some(1.0)
    });
    assert_eq!(value(&address, "redlatch_exporter_up", &[]), Some(1.0));
    assert_eq!(value(&address, "redlatch_holders", &fair), Some(1.0));
    assert_eq!(
        value(&address, "redlatch_objects", &[("kind", "lock")]),
        Some(1.0)
    );
    assert_eq!(
        value(&address, "redlatch_object_holders", &[("name", name)]),
        Some(1.0)
    );
    assert_eq!(
        value(&address, "redlatch_object_waiters", &[("name", "a")]),
        Some(1.0)
    );
    let left = value(&address, "redlatch_object_lease_seconds", &[("name", "a")]);
    assert!(
        left.is_some_and(|left| left > 0.0 && left <= 30.0),
        "{left:?}"
    );
    for running in [holder, other] {
        running.release();
    }
    waiter.finish().expect(0);
    until("all is free", || {
        value(&address, "redlatch_objects", &[]).is_none()
    });
    exporter.signal(Signal::TERM);
    exporter.finish().expect(128 + 15);
}

#[test]
fn exporter_serves_nothing_else_and_survives_a_restart() {
    let mut server = Server::start();
    let (exporter, address) = start(&server.url(), &[&unique("none*")]);
    assert!(request(&address, "GET /etc").starts_with("HTTP/1.1 404"));
    assert!(request(&address, "GET /metrics/../etc").starts_with("HTTP/1.1 404"));
    assert!(request(&address, "POST /metrics").starts_with("HTTP/1.1 405"));
    let up = || value(&address, "redlatch_exporter_up", &[]);
    until("the store answers", || up() == Some(1.0));
    server.kill();
    until("the store does not answer", || up() == Some(0.0));
    assert_eq!(
        value(&address, "redlatch_exporter_looked_at_seconds", &[]),
        None
    );
    server.restart();
    until("the store answers again", || up() == Some(1.0));
    exporter.until_stderr("no metrics: ");
    exporter.until_stderr("the store answers again");
}

/// It serves what the new master has.
#[test]
fn exporter_follows_a_failover() {
    let mut sentinels = Sentinels::start();
    let (_exporter, address) = start(&sentinels.url(), &["--names"]);
    let name = unique("exported");
    let mut command = clean_command(&["run", "--response-timeout", "1m", &name, "--", "cat"]);
    command.env("REDLATCH_URL", sentinels.url());
    let holder = Running::start(command);
    let holders = || value(&address, "redlatch_object_holders", &[("name", &name)]);
    until("the holder is counted", || holders() == Some(1.0));
    let master = sentinels.master();
    sentinels.kill(master);
    sentinels.await_new_master(master);
    until("the holder is counted at the new master", || {
        value(&address, "redlatch_exporter_up", &[]) == Some(1.0) && holders() == Some(1.0)
    });
    holder.release();
    until("it is free", || {
        value(&address, "redlatch_exporter_up", &[]) == Some(1.0) && holders().is_none()
    });
}

#[test]
fn exporter_needs_a_free_address() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let finished = finish(redlatch(
        redlatch_testkit::shared(),
        &["exporter", "--listen", &address],
    ));
    assert!(
        finished
            .expect(71)
            .stderr
            .contains(&format!("cannot listen on {address}"))
    );
    let finished = finish(redlatch(
        redlatch_testkit::shared(),
        &["exporter", "--listen", "9187"],
    ));
    assert!(
        finished
            .expect(2)
            .stderr
            .contains("use an address and a port, such as 127.0.0.1:9187")
    );
}
