//! URLs, names and cluster answers: every part of an address is understood or refused.

use redlatch::{Client, Error};
use redlatch_testkit::{shared, unique};

/// Two services that are configured for the same database exclude each other, however the database is
/// written; an address that is only partly understood connects nobody.
#[tokio::test]
async fn the_database_of_a_url_is_the_one_that_is_used() {
    let url = shared().url();
    let name = unique("database");
    let by_path = Client::connect(&format!("{url}/3")).await.unwrap();
    let guard = by_path.lock(&name).lock().await.unwrap();
    for (form, held) in [
        ("/3", true),
        ("?db=3", true),
        ("/?db=3", true),
        ("/3?db=3", true),
        ("", false),
    ] {
        let other = Client::connect(&format!("{url}{form}")).await.unwrap();
        let is_locked = other.lock(&name).is_locked().await.unwrap();
        assert_eq!(is_locked, held, "{form}");
    }
    for (form, named) in [
        ("/?database=3", "database"),
        ("/4?db=3", "db="),
        ("/3#3", "#"),
    ] {
        let error = Client::connect(&format!("{url}{form}")).await.unwrap_err();
        assert!(matches!(error, Error::InvalidUrl { .. }), "{form}: {error}");
        assert!(error.to_string().contains(named), "{form}: {error}");
    }
    guard.unlock().await.unwrap();
}
