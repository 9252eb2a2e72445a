//! The Rust code in README.md and docs/ that is no whole program: it must be in this file, apart from whitespace, so it compiles. It is
//! not run, because it connects to servers. Whole programs are doc tests (`Guide` in lib.rs), and those of docs/fencing.md are in
//! fencing/.

use std::path::Path;
use std::time::Duration;

use redlatch::{Client, Credentials, Result, Slot};

const HOUR: Duration = Duration::from_secs(3600);

#[expect(dead_code)]
async fn readme() -> Result<()> {
    let client = redlatch::Client::connect("redis://127.0.0.1:6379").await?;
    let guard = client.lock("orders:42").lock().await?; // waits until the lock is free
    guard.unlock().await?; // or drop(guard)
    Ok(())
}

#[expect(dead_code)]
async fn deployments() -> Result<()> {
    let client = redlatch::Client::builder()
        .outage_limit(Duration::from_secs(300)) // None: any outage
        .watchdog_lease(Duration::from_secs(60))
        .connect("redis+sentinel://s1,s2,s3/orders")
        .await?;
    drop(client);
    Ok(())
}

#[expect(dead_code)]
async fn elections() -> Result<()> {
    async fn serve() {}
    let client = redlatch::Client::connect("redis://127.0.0.1:6379").await?;
    let election = client.election("scheduler");
    loop {
        // Waits until this candidate leads. Candidates lead in the order in which they campaigned. Without a limit it also waits
        // through outages of the store; by default it fails after 3 s of one.
        let campaign = election.campaign("10.0.0.7:8080").outage_limit(None);
        let leadership = match campaign.await {
            // This process was stopped, and learned of its election when that had ended.
            Err(redlatch::Error::Lost { .. }) => continue,
            elected => elected?,
        };
        println!("elected, epoch {}", leadership.epoch());
        // `serve` is dropped as soon as the leadership is lost.
        match leadership.run(serve()).await {
            Ok(()) => return leadership.resign().await,
            Err(lost) => eprintln!("{lost}"),
        }
    }
}

#[expect(dead_code)]
async fn observe(election: redlatch::Election, leadership: redlatch::Leadership) -> Result<()> {
    // Another process is to lead next, here the candidate that has waited longest.
    if let Some(next) = election.candidates().await?.first() {
        leadership.resign_to(&next.owner).await?; // or Campaign::owner_id(), sent by that process
    }

    // In another process: the current leader, and then each change. `None`: no process leads.
    let mut observer = election.observe();
    loop {
        match observer.next().await {
            Ok(Some(leader)) => println!("{} leads, epoch {}", leader.value, leader.epoch),
            Ok(None) => println!("no leader"),
            Err(error) => eprintln!("{error}; still observing"),
        }
    }
}

#[expect(dead_code)]
async fn operating(url: &str) -> Result<()> {
    let client = redlatch::Client::builder()
        .label("report")
        .connect(url)
        .await?;
    let guard = client.lock("nightly").lock().note("reindex 42").await?;
    guard.unlock().await
}

#[expect(dead_code)]
async fn retry_unfinished(client: Client) -> Result<()> {
    async fn send_report() {}
    let held = client.lock("report").lock().await?; // waits while another machine runs it
    let once = client
        .once("report", Slot::per(HOUR))
        .retry_unfinished(2, &held);
    let done = held.run(once.run(send_report())).await??;
    held.unlock().await?;
    drop(done);
    Ok(())
}

#[expect(dead_code)]
async fn run_once(client: Client) -> Result<()> {
    async fn send_report() {}
    let once = client.once("report", Slot::per(HOUR)); // or a text: client.once("report", "2026-11-22T02:00")
    match once.begin().await? {
        Ok(run) => {
            send_report().await;
            run.finish("42 pages").await?;
        }
        Err(earlier) => println!("{} began it: {:?}", earlier.by, earlier.outcome),
    }
    Ok(())
}

#[expect(dead_code)]
async fn job(client: Client, shutdown: impl Future<Output = ()>) -> Result<()> {
    async fn send_report(_: std::time::SystemTime) -> std::io::Result<()> {
        Ok(())
    }
    use redlatch::job::Cron;

    let nightly = Cron::parse("0 2 * * *")?.in_tz("Europe/Berlin")?;
    // A run whose machine dies is repeated once. One that returns an error is not.
    let job = client.job("nightly-report").schedule(nightly).retry(1);
    job.run_until(shutdown, async |run| {
        send_report(run.slot()).await // Result<(), E>, (), or job::Outcome
    })
    .await?;
    Ok(())
}

