//! A service whose tokens are the passwords of workers. Only in simulations.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redlatch::Credentials;

/// The user of the workers.
pub const USER: &str = "app";

/// The source of tokens. As services with a cache do, it still gives the former token once after each change.
#[derive(Debug, Clone, Default)]
pub struct Tokens(Arc<Mutex<Numbers>>);

#[derive(Debug, Default)]
struct Numbers {
    current: u64,
    cached: u64,
}

impl Tokens {
    /// Changes the token. Returns the new one.
    pub fn change(&self) -> String {
        let mut numbers = self.numbers();
        numbers.current += 1;
        token(numbers.current)
    }

    /// Returns the credentials with which a client logs in now.
    pub(super) fn credentials(&self) -> io::Result<Credentials> {
        let numbers = &mut *self.numbers();
        let cached = std::mem::replace(&mut numbers.cached, numbers.current);
        let credentials = Credentials::new(token(cached)).username(USER);
        Ok(credentials.renewed_after(Duration::from_secs(1)))
    }

    fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn token(number: u64) -> String {
    format!("token-{number}")
}
