//! PostgreSQL checks the token, with the table and the function of [`SCHEMA`].

use tokio_postgres::{Client, Error, Transaction};

/// The table and the function that check tokens. For a migration that runs once: it fails if they exist.
pub const SCHEMA: &str = include_str!("postgresql.sql");

#[cfg(feature = "testing")]
/// Adds an entry to the ledger, unless a later holder has used the account.
///
/// # Errors
///
/// If the token is too old ([`is_stale`]), and as [`Client::execute`].
pub async fn book(
    database: &mut Client,
    account: &str,
    amount: i64,
    token: u64,
) -> Result<(), Error> {
    let transaction = database.transaction().await?;
    // First, so that all that is read below includes the writes of the holders before.
    fence(&transaction, account, token).await?;
    let entry = "INSERT INTO ledger (account, amount, token) VALUES ($1, $2, $3)";
    let values: [&(dyn tokio_postgres::types::ToSql + Sync); 3] =
        [&account, &amount, &token.cast_signed()];
    transaction.execute(entry, &values).await?;
    transaction.commit().await
}

/// Records the token of a transaction. Other transactions on the resource wait until this one has ended.
///
/// # Errors
///
/// If a greater token has been recorded ([`is_stale`]), and as [`Client::execute`].
pub async fn fence(transaction: &Transaction<'_>, resource: &str, token: u64) -> Result<(), Error> {
    // A token beyond `i64` becomes a negative number, which is refused. No lock issues one.
    let token = token.cast_signed();
    let check = "SELECT redlatch_fence($1, $2)";
    transaction.execute(check, &[&resource, &token]).await?;
    Ok(())
}

/// Returns whether the token was too old. The caller must not retry with it.
pub fn is_stale(error: &Error) -> bool {
    error.code().is_some_and(|state| state.code() == "RL001")
}

/// Returns the greatest token that a transaction on the resource has recorded; 0 if there is none.
///
/// # Errors
///
/// As [`Client::query_opt`].
pub async fn greatest_token(database: &Client, resource: &str) -> Result<u64, Error> {
    let read = "SELECT token FROM redlatch_fence_token WHERE resource = $1";
    let row = database.query_opt(read, &[&resource]).await?;
    Ok(row.map_or(0, |row| row.get::<_, i64>(0).cast_unsigned()))
}
