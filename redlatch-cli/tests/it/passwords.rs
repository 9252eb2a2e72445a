//! Tests of the sources of passwords and certificates, and that no password is printed or passed on.

use std::process::Command;

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

/// Lists the locks with these variables and options. Asserts the exit code, and that no password is shown.
#[track_caller]
fn list(url: &str, variables: &[(&str, &str)], options: &[&str], code: i32) -> Finished {
    let mut command = clean_command(&[&["ls"], options].concat());
    command.env("REDLATCH_URL", url);
    command.env("REDLATCH_LOG", "trace");
    command.envs(variables.iter().copied());
    let finished = finish(command).expect(code);
    assert!(!finished.stderr.contains(PASSWORD), "{finished:#?}");
    finished
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
        list(url, variables, options, code);
    }
    let url = url(&server, &format!(":{PASSWORD}@"));
    let mut command = clean_command(&["ls"]);
    command.env("REDLATCH_URL", url);
    assert_eq!(finish(command).expect(0).stderr, "");
}

/// Options override variables.
#[test]
fn login_in_the_url_of_an_option_overrides_the_variables() {
    let (server, temp_dir) = (server(), TempDir::new());
    let of_me = temp_dir.path("of-me");
    let me = format!("{PASSWORD}-of-me");
    std::fs::write(&of_me, &me).unwrap();
    let with = |login: &str| url(&server, login);
    let (wrong, with_password) = (with("you:wrong@"), with(&format!("me:{me}@")));
    let (with_user, only_password) = (with("me@"), with(&format!(":{PASSWORD}@")));
    let command = "echo wrong; echo user: you";
    for (url, variables, options) in [
        (
            &with_password,
            &[("REDLATCH_PASSWORD", "wrong")][..],
            &[][..],
        ),
        (&with_password, &[("REDLATCH_USERNAME", "you")], &[]),
        (
            &with_password,
            &[("REDLATCH_CREDENTIALS_COMMAND", command)],
            &[],
        ),
        (&only_password, &[("REDLATCH_USERNAME", "me")], &[]),
        (
            &with_user,
            &[("REDLATCH_PASSWORD", &me), ("REDLATCH_USERNAME", "you")],
            &[],
        ),
        (
            &wrong,
            &[("REDLATCH_PASSWORD", "wrong")],
            &["--user", "me", "--password-file", &of_me],
        ),
    ] {
        let options = [&["--url", url.as_str()], options].concat();
        list(&wrong, variables, &options, 0);
    }
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
    // Not the file that the operator meant.
    let url = finish(ls(&["--tls-ca", "redis://:s3cret@h"])).expect(2);
    assert!(!url.stderr.contains("s3cret"), "{url:#?}");
    finish(ls(&["--tls-ca", "/no/such/file"]))
        .expect(2)
        .assert_stderr("/no/such/file");
    let mut unencrypted = ls(&all);
    unencrypted.env("REDLATCH_URL", server.plain().url());
    finish(unencrypted).expect(2).assert_stderr("rediss://");
}

/// Numbers for generated URLs.
struct Rng(u64);

impl Rng {
    /// Takes the seed from `REDLATCH_SEED`, or a new one, and prints it.
    fn new() -> Rng {
        let given = std::env::var("REDLATCH_SEED").ok();
        let new = || redlatch::Owner::new().number();
        let seed = given.map_or_else(new, |seed| seed.parse().unwrap());
        println!("REDLATCH_SEED={seed}");
        Rng(seed)
    }

