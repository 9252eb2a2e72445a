//! `redlatch serve`: its page, as a browser shows it, and its JSON.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use redlatch::job::Cron;
use redlatch_testkit::{Proxy, Server};
use rustix::process::Signal;
use serde_json::Value;

use crate::browser::Browser;
use crate::cron::{soon, start_at, words};
use crate::support::*;

/// Starts `redlatch serve` on a free port. Returns its address, too.
fn serve(server: &Server, args: &[&str]) -> (Running, String) {
    let listen = ["serve", "--listen", "127.0.0.1:0", "--refresh", "100ms"];
    start_serving(redlatch(server, &[&listen, args].concat()), "/metrics")
}

/// Sends a GET with the right `Host`. Returns the head of the response, and its body.
fn get(address: &str, path: &str) -> (String, String) {
    let response = request_for(address, address, &format!("GET {path}"));
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

/// Returns the state, and whether the status of the response is 200.
fn state(address: &str, query: &str) -> (Value, bool) {
    let (head, body) = get(address, &format!("/api/state{query}"));
    let state = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
    (state, head.starts_with("HTTP/1.1 200 "))
}

/// Makes so many locks of a client that is not registered. Their numbers replace the `#` of the name.
fn put_locks(server: &Server, name: &str, last: u32) {
    let script = "for i = 1, ARGV[2] do
        local name = string.gsub(ARGV[1], '#', i)
        redis.call('HSET', name, 'other:' .. i, 1)
        redis.call('PEXPIRE', name, 600000)
    end";
    let () = server.command(&["EVAL", script, "0", name, &last.to_string()]);
}

/// One browser, one page after the other. What takes a second or two begins before it is looked at.
#[test]
fn page_shows_locks() {
    let Some(mut browser) = Browser::start() else {
        return;
    };
    let [marked_up, with_jobs] = [(); 2].map(|()| Server::start());
    let holder = hold(&marked_up, &["--note", NOTE, "--label", "<i>"], NAME);
    with_job(&with_jobs, || {
        locks_are_taken_waited_for_and_lost(&mut browser);
        markup_is_shown_as_text(&mut browser, &marked_up);
        many_locks_are_bounded_and_filtered(&mut browser);
        outage_is_shown_with_the_last_reading(&mut browser);
        runs_of_jobs_are_squares(&mut browser, &with_jobs);
        run_of_a_machine_that_is_cut_off_is_lost_and_repeated(&mut browser);
    });
    holder.release();
}

fn locks_are_taken_waited_for_and_lost(browser: &mut Browser) {
    let server = Server::start();
    let (_serve, address) = serve(&server, &[]);
    browser.open(&format!("http://{address}/"));
    browser.until_shows(&["No lock is held.", "live", "read only"]);
    let campaign = [
        "elect",
        "--value",
        "10.0.0.7:80",
        "scheduler",
        "--",
        "sleep",
        "100",
    ];
    let _leader = Running::start(redlatch(&server, &campaign));
    let options = ["--label", "report", "--note", "reindex 42"];
    let holder = hold(&server, &options, "nightly");
    browser.until_shows(&["nightly", "report@", "“reindex 42”"]);
    let waiter = [
        "run",
        "--label",
        "web",
        "nightly",
        "--",
        "sh",
        "-c",
        "echo $$; exec cat",
    ];
    let waiter = Running::start(redlatch(&server, &waiter));
    let text = browser.until_shows(&["nightly", "●"]);
    assert!(!text.contains("web@"), "the details are closed: {text}");
    browser.value("document.querySelector('tbody button').click()");
    browser.until_shows(&["held by report@", "waits: web@"]);
    assert_eq!(browser.value("document.title"), "1 waiter – redlatch");
    // Lost, and acquired by the waiter.
    let () = server.command(&["DEL", "nightly"]);
    holder.finish().expect(74);
    waiter.until_stdout("\n");
    browser.until_shows(&["held by web@"]);
    waiter.release();
    browser.until_shows(&["free", "no holder and no waiters known"]);
    browser.until_shows(&["Elections", "scheduler", "10.0.0.7:80"]);
}

const NAME: &str = "<img src=x onerror=\"document.title='run'\">&amp;\u{202e}";
const NOTE: &str = "<script>document.title='run'</script><b>bold</b>";

fn markup_is_shown_as_text(browser: &mut Browser, server: &Server) {
    let (_serve, address) = serve(server, &[]);
    browser.open(&format!("http://{address}/"));
    let shown = NAME.replace('\u{202e}', "\\u{202e}");
    browser.until_shows(&[&shown, NOTE, "<i>@"]);
    browser.value("document.querySelector('tbody button').click()");
    browser.until_shows(&["held by <i>@"]);
    let elements = "document.querySelectorAll('main img, main script, main b, main i').length";
    assert_eq!(browser.value(elements), 0);
    assert_eq!(browser.value("document.title"), "0 waiters – redlatch");
    // The page is as the policy demands: nothing of it is refused, and what is not its own is.
    let injected = "(() => { document.body.append(Object.assign(document.createElement('script'), {
        textContent: 'document.title = \"run\"' })); return document.title })()";
    assert_eq!(browser.value(injected), "0 waiters – redlatch");
}

