//! SQLite checks the token, with the table and the trigger of [`SCHEMA`]. Begin the transaction with
//! `TransactionBehavior::Immediate`.

#[cfg(any(doc, feature = "testing"))]
use rusqlite::Connection;
#[cfg(feature = "testing")]
use rusqlite::TransactionBehavior;
use rusqlite::{Error, Transaction, ffi};

/// The table and the trigger that check tokens. For a migration that runs once: it fails if they exist.
pub const SCHEMA: &str = include_str!("sqlite.sql");

#[cfg(feature = "testing")]
/// Adds an entry to the ledger, unless a later holder has used the account.
///
/// # Errors
///
/// If the token is too old ([`is_stale`]), and as [`Connection::execute`].
pub fn book(
    database: &mut Connection,
    account: &str,
    amount: i64,
    token: u64,
) -> Result<(), Error> {
    // If an error returns early, the transaction is rolled back.
    let transaction = database.transaction_with_behavior(TransactionBehavior::Immediate)?;
    fence(&transaction, account, token)?;
    let entry = "INSERT INTO ledger (account, amount, token) VALUES (?1, ?2, ?3)";
    transaction.execute(entry, (account, amount, token.cast_signed()))?;
    transaction.commit()
}

/// Records the token of a transaction.
///
/// # Errors
///
/// If a greater token has been recorded ([`is_stale`]), and as [`Connection::execute`].
pub fn fence(transaction: &Transaction<'_>, resource: &str, token: u64) -> Result<(), Error> {
    // A token beyond `i64` becomes a negative number, which is refused. No lock issues one.
    let token = token.cast_signed();
    let check = "INSERT INTO redlatch_fence (resource, token) VALUES (?1, ?2)";
    transaction.execute(check, (resource, token))?;
    Ok(())
}

/// Returns whether the token was too old. The caller must not retry with it.
pub fn is_stale(error: &Error) -> bool {
    let Error::SqliteFailure(failure, Some(message)) = error else {
        return false;
    };
    failure.extended_code == ffi::SQLITE_CONSTRAINT_TRIGGER && message.starts_with("RL001")
}
