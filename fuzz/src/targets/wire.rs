//! What a server sends on a connection that several callers share: any bytes, or the right replies in any pieces, between messages,
//! errors and broken connections.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::Poll;

use redlatch::{Client, Result};

use super::server::{Server, handshake, in_process};

/// Separates what the server sends for one command from that for the next. No valid reply has it.
const SEPARATOR: u8 = 0xff;

/// Sends these bytes for the commands of several callers. The first byte is the size of the pieces.
pub fn run_replies(data: &[u8]) {
    let Some((&piece, replies)) = data.split_first() else {
        return;
    };
    let replies = replies.split(|byte| *byte == SEPARATOR);
    let server = Raw {
        replies: replies.map(<[u8]>::to_vec).collect(),
        piece: piece.into(),
    };
    in_process(server, use_locks(false));
}

/// Gives each caller the right reply, in the way that the input says. A caller that gets that of another one panics.
pub fn run_interleaved(data: &[u8]) {
    let server = Interleaved {
        input: data.iter().copied().collect(),
        breaks: 0,
    };
    in_process(server, use_locks(true));
}

struct Raw {
    replies: VecDeque<Vec<u8>>,
    piece: usize,
}

impl Server for Raw {
    fn is_open(&self) -> bool {
        !self.replies.is_empty()
    }

    fn answer(&mut self, command: &[String]) -> Option<Vec<u8>> {
        handshake(command).or_else(|| self.replies.pop_front())
    }

    fn piece(&mut self) -> usize {
        self.piece
    }
}

/// Two bytes of the input for each command: what comes with the reply, and the size of its pieces.
struct Interleaved {
    input: VecDeque<u8>,
    /// Number of connections that were broken.
    breaks: usize,
}

/// So that the callers get answers in time.
const MAX_BREAKS: usize = 20;

impl Server for Interleaved {
    fn is_open(&self) -> bool {
        true
    }

    fn answer(&mut self, command: &[String]) -> Option<Vec<u8>> {
        if let Some(reply) = handshake(command) {
            return Some(reply);
        }
        let mut answer = reply_to(command).unwrap_or_else(|| "_\r\n".to_owned());
        const MESSAGE: &str = ">3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$1\r\n0\r\n";
        match self.input.pop_front().unwrap_or_default() % 8 {
            0 => answer.insert_str(0, MESSAGE),
            1 => answer.push_str(MESSAGE),
            2 => answer.insert_str(0, "|1\r\n+ttl\r\n:3\r\n"),
            3 => answer = "-ERR not today\r\n".to_owned(),
            4 => answer = "-NOSCRIPT not here\r\n".to_owned(),
            5 if self.breaks < MAX_BREAKS => {
                self.breaks += 1;
                return None;
            }
            _ => {}
        }
        Some(answer.into_bytes())
    }

    fn piece(&mut self) -> usize {
        self.input.pop_front().unwrap_or(u8::MAX).into()
    }
}

/// Returns the reply to a step, or to several steps in one script, each of which has one key.
fn reply_to(command: &[String]) -> Option<String> {
    let count: usize = command.get(2)?.parse().ok()?;
    let (keys, args) = command.get(3..)?.split_at_checked(count)?;
    let args_of_one = args.len().checked_div(count)?;
    let replies = keys.iter().zip(args.chunks(args_of_one.max(1)));
    let replies: Vec<_> = replies
        .map(|(key, args)| {
            // An acquisition has a lease there, a release a channel.
            let acquires = args
                .get(1)
                .is_some_and(|lease| lease.parse::<u64>().is_ok());
            match acquires {
                true if key.starts_with("free") => "_\r\n",
                true => ":10000\r\n",
                false => ":1\r\n",
            }
        })
        .collect();
    Some(match &*replies {
        [one] => (*one).to_owned(),
        several => format!("*{count}\r\n{}", several.concat()),
    })
}

async fn use_lock(client: Client, number: usize, replies_are_right: bool) {
    let is_free = number.is_multiple_of(2);
    let kind = if is_free { "free" } else { "held" };
    let lock = client.lock(&format!("{kind}-{number}"));
    for _ in 0..3 {
        // Without an answer, it may have been acquired.
        let Ok(acquired) = lock.try_lock().await else {
            continue;
        };
        let is_right = acquired.is_some() == is_free;
        assert!(
            is_right || !replies_are_right,
            "the answer to another caller"
        );
        if let Some(guard) = acquired {
            let _ = guard.unlock().await;
        }
    }
}

/// Several callers try to acquire locks at the same time. Those with even numbers are free.
async fn use_locks(replies_are_right: bool) -> Result<()> {
    let client = Client::connect("redis://a").await?;
    let mut callers: Vec<_> = (0..6)
        .map(|number| Box::pin(use_lock(client.clone(), number, replies_are_right)))
        .collect();
    poll_fn(|cx| {
        callers.retain_mut(|caller| caller.as_mut().poll(cx).is_pending());
        match callers.is_empty() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    client.flush().await;
    Ok(())
}
