use super::super::{Refusal, User};
use super::*;

#[test]
fn unsupported_feature_ends_the_run() {
    let mut test = TestServer::new();
    let id = test.connect();
    for line in [
        "LOLWUT",
        "SET k v FOO",
        "ZRANGE k 0 -1 REV",
        "CLIENT LIST",
        "SELECT 1",
        "INFO commandstats",
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        assert!(test.send(id, &words).is_err(), "{line}");
    }
    for source in [
        "return redis.pcall('LOLWUT')",
        "pcall(redis.call, 'SET', 'k', 'v', 'FOO') return 1",
        "pcall(redis.setresp, 3) return 1",
        "pcall(function() return os.time() end) return 1",
        "pcall(function() x = 1 end) return 1",
        "return { map = {} }",
        "return math.random and 1 or pcall(math.random) and 0 or print",
    ] {
        assert!(test.send(id, &["EVAL", source, "0"]).is_err(), "{source}");
    }
    assert_eq!(test.run(id, "PING"), "+PONG", "another run could continue");
}

#[test]
fn bytes_may_arrive_one_by_one() {
    let mut test = TestServer::new();
    let id = test.server.connect();
    let bytes = [command(&["SET", "k", "a\r\nb"]), command(&["GET", "k"])].concat();
    let mut outputs = Vec::new();
    for byte in bytes {
        let now = test.now();
        outputs.extend(test.server.receive(id, &[byte], now).unwrap());
    }
    assert_eq!(sent(&outputs, id), "+OK | $4 a b");
    let now = test.now();
    let outputs = test.server.receive(id, b"GET k\r\n", now).unwrap();
    assert_eq!(
        sent(&outputs, id),
        "-ERR Protocol error: expected '*', got 'G' | closed"
    );
}

#[test]
fn scripts_may_use_memory_that_they_began_to_use() {
    let mut test = TestServer::new();
    let id = test.connect();
    test.run(id, "HSET h f 1");
    test.server.refuse(Some(Refusal::OutOfMemory));
    let refusal = "-OOM command not allowed when used memory > 'maxmemory'.";
    assert_eq!(test.run(id, "SET k v"), refusal);
    assert_eq!(test.run(id, "HDEL h x"), ":0");
    let source = "redis.call('SET', KEYS[1], 1) return 1";
    assert!(test.eval(id, source, &["k"]).starts_with(refusal));
    let source = "redis.call('HDEL', KEYS[1], '') redis.call('HSET', KEYS[1], 'f', 2) return 1";
    assert_eq!(test.eval(id, source, &["h"]), ":1");
    test.server.refuse(None);
    assert_eq!(test.run(id, "SET k v"), "+OK");
}

#[test]
fn writes_are_refused_without_replicas_and_everything_while_loading() {
    let mut test = TestServer::new();
    let id = test.connect();
    test.server.refuse(Some(Refusal::TooFewReplicas));
    assert_eq!(test.run(id, "GET k"), "_");
    let refusal = "-NOREPLICAS Not enough good replicas to write.";
    assert_eq!(test.run(id, "DEL k"), refusal);
    let source = "return redis.call('DEL', KEYS[1])";
    assert!(test.eval(id, source, &["k"]).starts_with(refusal));
    test.server.refuse(Some(Refusal::Loading));
    assert!(test.run(id, "GET k").starts_with("-LOADING"));
}

#[test]
fn scripts_can_be_forgotten() {
    let mut test = TestServer::new();
    let id = test.connect();
    let sha = test.run_args(id, &["SCRIPT", "LOAD", "return 5"]);
    let sha = sha.rsplit(' ').next().unwrap().to_owned();
    assert_eq!(test.run(id, &format!("EVALSHA {sha} 0")), ":5");
    test.server.forget_scripts();
    let refusal = "-NOSCRIPT No matching script. Please use EVAL.";
    assert_eq!(test.run(id, &format!("EVALSHA {sha} 0")), refusal);
}

#[test]
fn passwords_and_permissions_are_checked() {
    let mut test = TestServer::new();
    test.server = Server::new(Config {
        password: Some("secret".into()),
        ..config()
    });
    let id = test.server.connect();
    assert_eq!(test.run(id, "GET k"), "-NOAUTH Authentication required.");
    assert!(
        test.run(id, "HELLO 3")
            .starts_with("-NOAUTH HELLO must be called")
    );
    assert!(
        test.run(id, "HELLO 3 AUTH default wrong")
            .starts_with("-WRONGPASS")
    );
    assert!(
        test.run(id, "HELLO 3 AUTH default secret")
            .starts_with("%7 $6 server")
    );

    let limited = User {
        password: Some("pw".into()),
        denied: ["GET".to_owned(), "CLIENT|TRACKING".to_owned()].into(),
        keys: vec!["app:*".into()],
        channels: vec!["app:*".into()],
    };
    test.server.set_user("limited", limited);
    assert_eq!(test.run(id, "AUTH limited pw"), "+OK");
    for (line, refusal) in [
        ("GET app:k", "run the 'get' command"),
        ("CLIENT TRACKING ON", "run the 'client|tracking' command"),
        ("SET k v", "access one of the keys used as arguments"),
        (
            "SUBSCRIBE c",
            "access one of the channels used as arguments",
        ),
        (
            "PSUBSCRIBE app:x*",
            "access one of the channels used as arguments",
        ),
    ] {
        let refusal = format!("-NOPERM this user has no permissions to {refusal}");
        assert_eq!(test.run(id, line), refusal, "{line}");
    }
    assert_eq!(test.run(id, "SET app:k v"), "+OK");
    for (source, refusal) in [
        (
            "return redis.call('GET', 'app:k')",
            "run this command or subcommand",
        ),
        (
            "return redis.call('DEL', 'k')",
            "access at least one of the keys mentioned in the command arguments",
        ),
        (
            "return redis.call('PUBLISH', 'c', '')",
            "publish to the channel mentioned in the command",
        ),
    ] {
        let refusal = format!("-ERR The user executing the script can't {refusal}");
        assert!(test.eval(id, source, &[]).starts_with(&refusal), "{source}");
    }
}
