//! Configuration files, for servers that rewrite their own configuration.

use std::path::Path;

/// Returns the configuration file lines equivalent to these command-line arguments, such as
/// `["--requirepass", "x"]`.
pub(crate) fn lines(args: &[String]) -> String {
    let mut lines = String::new();
    for arg in args {
        match arg.strip_prefix("--") {
            Some(setting) => lines.extend(["\n", setting]),
            None => lines.extend([" ", &quoted(arg)]),
        }
    }
    lines + "\n"
}

/// Returns the value that these lines give to a setting, such as `requirepass`.
pub(crate) fn value(lines: &str, wanted: &str) -> Option<String> {
    let words = lines.lines().filter_map(|line| line.split_once(' '));
    let mut values = words.filter(|(setting, _)| *setting == wanted);
    let (_, value) = values.next_back()?;
    Some(unquoted(value.trim()))
}

/// Returns a path as the value of a setting.
pub(crate) fn path(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn quoted(word: &str) -> String {
    let word = word.replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{word}\"")
}

fn unquoted(word: &str) -> String {
    let inner = word
        .strip_prefix('"')
        .and_then(|word| word.strip_suffix('"'));
    inner.map_or_else(
        || word.to_owned(),
        |word| word.replace("\\\"", "\"").replace("\\\\", "\\"),
    )
}
