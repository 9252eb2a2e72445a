//! `redlatch token`: show, advance or delete the fencing token of a lock. The epochs of an election are tokens of its lock.

use redlatch::Client;
use redlatch::inspect::ObjectState;

use crate::args::{Token, TokenCommand};
use crate::exit::{self, Failure};
use crate::stderr::note;
use crate::store_args::StoreArgs;
use crate::{stdout, store};

pub(crate) async fn token(store_args: &StoreArgs, token: &Token) -> Result<u8, Failure> {
    let name = &token.name;
    store::check_name(name).await?;
    let client = store::connect(store_args, Client::builder()).await?;
    if let Some(state) = client.inspect(name).await?
        && !matches!(state, ObjectState::Lock { .. })
    {
        return Err(store::wrong_kind_failure(name, &state, "lock"));
    }
    let lock = client.fenced_lock(name);
    let number = match token.command {
        None => lock.current_token().await?,
        Some(TokenCommand::Advance { at_least }) => lock.advance_token(at_least).await?,
        Some(TokenCommand::Delete) => {
            if lock.delete_token().await? {
                return Ok(exit::OK);
            }
            note!("{name}: the lock is held, so its token was not deleted");
            return Ok(exit::NOT_ACQUIRED);
        }
    };
    stdout::lines([number.to_string()]).await
}
