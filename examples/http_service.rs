//! An HTTP service that works on an order for one request at a time, in the whole fleet. To pay, the layer is used: it
//! refuses a second request while the first one runs. To refund, the attribute is used: a second request waits.
//!
//! ```sh
//! cargo run --features http_service --example http_service                       # needs no server
//! cargo run --features http_service --example http_service -- redis://127.0.0.1  # or with REDLATCH_URL
//! ```

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header::RETRY_AFTER};
use axum::middleware::map_request;
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

/// The number of the order of a request.
#[derive(Clone, Copy)]
struct OrderId(u64);

/// Parses the number for [`lock_of_order`]. A request whose path has none gets 400.
async fn parse_order(Path(id): Path<u64>, mut request: Request) -> Request {
    request.extensions_mut().insert(OrderId(id));
    request
}

/// Returns the name of the lock of an order. It comes from the number, not from the path: `/orders/7/pay`, `/orders/%37/pay` and
/// `/orders/07/pay` all pay order 7.
fn lock_of_order(request: &Request) -> Option<String> {
    let id = request.extensions().get::<OrderId>();
    // `None` would handle a request without the lock. The empty name is invalid, and the response is 400.
    Some(id.map_or_else(String::new, |OrderId(id)| format!("order:{id}")))
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
    // The same lock as that of a refund. The number is parsed first.
    let lock = LockLayer::new(shop.locks.clone(), lock_of_order);
    // A payment takes less than a second.
    let lock = lock.retry_after(Duration::from_secs(1));
    let one_at_a_time = (map_request(parse_order), lock);
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

    // Two are refused, because the provider has not confirmed the payment of the other one yet.
    let mut payments = send_all(address, "pay");
    for count in 1.. {
        let Some(response) = payments.join_next().await else {
            break;
        };
        println!("pay order 7: {}", response??);
        if count == 2 {
            provider.notify_one();
        }
    }
    let mut refunds = send_all(address, "refund");
    while let Some(response) = refunds.join_next().await {
        println!("refund order 7: {}", response??);
    }
    serving.abort();
    locks.flush().await;
    println!("order 7 was paid once and refunded once");
    Ok(())
}

/// Sends three requests for order 7 at the same time, with different paths.
fn send_all(address: SocketAddr, action: &'static str) -> JoinSet<std::io::Result<String>> {
    let spellings = ["7", "%37", "07"];
    spellings
        .map(|id| send(address, id, action))
        .into_iter()
        .collect()
}

/// Sends a request. Returns the status code, the header `Retry-After` and the body.
async fn send(address: SocketAddr, id: &str, action: &str) -> std::io::Result<String> {
    let path = format!("/orders/{id}/{action}");
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
