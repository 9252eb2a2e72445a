//! The documents: their code compiles, the examples do what they say, each pair of features has a test, and links have targets.

mod examples;
mod feature_pairs;
mod guide;
mod links;
