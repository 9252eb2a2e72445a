//! The results: JSON, Markdown tables and plots.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use redlatch_testkit::Server;
use serde_json::{Value, json};

use crate::options::Options;
use crate::plot::{self, number};

pub(crate) fn write(server: &Server, rows: &[Value], options: &Options) -> std::io::Result<()> {
    let redis = server.info("redis_version");
    let cpus = std::thread::available_parallelism()?.get();
    let commit = commit();
    let results =
        json!({ "redis": redis, "cpus": cpus, "redlatch_commit": commit, "libraries": rows });
    let (rounds, ms, wakes) = (options.rounds, options.round.as_millis(), options.wakes);
    let text = format!(
        "{cpus} CPUs, Redis {redis} over loopback, redlatch at commit {commit}; {rounds} rounds of {ms} ms, {wakes} \
         wake-ups.\n\n{}",
        tables(rows),
    );
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    for (name, content) in [
        ("json", format!("{results:#}\n")),
        ("md", text.clone()),
        ("free.svg", plot::free(rows)),
        ("one-name.svg", plot::one_name(rows)),
        ("wake.svg", plot::wake(rows)),
    ] {
        std::fs::write(folder.join(format!("bench-peers.{name}")), content)?;
    }
    println!("\n{text}\nWritten to target/bench-peers.*");
    Ok(())
}

fn tables(rows: &[Value]) -> String {
    let mut text = "\
| pairs/s | polls every | 1 task | 16 tasks | 128 tasks | one name, 16 tasks | one name, 4 processes of 4 |
|---|---|---|---|---|---|---|
"
    .to_owned();
    let (one, four) = ("one_name_1x16", "one_name_4x4");
    for row in rows {
        let interval = row["polls_every_ms"].as_u64();
        let interval = interval.map_or("–".to_owned(), |ms| format!("{ms} ms"));
        let rates = ["free_1", "free_16", "free_128", one, four];
        let rates = rates.map(|scenario| thousands(&row[scenario]["pairs_per_s"]));
        let version = row["version"].as_str().unwrap_or_default();
        let _ = writeln!(text, "| {version} | {interval} | {} |", rates.join(" | "));
    }
    text += "
![Lock and unlock on free names](bench-peers.free.svg)

![Lock and unlock on one name](bench-peers.one-name.svg)

| | wake-up p50, µs | wake-up p99, µs | commands per pair: 1 task | 128 tasks | one name, 16 tasks | 4 of 4 | \
fewest and most turns: 16 tasks | 4 of 4 |
|---|---|---|---|---|---|---|---|---|
";
    for row in rows {
        let name = row["name"].as_str().unwrap_or_default();
        let wakes = ["wake_p50_us", "wake_p99_us"].map(|figure| thousands(&row[figure]));
        let commands = ["free_1", "free_128", one, four];
        let commands = commands.map(|s| format!("{:.2}", number(&row[s]["commands_per_pair"])));
        let turns = [one, four].map(|scenario| {
            let turns = ["fewest_turns", "most_turns"].map(|figure| &row[scenario][figure]);
            let [fewest, most] = turns.map(|share| number(share) * 100.0);
            format!("{fewest:.0}–{most:.0} %")
        });
        let cells = [&wakes[..], &commands, &turns].concat();
        let _ = writeln!(text, "| {name} | {} |", cells.join(" | "));
    }
    text + "\n![From the release in one process to the acquisition in another](bench-peers.wake.svg)\n"
}

/// Writes a whole number with a space between thousands, as in the documentation.
fn thousands(value: &Value) -> String {
    let digits = format!("{:.0}", number(value));
    let groups: Vec<&[u8]> = digits.as_bytes().rchunks(3).rev().collect();
    String::from_utf8_lossy(&groups.join(&b' ')).into_owned()
}

/// Returns the commit of this source tree, if git knows it.
fn commit() -> String {
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty"])
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    let printed = git.output().map(|ran| ran.stdout).unwrap_or_default();
    String::from_utf8_lossy(&printed).trim().to_owned()
}
