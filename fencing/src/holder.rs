//! A holder in a process of its own, which the tests stop and continue.
//!
//! ```text
//! redlatch-fencing-holder REDIS_URL NAME STORAGE_URL
//! ```
//!
//! Each line of its standard input is a request, which it answers with one line. `acquire`: acquires the fenced lock NAME and
//! prints the token. `write`: writes with that token, and prints `written`, `refused` or an error. It does not check
//! its guard before that, like a holder that was stopped right after the check.

use std::error::Error;

use redlatch::{Client, FencedLock, Guard};
use redlatch_fencing::{Outcome, Storage};
use tokio::io::{AsyncBufReadExt, BufReader};

/// Short, because the tests wait until it has ended.
const LEASE: std::time::Duration = std::time::Duration::from_millis(200);

/// Acquires the lock, once more if the answer came after the end of the lease, as on a busy machine.
async fn acquire(lock: &FencedLock) -> redlatch::Result<Guard<FencedLock>> {
    loop {
        match lock.lock().lease(LEASE).await {
            Err(redlatch::Error::Lost { .. }) => {}
            answer => return answer,
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    // Also while it is stopped, it ends with the test.
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [redis, name, storage] = &args[..] else {
        return Err("usage: redlatch-fencing-holder REDIS_URL NAME STORAGE_URL".into());
    };
    let lock = Client::connect(redis).await?.fenced_lock(name);
    let mut storage = Storage::open(storage).await?;
    let mut requests = BufReader::new(tokio::io::stdin()).lines();
    let mut guard = None;
    while let Some(request) = requests.next_line().await? {
        match (request.as_str(), &guard) {
            ("acquire", _) => {
                let acquired = acquire(&lock).await?;
                println!("{}", acquired.token());
                guard = Some(acquired);
            }
            ("write", Some(held)) => match storage.write(name, held.token()).await {
                Ok(Outcome::Written) => println!("written"),
                Ok(Outcome::Refused) => println!("refused"),
                Err(error) => println!("failed: {error}"),
            },
            _ => return Err(format!("unexpected request: {request}").into()),
        }
    }
    Ok(())
}
