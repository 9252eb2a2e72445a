//! Tests of wrong usage: it exits with 2, is explained on standard error, and needs no store.

use redlatch_testkit::unique;

use crate::support::*;

/// Runs without a store.
fn run_without_store(args: &[&str]) -> Finished {
    let mut command = clean_command(args);
    command.env("REDLATCH_URL", "redis://127.0.0.1:1");
    finish(command)
}

#[test]
fn both_usages_of_run_are_shown() {
    let help = run_without_store(&["run", "--help"]).expect(0).stdout;
    let usage = "Usage: redlatch run [OPTIONS] <NAME>... -- <CMD>...
       redlatch run [OPTIONS] --ticket <TICKET> -- <CMD>...\n";
    assert!(help.contains(usage), "{help}");
}

#[test]
fn wrong_options_of_run_are_rejected() {
    let long = "x".repeat(600);
    for (args, message) in [
        (&["n"][..], "CMD"),
        (&["n", "--"], "CMD"),
        (&["--", "true"], "NAME"),
        (&["n", "true"], "-- <CMD>"),
        (
            &["n", "true"],
            "CMD comes after --: redlatch run NAME -- CMD",
        ),
        (&["", "--", "true"], "empty"),
        (&["a\nb", "--", "true"], "line break"),
        (&[&long, "--", "true"], "512"),
        (&["--wait", "5x", "n", "--", "true"], "1h or 1d"),
        (&["--wait", "-5s", "n", "--", "true"], "negative"),
        (&["--wait=-5s", "n", "--", "true"], "negative"),
        (&["--wait", "", "n", "--", "true"], "--wait"),
        (&["--wait", "1.5s", "n", "--", "true"], "whole number"),
        (&["--wait", "1w", "n", "--", "true"], "300ms"),
        (&["--lease", "soon", "n", "--", "true"], "300ms"),
        (
            &["--watchdog", "99999999999999999999s", "n", "--", "true"],
            "too long",
        ),
        (&["--kill-after", "x", "n", "--", "true"], "300ms"),
        (&["--lease", "0s", "n", "--", "true"], "lease"),
        (&["--lease", "999999h", "n", "--", "true"], "lease"),
        (&["--at-most", "0s", "n", "--", "true"], "at_most"),
        (
            &["--lease", "1s", "--at-most", "1s", "n", "--", "true"],
            "--at-most",
        ),
        (&["--watchdog", "0s", "n", "--", "true"], "watchdog"),
        (&["--watchdog", "99ms", "n", "--", "true"], "100 ms"),
        (&["--watchdog", "999999h", "n", "--", "true"], "watchdog"),
        (&["--wait", "1s", "-n", "n", "--", "true"], "--no-wait"),
        (
            &["--wait", "1s", "--no-wait", "n", "--", "true"],
            "--no-wait",
        ),
        (
            &["--lease", "1s", "--watchdog", "1s", "n", "--", "true"],
            "--watchdog",
        ),
        (&["-E", "256", "n", "--", "true"], "0..=255"),
        (&["-E", "-1", "n", "--", "true"], "0..=255"),
        (&["-E", "x", "n", "--", "true"], "x"),
        (&["--no-such-option", "n", "--", "true"], "--no-such-option"),
        (&["--url", "http://h", "n", "--", "true"], "http"),
        (&["--url", "h:6379", "n", "--", "true"], "redis://"),
        (&["--url", "", "n", "--", "true"], "redis://"),
        (&["--url", "embedded:", "n", "--", "true"], "server"),
    ] {
        run_without_store(&[&["run"], args].concat())
            .expect(2)
            .assert_stderr(message);
    }
}

#[test]
fn invalid_lease_is_reported_in_one_line() {
    for (lease, shown) in [("0s", "0ms"), ("999999h", "999999h00m")] {
        let refused = run_without_store(&["run", "--lease", lease, "n", "--", "true"]).expect(2);
        let message =
            format!("redlatch: a lease of {shown} cannot be used; use 1ms to ten years\n");
        assert_eq!(refused.stderr, message);
    }
}

#[test]
fn help_is_printed_without_a_command() {
    for args in [&[][..], &["--url", "redis://:s3cret@h"]] {
        let refused = run_without_store(args)
            .expect(2)
            .assert_stderr("run          Run CMD");
        assert!(!refused.stderr.contains("__exec"), "{refused:#?}");
        assert!(!refused.stderr.contains("s3cret"), "{refused:#?}");
    }
}

