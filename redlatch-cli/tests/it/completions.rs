//! Tests of what is generated for shells and packages.

use std::process::Command;

use crate::support::*;

fn script(shell: &str) -> String {
    let mut command = clean_command(&["completions", shell]);
    // A shell that starts completes although the configuration is wrong.
    command.env("REDLATCH_CONFIG", "/no/such/file");
    let finished = finish(command).expect(0);
    assert_eq!(finished.stderr, "");
    finished.stdout
}

#[test]
fn completions_know_all_commands_except_internal_ones() {
    for shell in ["bash", "zsh", "fish"] {
        let script = script(shell);
        for word in [
            "run",
            "show",
            "count-down",
            "no-wait",
            "log-format",
            "completions",
        ] {
            assert!(script.contains(word), "{shell}: {word}");
        }
        for internal in ["__exec", "__man", "foreground"] {
            assert!(!script.contains(internal), "{shell}: {internal}");
        }
    }
}

/// Completes a command line in bash as the Tab key does.
#[test]
fn bash_completes_commands_and_options() {
    let temp_dir = TempDir::new();
    let path = temp_dir.path("redlatch.bash");
    std::fs::write(&path, script("bash")).unwrap();
    let complete = |words: &[&str]| {
        let mut command = Command::new("bash");
        command.args(["--norc", "-c"]);
        command.arg(
            r#". "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
            _redlatch redlatch "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
            printf '%s\n' "${COMPREPLY[@]}""#,
        );
        command.args(["bash", &path]).args(words);
        finish(command).expect(0).stdout
    };
    assert_eq!(complete(&["redlatch", "sh"]), "show\n");
    assert_eq!(complete(&["redlatch", "run", "--no-"]), "--no-wait\n");
    assert_eq!(complete(&["redlatch", "__"]), "\n");
    assert_eq!(complete(&["redlatch", "--log-format", "j"]), "json\n");
}

#[test]
#[cfg(feature = "man")]
fn man_pages_describe_all_commands_except_internal_ones() {
    let temp_dir = TempDir::new();
    let dir = temp_dir.path("");
    let mut command = clean_command(&["__man", &dir]);
    command.env("REDLATCH_URL", "redis://:s3cret@h");
    finish(command).expect(0);
    for (page, texts) in [
        ("redlatch", &["redlatch\\-run(1)", "REDLATCH_CONFIG"][..]),
        (
            "redlatch-run",
            &["SH EXAMPLES", "SH \"EXIT STATUS\"", "126"],
        ),
        ("redlatch-show", &["with \\-\\-quiet 1 if it is free"]),
        ("redlatch-latch-count-down", &["remaining count"]),
    ] {
        let text = std::fs::read_to_string(temp_dir.path(&format!("{page}.1"))).unwrap();
        for wanted in texts {
            assert!(text.contains(wanted), "{wanted} in {text}");
        }
    }
    for entry in std::fs::read_dir(&dir).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        for unwanted in ["__exec", "__man", "s3cret"] {
            assert!(!text.contains(unwanted), "{unwanted} in {text}");
        }
    }
    let missing = temp_dir.path("missing");
    finish(clean_command(&["__man", &missing]))
        .expect(71)
        .assert_stderr("cannot write the man pages");
}
