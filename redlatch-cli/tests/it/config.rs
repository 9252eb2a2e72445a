//! Tests of configuration files: where they are, what overrides them, and errors in them.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use redlatch_testkit::{CertSpec, LOOPBACK, Server, TlsServer, shared, unique};

use crate::support::*;

/// A store that cannot be reached.
const NO_STORE: &str = "redis://127.0.0.1:1";

/// Returns `redlatch` with these arguments, which looks for its configuration in `dir`.
fn configured(dir: &str, args: &[&str]) -> Command {
    let mut command = clean_command(args);
    command.env_remove("REDLATCH_CONFIG");
    command.env("XDG_CONFIG_HOME", dir);
    command
}

fn ls(path: &str) -> Command {
    clean_command(&["--config", path, "ls", "no-such-name"])
}

fn write(temp_dir: &TempDir, name: &str, text: &str) -> String {
    let path = temp_dir.path(name);
    std::fs::create_dir_all(std::path::Path::new(&path).parent().unwrap()).unwrap();
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn file_is_found_in_the_home_directory_or_by_its_path() {
    let temp_dir = TempDir::new();
    let text = format!("url = \"{}\"\n", shared().url());
    let by_path = write(&temp_dir, "other.toml", &text);
    write(&temp_dir, "redlatch.toml", &text);
    write(&temp_dir, ".config/redlatch.toml", &text);
    let (dir, missing) = (temp_dir.path(""), temp_dir.path("missing"));
    let show = ["show", "-q", &unique("config")];

    finish(configured(&dir, &show)).expect(1);
    let mut at_home = configured("", &show);
    at_home.env("HOME", &dir);
    finish(at_home).expect(1);
    let mut with_relative_directory = configured("relative", &show);
    with_relative_directory.env("HOME", &dir);
    finish(with_relative_directory).expect(1);

    let by_option = [&["--config", &by_path][..], &show].concat();
    finish(configured(&missing, &by_option)).expect(1);
    let mut by_variable = configured(&missing, &show);
    by_variable.env("REDLATCH_CONFIG", &by_path);
    finish(by_variable).expect(1);
}

/// Neither an error, nor a setting in place of that of the file.
#[test]
fn empty_variables_count_as_unset() {
    let certificate = CertSpec {
        names: &["db.example"],
        ..LOOPBACK
    };
    let server = TlsServer::start_for(certificate, "yes", &["me on >s3cret ~* &* +@all"]);
    let (temp_dir, ours) = (TempDir::new(), server.ca().client());
    write(&temp_dir, "password", "s3cret");
    write(&temp_dir, "ca", server.ca().pem());
    write(&temp_dir, "cert", &ours.cert);
    write(&temp_dir, "key", &ours.key);
    let text = "user = 'me'\npassword-file = 'password'\ntls-ca = 'ca'\ntls-cert = 'cert'\n\
                tls-key = 'key'\ntls-server-name = 'db.example'\nlog-format = 'json'\n";
    let text = format!("url = '{}'\n{text}", server.url());
    write(&temp_dir, "redlatch.toml", &text);
    let dir = temp_dir.path("");
    let mut variables = BTreeSet::from(["REDLATCH_PASSWORD", "REDLATCH_SENTINEL_PASSWORD"]);
    let help = ["run", "renew"].map(|command| finish(clean_command(&[command, "--help"])).stdout);
    for line in help.iter().flat_map(|help| help.lines()) {
        let variable = line.trim().strip_prefix("[env: ");
        variables.extend(variable.and_then(|variable| variable.strip_suffix(']')));
    }
    assert!(variables.contains("REDLATCH_TICKET"), "{variables:?}");
    let check_url = ["sh", "-c", "test \"$REDLATCH_URL\" != invalid"];
    for variable in variables {
        let with_empty = |args: &[&str], code| {
            let mut command = configured(&dir, args);
            command.env(variable, "");
            let finished = finish(command);
            assert_eq!(finished.code, Some(code), "{variable}: {finished:#?}");
        };
        let name = unique("empty");
        with_empty(&[&["run", &name, "--"], &check_url[..]].concat(), 0);
        with_empty(&["unlock", "--force", &name], 0);
        with_empty(&["completions", "bash"], 0);
        // No ticket.
        with_empty(&["renew"], 2);
    }
}

#[test]
fn options_override_variables_which_override_files() {
    let temp_dir = TempDir::new();
    write(
        &temp_dir,
        "redlatch.toml",
        "url = 'redis://127.0.0.1:1'\nreplicas = 1\n",
    );
    let (dir, name, url) = (temp_dir.path(""), unique("config"), shared().url());
    let run = |options: &[&str], variables: &[(&str, &str)]| {
        let args = [&["run", "-n"], options, &[&name, "--", "true"]].concat();
        let mut command = configured(&dir, &args);
        command.envs(variables.iter().copied());
        finish(command)
    };
    let unreachable = run(&[], &[]).expect(69);
    assert!(unreachable.stderr.contains(NO_STORE), "{unreachable:#?}");
    // The shared server has no replica.
    for (options, variables, code) in [
        (&[][..], &[("REDLATCH_URL", &*url)][..], 69),
        (&["--url", &url], &[], 69),
        (&["--url", &url, "--replicas", "off"], &[], 0),
        (&["--url", &url], &[("REDLATCH_REPLICAS", "off")], 0),
        (
            &["--url", &url, "--replicas", "1"],
            &[("REDLATCH_REPLICAS", "off")],
            69,
        ),
        (&["--replicas", "off"], &[("REDLATCH_URL", &url)], 0),
        (
            &["--url", &url, "--replicas", "0"],
            &[("REDLATCH_URL", NO_STORE)],
            0,
        ),
        (&["--config", "/dev/null"], &[("REDLATCH_URL", &url)], 0),
    ] {
        let finished = run(options, variables).expect(code);
        assert!(!finished.stderr.contains(NO_STORE), "{finished:#?}");
    }
}

/// Which label the registry shows is the same question as for the other settings.
#[test]
fn label_is_that_of_the_option_the_variable_or_the_file() {
    let temp_dir = TempDir::new();
    write(&temp_dir, "redlatch.toml", "label = 'file'\n");
    let (dir, server) = (temp_dir.path(""), Server::start());
    for (options, variable, label) in [
        (&[][..], None, "file"),
        (&[], Some(""), "file"),
        (&[], Some("variable"), "variable"),
        (&["--label", "option"], Some("variable"), "option"),
    ] {
        let name = unique("label");
        let args = [&["run"], options, &[&name, "--", "cat"]].concat();
        let mut command = configured(&dir, &args);
        command.env("REDLATCH_URL", server.url());
        command.envs(variable.map(|label| ("REDLATCH_LABEL", label)));
        let holder = Running::start(command);
        until("the holder is registered", || {
            let shown = finish(redlatch(&server, &["show", &name])).expect(0);
            shown.stdout.contains(&format!("{label}@"))
        });
        holder.release();
    }
}

#[test]
fn password_file_is_relative_to_its_configuration_file() {
    let server = Server::start_with(&["--requirepass", "s3cret"]);
    let temp_dir = TempDir::new();
    write(&temp_dir, "etc/password", "s3cret\n");
    write(&temp_dir, "etc/wrong", "wr0ng\n");
    let at = format!("127.0.0.1:{}", server.port());
    let text = |file| format!("url = 'redis://{at}'\npassword-file = '{file}'\n");
    let right = write(&temp_dir, "etc/right.toml", &text("password"));
    let wrong = write(&temp_dir, "etc/wrong.toml", &text("wrong"));
    let missing = write(&temp_dir, "etc/missing.toml", &text("missing"));
    finish(ls(&right)).expect(0);
    finish(ls(&missing)).expect(2).assert_stderr("etc/missing");
    finish(ls(&wrong)).expect(69);
    let with = |variable, value: &str| {
        let mut command = ls(&wrong);
        command.env(variable, value);
        finish(command)
    };
    with("REDLATCH_PASSWORD", "s3cret").expect(0);
    // A login in the URL excludes that of the file.
    with("REDLATCH_URL", &format!("redis://:s3cret@{at}")).expect(0);
    with("REDLATCH_URL", &format!("redis://{at}")).expect(69);
}

#[test]
fn log_format_can_be_configured() {
    let temp_dir = TempDir::new();
    let text = "log-format = 'json'\nresponse-timeout = '1s'\nurl = 'redis://127.0.0.1:1'\n";
    let path = write(&temp_dir, "json.toml", text);
    let finished = finish(ls(&path)).expect(69);
    assert!(finished.stderr.starts_with('{'), "{finished:#?}");
    let mut as_text = ls(&path);
    as_text.env("REDLATCH_LOG_FORMAT", "text");
    let finished = finish(as_text).expect(69);
    assert!(finished.stderr.starts_with("redlatch: "), "{finished:#?}");
}

#[test]
fn wrong_file_is_one_line_with_file_and_line_and_exits_2() {
    let temp_dir = TempDir::new();
    for (text, message) in [
        (
            "url = 'x'\nulr = 'redis://:s3cret@h'\n",
            ":2: ulr: unknown key",
        ),
        ("url = ['redis://:s3cret@h']", ":1: url: the type is array"),
        ("\nreplicas = true", ":2: replicas: the type is boolean"),
        ("url redis://:s3cret@h", ":1: "),
        ("url = \"redis://:s3cret@h", ":1: "),
        ("\n\n[", ":3: "),
        ("password = 's3cret'", "use password-file"),
        ("\"\\u001b[2J\" = 1", ":1: \\u{1b}[2J: unknown key"),
        ("\nurl = 'http://h'", ":2: url: "),
        ("tls-cert = '/no/such/file'", "--tls-key"),
    ] {
        let path = write(&temp_dir, "wrong.toml", text);
        let finished = finish(ls(&path)).expect(2).assert_stderr(message);
        assert_eq!(finished.stderr.lines().count(), 1, "{finished:#?}");
        assert!(!finished.stderr.contains("s3cret"), "{finished:#?}");
        if message.starts_with(':') {
            finished.assert_stderr(&format!("redlatch: {path}:"));
        }
    }
}

#[test]
fn file_that_cannot_be_read_exits_2() {
    let temp_dir = TempDir::new();
    let no_text = temp_dir.path("latin1.toml");
    std::fs::write(&no_text, b"user = '\xfc'").unwrap();
    let control = temp_dir.path("\x1b[2J.toml");
    for path in [
        &temp_dir.path("missing.toml"),
        &temp_dir.path(""),
        &no_text,
        &control,
        "/dev/null/x",
    ] {
        let finished = finish(ls(path)).expect(2);
        let finished = finished.assert_stderr("the configuration file cannot be read");
        assert_eq!(finished.stderr.lines().count(), 1, "{finished:#?}");
        assert!(!finished.stderr.contains('\x1b'), "{finished:#?}");
    }
    // A file at the default place that exists must also be readable.
    std::fs::create_dir(temp_dir.path("redlatch.toml")).unwrap();
    let finished = finish(configured(&temp_dir.path(""), &["ls"])).expect(2);
    finished.assert_stderr("redlatch.toml: the configuration file cannot be read");
}

#[test]
fn password_in_a_file_for_all_users_causes_warning() {
    let server = Server::start_with(&["--requirepass", "s3cret"]);
    let temp_dir = TempDir::new();
    let at = format!("127.0.0.1:{}", server.port());
    for (login, mode, is_exposed) in [
        (":s3cret@", 0o644, true),
        (":s3cret@", 0o640, false),
        (":s3cret@", 0o600, false),
        ("", 0o644, false),
    ] {
        let path = write(&temp_dir, "p.toml", &format!("url = 'redis://{login}{at}'"));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let mut command = ls(&path);
        command.env("REDLATCH_PASSWORD", "s3cret");
        let finished = finish(command).expect(0);
        let warning = format!("redlatch: warning: {path}: every user of this machine can read");
        assert_eq!(
            finished.stderr.contains(&warning),
            is_exposed,
            "{finished:#?}"
        );
        assert_eq!(finished.stderr.is_empty(), !is_exposed, "{finished:#?}");
        assert!(!finished.stderr.contains("s3cret"), "{finished:#?}");
        let mut quiet = clean_command(&["--quiet", "--config", &path, "ls", "no-such-name"]);
        quiet.env("REDLATCH_PASSWORD", "s3cret");
        assert_eq!(finish(quiet).expect(0).stderr, "");
    }
}

/// Names have the prefix in the store, and not in messages.
#[test]
fn prefix_is_set_by_option_variable_or_file() {
    let temp_dir = TempDir::new();
    let file = write(&temp_dir, "redlatch.toml", "prefix = \"file:\"\n");
    let file = ["--config", &file];
    let name = unique("prefix");
    for (options, variable, prefix) in [
        (&["--prefix", "option:"][..], "variable:", "option:"),
        (&["--prefix", ""], "variable:", ""),
        (&[file[0], file[1], "--prefix", ""], "", ""),
        (&[], "variable:", "variable:"),
        (&file, "", "file:"),
    ] {
        let run = [&["run"], options, &[&name, "--", "cat"]].concat();
        let mut command = redlatch(shared(), &run);
        if !variable.is_empty() {
            command.env("REDLATCH_PREFIX", variable);
        }
        let holder = Running::start(command);
        let key = format!("{prefix}{name}");
        until("it is held", || {
            shared().command::<i64>(&["EXISTS", &key]) == 1
        });
        let show = finish(redlatch(shared(), &["show", "--prefix", prefix, &name])).expect(0);
        assert!(
            show.stdout.contains(&name) && (prefix.is_empty() || !show.stdout.contains(prefix)),
            "{show:?}"
        );
        let show = finish(redlatch(shared(), &["show", &name]));
        let is_free = show.stdout.contains("(free)");
        assert_eq!(is_free, !prefix.is_empty(), "{show:?}");
        holder.release();
    }
}
