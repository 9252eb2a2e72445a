//! Fencing tokens grow with each acquisition, also after a loss, a restart, or lost data.

/// After lost data a resource that remembers a token refuses everybody until the token is advanced.
mod after_lost_data {
    use redlatch::{Client, Embedded, Error, MAX_TOKEN};
    use redlatch_testkit::Server;

    async fn recovers(client: &Client, lose_data: impl AsyncFn()) {
        let lock = client.fenced_lock("a");
        assert_eq!(lock.advance_token(0).await.unwrap(), 0, "nothing to raise");
        for _ in 0..3 {
            lock.lock().await.unwrap().unlock().await.unwrap();
        }
        let seen = lock.current_token().await.unwrap();
        lose_data().await;
        let late = lock.lock().await.unwrap();
        assert!(late.token() < seen, "counted from the beginning");
        // While it is held, too.
        assert_eq!(lock.advance_token(seen).await.unwrap(), seen);
        assert_eq!(lock.advance_token(1).await.unwrap(), seen, "never lowered");
        late.unlock().await.unwrap();
        let guard = lock.lock().await.unwrap();
        assert_eq!(guard.token(), seen + 1);
        assert!(!lock.delete_token().await.unwrap(), "it is held");
        assert_eq!(lock.current_token().await.unwrap(), seen + 1);
        guard.unlock().await.unwrap();

        for too_great in [MAX_TOKEN + 1, u64::MAX] {
            let refused = lock.advance_token(too_great).await.unwrap_err();
            let Error::InvalidSetting { setting, .. } = &refused else {
                panic!("{refused}");
            };
            assert_eq!(*setting, "at_least");
        }
        assert_eq!(lock.advance_token(MAX_TOKEN).await.unwrap(), MAX_TOKEN);
        let last = lock.lock().await.unwrap();
        assert_eq!(last.token(), MAX_TOKEN + 1);
        last.unlock().await.unwrap();
        assert!(lock.delete_token().await.unwrap());
        assert!(lock.delete_token().await.unwrap(), "there is none");
        assert_eq!(lock.current_token().await.unwrap(), 0);
        assert_eq!(lock.lock().await.unwrap().token(), 1);
    }

    #[tokio::test]
    async fn token_is_advanced_on_an_embedded_store() {
        let client = Client::builder()
            .connect_embedded(&Embedded::new())
            .unwrap();
        let lose = async || {
            assert!(client.fenced_lock("a").delete_token().await.unwrap());
        };
        recovers(&client, lose).await;
    }

    #[tokio::test]
    async fn token_is_advanced_on_a_server() {
        let server = Server::start();
        let client = Client::connect(&server.url()).await.unwrap();
        let lose = async || {
            let _: String = server.ask(&["FLUSHALL"]);
        };
        recovers(&client, lose).await;
        let key = "redisson_lock_token:{b}";
        let lock = client.fenced_lock("b");
        for foreign in ["x", "07", "1.5"] {
            let _: String = server.ask(&["SET", key, foreign]);
            let refused = lock.advance_token(5).await.unwrap_err();
            assert!(matches!(refused, Error::WrongKind { .. }), "{refused}");
            assert_eq!(server.ask::<String>(&["GET", key]), foreign);
        }
    }

    #[test]
    fn token_is_advanced_from_a_thread() {
        let client = redlatch::blocking::Client::embedded().unwrap();
        let lock = client.fenced_lock("a");
        assert_eq!(lock.advance_token(41).unwrap(), 41);
        let guard = lock.lock().unwrap();
        assert_eq!(guard.token(), 42);
        assert!(!lock.delete_token().unwrap());
        guard.unlock().unwrap();
        assert!(lock.delete_token().unwrap());
        assert_eq!(lock.current_token().unwrap(), 0);
    }
}
