//! Tests of `redlatch cron` and `redlatch jobs`.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::CommandExt as _;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use redlatch::Slot;
use redlatch::job::Cron;
use redlatch_testkit::{Proxy, Server, shared, unique};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::*;

/// Starts `redlatch cron` on a machine, whose number is in the variable MACHINE of its commands.
fn start(server: &Server, file: &str, machine: usize) -> Running {
    start_at(server.url(), file, machine)
}

/// The same for the store at this URL.
pub(crate) fn start_at(url: String, file: &str, machine: usize) -> Running {
    let args = ["cron", "--watchdog", "2s", "--kill-after", "1s", file];
    let mut command = clean_command(&args);
    command.env("REDLATCH_URL", url);
    command.env("MACHINE", machine.to_string());
    let cron = Running::start(command);
    cron.until_stderr("scheduled\n");
    cron
}

/// Returns a schedule that fires in so many seconds, and again after half a minute, for a machine that was too slow.
pub(crate) fn soon(seconds: u64) -> String {
    let at = SystemTime::now() + Duration::from_secs(seconds);
    let at = at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    format!("{},{} * * * * *", at % 60, (at + 30) % 60)
}

/// Returns the lines of a file, each split into its words.
pub(crate) fn words(path: &str) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let words = |line: &str| line.split(' ').map(str::to_owned).collect();
    text.lines().map(words).collect()
}

/// Returns what `redlatch jobs --json` says about a job.
fn history(server: &Server, name: &str) -> serde_json::Value {
    let finished = finish(redlatch(server, &["jobs", "--json", name])).expect(0);
    serde_json::from_str(&finished.stdout).unwrap_or_default()
}