#[expect(dead_code)]
async fn security() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let client = redlatch::Client::builder()
        .tls_ca_file("/etc/redis/ca.pem") // instead of the system's CAs
        .tls_client_cert_files("/etc/redis/app.pem", "/etc/redis/app.key") // for tls-auth-clients yes
        .username("app")
        .password(std::env::var("APP_REDIS_PASSWORD")?)
        .connect("rediss://redis.internal:6380")
        .await?;
    drop(client);
    Ok(())
}

#[expect(dead_code)]
async fn servers() -> Result<()> {
    async fn fetch_token() -> std::io::Result<(String, Duration)> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
    let client = redlatch::Client::builder()
        .credentials(|| async {
            let (token, valid_for) = fetch_token().await?;
            let renewed_after = valid_for.saturating_sub(Duration::from_secs(180));
            let credentials = Credentials::new(token).username("orders-service");
            std::io::Result::Ok(credentials.renewed_after(renewed_after))
        })
        .connect("rediss://orders.redis.example:6380")
        .await?;
    drop(client);
    Ok(())
}

#[expect(dead_code)]
async fn sharing_with_redisson() -> Result<()> {
    let client = redlatch::Client::connect("redis://127.0.0.1:6379").await?;
    let lock = client.lock("orders:42");
    let guard = lock.lock().await?;
    // …
    guard.unlock().await?;
    Ok(())
}

#[test]
fn code_on_all_pages_compiles() {
    let compiled = without_whitespace(concat!(
        include_str!("guide.rs"),
        include_str!("../../../../examples/http_service.rs"),
        include_str!("../../../../examples/schedulers/tokio_cron_scheduler.rs"),
    ));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let docs = std::fs::read_dir(root.join("docs")).unwrap();
    let mut pages: Vec<_> = docs.map(|entry| entry.unwrap().path()).collect();
    pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.push(root.join("README.md"));
    let mut checked = 0;
    for page in pages {
        // Those of `struct Guide`.
        let name = page.file_name().unwrap().to_string_lossy();
        let is_doc_tested = include_str!("../../../src/lib.rs").contains(&format!("/{name}\")"));
        if page.ends_with("fencing.md") {
            continue;
        }
        let text = std::fs::read_to_string(&page).unwrap();
        for block in text.split("\n```rust").skip(1) {
            let (attributes, block) = block.split_once('\n').unwrap();
            let (code, _) = block.split_once("```").unwrap();
            // A doc test, unless it is ignored.
            if is_doc_tested && !attributes.contains("ignore") {
                continue;
            }
            let page = page.display();
            assert!(
                compiled.contains(&without_whitespace(code)),
                "{page}: add this code to {}:\n{code}",
                file!()
            );
            checked += 1;
        }
    }
    assert!(checked > 5, "only {checked} blocks of code were found");
}

#[test]
fn readme_counts_the_tasks_of_the_cookbook() {
    let cookbook = include_str!("../../../../docs/cookbook.md");
    let is_task = |line: &&str| line.starts_with("## ") && line.contains(". ");
    let tasks = cookbook.lines().filter(is_task).count();
    let words = ["twelve", "thirteen", "fourteen", "fifteen", "sixteen"];
    let word = words[tasks - 12];
    let said = format!("has {word} tasks");
    assert!(
        include_str!("../../../../README.md").contains(&said),
        "{said}"
    );
}

/// The table says of each module what it proves.
#[test]
fn readme_of_the_tests_names_each_file_once() {
    let files_in = |folder: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let names = names.map(|name| name.trim_end_matches(".rs").to_owned());
        names.filter(|name| name != "mod").collect()
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it");
    let mut modules = vec!["common".to_owned()];
    for folder in files_in(&root) {
        if !["common", "main"].contains(&&*folder) {
            let names = files_in(&root.join(&folder)).into_iter();
            modules.extend(names.map(|name| format!("{folder}/{name}")));
        }
    }
    modules.sort();
    let page = include_str!("../../README.md");
    let (_, table) = page.split_once("| module |").unwrap();
    let (table, _) = table.split_once("\n\n").unwrap();
    let listed = table.lines().filter_map(|line| line.strip_prefix("| `"));
    let listed: Vec<&str> = listed
        .filter_map(|row| Some(row.split_once('`')?.0))
        .collect();
    assert_eq!(listed, modules);
}

fn without_whitespace(text: &str) -> String {
    text.split_whitespace().collect()
}
