//! A sentinel that names a wrong master, and is very sure of it.

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// Listens from now on, until its runtime ends; the port. It calls the server at `wrong` the master.
pub async fn start(wrong: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(serve(client, wrong));
        }
    });
    port
}

async fn serve(client: TcpStream, wrong: u16) {
    let mut client = BufReader::new(client);
    while let Some(words) = command(&mut client).await {
        let answer = answer(&words, wrong);
        if client.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// `*2\r\n$3\r\n…`
async fn command(client: &mut BufReader<TcpStream>) -> Option<Vec<String>> {
    let count = number(client).await?;
    let mut words = Vec::new();
    for _ in 0..count {
        let mut word = vec![0; number(client).await? + 2];
        client.read_exact(&mut word).await.ok()?;
        words.push(String::from_utf8_lossy(&word).trim_end().to_uppercase());
    }
    Some(words)
}

async fn number(client: &mut BufReader<TcpStream>) -> Option<usize> {
    let mut line = String::new();
    client.read_line(&mut line).await.ok()?;
    line.get(1..)?.trim().parse().ok()
}

fn answer(words: &[String], wrong: u16) -> String {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let bulk = |text: &str| format!("${}\r\n{text}\r\n", text.len());
    let port = wrong.to_string();
    match *words {
        ["HELLO", ..] => {
            let facts = [
                ("server", "redis"),
                ("version", "7.0.0"),
                ("mode", "sentinel"),
            ];
            let facts = facts.map(|(name, fact)| bulk(name) + &bulk(fact));
            format!("%3\r\n{}", facts.concat())
        }
        ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", ..] => {
            format!("*2\r\n{}{}", bulk("127.0.0.1"), bulk(&port))
        }
        ["SENTINEL", "MASTER", ..] => {
            let facts = [
                ("ip", "127.0.0.1"),
                ("port", &port),
                ("config-epoch", "1000000"),
            ];
            let facts = facts.map(|(name, fact)| bulk(name) + &bulk(fact));
            format!("%3\r\n{}", facts.concat())
        }
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
