//! An HTTP service that works on an order for one request at a time, in the whole fleet. To pay, the layer is used: it
//! refuses a second request while the first one runs. To refund, the attribute is used: a second request waits.
//!
//! ```sh
//! cargo run --example http_service                       # needs no server
//! cargo run --example http_service -- redis://127.0.0.1  # or with REDLATCH_URL
//! ```

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header::RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use redlatch::Client;
use redlatch::tower::{LockLayer, status_code};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Notify};
use tokio::task::JoinSet;

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

#[derive(Clone)]
struct Shop {
    locks: Client,
    refunded: Arc<Mutex<BTreeSet<u64>>>,
    /// The payment provider, which takes its time.
    provider: Arc<Notify>,
}

enum ShopError {
    Busy,
    Lock(redlatch::Error),
}

impl From<redlatch::Error> for ShopError {
    fn from(error: redlatch::Error) -> ShopError {
        ShopError::Lock(error)
    }
}

impl IntoResponse for ShopError {
    fn into_response(self) -> Response {
        let status = match &self {
            ShopError::Busy => StatusCode::CONFLICT,
            ShopError::Lock(error) => status_code(error),
        };
        match status {
            StatusCode::CONFLICT | StatusCode::SERVICE_UNAVAILABLE => {
                (status, [(RETRY_AFTER, "1")]).into_response()
            }
            _ => status.into_response(),
        }
    }
}

/// The layer holds the lock of the order.
async fn pay(State(shop): State<Shop>) -> &'static str {
    shop.provider.notified().await;
    "paid"
}

async fn refund(State(shop): State<Shop>, Path(id): Path<u64>) -> Result<&'static str, ShopError> {
    shop.refund(id).await
}

impl Shop {
    #[redlatch::locked(client = self.locks, name = "order:{id}", wait = "30s", or = Err(ShopError::Busy))]
    async fn refund(&self, id: u64) -> Result<&'static str, ShopError> {
        if self.refunded.lock().await.contains(&id) {
            return Ok("was refunded before");
        }
        // Without the lock, the other request would also get here, and refund the order a second time.
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.refunded.lock().await.insert(id);
        Ok("refunded")
    }
}

fn router(shop: Shop) -> Router {
    // The same lock as that of a refund.
    let one_at_a_time = LockLayer::new(shop.locks.clone(), |request: &Request| {
        let id = request.uri().path().split('/').nth(2)?;
        Some(format!("order:{id}"))
    });
    Router::new()
        .route("/orders/{id}/pay", post(pay).layer(one_at_a_time))
        .route("/orders/{id}/refund", post(refund))
        .with_state(shop)
}

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("http_service: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let url = std::env::args().nth(1);
    let url = url.or_else(|| std::env::var("REDLATCH_URL").ok());
    // Unique names. In production all processes use the same fixed names.
    let prefix = format!("redlatch-example:{}:", Client::embedded().id());
    let builder = Client::builder().prefix(prefix);
    let locks = builder
        .connect(url.as_deref().unwrap_or("embedded:"))
        .await?;
    let provider = Arc::new(Notify::new());
    let shop = Shop {
        locks: locks.clone(),
        refunded: Arc::default(),
        provider: provider.clone(),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let serving = tokio::spawn(async move { axum::serve(listener, router(shop)).await });

    // The first response is the refusal, because the provider has not confirmed the payment yet.
    let mut payments = send_twice(address, "/orders/7/pay");
    while let Some(response) = payments.join_next().await {
        println!("pay order 7: {}", response??);
        provider.notify_one();
    }
    let mut refunds = send_twice(address, "/orders/7/refund");
    while let Some(response) = refunds.join_next().await {
        println!("refund order 7: {}", response??);
    }
    serving.abort();
    locks.flush().await;
    println!("order 7 was paid once and refunded once");
    Ok(())
}

/// Sends two requests at the same time.
fn send_twice(address: SocketAddr, path: &'static str) -> JoinSet<std::io::Result<String>> {
    (0..2).map(|_| send(address, path)).collect()
}

/// Sends a request. Returns the status code, the header `Retry-After` and the body.
async fn send(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut connection = TcpStream::connect(address).await?;
    let request = format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    connection.write_all(request.as_bytes()).await?;
    let mut response = String::new();
    connection.read_to_string(&mut response).await?;
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or_default();
    let status = head.split(' ').nth(1).unwrap_or_default();
    let retry = head.lines().find(|line| line.starts_with("retry-after"));
    Ok(format!("{status} {}{body}", retry.unwrap_or_default()))
}
