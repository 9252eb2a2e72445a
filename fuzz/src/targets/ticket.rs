//! Tickets that another process has passed on.

use redlatch::Ticket;

/// Parses a text. An accepted ticket is written as it was read, and its debug output does not contain its secret.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(ticket) = text.parse::<Ticket>() {
        assert_eq!(ticket.to_string(), text);
        let (_, secret) = text.rsplit_once('.').expect("a ticket has parts");
        assert!(!format!("{ticket:?}").contains(secret));
    }
}
