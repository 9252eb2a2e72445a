//! Random commands: few keys and few values, so that types, names and scores meet.

use redlatch_simulation::server::ConnectionId;

use crate::pair::ServerPair;
use crate::random::{Random, seeded};
use crate::state;

const COMMANDS: usize = 21_000;

/// Command lines with placeholders: `K` key, `F` field or member, `V` value, `I` integer, `D` number, `R` place
/// in a range, `S` end of a range of scores, `T` time in ms, `U` a value of its own, `C` channel, `P` pattern.
/// There is one pattern of channels, because the order of several is not specified.
const LINES: &str = "
    PING|PING V|ECHO V|TIME|DBSIZE|ROLE|SELECT 0|CLIENT ID|CLIENT GETNAME|CONFIG GET databases
    TYPE K|TYPE K|EXISTS K|EXISTS K K K|TTL K|PTTL K|PEXPIRETIME K|KEYS *|KEYS P|SCAN 0 COUNT 1000 TYPE hash
    EXPIRE K 1000000|PEXPIRE K T|PEXPIRE K T NX|PEXPIRE K T XX|PEXPIRE K U GT|PEXPIRE K U LT|PEXPIRE K -1
    PEXPIRE K V|PEXPIREAT K 99999999999999|EXPIREAT K 1|PERSIST K|DEL K|DEL K K|UNLINK K K
    GET K|GET K|STRLEN K|GETRANGE K R R|SET K V|SET K I|SET K V PX T|SET K V NX|SET K V XX GET|SET K I KEEPTTL
    SET K V PX 0|SET K V NX XX|SET K V PX V|SET K V EX 100000|SET K V GET|INCR K|DECR K|INCRBY K I|DECRBY K I
    INCRBY K V|SET K 9223372036854775807
    HSET K F V|HSET K F I|HSET K F V F V|HSET K F|HGET K F|HMGET K F F F|HGETALL K|HKEYS K|HVALS K|HLEN K
    HEXISTS K F|HDEL K F|HDEL K F F|HINCRBY K F I|HDEL K
    RPUSH K F|RPUSH K F F F|LPUSH K F F|LPOP K|RPOP K|LLEN K|LRANGE K R R|LRANGE K 0 -1|LINDEX K R|LPOS K F
    LREM K I F|LREM K 1 F|LREM K -1 F|LINDEX K V
    ZADD K D F|ZADD K D F D F|ZADD K NX D F|ZADD K XX D F|ZADD K GT D F|ZADD K LT D F|ZADD K XX GT CH D F
    ZADD K INCR D F|ZADD K GT INCR D F|ZADD K NX XX D F|ZADD K GT LT D F|ZADD K D|ZADD K V F|ZINCRBY K D F|ZADD K INCR D F D F
    ZCARD K|ZSCORE K F|ZCOUNT K S S|ZRANGE K R R|ZRANGE K R R WITHSCORES|ZREVRANGE K R R|ZREVRANGE K 0 0 WITHSCORES
    ZREM K F|ZREM K F F|ZREMRANGEBYRANK K R R|ZREMRANGEBYSCORE K S S|ZCOUNT K V V
    PUBLISH C V|PUBLISH C V|PUBLISH C V|SPUBLISH C V|SUBSCRIBE C|SUBSCRIBE C C|UNSUBSCRIBE C|UNSUBSCRIBE C
    PSUBSCRIBE ch*|PUNSUBSCRIBE ch*|SSUBSCRIBE C|SUNSUBSCRIBE C|PUBSUB NUMSUB C C|PUBSUB SHARDNUMSUB C
    PUBSUB CHANNELS|PUBSUB CHANNELS P|PUBSUB SHARDCHANNELS|PUBSUB NUMPAT|WAIT 0 0
    GET|GET K K|HSET K|EVALSHA 0000000000000000000000000000000000000000 0|EVAL V 0|EVAL X V|EVAL X -1|EVAL X 3 K
    SCRIPT EXISTS 0000000000000000000000000000000000000000|INFO server|HELLO 3|HELLO 4|CLIENT SETNAME V
    AUTH V|AUTH V V
    CLIENT TRACKING ON OPTIN NOLOOP|CLIENT CACHING YES|CLIENT CACHING YES|CLIENT CACHING YES|CLIENT TRACKING OFF
";

