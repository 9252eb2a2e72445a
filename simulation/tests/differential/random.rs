//! Random choices from one seed, which is printed.

/// SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    /// From `REDLATCH_SEED`, or from the id of this process.
    pub(crate) fn new(what: &str) -> Random {
        let seed = match std::env::var("REDLATCH_SEED") {
            Ok(seed) => seed.parse().expect("REDLATCH_SEED is a number"),
            Err(_) => u64::from(std::process::id()) ^ 0x5eed,
        };
        println!("{what}: REDLATCH_SEED={seed}");
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below this.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).expect("it is below a usize")
    }

    /// True once in so many times.
    pub(crate) fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}
