//! The crontab of `redlatch cron`.
//!
//! ```text
//! CRON_TZ=Europe/Berlin
//! # minute hour day month weekday   name            command
//! 0 2 * * *                         nightly-report  /opt/report.sh
//! */5 * * * *    cleanup [timeout=4m overlap=wait]  /opt/cleanup.sh
//! ```
//!
//! A line is a job, a setting of the environment for the jobs below it, a comment, or empty. All
//! wrong lines are reported, each with its number.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use redlatch::Client;
use redlatch::job::{CatchUp, Cron, Overlap, Scheduled};

use crate::duration;

/// A job of the crontab.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) cron: Cron,
    /// What the shell executes.
    pub(crate) command: String,
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) options: Options,
}

/// The words in brackets behind the name of a job.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Options {
    pub(crate) overlap: Overlap,
    catch_up: CatchUp,
    retry: u32,
    jitter: Duration,
    pub(crate) timeout: Option<Duration>,
}

/// Parses a crontab. Returns its jobs, or what is wrong with which lines.
pub(crate) fn parse(text: &str) -> Result<Vec<Line>, Vec<(usize, String)>> {
    let mut jobs: Vec<Line> = Vec::new();
    let (mut lines_of, mut wrong) = (HashMap::new(), Vec::new());
    let (mut environment, mut zone) = (BTreeMap::new(), "UTC".to_owned());
    // Reports a name that the library does not accept, without a server.
    let client = Client::embedded();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some((variable, value)) = setting(line) {
            if matches!(variable, "TZ" | "CRON_TZ") {
                match checked_zone(value) {
                    Ok(()) => value.clone_into(&mut zone),
                    Err(reason) => wrong.push((number, reason)),
                }
            }
            environment.insert(variable.to_owned(), value.to_owned());
            continue;
        }
        let parsed = job(line, &zone, &environment).and_then(|job| {
            let checked = job.scheduled(&client).check();
            checked.map(|()| job).map_err(|error| error.to_string())
        });
        match parsed {
            Ok(job) => match lines_of.insert(job.name.clone(), number) {
                Some(earlier) => {
                    wrong.push((
                        number,
                        format!("line {earlier} has a job `{}`, too", job.name),
                    ));
                }
                None => jobs.push(job),
            },
            Err(reason) => wrong.push((number, reason)),
        }
    }
    match wrong.is_empty() {
        true => Ok(jobs),
        false => Err(wrong),
    }
}

/// Returns the variable and its value if the line sets one. Quotes around the value are removed.
fn setting(line: &str) -> Option<(&str, &str)> {
    let (variable, value) = line.split_once('=')?;
    let variable = variable.trim_end();
    let is_variable = variable.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && variable
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '_');
    let value = value.trim();
    // `TZ=UTC 0 2 * * * name command` is a job.
    let is_job = matches!(variable, "TZ" | "CRON_TZ") && value.contains(char::is_whitespace);
    let quoted = ['"', '\'']
        .into_iter()
        .find_map(|quote| value.strip_prefix(quote)?.strip_suffix(quote));
    (is_variable && !is_job).then_some((variable, quoted.unwrap_or(value)))
}

fn checked_zone(zone: &str) -> Result<(), String> {
    in_zone("@daily", zone).map(drop)
}

fn in_zone(schedule: &str, zone: &str) -> Result<Cron, String> {
    let cron = Cron::parse(schedule).and_then(|cron| cron.in_tz(zone));
    cron.map_err(|error| match error {
        redlatch::Error::InvalidSetting {
            setting, reason, ..
        } => format!("{setting}: {reason}"),
        error => error.to_string(),
    })
}

/// Parses the line of a job.
fn job(line: &str, zone: &str, environment: &BTreeMap<String, String>) -> Result<Line, String> {
    let (mut rest, mut zone, mut environment) = (line, zone, environment.clone());
    if let Some((variable @ ("TZ" | "CRON_TZ"), value)) = rest.split_once('=') {
        let word;
        (word, rest) = next_word(value);
        environment.insert(variable.to_owned(), word.to_owned());
        zone = word;
    }
    let fields = match rest.starts_with('@') {
        true => 1,
        // The sixth word is the day of the week behind five others, or a name.
        false => match words(rest, 6) {
            Some((six, _)) if Cron::parse(six).is_ok() => 6,
            _ => 5,
        },
    };
    let (schedule, rest) =
        words(rest, fields).ok_or("a schedule, a name and a command expected")?;
    let cron = in_zone(schedule, zone)?;
    // Options may follow the name without a space.
    let end = rest.find(|c: char| c.is_whitespace() || c == '[');
    let (name, rest) = rest.split_at(end.unwrap_or(rest.len()));
    let rest = rest.trim_start();
    if name.is_empty() {
        return Err("a name and a command expected behind the schedule".to_owned());
    }
    if name.starts_with('/') {
        // The name is missing, or was read as the day of the week.
        return Err(format!(
            "a name expected behind the schedule `{schedule}`, and not the command `{name}`"
        ));
    }
    let (options, command) = match rest.strip_prefix('[') {
        None => (Options::default(), rest),
        Some(rest) => {
            let (words, command) = rest.split_once(']').ok_or("`]` expected")?;
            (options(words)?, command.trim_start())
        }
    };
    if command.is_empty() {
        return Err(format!("a command expected behind the name `{name}`"));
    }
    Ok(Line {
        name: name.to_owned(),
        cron,
        // As in crontabs, where `%` has a meaning of its own.
        command: command.replace("\\%", "%"),
        environment,
        options,
    })
}

