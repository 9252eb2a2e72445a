//! Permit ids that a caller has read from somewhere.

use redlatch::PermitId;

/// Parses a text. An accepted id is written as it was read, in lower case.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(id) = text.parse::<PermitId>() {
        assert_eq!(id.to_string(), text.to_ascii_lowercase());
        assert_eq!(PermitId::from_bytes(*id.as_bytes()), id);
    }
}
