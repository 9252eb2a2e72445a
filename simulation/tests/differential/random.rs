//! Random choices from one seed, which is printed.

pub(crate) use redlatch_robustness::random::Random;

/// Creates random numbers with the seed in `REDLATCH_SEED`, or with the id of this process.
pub(crate) fn seeded(what: &str) -> Random {
    let seed = match std::env::var("REDLATCH_SEED") {
        Ok(seed) => seed.parse().expect("REDLATCH_SEED is a number"),
        Err(_) => u64::from(std::process::id()) ^ 0x5eed,
    };
    println!("{what}: REDLATCH_SEED={seed}");
    Random::new(seed)
}