/// Splits off the first word.
fn next_word(text: &str) -> (&str, &str) {
    let text = text.trim_start();
    let end = text.find(char::is_whitespace).unwrap_or(text.len());
    let (word, rest) = text.split_at(end);
    (word, rest.trim_start())
}

/// Splits off so many words, if there are as many.
fn words(text: &str, count: usize) -> Option<(&str, &str)> {
    let mut rest = text;
    for _ in 0..count {
        let word;
        (word, rest) = next_word(rest);
        if word.is_empty() {
            return None;
        }
    }
    let (words, _) = text.split_at(text.len() - rest.len());
    Some((words.trim(), rest))
}

fn options(words: &str) -> Result<Options, String> {
    let mut options = Options::default();
    let mut named = Vec::new();
    for word in words
        .split([' ', '\t', ','])
        .filter(|word| !word.is_empty())
    {
        let (option, value) = word
            .split_once('=')
            .ok_or_else(|| format!("`{word}`: OPTION=VALUE expected"))?;
        let invalid = |reason: &str| format!("{option}: `{value}` is invalid: {reason}");
        let parsed_duration = || duration::parse(value).map_err(|reason| invalid(&reason));
        match option {
            "overlap" => {
                options.overlap = match value {
                    "skip" => Overlap::Skip,
                    "wait" => Overlap::Wait,
                    "allow" => Overlap::Allow,
                    _ => return Err(invalid("use skip, wait or allow")),
                }
            }
            "catch-up" => {
                options.catch_up = match value {
                    "none" => CatchUp::None,
                    "last" => CatchUp::Last,
                    _ => return Err(invalid("use none or last")),
                }
            }
            "retry" => {
                options.retry = value.parse().map_err(|_| invalid("use 0 to 19"))?;
            }
            "jitter" => options.jitter = parsed_duration()?,
            "timeout" => options.timeout = Some(parsed_duration()?),
            _ => {
                return Err(format!(
                    "`{option}` is no option; use overlap, timeout, catch-up, jitter or retry"
                ));
            }
        }
        if named.contains(&option) {
            return Err(format!("`{option}` is repeated"));
        }
        named.push(option);
    }
    Ok(options)
}

