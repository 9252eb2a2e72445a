//! Escapes what could control a terminal or change how the text around it is shown.
//!
//! [`crate::output::stdout`] and [`crate::output::stderr`] escape all output where it goes out.
//! Tables and `redlatch top` escape their cells before that, because the width of the escapes
//! counts.

use std::fmt::Write as _;

use serde::Serialize;

/// Returns a line of text without line breaks, control characters and format characters.
pub(crate) fn line(text: &str) -> String {
    escaped(text, |line, c| line.extend(c.escape_default()))
}

/// Returns a line of JSON with the same value. Outside of strings it has no such characters.
pub(crate) fn json(text: &str) -> String {
    escaped(text, |json, c| {
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(json, "\\u{unit:04x}");
        }
    })
}

/// Returns a value in one line of JSON.
pub(crate) fn to_json(value: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string(value).map(|text| json(&text))
}

fn escaped(text: &str, mut escape: impl FnMut(&mut String, char)) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() || is_format(c) {
            true => escape(&mut escaped, c),
            false => escaped.push(c),
        }
    }
    escaped
}

/// Returns whether a character has no picture of its own and is no accent: the categories Cf, Zl
/// and Zp of Unicode, and the characters that it calls default ignorable.
fn is_format(c: char) -> bool {
    matches!(
        c,
        '\u{ad}'
            | '\u{34f}'
            | '\u{600}'..='\u{605}'
            | '\u{61c}'
            | '\u{6dd}'
            | '\u{70f}'
            | '\u{890}'..='\u{891}'
            | '\u{8e2}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}'
            | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}'
            | '\u{110bd}'
            | '\u{110cd}'
            | '\u{13430}'..='\u{1343f}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_and_format_characters_are_escaped() {
        for (text, shown) in [
            ("a\u{1b}[2Jb", r"a\u{1b}[2Jb"),
            ("a\nb\tc\u{9b}d", r"a\nb\tc\u{9b}d"),
            (
                "\u{202e}evil\u{200d}\u{feff}",
                r"\u{202e}evil\u{200d}\u{feff}",
            ),
            ("\u{2028}\u{2066}\u{e0041}", r"\u{2028}\u{2066}\u{e0041}"),
            ("日本 e\u{301} ü \"\\'", "日本 e\u{301} ü \"\\'"),
        ] {
            assert_eq!(line(text), shown);
            assert_eq!(line(shown), shown);
        }
    }

    #[test]
    fn json_keeps_its_value() {
        let all: String = (0..=0xe0fff).filter_map(char::from_u32).collect();
        let escaped = to_json(&all).unwrap();
        assert_eq!(line(&escaped), escaped);
        assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), all);
        let some = to_json(&"\u{202e}\u{7f}\u{e0041}ü").unwrap();
        assert_eq!(some, r#""\u202e\u007f\udb40\udc41ü""#);
    }
}
