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

use redlatch::{Client, Embedded, MultiLock};
use tokio::task::JoinSet;

const ACCOUNTS: usize = 3;
const CLERKS: usize = 6;
const TRANSFERS: usize = 30;
const OPENING: i64 = 1000;

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// The balances of the accounts. Reads and writes are separate, so without a lock transfers would undo
/// each other.
type Bank = Arc<[AtomicI64; ACCOUNTS]>;

/// One transfer: correct because no other task accesses either account meanwhile.
async fn transfer(
    client: &Client,
    prefix: &str,
    bank: &Bank,
    from: usize,
    to: usize,
    amount: i64,
) -> Result<()> {
    let account = |n: usize| client.lock(&format!("{prefix}:account:{n}"));
    let guard = MultiLock::new([account(from), account(to)]).lock().await?;
    let (less, more) = (bank[from].load(SeqCst), bank[to].load(SeqCst));
    tokio::time::sleep(Duration::from_micros(200)).await;
    bank[from].store(less - amount, SeqCst);
    bank[to].store(more + amount, SeqCst);
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
    let bank = Bank::new([const { AtomicI64::new(OPENING) }; ACCOUNTS]);
    let store = Embedded::new();
    let mut clerks: JoinSet<Result<()>> = JoinSet::new();
    for clerk in 0..CLERKS {
        // Each clerk has a client of its own, as if it were a separate process.
        let client = match &url {
            None => Client::builder().connect_embedded(&store)?,
            Some(url) => Client::connect(url).await?,
        };
        let (bank, prefix) = (bank.clone(), prefix.clone());
        clerks.spawn(async move {
            for n in 0..TRANSFERS {
                // In all directions, so that transfers conflict.
                let from = (clerk + n) % ACCOUNTS;
                let to = (from + 1 + n % (ACCOUNTS - 1)) % ACCOUNTS;
                let amount = i64::try_from(1 + (clerk * n) % 7)?;
                transfer(&client, &prefix, &bank, from, to, amount).await?;
            }
            Ok(())
        });
    }
    while let Some(clerk) = clerks.join_next().await {
        clerk??;
    }
    let mut sum = 0;
    for (account, balance) in bank.iter().enumerate() {
        let balance = balance.load(SeqCst);
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