    /// SplitMix64.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// The first and the last characters of each generated password: no part of it is shown.
const ENDS: [&str; 2] = ["HEAD9", "TAIL9"];

/// A generated URL.
struct GeneratedUrl {
    url: String,
    password: String,
    /// The user for the data servers.
    user: &'static str,
    /// Whether it names the server of the test.
    is_reachable: bool,
}

impl GeneratedUrl {
    /// Makes a URL of this server, which listens on `socket`, too, or of one that cannot be
    /// reached.
    fn new(rng: &mut Rng, server: &Server, socket: &str) -> GeneratedUrl {
        const ESCAPED: [(&str, &str); 8] = [
            ("%40", "@"),
            ("%2F", "/"),
            ("%3F", "?"),
            ("%23", "#"),
            ("%26", "&"),
            ("%25", "%"),
            ("ü", "ü"),
            ("@", "@"),
        ];
        const IN_AUTHORITY: [(&str, &str); 2] = [(":", ":"), ("&", "&")];
        const IN_QUERY: [(&str, &str); 3] = [("/", "/"), ("?", "?"), ("=", "=")];
        let form = rng.below(8);
        let permitted = match form {
            0..4 => [&ESCAPED[..], &IN_QUERY].concat(),
            _ => [&ESCAPED[..], &IN_AUTHORITY].concat(),
        };
        let mut text = ENDS[0].to_owned();
        let mut password = text.clone();
        for _ in 0..rng.below(4) {
            let (part, decoded) = rng.pick(&permitted);
            text.push_str(part);
            password.push_str(decoded);
        }
        text.push_str(ENDS[1]);
        password.push_str(ENDS[1]);
        let user = rng.pick(&["", "m@e"]);
        let user_text = match user {
            "" => "",
            _ => rng.pick(&["m@e", "m%40e"]),
        };
        let port = server.port();
        let mut is_reachable = true;
        let url = match form {
            0..4 => {
                let start = rng.pick(&["unix:", "unix://", "redis+unix:", "valkey+unix://"]);
                let user = match user_text {
                    "" => String::new(),
                    text => format!("&user={text}"),
                };
                let db = rng.pick(&["", "&db=1"]);
                format!("{start}{socket}?pass={text}{user}{db}")
            }
            4 | 5 => {
                let scheme = rng.pick(&["redis", "valkey"]);
                let end = rng.pick(&["", "/", "/1", "?db=1"]);
                format!("{scheme}://{user_text}:{text}@127.0.0.1:{port}{end}")
            }
            6 => {
                is_reachable = false;
                let scheme = rng.pick(&["rediss", "valkey+cluster", "rediss+cluster"]);
                format!("{scheme}://{user_text}:{text}@127.0.0.1:1")
            }
            _ => {
                is_reachable = false;
                let sentinel_password = rng.pick(&["a@b", "c/d?e"]);
                format!(
                    "redis+sentinel://{user_text}:{text}@127.0.0.1:1/m?sentinel_password=\
                     {}{sentinel_password}{}",
                    ENDS[0], ENDS[1]
                )
            }
        };
        GeneratedUrl {
            url,
            password,
            user,
            is_reachable,
        }
    }

    /// Returns the URL with one character removed, added or replaced in front of the password.
    fn with_typo(&self, rng: &mut Rng) -> String {
        let end = self.url.find(ENDS[0]).unwrap();
        let mut chars: Vec<char> = self.url[..end].chars().collect();
        let at = rng.below(chars.len());
        if rng.below(2) == 0 {
            chars.remove(at);
        } else {
            chars[at] = rng.pick(&[';', '/', ' ', 'x', '@']);
        }
        chars.into_iter().collect::<String>() + &self.url[end..]
    }
}

#[track_caller]
fn assert_no_secret(finished: &Finished, url: &str) {
    let [stdout, stderr] = [&finished.stdout, &finished.stderr];
    for end in ENDS {
        let is_shown = stdout.contains(end) || stderr.contains(end);
        assert!(!is_shown, "{url}: {finished:#?}");
    }
}

/// A server with a socket whose path contains an @, and that path as it is in a URL.
fn server_with_socket(dir: &TempDir) -> (Server, String) {
    let socket = dir.path("a@b.sock");
    let server = Server::start_with(&["--requirepass", PASSWORD, "--unixsocket", &socket]);
    (server, socket.replace('@', "%40"))
}

#[test]
fn generated_urls_connect_and_show_no_password() {
    let (mut rng, dir) = (Rng::new(), TempDir::new());
    let (server, socket) = server_with_socket(&dir);
    let traced = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = clean_command(args);
        command.env("REDLATCH_LOG", "trace");
        command.env("REDLATCH_RESPONSE_TIMEOUT", "60s");
        command.envs(variables.iter().copied());
        finish(command)
    };
    for i in 0..36 {
        let generated = GeneratedUrl::new(&mut rng, &server, &socket);
        let url = &generated.url;
        let rule = format!(">{}", generated.password);
        let user = match generated.user {
            "" => "default",
            user => user,
        };
        let () = server.command(&["ACL", "SETUSER", user, "on", &rule, "+@all", "~*", "&*"]);
        let code = if generated.is_reachable { 0 } else { 69 };
        let run = ["run", "-n", &unique("generated"), "--", "env"];
        let ran = traced(&run, &[("REDLATCH_URL", url)]);
        assert_no_secret(&ran, url);
        let ran = ran.expect(code);
        if generated.is_reachable {
            // CMD can use it with the password that it has from elsewhere.
            let line = |line: &'_ &str| line.starts_with("REDLATCH_URL=");
            let kept = ran.stdout.lines().find(line).unwrap();
            let (_, kept) = kept.split_once('=').unwrap();
            let password = ("REDLATCH_PASSWORD", &*generated.password);
            let script = "echo here >$FILE; exec cat";
            let name = unique("same-place");
            let mut holding = clean_command(&["run", &name, "--", "sh", "-c", script]);
            let file = dir.path("here");
            holding.envs([("REDLATCH_URL", kept), password, ("FILE", &file)]);
            let holder = Running::start(holding);
            until("CMD runs", || std::fs::exists(&file).unwrap());
            std::fs::remove_file(&file).unwrap();
            let shown = traced(&["show", "-q", &name], &[("REDLATCH_URL", url)]);
            shown.expect(0);
            holder.release();
        }
        let option = format!("--url={url}");
        let path = dir.path("config.toml");
        std::fs::write(&path, format!("url = '{url}'\n")).unwrap();
        let [wrong, json] = ["--wait", "--log-format=json"];
        let finished = match i % 4 {
            0 => traced(&[&option, "ls", "no-such-name"], &[]).expect(code),
            1 => traced(&["--config", &path, "ls", "no-such-name"], &[]).expect(code),
            2 => traced(&[json, "--url", url, "latch", "no-such-name"], &[]).expect(2),
            _ => traced(&["run", wrong, url, "n", "--", "true"], &[]).expect(2),
        };
        assert_no_secret(&finished, url);
    }
}

