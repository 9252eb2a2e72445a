//! The check of the service.

use redlatch_fencing::post;

use crate::support::{File, Service};

#[tokio::test(flavor = "multi_thread")]
async fn status_says_what_is_wrong_with_the_token() {
    let file = File::create();
    let service = Service::start(&file).await;
    let address = service.address.to_string();
    for (headers, status) in [
        ("Fencing-Token: 5\r\n", "204"),
        ("fencing-token: 5 \r\n", "204"),
        ("Fencing-Token: 4\r\n", "412"),
        ("", "428"),
        ("Fencing-Token:\r\n", "400"),
        ("Fencing-Token: 0\r\n", "400"),
        ("Fencing-Token: -6\r\n", "400"),
        ("Fencing-Token: +6\r\n", "400"),
        ("Fencing-Token: 6.0\r\n", "400"),
        ("Fencing-Token: 6, 7\r\n", "400"),
        ("Fencing-Token: 6\r\nFencing-Token: 7\r\n", "400"),
        ("Fencing-Token: \u{0666}\r\n", "400"),
        ("Fencing-Token: 9223372036854775808\r\n", "400"),
        ("Fencing-Token: 9223372036854775807\r\n", "204"),
    ] {
        let answer = post(&address, "account", headers, "1").unwrap();
        assert_eq!(answer, status, "{headers}");
    }
    assert_eq!(file.tokens("account"), [5, 5, i64::MAX]);
}

#[tokio::test(flavor = "multi_thread")]
async fn token_outlives_the_service() {
    let file = File::create();
    for (token, status) in [(5, "204"), (4, "412"), (6, "204")] {
        let service = Service::start(&file).await;
        let header = format!("Fencing-Token: {token}\r\n");
        let answer = post(&service.address.to_string(), "account", &header, "1");
        assert_eq!(answer.unwrap(), status, "{token}");
    }
}
