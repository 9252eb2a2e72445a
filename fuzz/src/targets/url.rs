//! URLs of stores.

use redlatch::{Client, Error, PublicUrl};

use super::server::{Replies, in_process};

const SECRET: &str = "correct-horse";

/// Connects to a URL, and to one whose password begins with the input. Neither an error nor what may be
/// shown repeats a password.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    connect(text.to_owned());
    let url = format!("redis://user:{text}{SECRET}@host");
    if let Ok(public) = PublicUrl::parse(&url) {
        assert!(!format!("{public:?}").contains(SECRET), "{public:?}");
    }
    if let Some(error) = connect(url) {
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