#[test]
fn login_of_a_file_is_kept_beside_an_at_sign_in_a_socket() {
    let dir = TempDir::new();
    let (server, socket) = server_with_socket(&dir);
    let rule = format!(">{PASSWORD}");
    let () = server.command(&["ACL", "SETUSER", "me", "on", &rule, "+@all", "~*", "&*"]);
    std::fs::write(dir.path("password"), PASSWORD).unwrap();
    let path = dir.path("redlatch.toml");
    std::fs::write(&path, "user = 'me'\npassword-file = 'password'\n").unwrap();
    for url in [format!("unix:{socket}"), format!("unix://{socket}?db=1")] {
        let mut command = clean_command(&["--config", &path, "ls", "no-such-name"]);
        command.env("REDLATCH_URL", &url);
        finish(command).expect(0);
    }
}

/// What cannot be parsed is not shown: it may be a URL with a typo.
#[test]
fn texts_that_are_no_urls_show_no_password() {
    let (mut rng, dir) = (Rng::new(), TempDir::new());
    let (server, socket) = server_with_socket(&dir);
    let variables = [
        "REDLATCH_URL",
        "REDLATCH_CONFIG",
        "REDLATCH_LOG",
        "REDLATCH_LOG_FORMAT",
        "REDLATCH_REPLICAS",
        "REDLATCH_RESPONSE_TIMEOUT",
        "REDLATCH_TLS_CA",
    ];
    for i in 0..28 {
        let generated = GeneratedUrl::new(&mut rng, &server, &socket);
        let wrong = match i % 4 {
            0 => generated.url.clone(),
            _ => generated.with_typo(&mut rng),
        };
        let check = |mut command: Command| {
            command.env("REDLATCH_LOG_FORMAT", "text");
            let finished = finish(command);
            assert_no_secret(&finished, &wrong);
            finished
        };
        let name = unique("typo");
        for args in [
            &[&wrong, "ls"][..],
            &["ls", "a", &wrong],
            &["ls", &format!("--{wrong}")],
            &["-q", "run", "-E", &wrong, &name, "--", "true"],
            &["--config", &wrong, "ls"],
            &["--password-file", &wrong, "ls"],
        ] {
            check(clean_command(args)).expect(2);
        }
        let variable = variables[i % variables.len()];
        let mut command = clean_command(&["--url", "redis://127.0.0.1:1", "ls"]);
        command.env(variable, &wrong);
        check(command);
        let mut help = clean_command(&["ls", "--help"]);
        help.env(variable, &wrong);
        check(help).expect(0);
        let text = format!("\"{}\" = 'url'\n", wrong.escape_default());
        std::fs::write(dir.path("swapped.toml"), text).unwrap();
        let swapped = clean_command(&["--config", &dir.path("swapped.toml"), "ls"]);
        check(swapped).expect(2);
        // CMD gets no URL that cannot be parsed. Without one, it would use the default server.
        let url = format!("redis://:{PASSWORD}@127.0.0.1:{}", server.port());
        let unparsable = format!("redis;{wrong}");
        let mut command = clean_command(&["run", "-n", &name, "--url", &url, "--", "env"]);
        command.env("REDLATCH_URL", &unparsable);
        let ran = check(command).expect(0);
        assert!(ran.stdout.contains("\nREDLATCH_URL=invalid\n"), "{ran:#?}");
    }
}

