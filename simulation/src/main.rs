//! `make simulate`: many seeds, or one with its trace.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use redlatch_simulation::plan::Plan;
use redlatch_simulation::run::{Outcome, run};

/// Runs redlatch's client on a simulated network, clock and servers.
#[derive(Debug, Parser)]
struct Options {
    /// How many seeds to run, from --first on. Without it: as many as fit into a minute.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    first: u64,
    /// Runs this seed alone, and prints what happens in it.
    #[arg(long, conflicts_with_all = ["seeds", "first"])]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match options.seed {
        Some(seed) => one(seed),
        None => many(options.first, options.seeds),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("redlatch-simulation: {error}");
            ExitCode::FAILURE
        }
    }
}

fn one(seed: u64) -> Result<bool, String> {
    let plan = Plan::draw(seed);
    let outcome = run(&plan, true)?;
    println!("{plan:#?}");
    for line in &outcome.trace {
        println!("{line}");
    }
    report(seed, &outcome);
    Ok(outcome.violations.is_empty())
}

fn report(seed: u64, outcome: &Outcome) {
    for violation in &outcome.violations {
        println!("seed {seed}: {violation}");
    }
}

fn many(first: u64, seeds: Option<u64>) -> Result<bool, String> {
    let begun = Instant::now();
    let (mut runs, mut failed, mut entered) = (0u64, 0u64, 0);
    let mut simulated = Duration::ZERO;
    let goes_on = |runs| match seeds {
        Some(seeds) => runs < seeds,
        None => begun.elapsed() < Duration::from_secs(60),
    };
    while goes_on(runs) {
        let seed = first + runs;
        let outcome =
            run(&Plan::draw(seed), false).map_err(|error| format!("seed {seed}: {error}"))?;
        report(seed, &outcome);
        runs += 1;
        failed += u64::from(!outcome.violations.is_empty());
        entered += outcome.entered;
        simulated += outcome.simulated;
    }
    let minutes = begun.elapsed().as_secs_f64() / 60.0;
    println!(
        "{runs} seeds, {failed} with violations; {entered} critical sections; {:.1} simulated hours; \
         {:.0} seeds and {:.1} simulated hours a minute",
        simulated.as_secs_f64() / 3600.0,
        runs as f64 / minutes,
        simulated.as_secs_f64() / 3600.0 / minutes,
    );
    Ok(failed == 0)
}
