//! Helpers for log events.

/// Number of names that are listed; the rest are counted.
const MAX_NAMES: usize = 5;

/// Formats the first names, and the number of the others.
pub(crate) fn join_names<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(MAX_NAMES);
    let listed: Vec<&str> = names.take(MAX_NAMES).collect();
    let listed = listed.join(", ");
    match more {
        0 => listed,
        more => format!("{listed} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::join_names;

    #[test]
    fn five_names_are_listed_and_the_rest_is_counted() {
        let names = ["a", "b", "c", "d", "e", "f", "g"];
        assert_eq!(join_names(names[..1].iter().copied()), "a");
        assert_eq!(join_names(names[..5].iter().copied()), "a, b, c, d, e");
        assert_eq!(
            join_names(names.iter().copied()),
            "a, b, c, d, e and 2 more"
        );
    }
}