/// A server that does not know HELLO may repeat its arguments.
#[test]
fn server_that_repeats_the_password_does_not_show_it() {
    let server = Server::start_with(&["--rename-command", "HELLO", ""]);
    let mut command = clean_command(&["ls"]);
    let url = format!(
        "redis://:{}{}@127.0.0.1:{}",
        ENDS[0],
        ENDS[1],
        server.port()
    );
    command.env("REDLATCH_URL", &url);
    command.env("REDLATCH_LOG", "trace");
    let finished = finish(command).expect(69);
    assert_no_secret(&finished, &url);
}

#[test]
fn top_shows_no_password() {
    let dir = TempDir::new();
    let (server, socket) = server_with_socket(&dir);
    let rule = format!(">{}@{}", ENDS[0], ENDS[1]);
    let () = server.command(&["ACL", "SETUSER", "default", &rule]);
    let binary = env!("CARGO_BIN_EXE_redlatch");
    let url = format!("unix:{socket}?pass={}@{}", ENDS[0], ENDS[1]);
    let line = format!("stty cols 200 rows 24; REDLATCH_URL='{url}' '{binary}' top");
    let mut top = at_a_terminal(&line);
    // The terminal gets no spaces, but moves of the cursor.
    top.until_stdout("held");
    top.write("q");
    let finished = top.finish().expect(0);
    assert!(
        finished.stdout.contains(&format!("unix:{socket}")),
        "{finished:#?}"
    );
    assert_no_secret(&finished, &url);
}

/// A script that counts its runs in a file, and prints what the file `login` contains.
fn login_script(temp_dir: &TempDir, more: &str) -> String {
    let (runs, login) = (temp_dir.path("runs"), temp_dir.path("login"));
    format!("echo x >> {runs}; cat {login}; {more}")
}

fn runs(temp_dir: &TempDir) -> usize {
    let runs = std::fs::read_to_string(temp_dir.path("runs"));
    runs.unwrap_or_default().lines().count()
}

#[test]
fn login_can_be_printed_by_a_command() {
    let (server, temp_dir) = (server(), TempDir::new());
    let [login, of_me, config] = ["login", "of-me", "config"].map(|name| temp_dir.path(name));
    std::fs::write(&login, format!("{PASSWORD}\nvalid-for: 15m\n")).unwrap();
    std::fs::write(&of_me, format!("{PASSWORD}-of-me\nuser: me\n")).unwrap();
    let (command, other) = (login_script(&temp_dir, ""), format!("cat {of_me}"));
    std::fs::write(&config, format!("credentials-command = '{command}'\n")).unwrap();
    let by = |command| ["--credentials-command", command];
    let (plain, wrong) = (url(&server, ""), url(&server, "you:wrong@"));
    let variable = ("REDLATCH_CREDENTIALS_COMMAND", &*command);
    let wrong_password = ("REDLATCH_PASSWORD", "wrong");
    let (in_file, of_file) = (["--config", &*config], ["--password-file", &*config]);
    let failed = "--credentials-command";
    for (url, variables, options, code, said) in [
        (&plain, &[][..], &by(&command)[..], 0, ""),
        (&plain, &[variable][..], &[], 0, ""),
        (&plain, &[variable], &by(&other), 0, ""),
        (&plain, &[], &in_file, 0, ""),
        // A command overrides the environment and the URL, and is overridden by a file.
        (&plain, &[wrong_password], &by(&command), 0, ""),
        (&wrong, &[], &by(&other), 0, ""),
        (&plain, &[variable], &of_file, 69, failed),
        // That of a configuration file belongs to its user.
        (&wrong, &[], &in_file, 69, failed),
        (&plain, &[wrong_password], &in_file, 69, ""),
        (&plain, &[], &by("exit 3"), 69, "failed with exit code 3"),
        (
            &plain,
            &[],
            &by("kill -9 $$"),
            69,
            "failed with exit code 137",
        ),
        (&plain, &[], &by("true"), 69, "the password, is empty"),
        (&plain, &[], &by("/no/such"), 69, "/no/such"),
        (&plain, &[], &by("cat /dev/zero"), 69, ""),
    ] {
        let finished = list(url, variables, options, code);
        assert!(finished.stderr.contains(said), "{finished:#?}");
    }
}

