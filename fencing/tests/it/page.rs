//! `docs/fencing.md` shows the code that these tests run.

const PAGE: &str = include_str!("../../../docs/fencing.md");

const TESTED: [&str; 10] = [
    include_str!("../../../docs/fencing/mariadb.sql"),
    include_str!("../../../docs/fencing/postgresql.sql"),
    include_str!("../../../docs/fencing/sqlite.sql"),
    include_str!("../../src/http.rs"),
    include_str!("../../src/mariadb.rs"),
    include_str!("../../src/postgresql.rs"),
    include_str!("../../src/postgresql_sqlx.rs"),
    include_str!("../../src/release_after.rs"),
    include_str!("../../src/retry_stale.rs"),
    include_str!("../../src/sqlite.rs"),
];

#[test]
fn page_shows_tested_code() {
    let mut shown = 0;
    for language in ["```sql\n", "```rust\n"] {
        for block in PAGE.split(language).skip(1) {
            let (code, _) = block.split_once("```").expect("the end of the block");
            let is_tested = TESTED.iter().any(|file| file.contains(code));
            assert!(is_tested, "not in a tested file:\n{code}");
            shown += 1;
        }
    }
    assert_eq!(shown, TESTED.len());
}
