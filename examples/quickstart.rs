//! A shop sells its stock with many concurrent workers: first without a lock, then with one.
//!
//! ```sh
//! cargo run --release --example quickstart                       # needs no server
//! cargo run --release --example quickstart -- redis://127.0.0.1  # or with REDLATCH_URL: several processes
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, SystemTime};

use redlatch::Client;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

const STOCK: u64 = 300;
const WORKERS: usize = 16;
/// With a server, the workers run in this many processes.
const PROCESSES: usize = 4;
/// Time between reading and writing the stock, in place of some real work.
const THINKING: Duration = Duration::from_millis(1);

const USAGE: &str = "\
Usage: quickstart [[--url] URL]

Sells a stock of 300 with 16 workers, first without a lock and then with one.

  --url URL   use the Redis or Valkey server at URL, with the workers in 4 processes;
              without it, or REDLATCH_URL in the environment, the store is embedded and the
              workers are tasks of this process
";

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// One worker: sells until the stock is empty. With a lock, only while it holds that.
async fn work(stock: Stock, lock: Option<(Client, String)>, sold: impl Fn()) -> Result<()> {
    // Without a lock the stock can grow again, so this limits the loop.
    for _ in 0..STOCK {
        let sold_one = match &lock {
            None => stock.sell_one().await?,
            Some((client, name)) => {
                let guard = client.lock(name).lock().await?;
                let sold_one = stock.sell_one().await;
                guard.unlock().await?;
                sold_one?
            }
        };
        if !sold_one {
            break;
        }
        sold();
    }
    Ok(())
}

/// The remaining stock: a number in a file.
#[derive(Clone)]
struct Stock(PathBuf);

impl Stock {
    fn create(file: &Path) -> Result<Stock> {
        File::create_new(file)?;
        let stock = Stock(file.to_owned());
        stock.write(STOCK)?;
        Ok(stock)
    }

    /// Reads the stock, waits, and writes one less: correct only if no other worker does so at the same time.
    async fn sell_one(&self) -> Result<bool> {
        let left: u64 = fs::read_to_string(&self.0)?.trim().parse()?;
        if left == 0 {
            return Ok(false);
        }
        tokio::time::sleep(THINKING).await;
        self.write(left - 1)?;
        Ok(true)
    }

