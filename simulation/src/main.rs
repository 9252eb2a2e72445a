//! `make simulate`: many seeds, or one with its trace.

mod options;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use redlatch_robustness::checker::Rule;
use redlatch_simulation::plan::Plan;
use redlatch_simulation::run::{Outcome, run};
use redlatch_simulation::shrink::shrink;

use crate::options::Options;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Prints a line. Ends the program if standard output is closed, as `head` closes it.
macro_rules! print_line {
    ($($arg:tt)*) => {
        if writeln!(io::stdout(), $($arg)*).is_err() {
            std::process::exit(1);
        }
    };
}

/// How long new seeds are started if their number is not given.
const START_LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let options = match Options::from_command_line() {
        Ok(options) => options,
        Err(exit) => return exit,
    };
    let succeeded = match options.seed {
        Some(seed) => run_one(seed),
        None => run_many(&options),
    };
    match succeeded {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Runs one seed and prints its trace; of a run that fails, that of the smallest one that fails in the same
/// way. Returns whether there was no violation.
fn run_one(seed: u64) -> bool {
    let mut plan = Plan::draw(seed);
    let mut outcome = run(&plan, true);
    if let Some(failure) = failure(&outcome) {
        plan = shrink(plan, |plan| {
            self::failure(&run(plan, false)) == Some(failure)
        });
        outcome = run(&plan, true);
    }
    print_line!("{plan:#?}");
    if let Ok(outcome) = &outcome {
        for line in &outcome.trace {
            print_line!("{line}");
        }
    }
    report(seed, &outcome)
}

/// Returns how a run failed: the rule that was violated first, or none if an error ended the run itself.
fn failure(outcome: &Result<Outcome, String>) -> Option<Option<Rule>> {
    match outcome {
        Ok(outcome) => outcome.violations.first().map(|one| Some(one.rule)),
        Err(_) => Some(None),
    }
}

/// Prints the violations of a run. Returns whether there are none.
fn report(seed: u64, outcome: &Result<Outcome, String>) -> bool {
    match outcome {
        Ok(outcome) => {
            for violation in &outcome.violations {
                print_line!("seed {seed}: {violation}");
            }
            outcome.violations.is_empty()
        }
        Err(error) => {
            print_line!("seed {seed}: {error}");
            false
        }
    }
}

/// Runs seeds on several threads and reports them in their order. Returns whether there was no violation.
fn run_many(options: &Options) -> bool {
    let begun = Instant::now();
    let next = &AtomicU64::new(0);
    let seeds = options.seeds.unwrap_or(u64::MAX);
    let limit = options.seeds.is_none().then(|| begun + START_LIMIT);
    let (sender, outcomes) = channel();
    let mut total = Total::default();
    thread::scope(|scope| {
        for _ in 0..options.threads() {
            let sender = sender.clone();
            scope.spawn(move || {
                // A seed whose number was taken is run even if the time is over, so that no seed is missing.
                while limit.is_none_or(|limit| Instant::now() < limit) {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= seeds {
                        return;
                    }
                    let seed = options.first.wrapping_add(number);
                    let outcome = run(&Plan::draw(seed), false);
                    if sender.send((number, seed, outcome)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut pending = BTreeMap::new();
        for (number, seed, outcome) in outcomes {
            pending.insert(number, (seed, outcome));
            while let Some((seed, outcome)) = pending.remove(&total.runs) {
                total.add(seed, &outcome);
            }
        }
    });
    total.print(begun.elapsed());
    match total.first_failed {
        None => true,
        Some(seed) => {
            print_line!("the smallest run found that fails in the same way as seed {seed}:");
            run_one(seed);
            false
        }
    }
}

/// The sum of several runs.
#[derive(Default)]
struct Total {
    runs: u64,
    failed: u64,
    first_failed: Option<u64>,
    explained: BTreeMap<Rule, usize>,
    abandoned: usize,
    entered: usize,
    simulated: Duration,
    hasher: DefaultHasher,
}

impl Total {
    fn add(&mut self, seed: u64, outcome: &Result<Outcome, String>) {
        self.runs += 1;
        if !report(seed, outcome) {
            self.failed += 1;
            self.first_failed.get_or_insert(seed);
        }
        if let Ok(outcome) = outcome {
            for (rule, number) in &outcome.explained {
                *self.explained.entry(*rule).or_default() += number;
            }
            self.abandoned += outcome.abandoned;
            self.entered += outcome.entered;
            self.simulated += outcome.simulated;
            outcome.hash.hash(&mut self.hasher);
        }
    }

    fn print(&self, took: Duration) {
        let minutes = took.as_secs_f64() / 60.0;
        let hours = self.simulated.as_secs_f64() / 3600.0;
        print_line!(
            "{} seeds, {} with violations, {:?} explained by documented limits, {} \
             linearizability searches abandoned; {} critical sections; {hours:.1} simulated hours; {:.0} seeds and {:.1} simulated hours \
             per minute; hash {:016x}",
            self.runs,
            self.failed,
            self.explained,
            self.abandoned,
            self.entered,
            self.runs as f64 / minutes,
            hours / minutes,
            self.hasher.finish(),
        );
    }
}
