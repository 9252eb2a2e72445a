//! `redlatch jobs`: the jobs that run by a schedule, and their latest runs.

use std::pin::pin;
use std::time::{Duration, SystemTime};

use futures_util::{StreamExt as _, stream};
use redlatch::Client;
use redlatch::job::{History, RunRecord, RunState};
use serde::Serialize;

use crate::args::cron::Jobs;
use crate::exit::Failure;
use crate::output::{escape, stdout};
use crate::show::{whole_millis, widths};
use crate::store::args::StoreArgs;
use crate::text::utc_time;
use crate::{duration, store};

/// How many objects are read at a time.
pub(crate) const READS: usize = 16;

/// A job in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Job<'a> {
    name: &'a str,
    schedule: Option<&'a str>,
    tz: Option<&'a str>,
    next: Option<String>,
    overdue: Option<String>,
    last_slot: String,
    skipped: u64,
    runs: Vec<Run<'a>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Run<'a> {
    slot: String,
    attempt: u32,
    state: &'static str,
    host: &'a str,
    by: &'a str,
    began: String,
    took_ms: Option<u64>,
    outcome: &'a str,
    output: &'a str,
}

pub(crate) async fn jobs(store_args: &StoreArgs, args: &Jobs) -> Result<u8, Failure> {
    if let Some(name) = &args.name {
        store::check_name(name).await?;
    }
    let client = store::connect(store_args, Client::builder()).await?;
    let histories = match &args.name {
        Some(name) => Vec::from_iter(client.job(name).history().await?),
        None => read_all(&client, client.jobs("*").await?, args.json).await?,
    };
    let now = SystemTime::now();
    if args.json {
        let jobs: Vec<_> = histories.iter().map(|job| to_json(job, now)).collect();
        return stdout::json(&jobs).await;
    }
    match (&args.name, histories.first()) {
        (Some(name), None) => stdout::lines([format!("{name}: no runs are known")]).await,
        (Some(_), Some(history)) => stdout::lines(lines_of(history, now)).await,
        (None, _) => stdout::lines(list(&histories, now)).await,
    }
}

/// Returns the jobs with these names, in the same order, with the outputs of their runs or without them.
pub(crate) async fn read_all(
    client: &Client,
    names: Vec<String>,
    outputs: bool,
) -> redlatch::Result<Vec<History>> {
    let read = async |name: String| {
        let job = client.job(&name);
        match outputs {
            true => job.history().await,
            false => job.history_without_outputs().await,
        }
    };
    let mut histories = pin!(stream::iter(names).map(read).buffered(READS));
    let mut all = Vec::new();
    while let Some(history) = histories.next().await {
        match history {
            // It may have expired meanwhile.
            Ok(history) => all.extend(history),
            // The key holds something else.
            Err(redlatch::Error::WrongKind { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(all)
}

pub(crate) fn to_json(history: &History, now: SystemTime) -> Job<'_> {
    let runs = history.runs.iter().map(|run| Run {
        slot: utc_time(run.slot),
        attempt: run.attempt,
        state: run.state.as_str(),
        host: &run.host,
        by: &run.by,
        began: utc_time(run.began),
        took_ms: run.took.map(whole_millis),
        outcome: &run.outcome,
        output: &run.output,
    });
    let schedule = history.schedule.as_ref();
    let next = next_run(history, now);
    Job {
        name: &history.name,
        schedule: schedule.map(|cron| cron.expression()),
        tz: schedule.map(|cron| cron.tz()),
        next: next.ok().flatten().map(utc_time),
        overdue: next.err().map(utc_time),
        last_slot: utc_time(history.last_slot),
        skipped: history.skipped,
        runs: runs.collect(),
    }
}

/// Returns when the job fires next, as far as that is known. The error is a firing that is overdue: then
/// perhaps no machine schedules the job any more.
fn next_run(history: &History, now: SystemTime) -> Result<Option<SystemTime>, SystemTime> {
    history
        .overdue(now)
        .map_or_else(|| Ok(history.next_run(now)), Err)
}

/// Returns how long a run has taken, or lasts.
fn took(run: &RunRecord, now: SystemTime) -> String {
    let lasts = || now.duration_since(run.began).unwrap_or(Duration::ZERO);
    match run.state {
        RunState::Running => duration::short(lasts()),
        _ => run.took.map(duration::short).unwrap_or_default(),
    }
}

fn list(histories: &[History], now: SystemTime) -> Vec<String> {
    let row = |history: &History| {
        let latest = history.runs.first();
        let of = |text: fn(&RunRecord) -> String| latest.map(text).unwrap_or_default();
        [
            history.name.clone(),
            of(|run| utc_time(run.slot)),
            of(|run| run.state.as_str().to_owned()),
            latest.map(|run| took(run, now)).unwrap_or_default(),
            of(|run| run.host.clone()),
            match next_run(history, now) {
                Ok(next) => next.map(utc_time).unwrap_or_default(),
                Err(_) => "overdue".to_owned(),
            },
            history.skipped.to_string(),
            history
                .schedule
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
        ]
    };
    let head = [
        "NAME", "LAST", "STATE", "TOOK", "HOST", "NEXT", "SKIPPED", "SCHEDULE",
    ];
    table(head, histories.iter().map(row))
}

fn lines_of(history: &History, now: SystemTime) -> Vec<String> {
    let row = |run: &RunRecord| {
        [
            utc_time(run.slot),
            run.attempt.to_string(),
            run.state.as_str().to_owned(),
            utc_time(run.began),
            took(run, now),
            run.by.clone(),
            run.outcome.clone(),
        ]
    };
    let head = ["SLOT", "ATTEMPT", "STATE", "BEGAN", "TOOK", "BY", "OUTCOME"];
    let mut lines = table(head, history.runs.iter().map(row));
    match next_run(history, now) {
        Ok(next) => lines.extend(next.map(|next| format!("next run: {}", utc_time(next)))),
        Err(slot) => lines.push(format!(
            "overdue since {}: no machine has begun that run",
            utc_time(slot)
        )),
    }
    let latest = history.runs.first();
    if let Some(run) = latest.filter(|run| !run.output.trim().is_empty()) {
        lines.push(format!("output of {}:", utc_time(run.slot)));
        lines.extend(run.output.lines().map(|line| format!("  {line}")));
    }
    lines
}

/// Aligns columns.
fn table<const N: usize>(head: [&str; N], rows: impl Iterator<Item = [String; N]>) -> Vec<String> {
    let rows = std::iter::once(head.map(str::to_owned)).chain(rows);
    // Also when they are printed, but then the columns would not be aligned.
    let rows: Vec<[String; N]> = rows
        .map(|row| row.map(|cell| escape::line(&cell)))
        .collect();
    let widths = widths(&rows);
    let line = |row: &[String; N]| {
        let cells = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}