/// Scripts that pass all kinds of values to commands and back.
const SCRIPTS: &[&str] = &[
    "return { 1, 2.9, -2.9, 'x', true, false, { ok = 'fine' }, { err = 'E bad' }, nil, 3 }",
    "return { redis.call('TYPE', KEYS[1]), redis.call('TYPE', KEYS[2]).ok }",
    "return redis.call('GET', KEYS[1])",
    "return redis.pcall('GET', KEYS[1])",
    "redis.call('SET', KEYS[2], ARGV[1]) return redis.call('INCR', KEYS[1])",
    "local ok, problem = pcall(redis.call, 'HSET', KEYS[1], 'f', 1) return { ok, type(problem) == 'table' and problem.err or problem }",
    "return redis.call('HGETALL', KEYS[1])",
    "return redis.call('HMGET', KEYS[1], 'a', 'nothing')",
    "return redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')",
    "return { redis.call('ZADD', KEYS[1], 1.5, 'x'), redis.call('ZSCORE', KEYS[1], 'x'), redis.call('ZADD', KEYS[1], 'INCR', 0.25, 'x') }",
    "return redis.call('SET', KEYS[1], 10 / 4)",
    "return { redis.call('SET', KEYS[1], 1e15), redis.call('SET', KEYS[2], 2 ^ 60), redis.call('GET', KEYS[2]) }",
    "return redis.error_reply('WRONGKIND of thing')",
    "return { redis.error_reply('ONE'), redis.error_reply('-TWO words'), redis.status_reply('good') }",
    "return redis.call('GET')",
    "return redis.pcall('SUBSCRIBE', 'x')",
    "redis.call('RPUSH', KEYS[1], 'a')\nerror('no')",
    "error({ err = 'OWN error' })",
    "local t\nreturn t.x",
    "return redis.sha1hex('x')",
    "return #ARGV + #KEYS",
    "return { redis.call('PUBLISH', ARGV[1], 'm'), redis.call('PUBSUB', 'NUMSUB', ARGV[1]) }",
    "return { redis.call('PTTL', KEYS[1]), redis.call('EXISTS', KEYS[1], KEYS[2]) }",
    "return redis.call('LPOS', KEYS[1], 'a')",
    "return redis.call('SET', KEYS[1], {})",
    "return tostring(redis.call('INCRBY', KEYS[1], 3))",
    "return { string.format('%.0f', 2 ^ 53), tostring(1e15), tostring(0.1), 10 % 3, math.floor(-1.5) }",
    "return this is no script",
];

struct Placeholders<'a>(&'a mut Random);

impl Placeholders<'_> {
    fn fill(&mut self, line: &str) -> Vec<String> {
        let words = line.split_whitespace();
        words.map(|word| self.word(word)).collect()
    }

    fn word(&mut self, word: &str) -> String {
        let of = |random: &mut Random, all: &[&str]| (*random.pick(all)).to_owned();
        let random = &mut *self.0;
        match word {
            "K" => format!("k{}", random.below(7)),
            "F" => of(random, &["a", "b", "c", "d", ""]),
            "V" => of(random, &["", "x", "hello", "-0", "007", "{k}"]),
            "I" => (i64::try_from(random.below(7)).unwrap() - 3).to_string(),
            "D" => of(
                random,
                &["0", "1", "-1", "1.5", "2e3", "inf", "-inf", "0.1", "3"],
            ),
            "R" => (i64::try_from(random.below(9)).unwrap() - 4).to_string(),
            "S" => of(
                random,
                &["-inf", "+inf", "0", "(0", "1", "(1.5", "-1", "2000"],
            ),
            "T" => (100_000_000 * (1 + random.below(3))).to_string(),
            "U" => (20_000 * (5000 + random.below(1_000_000_000))).to_string(),
            "C" => of(random, &["ch", "ch2", "other"]),
            "P" => of(random, &["*", "ch*", "ch?", "[a-o]*", "k[135]"]),
            "X" => "return 1".to_owned(),
            word => word.to_owned(),
        }
    }
}

fn script(random: &mut Random) -> Vec<String> {
    let source = (*random.pick(SCRIPTS)).to_owned();
    let mut args = vec!["EVAL".to_owned(), source, "2".to_owned()];
    args.extend(Placeholders(random).fill("K K C V"));
    args
}

#[test]
fn random_commands_have_equal_replies_and_leave_equal_state() {
    let mut random = seeded("random commands");
    let mut pair = ServerPair::new();
    let ids: Vec<ConnectionId> = (0..3).map(|_| pair.connect_resp3()).collect();
    let lines: Vec<&str> = LINES.split(['|', '\n']).map(str::trim).collect();
    let lines: Vec<&str> = lines.into_iter().filter(|line| !line.is_empty()).collect();
    let mut compared = 0;
    while pair.commands_run < COMMANDS {
        let id = *random.pick(&ids);
        for _ in 0..random.below(40) {
            let args = match random.one_in(6) {
                true => script(&mut random),
                false => {
                    let line = *random.pick(&lines);
                    Placeholders(&mut random).fill(line)
                }
            };
            pair.send(id, &args);
        }
        if random.one_in(20) {
            compared += state::compare(&mut pair, id);
        }
        if random.one_in(60) {
            pair.run(id, &["FLUSHALL"]);
        }
    }
    compared += state::compare(&mut pair, ids[0]);
    println!("{} commands, {compared} keys compared", pair.commands_run);
    assert!(compared > 100, "there must be something to compare");
}