fn many_locks_are_bounded_and_filtered(browser: &mut Browser) {
    let server = Server::start();
    put_locks(&server, "lock:#", 10_000);
    let (_serve, address) = serve(&server, &[]);
    browser.open(&format!("http://{address}/"));
    browser.until_shows(&[
        "10,000",
        "The 100 locks with the longest waits are shown, and 9,900 are not",
    ]);
    assert_eq!(
        browser.value("document.querySelectorAll('#locks tbody').length"),
        100
    );
    browser.value(
        "document.getElementById('filter').value = 'Lock:777';
        document.getElementById('filter').dispatchEvent(new Event('input'))",
    );
    // 777, and 7770 to 7779.
    until("11 locks match", || {
        browser.value("document.querySelectorAll('#locks tbody').length") == 11
    });
    assert_eq!(browser.value("location.hash"), "#Lock%3A777");
    browser.open(&format!("http://{address}/#no%20such%20lock"));
    browser.until_shows(&["No lock matches."]);
}

fn outage_is_shown_with_the_last_reading(browser: &mut Browser) {
    let mut server = Server::start();
    put_locks(&server, "left", 1);
    let (serve, address) = serve(&server, &["--response-timeout", "1s"]);
    browser.open(&format!("http://{address}/"));
    browser.until_shows(&["left", "live"]);
    assert!(get(&address, "/healthz").0.starts_with("HTTP/1.1 200 "));
    server.kill();
    browser.until_shows(&["store does not answer", "Last good reading: ", "left"]);
    let (state, is_good) = state(&address, "");
    assert!(!is_good && state["failure"].is_string(), "{state}");
    assert_eq!(state["locks"][0]["name"], "left");
    assert!(
        state["time_ms"].is_u64() && state["age_ms"].is_u64(),
        "{state}"
    );
    let (head, body) = get(&address, "/healthz");
    assert!(
        head.starts_with("HTTP/1.1 503 ") && body.len() > 2,
        "{head}\n{body}"
    );
    server.restart();
    browser.until_shows(&["No lock is held.", "live"]);
    serve.signal(Signal::TERM);
    serve.finish().expect(143);
    browser.until_shows(&["not connected", "No connection to redlatch serve."]);
}

fn runs_of_jobs_are_squares(browser: &mut Browser, server: &Server) {
    let (_serve, address) = serve(server, &["--interval", "100ms"]);
    browser.open(&format!("http://{address}/"));
    browser.until_shows(&["Jobs", "each second", "ok, "]);
    for class in ["failed", "ok"] {
        let squares = format!("document.querySelectorAll('.run.{class}').length > 0");
        until(&squares, || browser.value(&squares) == true);
    }
    let title = browser.value("document.querySelector('.run.failed').title");
    assert!(title.as_str().unwrap().contains("out of paper"), "{title}");
    let run = &state(&address, "").0["jobs"][0]["runs"][0];
    assert!(run["host"].is_string() && run["attempt"] == 1, "{run}");
    for series in [
        "redlatch_job_failures{name=\"each second\"} ",
        "redlatch_job_last_success_seconds{name=\"each second\"} 1",
        "redlatch_job_last_duration_seconds{name=\"each second\"} ",
    ] {
        let metrics = request(&address, "GET /metrics");
        assert!(metrics.contains(series), "{series}: {metrics}");
    }
}

