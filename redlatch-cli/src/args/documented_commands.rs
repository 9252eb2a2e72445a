//! Checks that the command lines in the documentation, the help and `packaging/` are accepted.
//!
//! 1. Lines of `sh` blocks, lines of other blocks that begin with `$ redlatch`, and the examples in
//!    the help must parse.
//! 2. Code in running text, such as `redlatch show --quiet`, may lack arguments, but its options
//!    and values must exist.
//! 3. In `packaging/`, the arguments of containers, which are on one line, and `ExecStart` of units.
//! 4. A word in capitals stands for any value, and `…` for more words.

use std::path::Path;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser as _};

use super::Args;

/// A command line, and where it is.
struct Documented {
    source: String,
    line: String,
    /// Whether it may lack arguments.
    is_mention: bool,
}

#[test]
fn documented_command_lines_are_accepted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let docs = std::fs::read_dir(root.join("docs")).unwrap();
    let mut pages: Vec<_> = docs.map(|entry| entry.unwrap().path()).collect();
    pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.push(root.join("README.md"));
    let mut documented = examples_in_help();
    documented.extend(packaged(&root.join("packaging")));
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        documented.extend(in_page(&page.display().to_string(), &text));
    }
    let mut count = 0;
    let mut failures = Vec::new();
    for Documented {
        source,
        line,
        is_mention,
    } in documented
    {
        for words in commands(&line) {
            count += 1;
            // Their ticket may be in REDLATCH_TICKET.
            let has_ticket = words[1..]
                .first()
                .is_some_and(|word| word == "renew" || word == "unlock");
            let is_open = is_mention || has_ticket || line.contains('…');
            if let Err(error) = parse(words, is_open) {
                failures.push(format!("{source}: {line}\n{error}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(count > 100, "only {count} command lines were found");
}

#[test]
fn wrong_command_lines_are_noticed() {
    for (line, is_mention) in [
        ("redlatch rum NAME -- CMD", false),
        ("redlatch run NAME --no-such-option -- CMD", false),
        ("redlatch run NAME", false),
        ("redlatch run --wait soon NAME -- CMD", true),
        ("redlatch show --no-such-option", true),
    ] {
        let [words]: [_; 1] = commands(line).try_into().unwrap();
        assert!(parse(words, is_mention).is_err(), "{line}");
    }
}

#[test]
fn words_are_those_of_a_shell() {
    let line =
        "if redlatch show 'a b'; then x; fi && redlatch ls \"$(date +%F);c\" | jq # redlatch no";
    let expected = [
        vec!["redlatch", "show", "a b"],
        vec!["redlatch", "ls", "$(date +%F);c"],
    ];
    assert_eq!(commands(line), expected);
}

fn examples_in_help() -> Vec<Documented> {
    let command = Args::command();
    let helps = command.get_subcommands().chain([&command]);
    let helps = helps.filter_map(|command| Some((command, command.get_after_help()?)));
    helps
        .flat_map(|(command, help)| {
            let source = format!("help of {}", command.get_name());
            let lines: Vec<String> = help.to_string().lines().map(str::to_owned).collect();
            lines.into_iter().map(move |line| Documented {
                source: source.clone(),
                line,
                is_mention: false,
            })
        })
        .collect()
}

/// Returns the command lines of a page.
fn in_page(page: &str, text: &str) -> Vec<Documented> {
    let mut found = Vec::new();
    let mut block: Option<&str> = None;
    let mut paragraph = String::new();
    for (number, line) in text.lines().chain([""]).enumerate() {
        let source = format!("{page}:{}", number + 1);
        if let Some(language) = line.trim_start().strip_prefix("```") {
            block = block.is_none().then_some(language);
        } else if let Some(language) = block {
            let prompted = line.strip_prefix("$ ");
            if language == "sh" || prompted.is_some() {
                found.push(Documented {
                    source,
                    line: prompted.unwrap_or(line).to_owned(),
                    is_mention: false,
                });
            }
        } else if line.is_empty() {
            // Code is between the first and the second backtick, the third and the fourth, and so
            // on.
            let code = paragraph.split('`').skip(1).step_by(2);
            found.extend(code.map(|code| Documented {
                source: source.clone(),
                line: code.to_owned(),
                is_mention: true,
            }));
            paragraph.clear();
        } else {
            paragraph.push_str(line);
            paragraph.push(' ');
        }
    }
    found
}

/// Returns what the manifests and units in a directory run.
fn packaged(directory: &Path) -> Vec<Documented> {
    let mut found = Vec::new();
    for file in ["kubernetes", "systemd"]
        .iter()
        .flat_map(|folder| std::fs::read_dir(directory.join(folder)).unwrap())
    {
        let path = file.unwrap().path();
        let before = found.len();
        for line in std::fs::read_to_string(&path).unwrap().lines() {
            let line = line.trim_start().trim_start_matches('#');
            let line = if let Some(args) = line.strip_prefix("args: ") {
                let args: Vec<String> = serde_json::from_str(args).unwrap();
                format!("redlatch '{}'", args.join("' '"))
            } else if let Some(command) = line.strip_prefix("ExecStart=/usr/bin/") {
                command.to_owned()
            } else {
                continue;
            };
            found.push(Documented {
                source: path.display().to_string(),
                line,
                is_mention: false,
            });
        }
        assert!(
            found.len() > before || path.ends_with("store.yaml"),
            "{} runs nothing",
            path.display()
        );
    }
    found
}

/// Parses the words of a command line. `is_open`: it may lack arguments.
fn parse(words: Vec<String>, is_open: bool) -> Result<(), clap::Error> {
    let words = words.into_iter().take_while(|word| !word.contains('…'));
    let is_optional = |word: &String| word.starts_with('[');
    let words = words
        .filter(|word| !is_optional(word))
        .map(|word| match &*word {
            "COMMAND" => "run".to_owned(),
            // A valid name, number, duration and so on.
            word if word.chars().all(|c| c.is_ascii_uppercase()) => "1".to_owned(),
            _ => word,
        });
    match Args::try_parse_from(words).map_err(|error| (error.kind(), error)) {
        Ok(_) | Err((ErrorKind::DisplayHelp | ErrorKind::DisplayVersion, _)) => Ok(()),
        Err((
            ErrorKind::MissingRequiredArgument
            | ErrorKind::MissingSubcommand
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
            _,
        )) if is_open => Ok(()),
        // An option at the end, without its value.
        Err((ErrorKind::InvalidValue, error)) if is_open && has_no_value(&error) => Ok(()),
        Err((_, error)) => Err(error),
    }
}

fn has_no_value(error: &clap::Error) -> bool {
    error.to_string().contains("a value is required")
}

/// Returns the simple commands of a line that run redlatch, as words.
fn commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut rest = line.trim_start();
    while let Some(first) = rest.chars().next() {
        if first == '#' {
            break;
        }
        if ";|&>".contains(first) {
            commands.push(Vec::new());
            rest = rest[1..].trim_start();
            continue;
        }
        let (word, after) = split_word(rest);
        match &*word {
            "if" | "then" => commands.push(Vec::new()),
            _ => commands.last_mut().unwrap().push(word),
        }
        rest = after.trim_start();
    }
    commands.retain(|words| words.first().is_some_and(|word| word == "redlatch"));
    commands
}

/// Splits the first word from a line.
fn split_word(line: &str) -> (String, &str) {
    let mut quote = None;
    let mut word = String::new();
    for (at, c) in line.char_indices() {
        match quote {
            Some(open) if c == open => quote = None,
            None if c == '\'' || c == '"' => quote = Some(c),
            None if c.is_whitespace() || ";|&".contains(c) => return (word, &line[at..]),
            _ => word.push(c),
        }
    }
    (word, "")
}
