//! A few seeds on every run, and that a seed always gives the same run. `make simulate` has more.

use std::time::Duration;

use redlatch_simulation::plan::Plan;
use redlatch_simulation::run::run;

/// A plan that ends soon: a debug build is slow.
fn short(seed: u64) -> Plan {
    let mut plan = Plan::draw(seed);
    plan.duration = Duration::from_secs(8);
    plan.faults.retain(|one| one.until < plan.duration);
    plan
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in [3, 4] {
        let [first, second] = [(); 2].map(|()| run(&short(seed), true).unwrap());
        let different = first.trace.iter().zip(&second.trace).find(|(a, b)| a != b);
        assert_eq!(different, None, "seed {seed}");
        assert_eq!(first.hash, second.hash, "seed {seed}");
        assert!(first.entered > 0);
    }
}

#[test]
fn a_few_seeds_have_no_violations() {
    for seed in 1..=8 {
        let outcome = run(&short(seed), false).unwrap();
        assert!(
            outcome.violations.is_empty(),
            "seed {seed}: {:#?}",
            outcome.violations
        );
    }
}
