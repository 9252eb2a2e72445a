//! The table: a run for each fault and topology.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread::{self, sleep};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::Result;
use crate::checker::Rule;
use crate::clock::millis;
use crate::deployment::Topology;
use crate::faults::{self, Fault};
use crate::names::{contended_names, names, slow_jobs};
use crate::namespace;
use crate::options::TableOptions;
use crate::run::{Explained, Outcome, Setup, run};
use crate::worker::WorkerOptions;

/// Number of violations of a row that are printed in full.
const PRINTED_VIOLATIONS: usize = 10;

/// Runs the selected rows. Returns whether all violations are explained.
pub(crate) fn run_table(options: &TableOptions) -> Result<bool> {
    let faults = faults::all();
    let wanted: Vec<(&Fault, Topology)> = faults
        .iter()
        .flat_map(|fault| {
            fault
                .topologies
                .iter()
                .map(move |&topology| (fault, topology))
        })
        .filter(|(fault, topology)| options.selects(fault.name, *topology))
        .collect();
    if wanted.is_empty() {
        return Err("no such fault; --list prints the available ones".into());
    }
    if options.list {
        for (fault, topology) in wanted {
            println!(
                "{:<22} {:<9} {}",
                fault.name,
                topology.name(),
                fault.description
            );
        }
        return Ok(true);
    }
    let partitions = wanted.iter().any(|(fault, _)| fault.needs.partitions);
    let network = match partitions {
        true => namespace::enter(options.outside.as_deref()),
        false => Ok(()),
    };
    // The reason, if servers cannot be cut off from each other.
    let refused = &network.err().map(|error| error.to_string());
    let seed = options.seed();
    println!("SEED={seed}\n\n{HEAD}");
    let bar = ProgressBar::new(wanted.len() as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len}") {
        bar.set_style(style);
    }
    let (mut explanations, mut passed) = (Vec::new(), true);
    let (rows, next) = (&wanted, &AtomicUsize::new(0));
    let (sender, outcomes) = channel();
    thread::scope(|scope| {
        for _ in 0..options.at_once.max(1) {
            let sender = sender.clone();
            scope.spawn(move || {
                while let Some(&(fault, topology)) = rows.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    // The testkit panics when servers do not start or do not form a cluster.
                    let row = || match refused {
                        Some(why) if fault.needs.partitions => {
                            Err(format!("a network namespace is required; {why}").into())
                        }
                        _ => row(fault, topology, options, seed),
                    };
                    let outcome = catch_unwind(AssertUnwindSafe(row))
                        .unwrap_or_else(|_| Err("the run panicked, see above".into()));
                    if sender.send((fault, topology, outcome)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        for (fault, topology, outcome) in outcomes {
            bar.suspend(|| match outcome {
                Ok(outcome) => {
                    println!(
                        "{}",
                        format_row(fault, topology, &outcome, &mut explanations)
                    );
                    print_violations(&outcome);
                    passed &= outcome.violations.is_empty();
                }
                Err(error) => {
                    let topology = topology.name();
                    println!(
                        "| {} | {topology} | could not be run: {error} |",
                        fault.name
                    );
                    passed = false;
                }
            });
            bar.inc(1);
        }
    });
    bar.finish_and_clear();
    println!();
    for (number, why) in explanations.iter().enumerate() {
        println!("[{}] {why}", number + 1);
    }
    Ok(passed)
}

fn row(fault: &Fault, topology: Topology, options: &TableOptions, seed: u64) -> Result<Outcome> {
    let lease = Duration::from_secs(if options.quick { 2 } else { 3 }) * fault.lease;
    let setup = Setup {
        topology,
        needs: fault.needs,
        losses: fault.losses,
        // One process is enough to hold thousands of locks.
        processes: if fault.permanent_locks > 0 { 1 } else { 3 },
        worker: WorkerOptions {
            sync: fault.sync,
            uses_tickets: true,
            client_id: fault.chosen_ids.then(|| "pod".to_owned()),
            contended_names: contended_names(10),
            jobs: slow_jobs(),
            permanent_locks: fault.permanent_locks,
            ..WorkerOptions::new(lease, 8, names(20), seed)
        },
        keep: options.output_folder(&format!("{}-{}", fault.name, topology.name())),
    };
    let once = options.quick || topology.is_service();
    let times = if once { 1 } else { fault.times };
    run(&setup, |context| {
        for time in 0..times {
            if time > 0 {
                sleep(lease / 3);
            }
            fault.run(context, fault.duration.of(lease))?;
        }
        Ok(())
    })
}

const HEAD: &str = "\
| fault | topology | operations | during fault | lost | errors | violations | explained | worst recovery |
|---|---|---|---|---|---|---|---|---|";

fn format_row(
    fault: &Fault,
    topology: Topology,
    outcome: &Outcome,
    explanations: &mut Vec<&'static str>,
) -> String {
    let mut explained = Vec::new();
    for (why, rules) in &outcome.explained {
        let known = explanations.iter().position(|known| known == why);
        let number = known.unwrap_or_else(|| {
            explanations.push(why);
            explanations.len() - 1
        });
        let rules = rules.iter().map(format_explained).collect::<Vec<_>>();
        explained.push(format!("{} [{}]", rules.join(", "), number + 1));
    }
    let errors = outcome
        .errors
        .iter()
        .map(|(error, count)| format!("{count} {error}"));
    let recovery = outcome.recovery.map(|time| format!("{} ms", millis(time)));
    [
        "",
        fault.name,
        topology.name(),
        &outcome.entered.to_string(),
        &outcome.during_faults.to_string(),
        &outcome.lost.to_string(),
        &or_none(errors.collect::<Vec<_>>().join(", ")),
        &outcome.violations.len().to_string(),
        &or_none(explained.join(", ")),
        &or_none(recovery.unwrap_or_default()),
        "",
    ]
    .join(" | ")
    .trim()
    .to_owned()
}

/// Describes which rule was violated, how often, and for how long at most.
pub(crate) fn format_explained((rule, excused): (&Rule, &Explained)) -> String {
    let count = excused.count;
    match millis(excused.longest) {
        0 => format!("{count} {rule:?}"),
        longest => format!("{count} {rule:?} (≤ {longest} ms)"),
    }
}

fn or_none(text: String) -> String {
    if text.is_empty() { "–".into() } else { text }
}

/// Prints the violations.
pub(crate) fn print_violations(outcome: &Outcome) {
    let violations = &outcome.violations;
    if outcome.stalled > 0 {
        let stalled = millis(outcome.stalled);
        println!("    the machine stalled a process for {stalled} ms");
    }
    for violation in violations.iter().take(PRINTED_VIOLATIONS) {
        println!("    {violation}");
    }
    if violations.len() > PRINTED_VIOLATIONS {
        println!("    … and {} more", violations.len() - PRINTED_VIOLATIONS);
    }
}

impl TableOptions {
    fn selects(&self, fault: &str, topology: Topology) -> bool {
        let only = self
            .only
            .as_ref()
            .is_none_or(|only| fault.contains(only.as_str()));
        only && (self.topology.is_empty() || self.topology.contains(&topology))
    }

    /// Returns the folder for the output of the workers of one row.
    pub(crate) fn output_folder(&self, row: &str) -> Option<PathBuf> {
        let folder = self.keep.as_ref()?;
        Some(folder.join(row.replace([' ', ','], "-")))
    }
}
