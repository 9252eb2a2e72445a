//! `redlatch token`: show, advance or delete the fencing token of a lock. The epochs of an election
//! are tokens of its lock.

use std::io::Read as _;
use std::path::Path;

use redlatch::Client;
use redlatch::inspect::ObjectState;

use crate::args::change::{Token, TokenCommand};
use crate::exit::{self, Failure};
use crate::output::stderr::note;
use crate::output::stdout;
use crate::store;
use crate::store::args::StoreArgs;
use crate::threads::run_in_thread;

pub(crate) async fn token(store_args: &StoreArgs, token: &Token) -> Result<u8, Failure> {
    if let Some(file) = &token.from_file {
        if token.command.is_some() {
            return Err(Failure::usage("--from-file takes no subcommand"));
        }
        return advance_all(store_args, file).await;
    }
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

/// Advances the token of each name in a file.
async fn advance_all(store_args: &StoreArgs, file: &Path) -> Result<u8, Failure> {
    let path = file.to_owned();
    let read = run_in_thread("file", move || match path.as_os_str() == "-" {
        true => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).map(|_| text)
        }
        false => std::fs::read_to_string(path),
    });
    let text = read.await.and_then(|text| text);
    let text =
        text.map_err(|error| Failure::system(&format!("cannot read {}", file.display()), &error))?;
    let tokens = parse(&text).await?;
    let client = store::connect(store_args, Client::builder()).await?;
    for (name, at_least) in tokens {
        let lock = client.fenced_lock(name);
        let token = lock.advance_token(at_least).await.map_err(|error| {
            let failure = Failure::from(error);
            let message = format!("{name}: {}", failure.message);
            Failure { message, ..failure }
        })?;
        if !stdout::lines_if_open([format!("{name} {token}")]).await? {
            break;
        }
    }
    Ok(exit::OK)
}

/// Reads a name and a token from each line. They are separated by a tab, or by one space: of more, it is not known whether
/// they belong to the name. The error names all lines that are wrong.
async fn parse(text: &str) -> Result<Vec<(&str, u64)>, Failure> {
    let (mut tokens, mut wrong) = (Vec::new(), Vec::new());
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() {
            continue;
        }
        let by_space = || {
            line.rsplit_once(' ')
                .filter(|(name, _)| !name.ends_with(' '))
        };
        let Some((name, token)) = line.rsplit_once('\t').or_else(by_space) else {
            wrong.push(format!(
                "line {number}: no name and token with a tab or one space between them"
            ));
            continue;
        };
        match (token.parse::<u64>(), store::check_name(name).await) {
            (Ok(token), Ok(())) if token <= redlatch::MAX_TOKEN => tokens.push((name, token)),
            (_, Ok(())) => wrong.push(format!("line {number}: the last word is no token")),
            (_, Err(failure)) => wrong.push(format!("line {number}: {}", failure.message)),
        }
    }
    match wrong.is_empty() {
        true => Ok(tokens),
        false => Err(Failure::usage(wrong.join("\n"))),
    }
}
