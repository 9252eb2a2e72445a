//! Patterns of keys and channels: `*`, `?`, `[a-z]`, `[^a]` and `\` before a literal character.

/// Returns whether the whole text matches the pattern.
pub(super) fn matches(pattern: &[u8], text: &[u8]) -> bool {
    match pattern {
        [] => text.is_empty(),
        [b'*'] => true,
        [b'*', rest @ ..] => (0..=text.len()).any(|from| matches(rest, &text[from..])),
        [b'?', rest @ ..] => !text.is_empty() && matches(rest, &text[1..]),
        [b'[', set @ ..] => {
            let Some((byte, text)) = text.split_first() else {
                return false;
            };
            let (is_in, rest) = in_set(set, *byte);
            is_in && matches(rest, text)
        }
        [b'\\', byte, rest @ ..] | [byte, rest @ ..] => {
            text.first() == Some(byte) && matches(rest, &text[1..])
        }
    }
}

/// Returns whether a byte is in the set at the start of the pattern, and the pattern behind the set.
fn in_set(mut set: &[u8], byte: u8) -> (bool, &[u8]) {
    let negated = set.first() == Some(&b'^');
    if negated {
        set = &set[1..];
    }
    let mut is_in = false;
    loop {
        set = match set {
            [] => return (is_in != negated, set),
            [b']', rest @ ..] => return (is_in != negated, rest),
            [b'\\', one, rest @ ..] => {
                is_in |= byte == *one;
                rest
            }
            [from, b'-', to, rest @ ..] => {
                is_in |= (*from.min(to)..=*from.max(to)).contains(&byte);
                rest
            }
            [one, rest @ ..] => {
                is_in |= byte == *one;
                rest
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns_match_as_in_redis() {
        let cases = [
            ("*", "", true),
            ("a*c", "abbc", true),
            ("a*c", "abb", false),
            ("a?c", "abc", true),
            ("a?", "a", false),
            ("[ab]x", "bx", true),
            ("[^ab]x", "bx", false),
            ("[a-c]", "b", true),
            ("[c-a]", "b", true),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("[\\]]", "]", true),
        ];
        for (pattern, text, expected) in cases {
            assert_eq!(
                matches(pattern.as_bytes(), text.as_bytes()),
                expected,
                "{pattern} {text}"
            );
        }
    }
}
