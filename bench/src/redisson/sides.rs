//! The two libraries that are compared, and the resulting figures.

use redlatch_interop::{Library, Peer};
use redlatch_testkit::Server;
use serde_json::{Value, json};

use crate::samples::{median, quantile, round};

/// A process with each library.
pub(crate) struct Sides {
    pub(crate) redisson: Peer,
    pub(crate) redlatch: Peer,
}

impl Sides {
    pub(crate) fn start(server: &Server) -> Sides {
        let start = |library: Library| library.start(&[], &[server.url()]);
        Sides {
            redisson: start(Library::Redisson),
            redlatch: start(Library::Redlatch),
        }
    }

    /// Returns the process with this library.
    pub(crate) fn peer(&self, library: Library) -> &Peer {
        match library {
            Library::Redlatch => &self.redlatch,
            _ => &self.redisson,
        }
    }
}

/// The results of both libraries.
pub(crate) struct Figure {
    name: String,
    unit: &'static str,
    redisson: f64,
    redlatch: f64,
    /// How many times better redlatch is.
    ratio: f64,
    /// Quartiles of the ratio, if it was measured round by round.
    quartiles: Option<[f64; 2]>,
}

impl Figure {
    /// Creates a figure from the rates of both sides, round by round: higher is better.
    pub(crate) fn rates(
        name: String,
        unit: &'static str,
        redisson: &[f64],
        redlatch: &[f64],
    ) -> Figure {
        let ratios: Vec<f64> = redlatch
            .iter()
            .zip(redisson)
            .map(|(ours, theirs)| ours / theirs)
            .collect();
        Figure {
            name,
            unit,
            redisson: median(redisson),
            redlatch: median(redlatch),
            ratio: median(&ratios),
            quartiles: Some([quantile(&ratios, 0.25), quantile(&ratios, 0.75)]),
        }
        .printed()
    }

    /// Creates a figure from the costs of both sides: lower is better.
    pub(crate) fn costs(name: String, unit: &'static str, redisson: f64, redlatch: f64) -> Figure {
        Figure {
            name,
            unit,
            redisson,
            redlatch,
            ratio: redisson / redlatch,
            quartiles: None,
        }
        .printed()
    }

    /// Prints the figure, and returns it.
    fn printed(self) -> Figure {
        let Figure {
            name,
            unit,
            redisson,
            redlatch,
            ratio,
            ..
        } = &self;
        let spread = self.quartiles.map_or(String::new(), |[low, high]| {
            format!("  ({low:.2}-{high:.2})")
        });
        println!("  {name:52} {redisson:10.1} {redlatch:10.1} {unit:10} {ratio:6.2}{spread}");
        self
    }

    pub(crate) fn json(&self) -> Value {
        let mut row = json!({
            "name": self.name,
            "unit": self.unit,
            "redisson": round(self.redisson, 2),
            "redlatch": round(self.redlatch, 2),
            "times_better": round(self.ratio, 3),
        });
        if let Some([low, high]) = self.quartiles {
            row["times_better_p25"] = round(low, 3).into();
            row["times_better_p75"] = round(high, 3).into();
        }
        row
    }
}