fn state(server: &Server, name: &str) -> String {
    history(server, name)["runs"][0]["state"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

#[test]
fn all_wrong_lines_are_reported_and_nothing_starts() {
    let temp_dir = TempDir::new();
    let file = temp_dir.path("crontab");
    let text =
        "# jobs\n* * * * * ok true\n61 * * * * a true\nTZ=Mars/Olympus\n@daily b [retry=x] true\n";
    std::fs::write(&file, text).unwrap();
    for args in [vec!["cron", &file], vec!["cron", "--check", &file]] {
        // Also without a server.
        let mut command = clean_command(&args);
        command.env("REDLATCH_URL", "redis://127.0.0.1:1");
        let finished = finish(command).expect(2);
        let stderr = &finished.stderr;
        for (line, reason) in [
            (3, "out of bounds"),
            (4, "`Mars/Olympus` is unknown"),
            (5, "0 to 19"),
        ] {
            let prefix = format!("redlatch: {file}:{line}: ");
            let found = stderr.lines().find_map(|line| line.strip_prefix(&prefix));
            assert!(
                found.is_some_and(|found| found.contains(reason)),
                "{stderr}"
            );
        }
        assert!(stderr.ends_with("3 lines wrong\n"), "{stderr}");
    }
    std::fs::write(&file, "TZ=Asia/Tokyo\n@daily a true\n@daily b true\n").unwrap();
    let finished = finish(clean_command(&["cron", "--check", &file])).expect(0);
    assert!(
        finished.stderr.ends_with(": 2 jobs\n"),
        "{}",
        finished.stderr
    );
    let missing = finish(clean_command(&["cron", "/nowhere"])).expect(71);
    assert!(
        missing.stderr.contains("cannot read /nowhere"),
        "{}",
        missing.stderr
    );
}

/// Three machines, two jobs that fire each second. One machine is stopped for a while, and one ends in between.
#[test]
fn each_firing_runs_on_one_machine() {
    let (temp_dir, names) = (TempDir::new(), [unique("a"), unique("b")]);
    let (file, ran) = (temp_dir.path("crontab"), temp_dir.path("ran"));
    let line = |name| {
        format!(
            "* * * * * * {name} [jitter=100ms] echo $REDLATCH_LOCK $REDLATCH_SLOT $MACHINE >> {ran}\n"
        )
    };
    std::fs::write(&file, names.each_ref().map(line).concat()).unwrap();
    let mut machines: Vec<_> = (0..3).map(|n| start(shared(), &file, n)).collect();
    until("runs", || words(&ran).len() >= 6);
    machines[1].signal(Signal::STOP);
    let before = words(&ran).len();
    until("runs beside a stopped machine", || {
        words(&ran).len() >= before + 8
    });
    machines[1].signal(Signal::CONT);
    let ended = machines.remove(0);
    ended.signal(Signal::TERM);
    ended.finish().expect(0);
    let before = words(&ran).len();
    until("runs without a machine", || words(&ran).len() >= before + 6);
    for machine in machines {
        machine.signal(Signal::INT);
        machine.finish().expect(0);
    }
    let mut slots = BTreeMap::<_, Vec<String>>::new();
    for line in words(&ran) {
        slots
            .entry(line[0].clone())
            .or_default()
            .push(line[1].clone());
    }
    assert_eq!(slots.len(), 2);
    for (name, slots) in slots {
        let distinct: BTreeSet<_> = slots.iter().collect();
        assert_eq!(distinct.len(), slots.len(), "{name}: {slots:?}");
    }
}

/// Twenty processes, five for each case, whose clocks differ by almost a period, over the changes of the clocks and the end of a year.
#[test]
fn machines_with_shifted_clocks_run_each_firing_once() {
    // When the clocks change in Berlin, a schedule, and whether it fires then. All of it has passed: the clock of the
    // server holds no machine back.
    let cases = [
        (1_774_746_000, "0 2 * * *", true), // 2026-03-29T01:00Z: 02:00 does not exist
        (1_792_886_400, "0 2 * * *", true), // 2026-10-25T00:00Z: the first 02:00
        (1_792_890_000, "0 2 * * *", false), // 2026-10-25T01:00Z: the second one
        (1_767_222_000, "@yearly", true),   // 2025-12-31T23:00Z
    ];
    for_each(&cases, |(change, schedule, fires)| {
        let change = SystemTime::UNIX_EPOCH + Duration::from_secs(*change);
        // A busy machine needs longer to start them.
        let ran = [4, 16, 64]
            .into_iter()
            .find_map(|lead| ran_over(change, schedule, lead));
        let ran = ran.expect("machines that start in time");
        let slots = |name: &str| -> Vec<Slot> {
            let of_job = ran.iter().filter(|words| words[0] == name);
            of_job.map(|words| Slot::from(&*words[1])).collect()
        };
        let (at_fixed_time, often) = (slots("fixed"), slots("often"));
        let expected: &[_] = if *fires { &[slot_at(change)] } else { &[] };
        assert_eq!(at_fixed_time, expected, "{schedule}");
        for slot in (0..=3).map(|n| slot_at(change + n * PERIOD - PERIOD)) {
            assert!(often.contains(&slot), "{slot:?} in {often:?}");
        }
        let is_new = |(i, slot)| !often[..i].contains(slot);
        assert!(often.iter().enumerate().all(is_new), "{often:?}");
    });
}

/// The period of the job that fires often.
const PERIOD: Duration = Duration::from_secs(2);

fn slot_at(time: SystemTime) -> Slot {
    Slot::cron(&Cron::parse("* * * * * *").unwrap(), time)
}

/// Runs a job at a fixed time, and one every two seconds, on machines whose clocks begin so many seconds before
/// `change`. Returns the names and slots of their runs. `None`: the machines did not start in time.
fn ran_over(change: SystemTime, schedule: &str, lead: u64) -> Option<Vec<Vec<String>>> {
    let (temp_dir, prefix) = (TempDir::new(), unique("shifted"));
    let (file, ran) = (temp_dir.path("crontab"), temp_dir.path("ran"));
    let line = |schedule, name| {
        format!("{schedule} {name} [overlap=allow] echo {name} $REDLATCH_SLOT >> {ran}\n")
    };
    let jobs = line(schedule, "fixed") + &line("*/2 * * * * *", "often");
    std::fs::write(&file, format!("CRON_TZ=Europe/Berlin\n{jobs}")).unwrap();
    let started = Instant::now();
    let back = SystemTime::now().duration_since(change).unwrap() + Duration::from_secs(lead);
    let mut faketime = std::process::Command::new("faketime");
    faketime.args(["-m", "-f", "+0", "printenv", "LD_PRELOAD"]);
    let library = finish(faketime).expect(0).stdout.trim().to_owned();
    let machine = |number: i32| {
        // By less than half a period.
        let ahead = 0.45 * f64::from(number - 2);
        let shift = format!("{:+.3}", ahead - back.as_secs_f64());
        let args = ["--prefix", &prefix, "cron", &file];
        let mut shifted = redlatch(shared(), &args);
        // `faketime` itself would stay as a parent that receives the signals.
        shifted.env("LD_PRELOAD", &library).env("FAKETIME", shift);
        shifted.env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        Running::start(shifted)
    };
    let machines: Vec<_> = (0..5).map(machine).collect();
    for machine in &machines {
        machine.until_stderr("scheduled\n");
    }
    if started.elapsed() + PERIOD > Duration::from_secs(lead) {
        return None;
    }
    let last = slot_at(change + 2 * PERIOD);
    until("a run after the change", || {
        words(&ran)
            .iter()
            .any(|words| words[0] == "often" && Slot::from(&*words[1]) == last)
    });
    for machine in &machines {
        machine.signal(Signal::TERM);
    }
    for machine in machines {
        machine.finish().expect(0);
    }
    Some(words(&ran))
}

/// One machine is killed, another is stopped, while each has a run.
#[test]
fn run_of_a_dead_machine_is_repeated_elsewhere() {
    for signal in [Signal::KILL, Signal::STOP] {
        let (temp_dir, name) = (TempDir::new(), unique("dead"));
        let (file, ran) = (temp_dir.path("crontab"), temp_dir.path("ran"));
        let script = format!(
            "echo $REDLATCH_SLOT $REDLATCH_ATTEMPT $MACHINE $$ >> {ran}; \
             [ $REDLATCH_ATTEMPT = 2 ] || sleep 600"
        );
        let text = format!("{} {name} [retry=1] {script}\n", soon(3));
        std::fs::write(&file, text).unwrap();
        let machines: Vec<_> = (0..3).map(|n| start(shared(), &file, n)).collect();
        until("the first attempt", || words(&ran).len() == 1);
        let first = words(&ran).remove(0);
        let dead: usize = first[2].parse().unwrap();
        machines[dead].signal(signal);
        until("the second attempt", || words(&ran).len() == 2);
        let second = words(&ran).remove(1);
        assert_eq!((&second[0], &*second[1]), (&first[0], "2"));
        assert_ne!(second[2], first[2]);
        until("its end", || state(shared(), &name) == "ok");
        let all = history(shared(), &name);
        assert_eq!(all["runs"][1]["state"], "lost", "{all}");
        // It notices the loss when it continues.
        machines[dead].signal(Signal::CONT);
        until("the end of the first attempt", || {
            is_dead(first[3].parse().unwrap())
        });
        for (n, machine) in machines.into_iter().enumerate() {
            machine.signal(Signal::TERM);
            let end = machine.finish();
            assert!(end.code == Some(0) || n == dead, "{:?}", end.code);
            let is_told = end.stderr.contains("the lock of a run was lost");
            let goes_on = n == dead && signal == Signal::STOP;
            assert_eq!(is_told, goes_on, "{}", end.stderr);
        }
        assert_eq!(words(&ran).len(), 2);
    }
}

/// On the same machine: a command whose lock was lost needs some time to end.
#[test]
fn attempt_begins_when_the_one_before_has_ended() {
    let (temp_dir, name) = (TempDir::new(), unique("forced"));
    let (file, ran) = (temp_dir.path("crontab"), temp_dir.path("ran"));
    let script = format!("trap '' TERM; echo $$ >> {ran}; {IDLE_SCRIPT}");
    std::fs::write(&file, format!("{} {name} [retry=1] {script}\n", soon(2))).unwrap();
    let cron = start(shared(), &file, 0);
    let pid = |attempt: usize| words(&ran)[attempt - 1][0].parse().unwrap();
    for attempt in 1..=2 {
        until("an attempt", || words(&ran).len() == attempt);
        assert!(attempt == 1 || is_dead(pid(1)));
        finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    }
    until("both losses", || {
        let lost = "the lock of a run was lost";
        cron.stderr().matches(lost).count() == 2
    });
    cron.signal(Signal::TERM);
    cron.finish().expect(0);
    assert!(is_dead(pid(2)));
}

/// The command of the attempt before, whose lock was lost, needs some time to end.
#[test]
fn attempt_that_waits_does_not_begin_after_a_second_signal() {
    let (temp_dir, name) = (TempDir::new(), unique("waits"));
    let [file, ran, go] = ["crontab", "ran", "go"].map(|name| temp_dir.path(name));
    let script = format!(
        "trap 'until test -e {go}; do sleep 0.02; done; exit' TERM; \
         echo $REDLATCH_ATTEMPT >> {ran}; {IDLE_SCRIPT}"
    );
    std::fs::write(&file, format!("{} {name} [retry=1] {script}\n", soon(2))).unwrap();
    let args = ["cron", "--watchdog", "2s", "--kill-after", "1h", &file];
    let cron = Running::start(redlatch(shared(), &args));
    until("the first attempt", || words(&ran).len() == 1);
    finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    until("the second attempt", || {
        history(shared(), &name)["runs"][0]["attempt"] == 2
    });
    cron.signal(Signal::TERM);
    cron.signal(Signal::INT);
    until("its end", || state(shared(), &name) == "failed");
    std::fs::write(&go, "").unwrap();
    cron.finish().expect(0);
    assert_eq!(words(&ran), [["1"]]);
}

/// The limit of its user forbids a thread or a process, whichever is the last one that it needs. Such a limit does not
/// apply to root.
#[test]
fn process_for_which_no_thread_can_wait_is_not_started() {
    let is_root = rustix::process::geteuid().is_root();
    let outcomes = Mutex::new(BTreeMap::new());
    let run = |limit: &u32| {
        let (temp_dir, name) = (TempDir::new(), unique("limited"));
        let file = temp_dir.path("crontab");
        std::fs::write(&file, format!("{} {name} true\n", soon(2))).unwrap();
        let command = redlatch(shared(), &["cron", &file]);
        let mut limited = limited(&format!("--nproc={limit}:{limit}"), &command);
        if is_root {
            // Nobody else's processes count.
            let user = 20_000 + 20 * (std::process::id() % 2_000) + limit;
            limited.uid(user).gid(65534);
        }
        let cron = Running::start(limited);
        let has_run = || matches!(&*state(shared(), &name), "ok" | "failed");
        until("a run", || has_run() || is_dead(cron.pid()));
        cron.signal(Signal::TERM);
        let stdout = cron.finish().stdout;
        let outcome = history(shared(), &name)["runs"][0]["outcome"].to_string();
        (outcome != "null").then_some((outcome, stdout))
    };
    for_each(&Vec::from_iter(1..=16), |limit| {
        // A thread that has ended counts for a moment, so with the smallest limit it starts only sometimes.
        let Some((outcome, stdout)) = (0..6).find_map(|_| run(limit)) else {
            return;
        };
        let is_started = !outcome.contains("could not be started");
        assert!(is_started || stdout.is_empty(), "{limit}: {stdout}");
        let outcome = (is_started, outcome);
        outcomes.lock().unwrap().insert(*limit, outcome);
    });
    let outcomes = outcomes.into_inner().unwrap();
    let has = |wanted| {
        outcomes
            .values()
            .any(|(is_started, _)| *is_started == wanted)
    };
    assert!(has(true) && has(false) || !is_root, "{outcomes:?}");
}

/// The signal finds it in its work, of which it prints how it is left.
#[test]
fn command_whose_lock_is_lost_prints_and_cleans_up() {
    let (temp_dir, name) = (TempDir::new(), unique("tidies"));
    let (file, ran) = (temp_dir.path("crontab"), temp_dir.path("ran"));
    let script = format!("trap 'echo tidy; echo cleaned > {ran}; exit' TERM; echo begins");
    let text = format!("{} {name} {script}; {IDLE_SCRIPT}\n", soon(2));
    std::fs::write(&file, text).unwrap();
    let cron = start(shared(), &file, 0);
    cron.until_stdout("begins\n");
    finish(redlatch(shared(), &["unlock", "--force", &name])).expect(0);
    cron.until_stderr("the lock of a run was lost");
    cron.signal(Signal::TERM);
    let stdout = cron.finish().expect(0).stdout;
    assert!(stdout.ends_with(&format!("{name}: tidy\n")), "{stdout}");
    assert_eq!(words(&ran), [["cleaned"]]);
}

/// It ends as under `redlatch run`, and its exit code says whether it has failed. It is not repeated.
#[test]
fn asked_command_ends_and_its_lock_is_released() {
    for (code, expected) in [("3", "failed"), ("0", "ok")] {
        let (temp_dir, name) = (TempDir::new(), unique("asked"));
        let file = temp_dir.path("crontab");
        let script = format!("trap 'echo tidy; exit {code}' TERM; echo begins; {IDLE_SCRIPT}");
        std::fs::write(&file, format!("{} {name} [retry=1] {script}\n", soon(2))).unwrap();
        let args = ["cron", "--watchdog", "1h", "--kill-after", "1h", &file];
        let cron = Running::start(redlatch(shared(), &args));
        cron.until_stdout("begins\n");
        let args = ["unlock", "--ask", "--wait", "1m", &name];
        let asked = finish(redlatch(shared(), &args)).expect(0);
        assert!(asked.stdout.ends_with(": released\n"), "{asked:#?}");
        cron.signal(Signal::TERM);
        let finished = cron.finish().expect(0);
        let line = "attempt 1: asked to release its lock; ending its command: SIGTERM now";
        assert_eq!(finished.stderr.matches(line).count(), 1, "{finished:#?}");
        let tidy = format!("{name}: tidy\n");
        assert!(finished.stdout.ends_with(&tidy), "{finished:#?}");
        let all = history(shared(), &name);
        assert_eq!(all["runs"].as_array().map(Vec::len), Some(1), "{all}");
        let run = &all["runs"][0];
        assert_eq!(run["state"], expected, "{all}");
        let outcome = format!("asked to release its lock, exit code {code}");
        assert_eq!(run["outcome"], outcome, "{all}");
    }
}

/// It is killed after the same time as at a loss, and its lock is held until then.
#[test]
fn asked_command_that_ignores_sigterm_is_killed() {
    let (temp_dir, name) = (TempDir::new(), unique("stubborn"));
    let file = temp_dir.path("crontab");
    let script = "trap '' TERM; echo $$; exec sleep 600";
    std::fs::write(&file, format!("{} {name} {script}\n", soon(2))).unwrap();
    let cron = start(shared(), &file, 0);
    let stdout = cron.until_stdout("\n");
    let (_, pid) = stdout.trim().rsplit_once(' ').unwrap();
    let args = ["unlock", "--ask", "--wait", "1m", &name];
    finish(redlatch(shared(), &args)).expect(0);
    assert!(
        is_dead(pid.parse().unwrap()),
        "it continues without the lock"
    );
    until("its end", || state(shared(), &name) == "failed");
    cron.signal(Signal::TERM);
    cron.finish().expect(0);
}

#[test]
fn signals_end_and_reload() {
    let (temp_dir, names) = (TempDir::new(), [unique("old"), unique("new")]);
    let file = temp_dir.path("crontab");
    let text = format!("* * * * * * {} echo old; sleep 1; echo end\n", names[0]);
    std::fs::write(&file, text).unwrap();
    let cron = start(shared(), &file, 0);
    cron.until_stdout(&format!("{}: old\n", names[0]));
    std::fs::write(&file, "* * * wrong\n").unwrap();
    cron.signal(Signal::HUP);
    cron.until_stderr("1 line wrong; the jobs stay as they were\n");
    let text = format!("* * * * * * {} echo new; sleep 2; echo end\n", names[1]);
    std::fs::write(&file, text).unwrap();
    cron.signal(Signal::HUP);
    cron.until_stdout(&format!("{}: new\n", names[1]));
    // The run lasts.
    cron.signal(Signal::TERM);
    let finished = cron.finish().expect(0);
    for name in &names {
        assert!(
            finished.stdout.contains(&format!("{name}: end\n")),
            "{}",
            finished.stdout
        );
        assert_eq!(state(shared(), name), "ok");
        assert!(!is_held(shared(), name));
    }
}

/// Its key has a value of another program. At the start that ends the program.
#[test]
fn job_that_the_store_refuses_after_a_reload_ends_no_other() {
    let (temp_dir, server) = (TempDir::new(), Server::start());
    let (file, ran) = (temp_dir.path("crontab"), temp_dir.path("ran"));
    let job = |name: &str| format!("* * * * * * {name} echo {name} >> {ran}\n");
    std::fs::write(&file, job("good")).unwrap();
    let cron = start(&server, &file, 0);
    let _: () = server.command(&["SET", "redlatch_job:{bad}", "text"]);
    std::fs::write(&file, job("good") + &job("bad")).unwrap();
    cron.signal(Signal::HUP);
    cron.until_stderr("this job is not scheduled\n");
    let before = words(&ran).len();
    until("further runs", || words(&ran).len() >= before + 2);
    // The next reload tries it again.
    let _: i64 = server.command(&["DEL", "redlatch_job:{bad}"]);
    cron.signal(Signal::HUP);
    until("the job", || words(&ran).contains(&vec!["bad".to_owned()]));
    cron.signal(Signal::TERM);
    let stderr = cron.finish().expect(0).stderr;
    assert!(stderr.contains("redlatch: bad: "), "{stderr}");
    let _: () = server.command(&["SET", "redlatch_job:{worse}", "text"]);
    std::fs::write(&file, job("worse")).unwrap();
    finish(redlatch(&server, &["cron", &file])).expect(65);
}

/// What its user may do is changed meanwhile, and changed back.
#[test]
fn job_that_the_store_refuses_for_a_while_is_scheduled_later() {
    let (temp_dir, server) = (TempDir::new(), Server::start());
    let (file, ran) = (temp_dir.path("crontab"), temp_dir.path("ran"));
    std::fs::write(&file, "").unwrap();
    let cron = start(&server, &file, 0);
    let _: () = server.command(&["ACL", "SETUSER", "default", "-eval", "-evalsha"]);
    std::fs::write(&file, format!("* * * * * * job echo ran >> {ran}\n")).unwrap();
    cron.signal(Signal::HUP);
    cron.until_stderr("; it is tried again every ");
    let _: () = server.command(&["ACL", "SETUSER", "default", "+@all"]);
    until("a run", || !words(&ran).is_empty());
    cron.signal(Signal::TERM);
    cron.finish().expect(0);
}

/// Its store is down, as it may be when the machine boots.
#[test]
fn signals_end_and_reload_also_before_it_is_connected() {
    let (temp_dir, mut server) = (TempDir::new(), Server::start());
    let (file, ran) = (temp_dir.path("crontab"), temp_dir.path("ran"));
    let job = |text: &str| format!("* * * * * * job echo {text} >> {ran}\n");
    std::fs::write(&file, job("old")).unwrap();
    server.kill();
    let start = || {
        let cron = Running::start(redlatch(&server, &["cron", &file]));
        cron.until_stderr("waiting for");
        cron
    };
    let (ended, reloaded) = (start(), start());
    ended.signal(Signal::TERM);
    ended.finish().expect(0);
    std::fs::write(&file, "* * * wrong\n").unwrap();
    reloaded.signal(Signal::HUP);
    reloaded.until_stderr("1 line wrong; the jobs stay as they were\n");
    std::fs::write(&file, job("new")).unwrap();
    reloaded.signal(Signal::HUP);
    until("the signal is received", || {
        pending_signals(reloaded.pid()) == 0
    });
    server.restart();
    until("a run", || !words(&ran).is_empty());
    assert_eq!(words(&ran)[0], ["new"]);
    reloaded.signal(Signal::TERM);
    reloaded.finish().expect(0);
}

/// The file is a pipe that has no content: at the start, before it is connected, and while a job runs.
#[test]
fn signals_are_received_while_the_crontab_is_read() {
    let (temp_dir, name) = (TempDir::new(), unique("silent"));
    let silent = temp_dir.path("silent");
    make_silent(&silent);
    for (args, code) in [
        (vec!["cron", &silent], 0),
        (vec!["cron", "--check", &silent], 143),
    ] {
        let cron = Running::start(redlatch(shared(), &args));
        let _writer = until_opened(silent.clone());
        cron.signal(Signal::TERM);
        cron.finish().expect(code);
    }
    let file = temp_dir.path("crontab");
    let text = format!("{} {name} echo began; sleep 1; echo end\n", soon(2));
    let mut down = Server::start();
    down.kill();
    for (server, is_up) in [(shared(), true), (&down, false)] {
        std::fs::write(&file, &text).unwrap();
        let cron = Running::start(redlatch(server, &["cron", &file]));
        match is_up {
            true => drop(cron.until_stdout("began\n")),
            false => drop(cron.until_stderr("waiting for")),
        }
        std::fs::remove_file(&file).unwrap();
        make_silent(&file);
        cron.signal(Signal::HUP);
        let _writer = until_opened(file.clone());
        cron.signal(Signal::TERM);
        let stdout = cron.finish().expect(0).stdout;
        assert!(!is_up || stdout.ends_with(": end\n"), "{stdout}");
        std::fs::remove_file(&file).unwrap();
    }
}

/// Also those of which it makes no use.
#[test]
fn each_ending_signal_lets_the_runs_end() {
    let signals = [Signal::QUIT, Signal::USR1, Signal::ALARM, Signal::XFSZ];
    for_each(&signals, |signal| {
        let (temp_dir, name) = (TempDir::new(), unique("signal"));
        let file = temp_dir.path("crontab");
        let text = format!("{} {name} echo began; sleep 1; echo end\n", soon(2));
        std::fs::write(&file, text).unwrap();
        let cron = start(shared(), &file, 0);
        cron.until_stdout("began\n");
        cron.signal(*signal);
        let stdout = cron.finish().expect(0).stdout;
        assert!(stdout.ends_with(": end\n"), "{stdout}");
    });
}

/// A stopped process would renew no lock, while its commands run.
#[test]
fn stop_signals_do_not_stop_it() {
    let (temp_dir, name) = (TempDir::new(), unique("stop"));
    let (file, ran) = (temp_dir.path("crontab"), temp_dir.path("ran"));
    let text = format!("* * * * * * {name} echo ran >> {ran}\n");
    std::fs::write(&file, text).unwrap();
    let mut command = redlatch(shared(), &["cron", &file]);
    // A separate job, as in a shell: in an orphaned group SIGTSTP has no effect.
    command.process_group(0);
    let cron = Running::start(command);
    for signal in [Signal::TSTP, Signal::TTIN] {
        let before = words(&ran).len();
        until("a run", || words(&ran).len() > before);
        cron.signal(signal);
        let before = words(&ran).len();
        // One may have begun before.
        until("runs after it", || words(&ran).len() >= before + 2);
    }
    // A run may last.
    cron.signal(Signal::TERM);
    cron.signal(Signal::TSTP);
    cron.finish().expect(0);
}

/// With `stty tostop`, the system stops other programs that write from the background.
#[test]
fn output_in_the_background_of_a_terminal_does_not_stop_it() {
    let (temp_dir, name) = (TempDir::new(), unique("tostop"));
    let file = temp_dir.path("crontab");
    std::fs::write(&file, format!("* * * * * * {name} echo ran\n")).unwrap();
    let (shell, pid) = in_background_of_a_terminal(&format!("cron {file}"));
    shell.until_stdout(&format!("{name}: ran"));
    kill_process(pid, Signal::TERM).unwrap();
    shell.until_stdout("ended 0.");
}

/// As under other crons: the system would stop it, and no shell would continue it.
#[test]
fn command_cannot_read_the_terminal() {
    let (temp_dir, name) = (TempDir::new(), unique("reads"));
    let file = temp_dir.path("crontab");
    std::fs::write(&file, format!("{} {name} read line < /dev/tty\n", soon(2))).unwrap();
    let (shell, pid) = in_background_of_a_terminal(&format!("cron {file}"));
    until("its end", || state(shared(), &name) == "failed");
    kill_process(pid, Signal::TERM).unwrap();
    shell.until_stdout("ended 0.");
}

/// The machine is stopped for longer than its lease, and its command ends meanwhile.
#[test]
fn command_that_ended_before_the_loss_was_noticed_is_reported() {
    let (temp_dir, name) = (TempDir::new(), unique("frozen"));
    let [file, ran, go] = ["crontab", "ran", "go"].map(|name| temp_dir.path(name));
    let script = format!("echo $PPID >> {ran}; until test -e {go}; do sleep 0.02; done; exit 3");
    std::fs::write(&file, format!("{} {name} {script}\n", soon(2))).unwrap();
    let cron = start(shared(), &file, 0);
    until("a run", || words(&ran).len() == 1);
    cron.signal(Signal::STOP);
    std::fs::write(&go, "").unwrap();
    let process = words(&ran)[0][0].parse().unwrap();
    until("its end", || is_dead(process));
    until("the end of its lease", || !is_held(shared(), &name));
    cron.signal(Signal::CONT);
    let line = ": its command had ended by itself when the loss was noticed: exit code 3\n";
    let stderr = cron.until_stderr(line);
    assert!(stderr.contains("the lock of a run was lost"), "{stderr}");
    cron.signal(Signal::TERM);
    cron.finish().expect(0);
}

/// At once, although they may last for hours.
#[test]
fn first_signal_prints_which_runs_last() {
    let (temp_dir, names) = (TempDir::new(), [unique("long"), unique("longer")]);
    let file = temp_dir.path("crontab");
    let when = soon(2);
    let line = |name: &String| format!("{when} {name} echo begins; sleep 600\n");
    std::fs::write(&file, names.each_ref().map(line).concat()).unwrap();
    let cron = start(shared(), &file, 0);
    for name in &names {
        cron.until_stdout(&format!("{name}: begins\n"));
    }
    cron.signal(Signal::TERM);
    let stderr = cron.until_stderr("; another signal ends them\n");
    let line = stderr.lines().last().unwrap();
    assert!(line.contains("ending: waiting for 2 runs: "), "{stderr}");
    for name in &names {
        assert!(line.contains(&format!("{name} (")), "{stderr}");
    }
    cron.signal(Signal::TERM);
    cron.finish().expect(0);
}

/// A second signal ends what runs, with all processes.
#[test]
fn second_signal_ends_the_runs() {
    let (temp_dir, name) = (TempDir::new(), unique("twice"));
    let file = temp_dir.path("crontab");
    let script = "trap '' TERM; sleep 600 & echo $!; wait";
    std::fs::write(&file, format!("{} {name} {script}\n", soon(2))).unwrap();
    let cron = start(shared(), &file, 0);
    let stdout = cron.until_stdout("\n");
    let (_, pid) = stdout.trim().rsplit_once(' ').unwrap();
    cron.signal(Signal::TERM);
    cron.signal(Signal::INT);
    let finished = cron.finish().expect(0);
    assert!(
        finished.stderr.contains("ended by a signal"),
        "{}",
        finished.stderr
    );
    assert!(is_dead(pid.parse().unwrap()));
    let all = history(shared(), &name);
    assert_eq!(all["runs"][0]["state"], "failed", "{all}");
}

/// As process 1 of a container it adopts what commands leave behind, and no other process reaps that.
#[test]
fn process_1_leaves_no_zombies() {
    let (temp_dir, name) = (TempDir::new(), unique("reaps"));
    let (file, ran) = (temp_dir.path("crontab"), temp_dir.path("ran"));
    let text = format!("* * * * * * {name} (sleep 0.1; echo ran >> {ran}) &\n");
    std::fs::write(&file, text).unwrap();
    let mut unshare = std::process::Command::new("unshare");
    // Users other than root may create namespaces only as root of one.
    unshare.args(["--map-root-user", "--pid", "--mount-proc"]);
    unshare.args(["--fork", "--kill-child", "--"]);
    let unshare = started_by(unshare, &redlatch(shared(), &["cron", &file]));
    let unshare = Running::start(unshare);
    until("what runs leave behind", || words(&ran).len() >= 3);
    let [cron] = children(unshare.pid())[..] else {
        panic!("`unshare` has one child");
    };
    until("all zombies are reaped", || {
        !children(cron).into_iter().any(is_dead)
    });
    kill_process(Pid::from_raw(cron as i32).unwrap(), Signal::TERM).unwrap();
    unshare.finish().expect(0);
}

/// What it prints after its run has a reader until `redlatch cron` ends, as under `redlatch run`.
#[test]
fn process_that_a_command_leaves_behind_can_print() {
    let (temp_dir, name) = (TempDir::new(), unique("leaves"));
    let (file, go) = (temp_dir.path("crontab"), temp_dir.path("go"));
    // The next run leaves nothing behind.
    let script = format!("test -e {go} || (until [ -e {go} ]; do sleep 0.1; done; echo late) &");
    std::fs::write(&file, format!("{} {name} {script}\n", soon(2))).unwrap();
    let cron = start(shared(), &file, 0);
    until("its run has ended", || state(shared(), &name) == "ok");
    std::fs::write(&go, "").unwrap();
    cron.until_stdout(&format!("{name}: late\n"));
    cron.signal(Signal::TERM);
    cron.finish().expect(0);
}

/// Returns the processes with this parent.
fn children(parent: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
    pids.filter(|pid| parent_of(*pid) == Some(parent)).collect()
}

#[test]
fn command_that_never_ends_is_ended_at_its_timeout() {
    let (temp_dir, name) = (TempDir::new(), unique("timeout"));
    let file = temp_dir.path("crontab");
    let script = "sleep 600 & echo $!; echo out >&2; sleep 600";
    std::fs::write(&file, format!("{} {name}[timeout=3s] {script}\n", soon(2))).unwrap();
    let cron = start(shared(), &file, 0);
    let stdout = cron.until_stdout("\n");
    let (_, pid) = stdout.lines().next().unwrap().rsplit_once(' ').unwrap();
    until("its end", || state(shared(), &name) == "failed");
    assert!(is_dead(pid.parse().unwrap()));
    let all = history(shared(), &name);
    let run = &all["runs"][0];
    assert_eq!(run["outcome"], "timed out after 3.0s", "{all}");
    assert_eq!(run["output"], format!("{pid}\nout\n"), "{all}");
    assert_eq!((&run["attempt"], &all["skipped"]), (&1.into(), &0.into()));
    let took = run["took_ms"].as_u64().unwrap();
    assert!(took >= 3000, "{took}");
    cron.signal(Signal::TERM);
    cron.finish().expect(0);
}

/// Many jobs take as long as a few round trips.
#[test]
fn jobs_are_read_together() {
    let (server, answer) = (Server::start(), Duration::from_millis(200));
    let jobs = 100;
    for job in 0..jobs {
        let record = format!("redlatch_job:{{{job}}}");
        let () = server.command(&["HSET", &record, "last", "1000"]);
    }
    let proxy = Proxy::to(server.port());
    proxy.delay(answer);
    let mut command = clean_command(&["jobs", "--json"]);
    command.env("REDLATCH_URL", proxy.url());
    let begun = Instant::now();
    let listed = finish(command).expect(0).stdout;
    let took = begun.elapsed();
    assert_eq!(listed.lines().count(), jobs);
    // One after the other they take twice as long.
    assert!(took < answer * 50, "{took:?}");
}

/// No crontab has it any more, so it does not fire at the next time of its schedule.
#[test]
fn job_that_no_machine_schedules_is_overdue() {
    let server = Server::start();
    let record = ["last", "1767225600000", "schedule", "UTC 0 2 * * *"];
    let () = server.command(&[&["HSET", "redlatch_job:{gone}"], &record[..]].concat());
    let shown = |args: &[&str]| finish(redlatch(&server, args)).expect(0).stdout;
    let listed = shown(&["jobs"]);
    assert!(
        listed.lines().nth(1).unwrap().contains("  overdue  0  "),
        "{listed}"
    );
    let one = shown(&["jobs", "gone"]);
    let line = "overdue since 2026-01-01T02:00:00Z: no machine has begun that run\n";
    assert!(one.ends_with(line), "{one}");
    let job = history(&server, "gone");
    assert!(job["next"].is_null(), "{job}");
    assert_eq!(job["overdue"], "2026-01-01T02:00:00Z", "{job}");
}

#[test]
fn jobs_shows_the_runs() {
    let server = Server::start();
    let temp_dir = TempDir::new();
    let file = temp_dir.path("crontab");
    let when = soon(2);
    let text =
        format!("{when} good printf 'one\\ntwo'\n{when} bad [overlap=allow] echo no; exit 3\n");
    std::fs::write(&file, text).unwrap();
    let cron = start(&server, &file, 0);
    until("both ends", || {
        state(&server, "good") == "ok" && state(&server, "bad") == "failed"
    });
    let shown = |args: &[&str]| finish(redlatch(&server, args)).expect(0).stdout;
    let list = shown(&["jobs"]);
    let lines: Vec<Vec<_>> = list
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(lines[0][..4], ["NAME", "LAST", "STATE", "TOOK"], "{list}");
    assert_eq!((lines[1][0], lines[1][2]), ("bad", "failed"), "{list}");
    assert_eq!((lines[2][0], lines[2][2]), ("good", "ok"), "{list}");
    let bad = shown(&["jobs", "bad"]);
    assert!(
        bad.contains("exit code 3\n") && bad.contains("next run: "),
        "{bad}"
    );
    assert!(bad.ends_with(":\n  no\n"), "{bad}");
    let good = history(&server, "good");
    assert_eq!(
        (&good["tz"], &good["schedule"]),
        (&"UTC".into(), &when.into())
    );
    assert_eq!(good["runs"][0]["output"], "one\ntwo", "{good}");
    assert_eq!(shown(&["jobs", "other"]), "other: no runs are known\n");
    let (exporter, address) = crate::exporter::start(&server.url(), &[]);
    until("metrics", || {
        let metrics = request(&address, "GET /metrics");
        metrics.contains("redlatch_job_failures{name=\"bad\"} 1")
            && metrics.contains("redlatch_job_last_success_seconds{name=\"good\"}")
            && metrics.contains("redlatch_job_last_duration_seconds{name=\"bad\"}")
    });
    drop(exporter);
    cron.signal(Signal::TERM);
    cron.finish().expect(0);
}
