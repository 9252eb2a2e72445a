//! Text in cells of a terminal.

use ratatui::style::Style;
use ratatui::text::Span;

/// Returns the text with escapes for characters that would control the terminal, are invisible, or change the direction of
/// the text around them.
pub(super) fn visible(text: &str) -> String {
    let mut visible = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() || is_format(c) {
            visible.extend(c.escape_unicode());
        } else {
            visible.push(c);
        }
    }
    visible
}

/// Returns whether a character has no picture of its own, and is no accent.
fn is_format(c: char) -> bool {
    matches!(
        c,
        '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e0fff}'
    )
}

/// Returns how many cells a text fills.
pub(super) fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// Returns the graphemes of a text with their widths.
fn graphemes(text: &str) -> Vec<(String, usize)> {
    let span = Span::raw(text);
    let symbols = span.styled_graphemes(Style::default());
    symbols
        .map(|one| (one.symbol.to_owned(), width(one.symbol)))
        .collect()
}

/// Shortens a text to this width by replacing its middle with `…`.
pub(super) fn shortened(text: &str, limit: usize) -> String {
    if width(text) <= limit {
        return text.to_owned();
    }
    if limit == 0 {
        return String::new();
    }
    let graphemes = graphemes(text);
    let tail_limit = (limit - 1) / 2;
    let fitting = |limit: usize, graphemes: &mut dyn Iterator<Item = &(String, usize)>| {
        let mut filled = 0;
        graphemes
            .take_while(|(_, width)| {
                filled += width;
                filled <= limit
            })
            .count()
    };
    let head = fitting(limit - 1 - tail_limit, &mut graphemes.iter());
    let tail = fitting(tail_limit, &mut graphemes.iter().rev());
    let start = graphemes.iter().take(head);
    let end = graphemes.iter().skip(graphemes.len() - tail);
    let symbol = |(symbol, _): &(String, usize)| symbol.clone();
    start
        .map(symbol)
        .chain(["…".to_owned()])
        .chain(end.map(symbol))
        .collect()
}

/// Breaks a text into lines of at most this width, all but the first one indented.
pub(super) fn wrapped(text: &str, limit: usize, indent: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    let mut filled = 0;
    for word in text.split_inclusive(' ') {
        if filled + width(word.trim_end()) > limit && filled > indent {
            lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
            filled = indent;
        }
        // A word that is longer than a line is broken anywhere.
        for (symbol, width) in graphemes(word) {
            if filled + width > limit && filled > indent && symbol != " " {
                lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
                filled = indent;
            }
            line.push_str(&symbol);
            filled += width;
        }
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_and_format_characters_are_escaped() {
        assert_eq!(visible("a\u{1b}[2Jb"), r"a\u{1b}[2Jb");
        assert_eq!(visible("a\nb\u{9b}c"), r"a\u{a}b\u{9b}c");
        assert_eq!(
            visible("\u{202e}evil\u{200d}\u{feff}"),
            r"\u{202e}evil\u{200d}\u{feff}"
        );
        assert_eq!(visible("日本 e\u{301} ü"), "日本 e\u{301} ü");
    }

    #[test]
    fn shortened_text_keeps_both_ends() {
        assert_eq!(shortened("abcdef", 6), "abcdef");
        assert_eq!(shortened("abcdefg", 6), "abc…fg");
        assert_eq!(shortened("abcdefg", 1), "…");
        assert_eq!(shortened("abcdefg", 0), "");
        assert_eq!(shortened("ab日本語本日", 6), "ab…日");
        assert_eq!(shortened("e\u{301}e\u{301}e\u{301}", 2), "e\u{301}…");
        for limit in 0..12 {
            assert!(width(&shortened("日本語日本語", limit)) <= limit);
        }
    }

    #[test]
    fn lines_are_broken_between_words() {
        assert_eq!(wrapped("ab cd ef", 5, 1), ["ab cd ", " ef"]);
        assert_eq!(wrapped("abcdefgh", 4, 1), ["abcd", " efg", " h"]);
        assert_eq!(wrapped("", 4, 1), [""]);
        for limit in 3..9 {
            let lines = wrapped("日本 語日本語 a b", limit, 1);
            assert!(
                lines.iter().all(|line| width(line.trim_end()) <= limit),
                "{lines:?}"
            );
        }
    }
}
