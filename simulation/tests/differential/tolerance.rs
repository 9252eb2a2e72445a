//! Comparison of replies.

use redis::Value;

/// What may differ between the replies to one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tolerance {
    /// Nothing.
    Exact,
    /// The order of lists.
    AnyOrder,
    /// The order of lists; and all numbers that could be times, also as lines of a text.
    Times,
    /// Everything but the type.
    TypeOnly,
}

/// Numbers of at least this, in milliseconds, may differ in [`Tolerance::Times`]: greater than counts. Leases of the
/// random tests are far longer, but the rest of a lease can have any length.
const SHORTEST_TIME: f64 = 20.0;

/// Maximum difference in milliseconds: more than a busy machine delays a test.
const MAX_TIME_DIFFERENCE: f64 = 10_000.0;

/// Numbers of at least this are times in microseconds since 1970.
const MICROS: f64 = 1e14;

impl Tolerance {
    pub(crate) fn accepts(self, one: &Value, other: &Value) -> bool {
        if self == Tolerance::TypeOnly {
            return std::mem::discriminant(one) == std::mem::discriminant(other);
        }
        if let (Some(one), Some(other)) = (number(one), number(other))
            && self == Tolerance::Times
            && one >= SHORTEST_TIME
        {
            let unit = if one < MICROS { 1.0 } else { 1000.0 };
            return one == other || (one - other).abs() <= MAX_TIME_DIFFERENCE * unit;
        }
        match (one, other) {
            (Value::Array(one), Value::Array(other)) => {
                self.lists(one, other, |one, other| self.accepts(one, other))
            }
            (Value::Map(one), Value::Map(other)) => self.lists(one, other, |one, other| {
                self.accepts(&one.0, &other.0) && self.accepts(&one.1, &other.1)
            }),
            (Value::ServerError(one), Value::ServerError(other)) => {
                let (one, other) = (one.to_string(), other.to_string());
                // A line number of a script that the simulation does not know.
                match one.split_once(":-1.") {
                    Some((known, _)) => other.starts_with(known),
                    None => one == other,
                }
            }
            (Value::BulkString(one), Value::BulkString(other))
                if self == Tolerance::Times && one.contains(&b'\n') =>
            {
                let lines = |text: &[u8]| -> Vec<Value> {
                    let lines = text.split(|byte| *byte == b'\n');
                    lines.map(|line| Value::BulkString(line.to_vec())).collect()
                };
                let (one, other) = (lines(one), lines(other));
                let mut pairs = one.iter().zip(&other);
                one.len() == other.len() && pairs.all(|(one, other)| self.accepts(one, other))
            }
            _ => one == other,
        }
    }

    fn lists<T>(self, one: &[T], other: &[T], same: impl Fn(&T, &T) -> bool) -> bool {
        let in_order = one.iter().zip(other).all(|(one, other)| same(one, other));
        if one.len() != other.len() || in_order || self == Tolerance::Exact {
            return one.len() == other.len() && in_order;
        }
        let mut left: Vec<&T> = other.iter().collect();
        one.iter().all(|one| {
            let found = left.iter().position(|other| same(one, other));
            found.map(|at| left.swap_remove(at)).is_some()
        })
    }
}

/// Parses a number in any of the forms in which servers write it.
fn number(value: &Value) -> Option<f64> {
    match value {
        #[allow(clippy::cast_precision_loss, reason = "times are far smaller")]
        Value::Int(number) => Some(*number as f64),
        Value::Double(number) => Some(*number),
        Value::BulkString(text) => std::str::from_utf8(text).ok()?.parse().ok(),
        _ => None,
    }
}
