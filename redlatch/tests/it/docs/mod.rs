//! The documents: their code compiles, the examples do what they say, and each pair of features has a test.

mod examples;
mod feature_pairs;
mod guide;
