//! `redlatch elect`: CMD runs in one process at a time, and again after a lost leadership; observers and HTTP show the leader.

use redlatch_testkit::{Proxy, Server, shared, unique};
use rustix::process::Signal;

use crate::support::*;

/// A CMD that prints its epoch and its process id, and ends with 7 when its standard input ends.
const LEADS: &str = "echo $REDLATCH_EPOCH $$; cat; exit 7";

/// Starts a candidate. Its CMD is the shell script [`LEADS`].
fn candidate(options: &[&str], name: &str) -> Running {
    candidate_with(LEADS, options, name)
}

/// Starts a candidate with this script as its CMD.
fn candidate_with(script: &str, options: &[&str], name: &str) -> Running {
    let args = [&["elect"], options, &[name, "--", "bash", "-c", script]].concat();
    Running::start(redlatch(shared(), &args))
}

/// Starts a candidate, and waits until it is in the queue.
fn waiting_candidate(options: &[&str], name: &str) -> Running {
    let queue = format!("redisson_lock_queue:{{{name}}}");
    let length = || shared().command::<i64>(&["LLEN", &queue]);
    let before = length();
    let candidate = candidate(options, name);
    until("it waits for its turn", || length() > before);
    candidate
}

/// Waits until its CMD runs for the n-th time. Returns the epoch and the process id.
fn until_led(leader: &Running, nth: usize) -> (u64, u32) {
    let mut line = String::new();
    until("it leads", || {
        let stdout = leader.stdout();
        let lines: Vec<_> = stdout.split_inclusive('\n').collect();
        line = lines.get(nth - 1).map_or("", |line| *line).to_owned();
        line.ends_with('\n')
    });
    let (epoch, pid) = line.trim_end().split_once(' ').unwrap();
    (epoch.parse().unwrap(), pid.parse().unwrap())
}

#[test]
fn candidates_lead_one_after_the_other() {
    let name = unique("elect");
    let first = candidate(&[], &name);
    assert_eq!(until_led(&first, 1).0, 1);
    let second = waiting_candidate(&[], &name);
    assert_eq!(second.stdout(), "");
    let mut first = first;
    first.close_stdin();
    first.finish().expect(7);
    assert_eq!(until_led(&second, 1).0, 2);
    let third = waiting_candidate(&["--watchdog", "1h"], &name);
    let mut second = second;
    second.close_stdin();
    second.finish().expect(7);
    assert_eq!(until_led(&third, 1).0, 3);
    let mut third = third;
    third.close_stdin();
    third.finish().expect(7);
    assert!(!is_held(shared(), &name));
}

#[test]
fn killed_leader_is_succeeded_when_its_lease_ends() {
    let name = unique("elect");
    let first = candidate(&["--watchdog", "6s"], &name);
    let (epoch, cmd) = until_led(&first, 1);
    let second = waiting_candidate(&[], &name);
    first.signal(Signal::KILL);
    assert_eq!(until_led(&second, 1).0, epoch + 1);
    until("its CMD has ended", || is_dead(cmd));
}

#[test]
fn lost_leadership_ends_cmd_and_the_process_campaigns_again() {
    let name = unique("elect");
    let mut leader = candidate(&["--watchdog", "6s"], &name);
    let (epoch, cmd) = until_led(&leader, 1);
    finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    let (next_epoch, next_cmd) = until_led(&leader, 2);
    assert!(next_epoch > epoch);
    assert_ne!(next_cmd, cmd);
    assert!(is_dead(cmd));
    leader.close_stdin();
    let finished = leader.finish().expect(7);
    assert!(
        finished.stderr.contains("waiting to be elected again"),
        "{finished:?}"
    );
}

/// Only the release discovers the loss. The code of CMD does not matter: another process may have led meanwhile.
#[test]
fn process_whose_cmd_has_ended_does_not_campaign_again() {
    let name = unique("elect");
    let proxy = Proxy::to(shared().port());
    let timeout = ["--response-timeout", "1h", "--watchdog", "1h"];
    let args = [&["elect"], &timeout[..], &[&name, "--", "sh", "-c", LEADS]].concat();
    let mut command = clean_command(&args);
    command.env("REDLATCH_URL", proxy.url());
    let mut leader = Running::start(command);
    let (_, cmd) = until_led(&leader, 1);
    // It learns of nothing until its CMD has ended.
    proxy.stall(true);
    finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    leader.close_stdin();
    let process = format!("/proc/{cmd}");
    until("CMD is reaped", || !std::path::Path::new(&process).exists());
    proxy.stall(false);
    let finished = leader.finish().expect(74);
    assert_eq!(finished.stdout.lines().count(), 1, "{finished:?}");
    assert_eq!(finished.stderr.matches("lost").count(), 1, "{finished:?}");
}

