//! An HTTP service checks the token in the header `Fencing-Token`.

use http::{HeaderMap, StatusCode};
#[cfg(feature = "testing")]
use rusqlite::Connection;

#[cfg(feature = "testing")]
use crate::sqlite;

#[cfg(feature = "testing")]
/// Adds an entry to the ledger. Returns the status of the response: 204, 400 or 428 for a bad token, 412 for a token that
/// is too old.
pub fn book(
    database: &mut Connection,
    headers: &HeaderMap,
    account: &str,
    amount: i64,
) -> StatusCode {
    let token = match fencing_token(headers) {
        Ok(token) => token,
        Err(status) => return status,
    };
    match sqlite::book(database, account, amount, token) {
        Ok(()) => StatusCode::NO_CONTENT,
        Err(error) if sqlite::is_stale(&error) => StatusCode::PRECONDITION_FAILED,
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Returns the fencing token of a request.
///
/// # Errors
///
/// 428 (Precondition Required) if there is none, 400 (Bad Request) if it is not exactly one positive number.
pub fn fencing_token(headers: &HeaderMap) -> Result<u64, StatusCode> {
    let mut values = headers.get_all("fencing-token").iter();
    let value = values.next().ok_or(StatusCode::PRECONDITION_REQUIRED)?;
    let digits = value.to_str().unwrap_or_default();
    let token: i64 = digits.parse().unwrap_or_default();
    if token < 1 || digits.starts_with('+') || values.next().is_some() {
        return Err(StatusCode::BAD_REQUEST);
    }
    Ok(token.cast_unsigned())
}
