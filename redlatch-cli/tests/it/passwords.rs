//! Tests of the sources of passwords and certificates, and that no password is printed or passed on.

use redlatch_testkit::{Server, TlsServer, unique};

use crate::support::*;

const PASSWORD: &str = "s3cret-and-long";

fn server() -> Server {
    let server = Server::start_with(&["--requirepass", PASSWORD]);
    let rule = format!(">{PASSWORD}-of-me");
    let () = server.command(&["ACL", "SETUSER", "me", "on", &rule, "+@all", "~*", "&*"]);
    server
}

fn url(server: &Server, login: &str) -> String {
    format!("redis://{login}127.0.0.1:{}", server.port())
}

#[test]
fn password_can_be_in_a_file_or_in_the_environment() {
    let (server, temp_dir) = (server(), TempDir::new());
    let [file, of_me, empty] = ["password", "of-me", "empty"].map(|name| temp_dir.path(name));
    std::fs::write(&file, format!("{PASSWORD}\n")).unwrap();
    std::fs::write(&of_me, format!("{PASSWORD}-of-me\r\nanother line\n")).unwrap();
    std::fs::write(&empty, "\n").unwrap();
    let me = format!("{PASSWORD}-of-me");
    let (plain, wrong) = (url(&server, ""), url(&server, "you:wrong@"));
    for (url, variables, options, code) in [
        (&plain, &[][..], &[][..], 69),
        (&plain, &[("REDLATCH_PASSWORD", PASSWORD)], &[], 0),
        (&plain, &[], &["--password-file", &file], 0),
        // The file overrides the environment, which overrides the URL.
        (
            &plain,
            &[("REDLATCH_PASSWORD", "wrong")],
            &["--password-file", &file],
            0,
        ),
        (
            &wrong,
            &[("REDLATCH_PASSWORD", &me), ("REDLATCH_USERNAME", "me")],
            &[],
            0,
        ),
        (&wrong, &[], &["--user", "me", "--password-file", &of_me], 0),
        (&wrong, &[("REDLATCH_PASSWORD", "wrong")], &[], 69),
        (&plain, &[("REDLATCH_PASSWORD", "")], &[], 69),
        (&plain, &[], &["--password-file", &empty], 2),
        (&plain, &[], &["--password-file", "/no/such/file"], 2),
        (&plain, &[], &["--user", "me"], 2),
    ] {
        let mut command = clean_command(&[&["ls"], options].concat());
        command.env("REDLATCH_URL", url);
        command.env("REDLATCH_LOG", "trace");
        command.envs(variables.iter().copied());
        let finished = finish(command).expect(code);
        assert!(!finished.stderr.contains(PASSWORD), "{finished:#?}");
    }
    let url = url(&server, &format!(":{PASSWORD}@"));
    let mut command = clean_command(&["ls"]);
    command.env("REDLATCH_URL", url);
    assert_eq!(finish(command).expect(0).stderr, "");
}

#[test]
fn password_in_command_line_causes_warning() {
    let server = server();
    let with = url(&server, &format!(":{PASSWORD}@"));
    for args in [
        &["--url", &with, "ls"][..],
        &["ls", "--url", &with],
        &["ls", &format!("--url={with}")],
    ] {
        let finished = finish(clean_command(args)).expect(0);
        assert!(
            finished.stderr.contains("REDLATCH_PASSWORD"),
            "{finished:#?}"
        );
        assert!(!finished.stderr.contains(PASSWORD), "{finished:#?}");
    }
    let mut command = clean_command(&["--url", &url(&server, ""), "ls"]);
    command.env("REDLATCH_PASSWORD", PASSWORD);
    assert_eq!(finish(command).expect(0).stderr, "");
}

/// Returns what the system shows of a process. The process must not execute another program meanwhile: it would be shown with
/// nothing, or with a part.
fn proc(pid: u32, what: &str) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/{what}")).unwrap();
    String::from_utf8_lossy(&bytes).replace('\0', "\n")
}

#[test]
#[cfg(target_os = "linux")]
fn password_is_hidden_from_process_list_and_cmd() {
    let server = server();
    let with = url(&server, &format!("default:{PASSWORD}@"));
    let run = |options: &[&str]| {
        // The shell stays: with `exec cat`, or `cat` as its last command, it would be replaced at any time after its output.
        let script = "echo $$; cat; exit";
        let name = unique("seen");
        let args = [&["run"], options, &[&name, "--", "sh", "-c", script]].concat();
        let mut command = clean_command(&args);
        command.env("REDLATCH_URL", &with);
        command.env("REDLATCH_PASSWORD", PASSWORD);
        command.env("REDLATCH_SENTINEL_PASSWORD", PASSWORD);
        let running = Running::start(command);
        running.until_stdout("\n");
        running
    };
    let running = run(&[]);
    for pid in [running.pid(), running.cmd_pid()] {
        let line = proc(pid, "cmdline");
        assert!(!line.is_empty() && !line.contains(PASSWORD), "{line}");
    }
    let environment = proc(running.cmd_pid(), "environ");
    assert!(!environment.contains(PASSWORD), "{environment}");
    let left = format!("REDLATCH_URL={}\n", url(&server, "default@"));
    assert!(environment.contains(&left), "{environment}");
    assert!(environment.contains("REDLATCH_LOCK="), "{environment}");
    running.release();

    let running = run(&["--keep-passwords"]);
    let environment = proc(running.cmd_pid(), "environ");
    assert_eq!(environment.matches(PASSWORD).count(), 3, "{environment}");
    running.release();
}

#[test]
fn certificates_are_read_from_files() {
    let (server, temp_dir) = (TlsServer::start("yes", &[]), TempDir::new());
    let ours = server.ca().client();
    let [ca, cert, key] = [
        ("ca", server.ca().pem()),
        ("cert", &ours.cert),
        ("key", &ours.key),
    ]
    .map(|(name, text)| {
        let path = temp_dir.path(name);
        std::fs::write(&path, text).unwrap();
        path
    });
    let ls = |options: &[&str]| {
        let mut command = clean_command(&[&["ls"], options].concat());
        command.env("REDLATCH_URL", server.url());
        command
    };
    let all = ["--tls-ca", &ca, "--tls-cert", &cert, "--tls-key", &key];
    finish(ls(&all)).expect(0);
    let mut by_variables = ls(&[]);
    by_variables.env("REDLATCH_TLS_CA", &ca);
    by_variables.env("REDLATCH_TLS_CERT", &cert);
    by_variables.env("REDLATCH_TLS_KEY", &key);
    finish(by_variables).expect(0);

    let refused = finish(ls(&all[..2]))
        .expect(69)
        .assert_stderr("client certificate");
    assert!(refused.stderr.contains(&server.url()), "{refused:#?}");
    finish(ls(&all[2..])).expect(69).assert_stderr("tls_ca");
    finish(ls(&all[..4])).expect(2).assert_stderr("--tls-key");
    finish(ls(&["--tls-ca", "/no/such/file"]))
        .expect(2)
        .assert_stderr("/no/such/file");
    let mut unencrypted = ls(&all);
    unencrypted.env("REDLATCH_URL", server.plain().url());
    finish(unencrypted).expect(2).assert_stderr("rediss://");
}
