//! The soak: many clients for a long time, while random faults happen.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::Result;
use crate::checker::Losses;
use crate::clock::millis;
use crate::context::{Context, Schedule};
use crate::deployment::{Needs, Topology};
use crate::faults::{self, Fault, FaultDuration};
use crate::names::{contended_names, names, slow_jobs};
use crate::options::SoakOptions;
use crate::processes::lock;
use crate::run::{Outcome, Setup, run};
use crate::table::{format_explained, print_violations};
use crate::worker::WorkerOptions;

const LEASE: Duration = Duration::from_secs(3);

/// Runs the soak. Returns whether there was no violation.
pub(crate) fn soak(options: &SoakOptions) -> Result<bool> {
    let topology = options.topology;
    let faults = faults::all();
    let fits = |fault: &&Fault| fault.in_soak && fault.topologies.contains(&topology);
    let faults: Vec<Fault> = faults.iter().filter(fits).copied().collect();
    let (processes, tasks, clients) = (options.processes, options.tasks, options.clients);
    let seed = options.seed();
    println!(
        "SEED={seed}: {} s on {}, {processes} processes with {tasks} tasks and {clients} clients \
         each, {} names",
        options.seconds,
        topology.name(),
        options.names
    );
    let mut worker = WorkerOptions::new(LEASE, tasks, names(options.names), seed);
    worker.clients = clients;
    worker.uses_tickets = true;
    worker.max_hold_ms = 50;
    // Each client that dies in a fair lock's queue delays the others: if a hundred died at once, these locks
    // would make no progress for minutes.
    worker.fair = tasks.div_ceil(10);
    // Enough tasks hold locks for long to be affected by every fault, and enough names stay free for others.
    worker.long_holders = (options.names / 4 / processes.max(1)).max(1);
    worker.jobs = slow_jobs();
    worker.contended_names = contended_names(options.names.div_ceil(2));
    let setup = Setup {
        topology,
        needs: Needs {
            network: Topology::ONE_ADDRESS.contains(&topology),
            durable: true,
            ..Needs::NOTHING
        },
        losses: Losses::Any,
        processes,
        worker,
        keep: options.keep.clone(),
    };
    let mut drawn = BTreeMap::new();
    let outcome = run(&setup, |context| {
        let length = Duration::from_secs(options.seconds);
        drawn = break_at_random(context, &faults, length)?;
        Ok(())
    })?;
    report(&outcome, &drawn);
    Ok(outcome.violations.is_empty())
}

/// Runs one fault after the other, some during others. Returns how often each was drawn.
fn break_at_random(
    context: &mut Context,
    faults: &[Fault],
    length: Duration,
) -> Result<BTreeMap<&'static str, usize>> {
    let overlapping = faults.iter().filter(|fault| fault.can_overlap);
    let overlapping = overlapping.map(|fault| (fault.name, fault.inject));
    let mut schedule = Schedule::new(overlapping.collect(), LEASE);
    let began = Instant::now();
    let bar = ProgressBar::new(length.as_secs());
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} s {msg}") {
        bar.set_style(style);
    }
    while began.elapsed() < length {
        schedule.wait();
        let fault = &faults[context.random.below(faults.len())];
        // One in sixteen lasts longer than a lease; with replicas that would cause a failover, which is a fault of
        // its own.
        let long = context.random.below(16) == 0 && context.deployment.is_single_server();
        let duration = match long {
            true => FaultDuration::PastLease.of(LEASE),
            false => context.random.between(LEASE / 60, LEASE / 4),
        };
        let entered = lock(&context.history).entered();
        bar.set_message(format!("{entered} sections, {}", fault.name));
        context.schedule = Some(schedule);
        let done = fault.run(context, duration);
        schedule = context.schedule.take().ok_or("a schedule")?;
        match done {
            Ok(()) => *schedule.drawn.entry(fault.name).or_default() += 1,
            // The fault affected no client, or a server had not yet recovered from the previous one.
            Err(error) => bar.suspend(|| println!("  {error}")),
        }
        bar.set_position(began.elapsed().as_secs());
    }
    bar.finish_and_clear();
    Ok(schedule.drawn)
}

fn report(outcome: &Outcome, drawn: &BTreeMap<&str, usize>) {
    let faults: usize = drawn.values().sum();
    let Outcome {
        entered,
        during_faults,
        ..
    } = outcome;
    println!("{faults} faults:");
    for (name, count) in drawn {
        println!("  {count:>5} {name}");
    }
    println!("{entered} critical sections, {during_faults} of them entered during a fault");
    println!("{} locks lost and reported", outcome.lost);
    for (error, count) in &outcome.errors {
        println!("  {count:>5} {error}");
    }
    if let Some(recovery) = outcome.recovery {
        println!(
            "{} ms until a free lock was acquired, at worst",
            millis(recovery)
        );
    }
    for (why, rules) in &outcome.explained {
        let rules = rules
            .iter()
            .map(format_explained)
            .collect::<Vec<_>>()
            .join(", ");
        println!("{rules}: unavoidable violations: {why}");
    }
    println!("{} violations", outcome.violations.len());
    print_violations(outcome);
}
