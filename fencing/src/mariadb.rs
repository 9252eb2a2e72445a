//! MariaDB checks the token, with the table and the procedure of [`SCHEMA`].

#[cfg(feature = "testing")]
use sqlx::{Connection, MySqlConnection};
use sqlx::{Error, MySql, Transaction};

/// The table and the procedure that check tokens: a script for the client `mariadb`, with `DELIMITER`. For a migration that runs once: it fails if they exist.
pub const SCHEMA: &str = include_str!("mariadb.sql");

#[cfg(feature = "testing")]
/// Adds an entry to the ledger, unless a later holder has used the account.
///
/// # Errors
///
/// If the token is too old ([`is_stale`]), or as of sqlx.
pub async fn book(
    database: &mut MySqlConnection,
    account: &str,
    amount: i64,
    token: u64,
) -> Result<(), Error> {
    let mut transaction = database.begin().await?;
    let written = async {
        // First, so that all that is read below includes the writes of the holders before.
        fence(&mut transaction, account, token).await?;
        let entry = "INSERT INTO ledger (account, amount, token) VALUES (?, ?, ?)";
        let entry = sqlx::query(entry).bind(account).bind(amount);
        let entry = entry.bind(token.cast_signed());
        entry.execute(&mut *transaction).await
    };
    match written.await {
        Ok(_) => transaction.commit().await,
        Err(error) => {
            // If it were only dropped, the row would stay locked until the connection is used again.
            transaction.rollback().await?;
            Err(error)
        }
    }
}

/// Records the token of a transaction. Other transactions on the resource wait until this one has ended.
///
/// # Errors
///
/// If a greater token has been recorded ([`is_stale`]), or as of sqlx. The caller must roll back.
pub async fn fence(
    transaction: &mut Transaction<'_, MySql>,
    resource: &str,
    token: u64,
) -> Result<(), Error> {
    // A token beyond `i64` becomes a negative number, which is refused. No lock issues one.
    let token = token.cast_signed();
    let check = sqlx::query("CALL redlatch_fence(?, ?)");
    check
        .bind(resource)
        .bind(token)
        .execute(&mut **transaction)
        .await?;
    Ok(())
}

/// Returns whether the token was too old. The caller must not retry with it.
pub fn is_stale(error: &Error) -> bool {
    let error = error.as_database_error();
    error.is_some_and(|error| error.code().as_deref() == Some("RL001"))
}