/// Feared most: the lock ends while CMD runs, because a new connection logs in with an old token.
#[test]
fn lock_is_held_while_tokens_change() {
    let (server, temp_dir) = (server(), TempDir::new());
    let (login, name) = (temp_dir.path("login"), unique("held"));
    std::fs::write(&login, format!("{PASSWORD}-of-me\nuser: me\n")).unwrap();
    let command = login_script(&temp_dir, "");
    let url = url(&server, "");
    let args = [
        "--url",
        &url,
        "--credentials-command",
        &command,
        "run",
        &name,
        "--",
        "cat",
    ];
    let running = Running::start(clean_command(&args));
    until("held", || is_held(&server, &name));
    let () = server.command(&["ACL", "SETUSER", "me", "resetpass", ">second"]);
    std::fs::write(&login, "second\nuser: me\n").unwrap();
    let before = runs(&temp_dir);
    let _: u32 = server.command(&["CLIENT", "KILL", "USER", "me"]);
    until("logged in again", || runs(&temp_dir) > before);
    running.release();
    until("released", || !is_held(&server, &name));
}

/// While CMD runs, a command for credentials is neither counted as its descendant nor ended with it.
#[test]
#[cfg(target_os = "linux")]
fn command_for_credentials_does_not_belong_to_cmd() {
    let (server, temp_dir) = (server(), TempDir::new());
    let [login, hanging, signaled] =
        ["login", "hanging", "signaled"].map(|name| temp_dir.path(name));
    std::fs::write(&login, format!("{PASSWORD}\nvalid-for: 1s\n")).unwrap();
    // The first ones print a login, and later ones hang.
    let hang = format!(
        "trap 'echo x > {signaled}' TERM; echo $$ > {hanging}.new && mv {hanging}.new {hanging}"
    );
    let hang = format!("{hang}; sleep 1000 & wait; wait");
    let command = login_script(
        &temp_dir,
        &format!("[ ! -e {} ] || {{ {hang}; }}", temp_dir.path("held")),
    );
    let (url, name) = (url(&server, ""), unique("held"));
    let args = [
        "--url",
        &url,
        "--credentials-command",
        &command,
        "run",
        "--kill-after",
        "1h",
    ];
    let until_hanging = format!(
        "echo x > {}; until [ -e {hanging} ]; do sleep 0.01; done; kill $$",
        temp_dir.path("held")
    );
    let finished = finish(clean_command(
        &[&args[..], &[&name, "--", "sh", "-c", &until_hanging]].concat(),
    ));
    // After a signal redlatch ends all that is left of CMD.
    finished.expect(143);
    assert!(!std::path::Path::new(&signaled).exists());
    let pid = std::fs::read_to_string(&hanging).unwrap();
    until("ended with redlatch", || {
        is_dead(pid.trim().parse().unwrap())
    });
}

/// One that hangs is an outage within its limit, and is killed.
#[test]
#[cfg(target_os = "linux")]
fn hanging_command_for_credentials_is_killed() {
    let (server, temp_dir) = (server(), TempDir::new());
    let pid = temp_dir.path("pid");
    let command = format!("echo $$ > {pid}; sleep 1000; true");
    let url = url(&server, "");
    let args = ["--url", &url, "--credentials-command", &command, "ls"];
    finish(clean_command(&args)).expect(69);
    let pid = std::fs::read_to_string(&pid).unwrap();
    until("killed", || is_dead(pid.trim().parse().unwrap()));
}