/// It waits behind the other candidates, and leads again.
#[test]
fn leader_that_is_asked_resigns_and_campaigns_again() {
    let name = unique("elect");
    let first = candidate(&["--kill-after", "1h"], &name);
    let (_, cmd) = until_led(&first, 1);
    let mut second = waiting_candidate(&[], &name);
    let args = ["unlock", "--ask", "--wait", "1m", &name];
    finish(redlatch(shared(), &args)).expect(0);
    assert_eq!(until_led(&second, 1).0, 2);
    assert!(is_dead(cmd));
    second.close_stdin();
    second.finish().expect(7);
    assert_eq!(until_led(&first, 2).0, 3);
    let mut first = first;
    first.close_stdin();
    let finished = first.finish().expect(7);
    let asked = format!("{name}: asked to release it; ending CMD");
    assert_eq!(finished.stderr.matches(&asked).count(), 1, "{finished:#?}");
}

/// redlatch itself has ended CMD when the limit passes, but a child of CMD continues.
#[test]
fn revoked_leader_campaigns_again() {
    let name = unique("elect");
    let script = format!("(trap '' TERM; {IDLE_SCRIPT}) & echo $REDLATCH_EPOCH $$; cat; exit 7");
    let options = ["--watchdog", "6s", "--kill-after", "4s"];
    let leader = candidate_with(&script, &options, &name);
    until_led(&leader, 1);
    finish(redlatch(shared(), &["unlock", "--revoke", "1s", &name])).expect(0);
    until_led(&leader, 2);
    leader.signal(Signal::TERM);
    leader.finish().expect(143);
}

/// CMD ignores the signal. When the leadership is lost, the process does not campaign again.
#[test]
fn process_that_was_asked_to_end_does_not_campaign_again() {
    let name = unique("elect");
    let script = format!("trap 'echo asked' TERM; echo $REDLATCH_EPOCH $$; {IDLE_SCRIPT}");
    let options = ["--watchdog", "6s", "--kill-after", "0s"];
    let leader = candidate_with(&script, &options, &name);
    let (_, cmd) = until_led(&leader, 1);
    leader.signal(Signal::TERM);
    leader.until_stdout("asked\n");
    finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    leader.finish().expect(74);
    assert!(is_dead(cmd));
}

#[test]
fn signal_ends_a_waiting_candidate() {
    let name = unique("elect");
    let mut leader = candidate(&[], &name);
    until_led(&leader, 1);
    let waiting = waiting_candidate(&[], &name);
    waiting.signal(Signal::TERM);
    let finished = waiting.finish().expect(143);
    assert_eq!(finished.stdout, "");
    leader.close_stdin();
    leader.finish().expect(7);
}

#[test]
fn observer_prints_each_change() {
    let name = unique("elect");
    let observers = [&["--observe", "--json"][..], &["--observe"]].map(|options| {
        let args = [&["elect"], options, &[&name]].concat();
        Running::start(redlatch(shared(), &args))
    });
    let [json, text] = &observers;
    json.until_stdout("\"epoch\":null,\"leader\":null,\"value\":null}\n");
    text.until_stdout("  -  -  -\n");
    let mut leader = candidate(&["--value", "10.0.0.7:8080"], &name);
    until_led(&leader, 1);
    let owner = owner(shared(), &name);
    json.until_stdout(&format!(
        "\"epoch\":1,\"leader\":\"{owner}\",\"value\":\"10.0.0.7:8080\"}}\n"
    ));
    text.until_stdout(&format!("  1  {owner}  10.0.0.7:8080\n"));
    leader.close_stdin();
    leader.finish().expect(7);
    for observer in observers {
        until("the vacancy is printed", || {
            let lines: Vec<_> = observer.stdout().lines().map(str::to_owned).collect();
            lines.len() == 3 && (lines[2].contains("null") || lines[2].ends_with("-  -  -"))
        });
        observer.signal(Signal::INT);
        observer.finish().expect(130);
    }
}

/// The leader is the same before and after: its lock is in the file of the server.
#[test]
fn observer_warns_of_each_outage_and_prints_only_changes() {
    let mut server = Server::start_durable();
    let name = unique("elect");
    let args = ["elect", "--watchdog", "1h", &name, "--", "cat"];
    let _leader = Running::start(redlatch(&server, &args));
    until("it leads", || is_held(&server, &name));
    let args = ["elect", "--observe", "--response-timeout", "3s", &name];
    let observer = Running::start(redlatch(&server, &args));
    let printed = observer.until_stdout("\n");
    for outage in 1..=2 {
        server.kill();
        until("the outage is reported", || {
            observer.stderr().matches("not seen at present").count() == outage
        });
        server.restart();
        until("it observes again", || {
            observer.stderr().matches("seen again").count() == outage
        });
    }
    assert_eq!(observer.stdout(), printed);
    finish(redlatch(&server, &["unlock", "--force", &name])).expect(0);
    observer.until_stdout("  -  -  -\n");
}

