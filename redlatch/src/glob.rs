//! Glob patterns, as in SCAN's MATCH.

/// Returns whether `text` matches `pattern`: `*`, `?`, `[a-z]`, `[^a]` and `\` as in Redis.
///
/// Takes time proportional to the length of the pattern times that of the text: it backtracks only to the
/// last `*`.
pub(crate) fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut last_star: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(&b'*') {
            last_star = Some((p + 1, t));
            p += 1;
            continue;
        }
        match match_one(&pattern[p..], text[t]) {
            Some(used) => {
                p += used;
                t += 1;
            }
            None => match last_star {
                Some((after, from)) => {
                    last_star = Some((after, from + 1));
                    p = after;
                    t = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&rest| rest == b'*')
}

/// Returns the length of the start of `pattern` that matches `byte`, if it does.
fn match_one(pattern: &[u8], byte: u8) -> Option<usize> {
    match *pattern.first()? {
        b'?' => Some(1),
        b'[' => match_class(pattern, byte),
        b'\\' if pattern.len() > 1 => (pattern[1] == byte).then_some(2),
        literal => (literal == byte).then_some(1),
    }
}

fn match_class(pattern: &[u8], byte: u8) -> Option<usize> {
    let negated = pattern.get(1) == Some(&b'^');
    let mut at = if negated { 2 } else { 1 };
    let mut found = false;
    while let Some(&low) = pattern.get(at) {
        match low {
            b']' => break,
            b'\\' if at + 1 < pattern.len() => {
                found |= pattern[at + 1] == byte;
                at += 2;
            }
            _ if pattern.get(at + 1) == Some(&b'-') && at + 2 < pattern.len() => {
                let high = pattern[at + 2];
                found |= (low.min(high)..=low.max(high)).contains(&byte);
                at += 3;
            }
            _ => {
                found |= low == byte;
                at += 1;
            }
        }
    }
    (found != negated).then(|| (at + 1).min(pattern.len()))
}

/// Escapes text to a pattern that matches only itself.
pub(crate) fn escape(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}

/// Returns the text with which all matching texts start.
pub(crate) fn literal_prefix(pattern: &str) -> String {
    let mut prefix = String::new();
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        match c {
            '*' | '?' | '[' => break,
            '\\' => prefix.push(chars.next().unwrap_or(c)),
            literal => prefix.push(literal),
        }
    }
    prefix
}

#[cfg(test)]
mod tests {
    #[test]
    fn globs_match_as_in_redis() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("*", "orders:42", true),
            ("orders:*", "orders:42", true),
            ("orders:*", "order:42", false),
            ("*:42", "orders:42", true),
            ("a*b*c", "aXbXbXc", true),
            ("a*b*c", "aXbXbX", false),
            ("or?ers", "orders", true),
            ("or?ers", "orers", false),
            ("[a-c]x", "bx", true),
            ("[a-c]x", "dx", false),
            ("[^a-c]x", "dx", true),
            ("[abc", "a", true),
            (r"\*x", "*x", true),
            (r"\*x", "ax", false),
            ("", "", true),
            ("", "a", false),
        ] {
            let got = super::matches(pattern.as_bytes(), text.as_bytes());
            assert_eq!(got, expected, "{pattern:?} on {text:?}");
        }
    }

    #[test]
    fn pattern_full_of_stars_is_not_exponential() {
        let pattern = "a*".repeat(200) + "b";
        assert!(!super::matches(pattern.as_bytes(), &[b'a'; 2000]));
    }

    #[test]
    fn all_matching_texts_start_with_the_literal_prefix() {
        for (pattern, prefix) in [
            ("orders:*", "orders:"),
            ("or?ers", "or"),
            ("a[bc]", "a"),
            (r"\*x*", "*x"),
            (r"a\", r"a\"),
            ("exact", "exact"),
            ("*", ""),
        ] {
            assert_eq!(super::literal_prefix(pattern), prefix);
        }
        let special = r"*?[^a-z]\";
        let escaped = super::escape(special);
        assert_eq!(super::literal_prefix(&escaped), special);
        assert!(super::matches(escaped.as_bytes(), special.as_bytes()));
    }
}
