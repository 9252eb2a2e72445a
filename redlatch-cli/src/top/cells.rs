//! Text in cells of a terminal.

use ratatui::style::Style;
use ratatui::text::Span;

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