fn run_of_a_machine_that_is_cut_off_is_lost_and_repeated(browser: &mut Browser) {
    let (server, temp_dir) = (Server::start(), TempDir::new());
    let (file, began) = (temp_dir.path("crontab"), temp_dir.path("began"));
    // The first attempt never ends.
    let script =
        format!("echo $MACHINE $$ >> {began}; [ $REDLATCH_ATTEMPT = 2 ] || exec sleep 600");
    std::fs::write(&file, format!("{} nightly [retry=1] {script}\n", soon(3))).unwrap();
    let proxies = [(); 3].map(|()| Proxy::to(server.port()));
    let urls = proxies.iter().map(Proxy::url).enumerate();
    let _machines: Vec<_> = urls.map(|(n, url)| start_at(url, &file, n)).collect();
    let (_serve, address) = serve(&server, &["--interval", "100ms"]);
    browser.open(&format!("http://{address}/"));
    browser.until_shows(&["Jobs", "nightly", "running, "]);
    until("the first attempt", || words(&began).len() == 1);
    let first = words(&began).remove(0);
    let proxy = &proxies[first[0].parse::<usize>().unwrap()];
    proxy.refuse(true);
    proxy.cut();
    let runs = "[...document.querySelectorAll('.run')].map((run) => run.className).join()";
    until("a lost run and its repetition", || {
        let runs = browser.value(runs);
        runs.as_str().unwrap().starts_with("run lost,run ok")
    });
    let second = words(&began).remove(1);
    assert_ne!(second[0], first[0]);
    until("the end of the first attempt", || {
        is_dead(first[1].parse().unwrap())
    });
    browser.until_shows(&["ok, "]);
}

/// Runs a job each second, which fails every other time, while a test runs.
fn with_job(server: &Server, test: impl FnOnce()) {
    let url = server.url();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let runs = AtomicUsize::new(0);
    let work = async |_| match runs.fetch_add(1, Ordering::Relaxed) % 2 {
        0 => Err("out of paper"),
        _ => Ok(()),
    };
    let jobs = async move {
        let client = redlatch::Client::connect(&url).await.unwrap();
        let job = client.job("each second");
        let job = job.schedule(Cron::parse("* * * * * *").unwrap());
        let stopped = async { drop(stopped.await) };
        job.run_until(stopped, work).await.unwrap();
    };
    let runtime = current_thread_runtime();
    thread::scope(|scope| {
        scope.spawn(move || runtime.block_on(jobs));
        test();
        drop(stop);
    });
}

#[test]
fn state_is_json() {
    let server = Server::start();
    put_locks(&server, "a#", 3);
    put_locks(&server, "b/ü", 1);
    let _holder = hold(&server, &["--fair", "--label", "web"], "queue");
    let waiter = ["run", "--fair", "--label", "next", "queue", "--", "true"];
    let _waiter = Running::start(redlatch(&server, &waiter));
    let (_serve, address) = serve(&server, &["--interval", "100ms"]);
    until("holder and waiter are known", || {
        let lock = &state(&address, "?filter=WEB%40").0["locks"][0];
        lock["holders"][0]["note"] == "sh" && lock["waiters"][0]["client"].is_string()
    });
    let (all, is_good) = state(&address, "");
    assert!(is_good && all["failure"].is_null(), "{all}");
    assert_eq!((&all["held"], &all["matching"]), (&5.into(), &5.into()));
    let first = &all["locks"][0];
    assert_eq!(
        (&first["name"], &first["kind"]),
        (&"queue".into(), &"fair".into())
    );
    assert_eq!(
        (&first["waiter_count"], &first["waiters"][0]["position"]),
        (&1.into(), &1.into())
    );
    assert_eq!(all["kinds"]["fair lock"]["waiters"], 1);
    let (one, _) = state(&address, "?limit=1&filter=a");
    assert_eq!(
        (one["locks"].as_array().unwrap().len(), &one["matching"]),
        (1, &3.into())
    );
    assert_eq!(
        state(&address, "?filter=b%2F%C3%BC").0["locks"][0]["name"],
        "b/ü"
    );
}

