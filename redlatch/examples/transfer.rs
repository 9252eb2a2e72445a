//! Money between accounts: both are locked together, whichever way the money goes. Nothing is lost,
//! and transfers in opposite directions do not deadlock.
//!
//! ```sh
//! cargo run --example transfer                        # needs no server
//! cargo run --example transfer -- redis://127.0.0.1   # or with REDLATCH_URL
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redlatch::{Client, Embedded, MultiLock};
use tokio::task::JoinSet;

const ACCOUNTS: usize = 3;
const CLERKS: usize = 6;
const TRANSFERS: usize = 30;
const OPENING: i64 = 1000;

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// What is in the accounts: numbers in this process, or keys in a server. Reading and writing are
/// two things, so that without a lock transfers would undo each other.
#[derive(Clone)]
enum Bank {
    Here(Arc<[AtomicI64; ACCOUNTS]>),
    Server(MultiplexedConnection),
}

impl Bank {
    async fn balance(&mut self, account: usize) -> Result<i64> {
        Ok(match self {
            Bank::Here(accounts) => accounts[account].load(SeqCst),
            Bank::Server(server) => {
                let key = format!("transfer:balance:{account}");
                redis::cmd("GET").arg(key).query_async(server).await?
            }
        })
    }

    async fn set_balance(&mut self, account: usize, balance: i64) -> Result<()> {
        match self {
            Bank::Here(accounts) => accounts[account].store(balance, SeqCst),
            Bank::Server(server) => {
                let key = format!("transfer:balance:{account}");
                let set = redis::cmd("SET").arg(key).arg(balance).to_owned();
                let () = set.query_async(server).await?;
            }
        }
        Ok(())
    }
}

/// One transfer: correct because nobody else touches either account meanwhile.
async fn transfer(
    client: &Client,
    bank: &mut Bank,
    from: usize,
    to: usize,
    amount: i64,
) -> Result<()> {
    let account = |n: usize| client.lock(&format!("transfer:account:{n}"));
    let guard = MultiLock::new([account(from), account(to)]).lock().await?;
    let (less, more) = (bank.balance(from).await?, bank.balance(to).await?);
    tokio::time::sleep(Duration::from_micros(200)).await;
    bank.set_balance(from, less - amount).await?;
    bank.set_balance(to, more + amount).await?;
    Ok(guard.unlock().await?)
}

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1);
    let url = url.or_else(|| std::env::var("REDLATCH_URL").ok());
    let store = Embedded::new();
    let mut bank = match &url {
        None => Bank::Here(Arc::default()),
        Some(url) => {
            let server = redis::Client::open(url.as_str())?;
            Bank::Server(server.get_multiplexed_async_connection().await?)
        }
    };
    for account in 0..ACCOUNTS {
        bank.set_balance(account, OPENING).await?;
    }
    let mut clerks: JoinSet<Result<()>> = JoinSet::new();
    for clerk in 0..CLERKS {
        // Each has a client of its own, as if it were another process.
        let client = match &url {
            None => Client::builder().connect_embedded(&store)?,
            Some(url) => Client::connect(url).await?,
        };
        let mut bank = bank.clone();
        clerks.spawn(async move {
            for n in 0..TRANSFERS {
                // In all directions, so also against each other.
                let from = (clerk + n) % ACCOUNTS;
                let to = (from + 1 + n % (ACCOUNTS - 1)) % ACCOUNTS;
                let amount = i64::try_from(1 + (clerk * n) % 7)?;
                transfer(&client, &mut bank, from, to, amount).await?;
            }
            Ok(())
        });
    }
    while let Some(clerk) = clerks.join_next().await {
        clerk??;
    }
    let mut sum = 0;
    for account in 0..ACCOUNTS {
        let balance = bank.balance(account).await?;
        println!("account {account}: {balance}");
        sum += balance;
    }
    let opened = OPENING * i64::try_from(ACCOUNTS)?;
    println!("{} transfers, sum {sum} of {opened}", CLERKS * TRANSFERS);
    if sum != opened {
        return Err("money was lost or made".into());
    }
    Ok(())
}