impl Line {
    /// Returns the job for the library. The timeout is that of the command, which takes some time to
    /// end.
    pub(crate) fn scheduled(&self, client: &Client) -> Scheduled {
        let job = client.job(&self.name).schedule(self.cron.clone());
        let Options {
            overlap,
            catch_up,
            retry,
            jitter,
            ..
        } = self.options;
        job.overlap(overlap)
            .catch_up(catch_up)
            .retry(retry)
            .jitter(jitter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> Line {
        let mut jobs = parse(text).unwrap_or_else(|wrong| panic!("{text}: {wrong:?}"));
        assert_eq!(jobs.len(), 1, "{text}");
        jobs.remove(0)
    }

    #[test]
    fn jobs_have_schedule_name_options_and_command() {
        for (text, name, cron, command) in [
            (
                "0 2 * * * report /opt/report.sh --all",
                "report",
                "0 2 * * * (UTC)",
                "/opt/report.sh --all",
            ),
            (
                "  @daily\treport  a  |  b ",
                "report",
                "@daily (UTC)",
                "a  |  b",
            ),
            (
                "*/10 * * * * * fast true",
                "fast",
                "*/10 * * * * * (UTC)",
                "true",
            ),
            (
                "0 0 9 * * MON-FRI fast true",
                "fast",
                "0 0 9 * * MON-FRI (UTC)",
                "true",
            ),
            (
                "0 9 * * mon-fri fast true",
                "fast",
                "0 9 * * mon-fri (UTC)",
                "true",
            ),
            (
                "TZ=Asia/Tokyo 0 2 * * * report true",
                "report",
                "0 2 * * * (Asia/Tokyo)",
                "true",
            ),
            (
                "CRON_TZ=Asia/Tokyo\n0 2 * * * report true",
                "report",
                "0 2 * * * (Asia/Tokyo)",
                "true",
            ),
            (
                "TZ=\"Asia/Tokyo\"\n# 5\n\n0 2 * * * a:b true\r\n",
                "a:b",
                "0 2 * * * (Asia/Tokyo)",
                "true",
            ),
            (
                "0 2 * * * report date +\\%F",
                "report",
                "0 2 * * * (UTC)",
                "date +%F",
            ),
            (
                "0 2 * * * report [] [ -f x ]",
                "report",
                "0 2 * * * (UTC)",
                "[ -f x ]",
            ),
        ] {
            let line = one(text);
            let found = (&*line.name, &*line.cron.to_string(), &*line.command);
            assert_eq!(found, (name, cron, command), "{text}");
            assert_eq!(line.options, Options::default());
        }
        for brackets in [
            "[timeout=5m overlap=wait catch-up=last retry=2 jitter=10s]",
            "[ timeout=5m, overlap=wait,catch-up=last  retry=2 jitter=10s ]",
        ] {
            let options = Options {
                overlap: Overlap::Wait,
                catch_up: CatchUp::Last,
                retry: 2,
                jitter: Duration::from_secs(10),
                timeout: Some(Duration::from_secs(300)),
            };
            for space in ["", " "] {
                let line = one(&format!("0 2 * * * report{space}{brackets} true"));
                assert_eq!((line.options, &*line.command), (options, "true"));
            }
        }
    }

    #[test]
    fn settings_apply_to_the_lines_below() {
        let text = "0 1 * * * a true\nPATH = /opt:/bin\nX='a b'\n0 1 * * * b true\nTZ=Asia/Tokyo 0 1 * * * c true";
        let [a, b, c] = &parse(text).unwrap()[..] else {
            panic!("three jobs");
        };
        assert!(a.environment.is_empty());
        let two = [("PATH", "/opt:/bin"), ("X", "a b")];
        let two = two.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(b.environment, BTreeMap::from(two));
        assert_eq!(
            c.environment.get("TZ").map(String::as_str),
            Some("Asia/Tokyo")
        );
    }

    #[test]
    fn all_wrong_lines_are_reported() {
        let cases = [
            ("0 2 * *", "expected"),
            ("0 2 * * *", "a name and a command"),
            (
                "0 2 * * * report",
                "a command expected behind the name `report`",
            ),
            ("0 2 * * * report []", "a command expected"),
            ("0 2 * * * /opt/report.sh --all", "a name expected"),
            ("0 2 * * * 5 /opt/report.sh --all", "`0 2 * * * 5`"),
            ("61 2 * * * report true", "cron: "),
            ("@never report true", "cron: "),
            ("0 2 30 2 * report true", "never fires"),
            ("hello", "expected"),
            ("TZ=Europe/Nowhere", "`Europe/Nowhere` is unknown"),
            (
                "TZ=Europe/Nowhere 0 2 * * * report true",
                "`Europe/Nowhere` is unknown",
            ),
            ("0 2 * * * report [retry=1 true", "`]` expected"),
            ("0 2 * * * report [retry] true", "OPTION=VALUE"),
            ("0 2 * * * report [retry=-1] true", "0 to 19"),
            ("0 2 * * * report [retry=20] true", "fewer than 20"),
            ("0 2 * * * report [retry=1 retry=1] true", "repeated"),
            (
                "0 2 * * * report [overlap=maybe] true",
                "skip, wait or allow",
            ),
            ("0 2 * * * report [catch-up=all] true", "none or last"),
            ("0 2 * * * report [timeout=1w] true", "whole number"),
            ("0 2 * * * report [jitter=x] true", "whole number"),
            ("0 2 * * * report [color=red] true", "no option"),
            ("0 2 * * * a}b true", "hash tag"),
            ("0 3 * * * twice true", "line 1 has a job `twice`, too"),
        ];
        let text = cases.map(|(line, _)| line).join("\n");
        let wrong = parse(&format!("0 2 * * * twice true\n{text}")).unwrap_err();
        let numbers: Vec<_> = wrong.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, (2..=cases.len() + 1).collect::<Vec<_>>());
        for ((line, reason), (_, found)) in cases.iter().zip(&wrong) {
            assert!(found.contains(reason), "{line}: {found}");
        }
    }
}