#[test]
fn wrong_usage_of_other_commands_is_rejected() {
    for (args, message) in [
        (&[][..], "Usage"),
        (&["latch", "n"], "requires a subcommand"),
        (&["latch", "walk"], "requires a subcommand"),
        (&["latch", "n", "walk"], "walk"),
        (&["walk"], "walk"),
        (&["show"], "NAME"),
        (&["show", ""], "empty"),
        (&["show", "a\nb"], "line break"),
        (&["unlock", "n"], "--force"),
        (&["unlock", "--force"], "NAME"),
        (&["unlock", "--force", ""], "empty"),
        (&["ls", "a", "b"], "b"),
        (&["--url", "http://h", "ls"], "http"),
        (&["completions"], "SHELL"),
        (&["exporter", "--interval", "99ms"], "at least 100ms"),
        (&["serve", "--refresh", "99ms"], "at least 100ms"),
        (&["serve", "--interval", "10000000000000000000"], "too long"),
        (&["top", "--interval", "18446744073709551615"], "too long"),
        (
            &["cron", "--kill-after", "18446744073709551615", "crontab"],
            "too long",
        ),
        (&["completions", "tcsh"], "bash, zsh, fish"),
        (&["--log-format", "xml", "ls"], "text, json"),
        (&["show", "n", "-q", "--json"], "--json cannot be used"),
        (&["-q", "show", "n", "--json"], "--json cannot be used"),
    ] {
        run_without_store(args).expect(2).assert_stderr(message);
    }
}

#[test]
fn help_has_examples_and_no_passwords() {
    for command in [
        &[][..],
        &["run"],
        &["show"],
        &["ls"],
        &["watch"],
        &["unlock"],
        &["lock"],
        &["renew"],
        &["latch"],
        &["completions"],
    ] {
        for help in ["--help", "-h"] {
            let mut command = clean_command(&[command, &[help]].concat());
            command.env("REDLATCH_URL", "redis://:s3cret@h");
            let finished = finish(command).expect(0);
            assert_eq!(finished.stderr, "");
            assert!(finished.stdout.contains("Example"), "{finished:#?}");
            assert!(finished.stdout.contains("REDLATCH_URL"), "{finished:#?}");
            assert!(!finished.stdout.contains("s3cret"), "{finished:#?}");
            assert!(!finished.stdout.contains("__exec"), "{finished:#?}");
        }
    }
    let version = finish(clean_command(&["--version"])).expect(0).stdout;
    assert_eq!(version, format!("redlatch {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn usage_line_does_not_require_options() {
    for args in [
        &["run", "n"][..],
        &["show"],
        &["ls", "--no-such-option"],
        &["watch", "--no-such-option"],
        &["unlock"],
        &["lock"],
        &["renew"],
        &["latch", "n", "set"],
        &["latch", "n", "wait", "--no-such-option"],
        &["latch", "n", "count-down", "--no-such-option"],
        &["token"],
        &["token", "n", "advance"],
        &["token", "n", "delete", "--no-such-option"],
    ] {
        let args = [&["--url", "redis://h"], args].concat();
        let stderr = run_without_store(&args).expect(2).stderr;
        let usage = stderr.lines().find(|line| line.starts_with("Usage: "));
        assert!(
            usage.is_some_and(|usage| !usage.contains("--url")),
            "{stderr}"
        );
    }
}

#[test]
fn help_fits_80_columns_and_documents_the_log() {
    for command in [
        "",
        "run",
        "show",
        "ls",
        "watch",
        "unlock",
        "lock",
        "renew",
        "latch",
        "token",
        "completions",
    ] {
        let binary = env!("CARGO_BIN_EXE_redlatch");
        let line = format!("stty cols 80 rows 24; NO_COLOR=1 '{binary}' {command} --help");
        let help = at_a_terminal(&line).finish().expect(0).stdout;
        assert!(help.contains("REDLATCH_LOG"), "{help}");
        for line in help.lines() {
            assert!(line.trim_end().chars().count() <= 80, "{line:?}");
        }
    }
}

#[test]
fn urls_are_printed_without_passwords() {
    let name = unique("misplaced");
    for url in [
        "redis://:s3cret@127.0.0.1:1",
        "redis://me:s3cret@127.0.0.1:1/x",
        "redis://:s3cret@127.0.0.1:notaport",
        "redis://:s3cret/@?#@127.0.0.1:1",
        "redis+unix:///no/such/socket?pass=s3cret",
        "rediss://:s3cret@127.0.0.1:1",
        "http://:s3cret@127.0.0.1:1",
    ] {
        let option = format!("--url={url}");
        let wrong = format!("--ulr={url}");
        for args in [
            &[&option, "show", &name][..],
            &["--url", url, "show"],
            &["--url", url, "walk"],
            &["run", "-n", &name, "--url", url, "--", "true"],
            &["--url", url, "run", "--wait", url, &name, "--", "true"],
            // In positions where a URL does not belong.
            &[url, "ls"],
            &["ls", "a", url],
            &["run", url, url],
            &[&wrong, "ls"],
        ] {
            let finished = run_without_store(args);
            assert!(matches!(finished.code, Some(2 | 69)), "{finished:#?}");
            assert_eq!(finished.stdout, "");
            assert!(
                !finished.stderr.contains("s3cret"),
                "{args:?}: {finished:#?}"
            );
        }
    }
    let finished = run_without_store(&["--url", ":s3cret@127.0.0.1:1", "ls"]).expect(2);
    assert!(!finished.stderr.contains("s3cret"), "{finished:#?}");
}