/// Other programs may have written any keys where the records of jobs are.
#[test]
fn keys_of_other_programs_are_no_jobs() {
    let server = Server::start();
    let set = |words: &[&str]| server.command::<()>(words);
    // Without a name, with one that no job can have, and with nothing that a record has.
    for record in [
        "redlatch_job:{}",
        "redlatch_job::{}a",
        "redlatch_job:other",
        "redlatch_job:{b}",
    ] {
        set(&["HSET", record, "last", "x", "run:1:1", "x"]);
    }
    let long = "x".repeat(600);
    set(&["HSET", &format!("redlatch_job:{{{long}}}"), "last", "1"]);
    // The hash has the name of a job whose own key is a text.
    set(&["SET", "redlatch_job:{c}", "text"]);
    set(&["HSET", "redlatch_job::c", "last", "1"]);
    set(&["HSET", "redlatch_job:{good}", "last", "1000"]);
    let (_serve, address) = serve(&server, &["--interval", "100ms"]);
    let mut all = Value::Null;
    until("a look", || {
        let (state, is_good) = state(&address, "");
        all = state;
        is_good
    });
    let names = |jobs: &Value| -> Vec<String> {
        let jobs = jobs.as_array().unwrap().iter();
        jobs.map(|job| job["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(names(&all["jobs"]), ["good"], "{all}");
    let listed = finish(redlatch(&server, &["jobs", "--json"]))
        .expect(0)
        .stdout;
    let listed = listed
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    assert_eq!(names(&listed.collect()), ["good"]);
}

#[test]
fn deadlocks_are_in_the_state() {
    let server = Server::start();
    let runtime = current_thread_runtime();
    let (_serve, address) = serve(&server, &["--interval", "100ms"]);
    runtime.block_on(async {
        let client = redlatch::Client::builder().label("app");
        let client = client.connect(&server.url()).await.unwrap();
        let (one, other) = (redlatch::Owner::new(), redlatch::Owner::new());
        let _a = client.lock("a").lock().owner(one).await.unwrap();
        let _b = client.lock("b").lock().owner(other).await.unwrap();
        let (a, b) = (client.lock("a"), client.lock("b"));
        let checked = tokio::task::spawn_blocking(move || {
            until("it is found", || {
                state(&address, "").0["deadlocks"][0]["possible"] == false
            });
            let deadlock = state(&address, "").0["deadlocks"][0].take();
            assert_eq!(deadlock["waits"].as_array().unwrap().len(), 2);
            assert_eq!(deadlock["waits"][0]["waiter"]["registered"]["label"], "app");
        });
        tokio::select! {
            _ = a.lock().owner(other) => unreachable!(),
            _ = b.lock().owner(one) => unreachable!(),
            checked = checked => checked.unwrap(),
        }
    });
}

#[test]
fn only_this_machine_can_read_what_listens_on_it() {
    let server = Server::start();
    let (_serve, address) = serve(&server, &[]);
    for (host, path, status) in [
        ("rebound.example", "/", 403),
        ("rebound.example:9187", "/api/state", 403),
        ("rebound.example", "/api/events", 403),
        ("127.0.0.1.rebound.example", "/api/state", 403),
        ("rebound.example", "/metrics", 200),
        ("localhost:9187", "/", 200),
        ("[::1]:9187", "/page.js", 200),
        ("10.0.0.7", "/", 200),
        ("localhost", "/page.html", 404),
    ] {
        let response = request_for(host, &address, &format!("GET {path}"));
        assert!(
            response.starts_with(&format!("HTTP/1.1 {status} ")),
            "{host} {path}: {response}"
        );
        assert!(
            response.contains("\r\ncontent-security-policy: default-src 'self'; "),
            "{response}"
        );
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let response = request(&address, &format!("{method} /api/state"));
        assert!(response.starts_with("HTTP/1.1 405 "), "{response}");
    }
}

/// All pages together cost as many looks as one.
#[test]
fn hundred_pages_share_the_looks() {
    let server = Server::start();
    put_locks(&server, "a", 1);
    let (_serve, address) = serve(&server, &["--interval", "1h"]);
    let mut pages: Vec<_> = (0..100)
        .map(|_| {
            let mut stream = TcpStream::connect(&address).unwrap();
            let request = format!("GET /api/events?filter= HTTP/1.1\r\nHost: {address}\r\n\r\n");
            stream.write_all(request.as_bytes()).unwrap();
            BufReader::new(stream)
        })
        .collect();
    let scans = || -> u64 {
        let stats: String = server.command(&["INFO", "commandstats"]);
        let Some((_, scan)) = stats.split_once("cmdstat_scan:calls=") else {
            return 0;
        };
        scan.split_once(',').unwrap().0.parse().unwrap()
    };
    let mut looks = BTreeSet::new();
    // Returns when the look of the next event began.
    let mut next = |page: &mut BufReader<TcpStream>| {
        let mut line = String::new();
        while !line.starts_with("data: ") {
            line.clear();
            let read = page.read_line(&mut line).unwrap();
            assert!(read > 0, "the stream has ended");
        }
        let state: Value = serde_json::from_str(&line["data: ".len()..]).unwrap();
        let began = state["time_ms"].as_u64();
        looks.insert(began);
        began
    };
    next(&mut pages[0]);
    let before = scans();
    for page in &mut pages {
        let first = next(page);
        while next(page) == first {}
    }
    let metrics = request(&address, "GET /metrics");
    assert!(metrics.starts_with("HTTP/1.1 200 "), "beside the pages");
    let scans = scans() - before;
    let latest = state(&address, "").0["time_ms"].as_u64();
    while next(&mut pages[0]) < latest {}
    // Of objects, queues, clients and jobs, and one look may not have ended.
    let most = 4 * (looks.len() as u64 + 1);
    assert!(scans <= most, "{scans} scans in {} looks", looks.len());
}
