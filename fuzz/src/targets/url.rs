//! URLs of stores.

use redlatch::{Client, Error};

use super::server::{Replies, in_process};

const SECRET: &str = "correct-horse";

/// Connects to a URL, and to one whose password begins with the input. No error repeats a password.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    connect(text.to_owned());
    let error = connect(format!("redis://user:{text}{SECRET}@host"));
    if let Some(error) = error {
        assert!(!error.to_string().contains(SECRET), "{error}");
    }
}

/// Connects to servers that refuse all connections. Returns the error.
fn connect(url: String) -> Option<Error> {
    // It has no servers.
    if url == "embedded:" {
        return None;
    }
    in_process(Replies::default(), async move {
        Client::connect(&url).await.err()
    })
    .flatten()
}
