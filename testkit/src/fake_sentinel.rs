//! A fake sentinel that reports a wrong master, with a higher epoch than any real sentinel.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

/// Starts a fake sentinel that reports the server at the port `wrong` as the master, with a very
/// high epoch. It listens on the returned port until the program ends.
///
/// # Panics
///
/// If no port is free.
pub fn fake_sentinel(wrong: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("its address").port();
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || serve(client, wrong));
        }
    });
    port
}

fn serve(client: TcpStream, wrong: u16) -> Option<()> {
    let mut client = BufReader::new(client);
    loop {
        let words = command(&mut client)?;
        let answer = answer(&words, wrong);
        client.get_mut().write_all(answer.as_bytes()).ok()?;
    }
}

/// Reads one command: `*2\r\n$3\r\n…`
fn command(client: &mut impl BufRead) -> Option<Vec<String>> {
    let count = number(client)?;
    let mut words = Vec::new();
    for _ in 0..count {
        let mut word = vec![0; number(client)? + 2];
        client.read_exact(&mut word).ok()?;
        words.push(String::from_utf8_lossy(&word).trim_end().to_uppercase());
    }
    Some(words)
}

fn number(client: &mut impl BufRead) -> Option<usize> {
    let mut line = String::new();
    client.read_line(&mut line).ok()?;
    line.get(1..)?.trim().parse().ok()
}

fn answer(words: &[String], wrong: u16) -> String {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let bulk = |text: &str| format!("${}\r\n{text}\r\n", text.len());
    let map = |facts: [(&str, &str); 3]| {
        let facts = facts.map(|(name, fact)| bulk(name) + &bulk(fact));
        format!("%3\r\n{}", facts.concat())
    };
    let port = wrong.to_string();
    match *words {
        ["HELLO", ..] => map([
            ("server", "redis"),
            ("version", "7.0.0"),
            ("mode", "sentinel"),
        ]),
        ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", ..] => {
            format!("*2\r\n{}{}", bulk("127.0.0.1"), bulk(&port))
        }
        ["SENTINEL", "MASTER", ..] => map([
            ("ip", "127.0.0.1"),
            ("port", &port),
            ("config-epoch", "1000000"),
        ]),
        ["SUBSCRIBE", ref channels @ ..] => {
            let each = channels.iter().enumerate().map(|(n, channel)| {
                let channel = bulk(&channel.to_lowercase());
                format!(">3\r\n{}{channel}:{}\r\n", bulk("subscribe"), n + 1)
            });
            each.collect()
        }
        _ => "+OK\r\n".to_owned(),
    }
}