/// Starts a candidate that answers HTTP, on a free port. Returns its address, too.
pub(crate) fn serving_candidate(url: &str, options: &[&str], name: &str) -> (Running, String) {
    let args = [&["elect", "--http", "127.0.0.1:0"], options];
    let args = [&args.concat()[..], &[name, "--", "sh", "-c", LEADS]].concat();
    let mut command = clean_command(&args);
    command.env("REDLATCH_URL", url);
    start_serving(command, "/leader")
}

#[test]
fn http_tells_which_process_leads() {
    let name = unique("elect");
    let proxy = Proxy::to(shared().port());
    let options = ["--value", &name, "--watchdog", "6s"];
    let (leader, leader_address) = serving_candidate(&proxy.url(), &options, &name);
    let (epoch, cmd) = until_led(&leader, 1);
    let (follower, follower_address) = serving_candidate(&shared().url(), &options, &name);
    let is = |address: &str, path: &str, status: &str, body: &str| {
        let response = request(address, &format!("GET {path}"));
        response.starts_with(&format!("HTTP/1.1 {status} ")) && response.contains(body)
    };
    let owner = owner(shared(), &name);
    let fields = format!("\"epoch\":{epoch},\"leader\":\"{owner}\",\"value\":\"{name}\"}}\n");
    let leads = format!("{{\"name\":\"{name}\",\"leads\":true,{fields}");
    let follows = format!("{{\"name\":\"{name}\",\"leads\":false,{fields}");
    until("the leader says so", || {
        is(&leader_address, "/leader", "200", &leads)
    });
    until("the other one names it", || {
        is(&follower_address, "/leader", "503", &follows)
    });
    for address in [&leader_address, &follower_address] {
        assert!(is(address, "/healthz", "200", "ok\n"));
        assert!(is(address, "/", "404", ""));
        assert!(request(address, "POST /leader").starts_with("HTTP/1.1 405 "));
    }
    // Cut off, the leader must not answer 200 any longer than its lease.
    proxy.stall(true);
    until("the other one leads", || {
        is(&follower_address, "/leader", "200", "")
    });
    assert!(is(&leader_address, "/leader", "503", "\"leads\":false"));
    until("the outage is noticed", || {
        is(&leader_address, "/healthz", "503", "")
    });
    until("CMD has ended", || is_dead(cmd));
    proxy.stall(false);
    until("the store answers again", || {
        is(&leader_address, "/healthz", "200", "ok\n")
    });
    drop((leader, follower));
}

/// The leader is the same before and after: the outage is shorter than its lease.
#[test]
fn health_recovers_after_an_outage() {
    let name = unique("elect");
    let proxy = Proxy::to(shared().port());
    let options = ["--response-timeout", "200ms"];
    let (leader, address) = serving_candidate(&proxy.url(), &options, &name);
    let (_, cmd) = until_led(&leader, 1);
    let healthy = || request(&address, "GET /healthz").starts_with("HTTP/1.1 200 ");
    until("the leader has been read", healthy);
    proxy.refuse(true);
    proxy.cut();
    until("the outage is noticed", || !healthy());
    proxy.refuse(false);
    until("the store answers again", healthy);
    assert_eq!(until_led(&leader, 1).1, cmd);
    assert!(!is_dead(cmd));
    assert_eq!(leader.stdout().lines().count(), 1);
}

#[test]
fn wrong_usage_is_explained() {
    let wrong = [
        (&["elect", "a"][..], "redlatch elect NAME -- CMD"),
        (&["elect", "--observe", "a", "--", "true"], "--observe"),
        (&["elect", "--json", "a"], "--observe"),
        (&["elect", "--json", "a", "--", "true"], "--json"),
        (
            &["elect", "--observe", "--watchdog", "6s", "a"],
            "--watchdog",
        ),
        (&["elect", "--http", "4040", "a", "--", "true"], "127.0.0.1"),
        (&["elect", "", "--", "true"], "empty"),
        (&["elect", "--watchdog", "1ms", "a", "--", "true"], "100 ms"),
    ];
    for (args, reason) in wrong {
        finish(redlatch(shared(), args))
            .expect(2)
            .assert_stderr(reason);
    }
}

#[test]
fn object_of_another_kind_is_refused() {
    let name = unique("elect");
    shared().command::<()>(&["SET", &name, "text"]);
    let finished = finish(redlatch(shared(), &["elect", &name, "--", "true"]));
    assert_eq!(finished.expect(65).stdout, "");
}
