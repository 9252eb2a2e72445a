//! After the same play there are the same keys, types, fields, values and messages on either side, but for ids and times;
//! every difference is named where it begins to be.

use crate::play::{compare, compare_newest};

#[test]
fn lock() {
    compare(
        "
        1 lock lock NAME -1 LEASE
        2 lock lock NAME 0 LEASE
        1 lock lock NAME -1 LEASE
        2 unlock lock NAME
        1 unlock lock NAME
        2 lock lock NAME -1 LEASE | waits | listen 1
        1 unlock lock NAME | then 2
        2 force-unlock lock NAME
        2 force-unlock lock NAME
        2 unlock lock NAME
        1 lock lock NAME -1 -1
        1 lock lock NAME -1 LEASE
        1 unlock lock NAME
        1 unlock lock NAME
        1 lock lock NAME -1 LEASE
        1 lock lock NAME -1 60000
        1 unlock lock NAME
        1 unlock lock NAME
        1 lock lock NAME -1 -1
        2 lock lock NAME 300 LEASE
        1 lock lock NAME -1 -1
        1 unlock lock NAME
        1 unlock lock NAME
        1 unlock lock NAME
    ",
    );
}

#[test]
fn nonreentrant() {
    compare_newest(
        "
        1 lock nonreentrant NAME -1 LEASE
        1 lock nonreentrant NAME 0 LEASE
        2 lock nonreentrant NAME 0 LEASE
        2 lock nonreentrant NAME -1 LEASE | waits | listen 1
        1 unlock nonreentrant NAME | then 2
        2 force-unlock nonreentrant NAME
        1 lock nonreentrant-fair NAME -1 LEASE
        1 lock nonreentrant-fair NAME 0 -1
        2 lock nonreentrant-fair NAME -1 LEASE | waits | queue 1
        1 unlock nonreentrant-fair NAME | then 2
        2 unlock nonreentrant-fair NAME
    ",
    );
}

#[test]
fn spin() {
    compare(
        "
        1 lock spin NAME -1 LEASE
        2 lock spin NAME 0 LEASE
        1 lock spin NAME -1 LEASE
        1 unlock spin NAME
        1 unlock spin NAME
        1 lock spin NAME -1 LEASE
        2 lock spin NAME -1 LEASE | waits
        1 unlock spin NAME | then 2
        1 force-unlock spin NAME
        2 unlock spin NAME
    ",
    );
}

#[test]
fn fenced() {
    compare(
        "
        1 lock fenced NAME -1 LEASE
        2 lock fenced NAME 0 LEASE
        1 token NAME
        1 lock fenced NAME -1 LEASE
        1 unlock fenced NAME
        1 unlock fenced NAME
        2 lock fenced NAME -1 LEASE
        1 lock fenced NAME -1 LEASE | waits | listen 1
        2 unlock fenced NAME | then 1
        2 force-unlock fenced NAME
        2 lock fenced NAME 0 LEASE
        2 unlock fenced NAME
    ",
    );
}

#[test]
fn fair() {
    compare(
        "
        1 lock fair NAME -1 LEASE
        1 lock fair NAME -1 LEASE
        2 lock fair NAME 0 -1
        2 lock fair NAME -1 LEASE | waits | queue 1
        3 lock fair NAME -1 LEASE | waits | queue 2
        4 lock fair NAME -1 LEASE | waits | queue 3
        1 unlock fair NAME
        1 unlock fair NAME | then 2
        2 unlock fair NAME | then 3
        3 force-unlock fair NAME | then 4
        4 unlock fair NAME
        4 unlock fair NAME
        1 force-unlock fair NAME
    ",
    );
}

#[test]
fn fair_giving_up() {
    compare(
        "
        1 lock fair NAME -1 LEASE
        2 lock fair NAME 1500 LEASE | waits | queue 1
        3 lock fair NAME -1 LEASE | waits | queue 2
        4 lock fair NAME 400000 LEASE | waits | queue 3
        2 answers | queue 2
        1 unlock fair NAME | then 3
        3 unlock fair NAME | then 4
        2 lock fair NAME 500 LEASE
        4 unlock fair NAME
    ",
    );
}

#[test]
fn fair_with_the_dead() {
    compare(
        "
        1 lock fair NAME -1 LEASE
        2 lock fair NAME -1 LEASE | waits | queue 1
        0 LPUSH redisson_lock_queue:{NAME} dead:1
        0 ZADD redisson_lock_timeout:{NAME} 1 dead:1
        3 lock fair NAME 0 -1
        1 unlock fair NAME | then 2
        2 unlock fair NAME
    ",
    );
}

#[test]
fn fair_without_a_score() {
    compare(
        "
        1 lock fair NAME -1 LEASE
        0 RPUSH redisson_lock_queue:{NAME} dead:1
        1 unlock fair NAME
        2 lock fair NAME 0 -1
    ",
    );
}