    /// Always as many bytes, over the old ones, so that the file is never empty.
    fn write(&self, left: u64) -> Result<()> {
        let mut file = OpenOptions::new().write(true).open(&self.0)?;
        Ok(file.write_all(format!("{left:>20}").as_bytes())?)
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let ended = match args[..] {
        [] => sell_out(std::env::var("REDLATCH_URL").ok().as_deref()).await,
        ["--url", url] => sell_out(Some(url)).await,
        [url] if url.contains("://") => sell_out(Some(url)).await,
        // Started by `sell_with_processes`.
        ["--worker", url, file, lock] => worker_process(url, Path::new(file), lock).await,
        ["--help" | "-h"] => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprint!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match ended {
        Ok(code) => code,
        Err(error) => {
            eprintln!("quickstart: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Sells everything twice and prints the results.
async fn sell_out(url: Option<&str>) -> Result<ExitCode> {
    let location = match url {
        None => format!("{WORKERS} tasks in this process, on the embedded store"),
        Some(_) => format!("{WORKERS} tasks in {PROCESSES} processes, on a server"),
    };
    println!("A shop has {STOCK} things. Its workers are {location}.");
    println!("Each one looks how many are left, thinks for a moment, and writes down one less.\n");

    let without = sell(url, false).await?;
    let oversold_without = without.saturating_sub(STOCK);
    println!("Without a lock they sold {without}: {oversold_without} that were not there, because");
    println!("several of them saw the same number and sold the same thing.\n");

    let sold = sell(url, true).await?;
    let oversold = sold.saturating_sub(STOCK);
    println!(
        "With the lock they sold {sold}: only one worker at a time reads and writes the stock.\n"
    );

    println!(
        "sold {sold} of {STOCK}, oversold {oversold}, without the lock oversold {oversold_without}"
    );
    Ok(match sold {
        STOCK => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Sells everything once. Returns how much was sold.
async fn sell(url: Option<&str>, locked: bool) -> Result<u64> {
    // Unique names for the file and the lock.
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let sale = format!("{}-{}", std::process::id(), since.as_nanos());
    let file = std::env::temp_dir().join(format!("redlatch-quickstart-{sale}"));
    let lock = locked.then(|| format!("redlatch-example:{sale}:quickstart"));
    let stock = Stock::create(&file)?;
    let sold = Sold::default();
    let ended = match url {
        Some(url) => sell_with_processes(url, &file, lock.as_deref(), &sold).await,
        None => {
            let lock = lock.map(|name| (Client::embedded(), name));
            let sold = sold.clone();
            sell_with_tasks(WORKERS, stock, lock, move || sold.one()).await
        }
    };
    let removed = fs::remove_file(&file);
    ended?;
    removed?;
    Ok(sold.0.load(SeqCst))
}

/// Counts the sales.
#[derive(Clone, Default)]
struct Sold(Arc<AtomicU64>);

impl Sold {
    fn one(&self) {
        self.0.fetch_add(1, SeqCst);
    }
}

async fn sell_with_tasks(
    workers: usize,
    stock: Stock,
    lock: Option<(Client, String)>,
    sold: impl Fn() + Clone + Send + 'static,
) -> Result<()> {
    let mut tasks = JoinSet::new();
    for _ in 0..workers {
        tasks.spawn(work(stock.clone(), lock.clone(), sold.clone()));
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

async fn sell_with_processes(
    url: &str,
    file: &Path,
    lock: Option<&str>,
    sold: &Sold,
) -> Result<()> {
    // Reports problems with the URL or the server clearly.
    let client = Client::connect(url).await?;
    let mut processes = Vec::new();
    let ran = run_processes(url, file, lock, sold, &mut processes).await;

    // First stop all processes, then release what one of them may still hold.
    for process in &mut processes {
        let _ = process.kill().await;
    }
    let freed = match lock {
        Some(lock) => client.lock(lock).force_unlock().await.map(drop),
        None => Ok(()),
    };
    ran?;
    Ok(freed?)
}

/// Starts this program several times, and counts what the processes report as sold.
async fn run_processes(
    url: &str,
    file: &Path,
    lock: Option<&str>,
    sold: &Sold,
    processes: &mut Vec<Child>,
) -> Result<()> {
    let mut reports = JoinSet::new();
    for _ in 0..PROCESSES {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["--worker", url])
            .arg(file)
            .arg(lock.unwrap_or_default())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let report = process.stdout.take().ok_or("no pipe to a worker process")?;
        processes.push(process);
        let sold = sold.clone();
        reports.spawn(async move {
            let mut lines = BufReader::new(report).lines();
            let mut last = String::new();
            while let Some(line) = lines.next_line().await? {
                if line == "sold" {
                    sold.one();
                }
                last = line;
            }
            // A process that failed has explained that on standard error.
            match last.as_str() {
                "done" => Ok(()),
                _ => Err("a worker process failed".into()),
            }
        });
    }
    while let Some(ended) = reports.join_next().await {
        let ended: Result<()> = ended?;
        ended?;
    }
    Ok(())
}

/// One of the processes: some of the workers, with a client of their own. An empty name stands for no lock.
async fn worker_process(url: &str, file: &Path, lock: &str) -> Result<ExitCode> {
    let lock = match lock {
        "" => None,
        name => Some((Client::connect(url).await?, name.to_owned())),
    };
    let stock = Stock(file.to_owned());
    sell_with_tasks(WORKERS / PROCESSES, stock, lock, || {
        // A closed pipe is no reason to panic: this process is being stopped.
        let _ = writeln!(std::io::stdout(), "sold");
    })
    .await?;
    println!("done");
    Ok(ExitCode::SUCCESS)
}
