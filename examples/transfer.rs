//! Transfers between accounts. Each transfer locks both accounts together: no money is lost, and transfers in
//! opposite directions do not deadlock.
//!
//! ```sh
//! cargo run --example transfer                        # needs no server
//! cargo run --example transfer -- redis://127.0.0.1   # or with REDLATCH_URL
//! ```

use std::process::ExitCode;
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

/// The balances of the accounts: numbers in this process, or keys in a server. Reads and writes are
/// separate, so without a lock transfers would undo each other.
#[derive(Clone)]
enum Bank {
    Here(Arc<[AtomicI64; ACCOUNTS]>),
    Server(MultiplexedConnection, String),
}

impl Bank {
    async fn balance(&mut self, account: usize) -> Result<i64> {
        Ok(match self {
            Bank::Here(accounts) => accounts[account].load(SeqCst),
            Bank::Server(server, prefix) => {
                let key = format!("{prefix}:balance:{account}");
                redis::cmd("GET").arg(key).query_async(server).await?
            }
        })
    }

    async fn set_balance(&mut self, account: usize, balance: i64) -> Result<()> {
        match self {
            Bank::Here(accounts) => accounts[account].store(balance, SeqCst),
            Bank::Server(server, prefix) => {
                let key = format!("{prefix}:balance:{account}");
                let mut set = redis::cmd("SET");
                // If this process is killed, the server drops the balances after ten minutes.
                set.arg(key).arg(balance).arg("EX").arg(600);
                set.exec_async(server).await?;
            }
        }
        Ok(())
    }

    /// Deletes all keys.
    async fn close(&mut self) -> Result<()> {
        if let Bank::Server(server, prefix) = self {
            let keys = (0..ACCOUNTS).map(|account| format!("{prefix}:balance:{account}"));
            let mut del = redis::cmd("DEL");
            del.arg(keys.collect::<Vec<_>>());
            del.exec_async(server).await?;
        }
        Ok(())
    }
}

/// One transfer: correct because no other task accesses either account meanwhile.
async fn transfer(
    client: &Client,
    prefix: &str,
    bank: &mut Bank,
    from: usize,
    to: usize,
    amount: i64,
) -> Result<()> {
    let account = |n: usize| client.lock(&format!("{prefix}:account:{n}"));
    let guard = MultiLock::new([account(from), account(to)]).lock().await?;
    let (less, more) = (bank.balance(from).await?, bank.balance(to).await?);
    tokio::time::sleep(Duration::from_micros(200)).await;
    bank.set_balance(from, less - amount).await?;
    bank.set_balance(to, more + amount).await?;
    Ok(guard.unlock().await?)
}

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("transfer: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let url = std::env::args().nth(1);
    let url = url.or_else(|| std::env::var("REDLATCH_URL").ok());
    // Unique names.
    let prefix = format!("redlatch-example:{}", Client::embedded().id());
    let mut bank = match &url {
        None => Bank::Here(Arc::default()),
        Some(url) => {
            // Reports problems with the URL or the server clearly.
            Client::connect(url).await?;
            let server = redis::Client::open(url.as_str())?;
            Bank::Server(
                server.get_multiplexed_async_connection().await?,
                prefix.clone(),
            )
        }
    };
    let done = business(url.as_deref(), &prefix, &mut bank).await;
    bank.close().await?;
    done
}

/// Makes all transfers, and checks the balances.
async fn business(url: Option<&str>, prefix: &str, bank: &mut Bank) -> Result<()> {
    for account in 0..ACCOUNTS {
        bank.set_balance(account, OPENING).await?;
    }
    let store = Embedded::new();
    let mut clerks: JoinSet<Result<()>> = JoinSet::new();
    for clerk in 0..CLERKS {
        // Each clerk has a client of its own, as if it were a separate process.
        let client = match url {
            None => Client::builder().connect_embedded(&store)?,
            Some(url) => Client::connect(url).await?,
        };
        let (mut bank, prefix) = (bank.clone(), prefix.to_owned());
        clerks.spawn(async move {
            for n in 0..TRANSFERS {
                // In all directions, so that transfers conflict.
                let from = (clerk + n) % ACCOUNTS;
                let to = (from + 1 + n % (ACCOUNTS - 1)) % ACCOUNTS;
                let amount = i64::try_from(1 + (clerk * n) % 7)?;
                transfer(&client, &prefix, &mut bank, from, to, amount).await?;
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
        return Err("money was lost or created".into());
    }
    Ok(())
}
