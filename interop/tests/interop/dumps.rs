//! After the same scenario both sides have the same keys, types, fields, values and messages, except for ids and times.
//! Every difference is listed at the step where it begins.

use crate::scenario::{compare, compare_except_3_16, compare_newest};

#[test]
fn lock() {
    compare(
        "
        1 lock lock NAME -1 LEASE
        2 lock lock NAME 0 LEASE
        1 lock lock NAME -1 LEASE
        2 unlock lock NAME
        # A partial release does not change a lease that is not renewed: the requested lease stays in force.
        1 unlock lock NAME
            Redisson: NAME is a hash for 60 s
            redlatch: NAME is a hash for 600 s
        1 unlock lock NAME
        1 lock lock NAME -1 300000
        2 lock lock NAME -1 LEASE | waits | subscribed
        1 unlock lock NAME | then 2
        # Re-entering never moves the end earlier.
        2 lock lock NAME -1 300000
            Redisson: NAME is a hash for 300 s
            redlatch: NAME is a hash for 600 s
        2 force-unlock lock NAME
        2 force-unlock lock NAME
        # Its hold is gone, perhaps by DEL or with the data: the waiters may not have been woken.
        2 unlock lock NAME
            redlatch: redisson_lock__channel:{NAME} receives 0
        1 lock lock NAME -1 -1
        3 lock lock NAME 2000 LEASE
        1 lock lock NAME -1 -1
        1 unlock lock NAME
        1 lock lock NAME -1 LEASE
        1 unlock lock NAME
            Redisson: NAME is a hash for 60 s
            redlatch: NAME is a hash for 600 s
        # Nor does the watchdog's lease.
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
        2 lock nonreentrant NAME -1 LEASE | waits | subscribed
        1 unlock nonreentrant NAME | then 2
        2 force-unlock nonreentrant NAME
    ",
    );
}

#[test]
fn nonreentrant_fair() {
    compare_newest(
        "
        1 lock nonreentrant-fair NAME -1 LEASE
        1 lock nonreentrant-fair NAME 0 -1
        2 lock nonreentrant-fair NAME -1 LEASE | waits | subscribed
        1 unlock nonreentrant-fair NAME | then 2
        # The queue is empty: waiters for the name by another kind of lock are woken.
        2 unlock nonreentrant-fair NAME
            redlatch: redisson_lock__channel:{NAME} receives 0
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
        # A partial release does not change a lease that is not renewed: the requested lease stays in force.
        1 unlock spin NAME
            Redisson: NAME is a hash for 60 s
            redlatch: NAME is a hash for 600 s
        1 unlock spin NAME
        1 lock spin NAME -1 LEASE
        2 lock spin NAME -1 LEASE | waits
        1 unlock spin NAME | then 2
        # There may be subscribed waiters for the same name by another kind of lock.
        1 force-unlock spin NAME
            redlatch: redisson_lock__channel:{NAME} receives 0
        2 unlock spin NAME
    ",
    );
}

#[test]
fn fenced() {
    // Redisson 3.16.8 has no `RFencedLock`.
    compare_except_3_16(
        "
        1 lock fenced NAME -1 LEASE
        2 lock fenced NAME 0 LEASE
        1 token NAME
        1 lock fenced NAME -1 LEASE
        # A partial release does not change a lease that is not renewed: the requested lease stays in force.
        1 unlock fenced NAME
            Redisson: NAME is a hash for 60 s
            redlatch: NAME is a hash for 600 s
        1 unlock fenced NAME
        2 lock fenced NAME -1 LEASE
        1 lock fenced NAME -1 LEASE | waits | subscribed
        2 unlock fenced NAME | then 1
        2 force-unlock fenced NAME
        2 lock fenced NAME 0 LEASE
        2 unlock fenced NAME
    ",
    );
}

#[test]
fn group() {
    // Redisson 3.16.8 does not have it.
    compare_except_3_16(
        "
        1 lock group NAME:x,y -1 LEASE
        2 lock group NAME:y,z 0 LEASE
        2 lock group NAME:z 0 300000
        1 lock group NAME:y,z 0 LEASE
        1 lock group NAME:x,y -1 LEASE
        # No value is released, so no waiter is woken.
        1 unlock group NAME:x,y
            Redisson: redisson_lock__channel:{NAME} receives 0
        # Threads of one client may wait for different values; `0` wakes one of them, `1` all that sleep.
        2 unlock group NAME:z
            Redisson: redisson_lock__channel:{NAME} receives 0
            redlatch: redisson_lock__channel:{NAME} receives 1, 0
        2 lock group NAME:y -1 LEASE | waits | subscribed
        # Each value is released by itself.
        1 unlock group NAME:x,y | then 2
            Redisson: redisson_lock__channel:{NAME} receives 0
            redlatch: redisson_lock__channel:{NAME} receives 1, 0, 1, 0
        2 force-unlock group NAME:y
            Redisson: redisson_lock__channel:{NAME} receives 0
            redlatch: redisson_lock__channel:{NAME} receives 1, 0
        # Its hold is gone, perhaps by DEL or with the data: the waiters may not have been woken.
        2 unlock group NAME:y
            Redisson: redisson_lock__channel:{NAME} receives 0
            redlatch: redisson_lock__channel:{NAME} receives 1, 0
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
        2 lock fair NAME -1 LEASE | waits | subscribed
        3 lock fair NAME -1 LEASE | waits | subscribed
        4 lock fair NAME -1 LEASE | waits | subscribed
        # A partial release does not change a lease that is not renewed: the requested lease stays in force.
        1 unlock fair NAME
            Redisson: NAME is a hash for 60 s
            redlatch: NAME is a hash for 600 s
        # The new head is woken: it has to know how long the lock is held now.
        1 unlock fair NAME | then 2
            redlatch: redisson_lock__channel:{NAME}:OWNER3 receives 0
        2 unlock fair NAME | then 3
            redlatch: redisson_lock__channel:{NAME}:OWNER4 receives 0
        # The observers of an election are not in the queue.
        3 force-unlock fair NAME | then 4
            redlatch: redisson_lock__channel:{NAME} receives 0
        # The queue is empty: waiters for the name by another kind of lock are woken.
        4 unlock fair NAME
            redlatch: redisson_lock__channel:{NAME} receives 0
        # The lock is not held: Redisson reports success.
        4 unlock fair NAME
            Redisson: 4 answers true
            redlatch: 4 answers an error
        1 force-unlock fair NAME
        4 lock fair NAME -1 LEASE
        # Re-entering never moves the end earlier.
        4 lock fair NAME -1 300000
            Redisson: NAME is a hash for 300 s
            redlatch: NAME is a hash for 600 s
        # As above: the queue is empty.
        4 force-unlock fair NAME
            redlatch: redisson_lock__channel:{NAME} receives 0
    ",
    );
}

#[test]
fn fair_timed_out() {
    compare(
        "
        1 lock fair NAME -1 LEASE
        2 lock fair NAME 8000 LEASE | waits | subscribed
        3 lock fair NAME -1 LEASE | waits | subscribed
        # No waiter is waited for longer than `fair-wait`.
        4 lock fair NAME 390000 LEASE | waits | subscribed
            Redisson: redisson_lock_timeout:{NAME} OWNER4 ends in 1290 s
            redlatch: redisson_lock_timeout:{NAME} OWNER4 ends in 1200 s
        # The new head is woken.
        2 answers | queue 2
            Redisson: redisson_lock_timeout:{NAME} OWNER4 ends in 1290 s
            redlatch: redisson_lock__channel:{NAME}:OWNER3 receives 0
            redlatch: redisson_lock_timeout:{NAME} OWNER4 ends in 1200 s
        1 unlock fair NAME | then 3
            Redisson: redisson_lock_timeout:{NAME} OWNER4 ends in 990 s
            redlatch: redisson_lock__channel:{NAME}:OWNER4 receives 0
            redlatch: redisson_lock_timeout:{NAME} OWNER4 ends in 900 s
        3 unlock fair NAME | then 4
        2 lock fair NAME 500 LEASE
        # The queue is empty: waiters for the name by another kind of lock are woken.
        4 unlock fair NAME
            redlatch: redisson_lock__channel:{NAME} receives 0
    ",
    );
}

#[test]
fn fair_with_dead_waiters() {
    compare(
        "
        1 lock fair NAME -1 LEASE
        2 lock fair NAME -1 LEASE | waits | subscribed
        0 LPUSH redisson_lock_queue:{NAME} dead:1
        0 ZADD redisson_lock_timeout:{NAME} 1 dead:1
        # A client that drops a dead head wakes the next waiter.
        3 lock fair NAME 0 -1
            redlatch: redisson_lock__channel:{NAME}:OWNER2 receives 0
        1 unlock fair NAME | then 2
        # The queue is empty: waiters for the name by another kind of lock are woken.
        2 unlock fair NAME
            redlatch: redisson_lock__channel:{NAME} receives 0
    ",
    );
}

#[test]
fn fair_without_a_score() {
    // The scripts of Redisson 3.16.8 fail at such a head.
    compare_except_3_16(
        "
        1 lock fair NAME -1 LEASE
        0 RPUSH redisson_lock_queue:{NAME} dead:1
        # Its wait time is unknown, so it is dropped. Redisson waits for it for ever.
        1 unlock fair NAME
            Redisson: redisson_lock__channel:{NAME}:dead:1 receives 0
            Redisson: redisson_lock_queue:{NAME} [0] = dead:1
            Redisson: redisson_lock_queue:{NAME} is a list for ever
            redlatch: redisson_lock__channel:{NAME} receives 0
        2 lock fair NAME 0 -1
            Redisson: 2 answers false
            Redisson: redisson_lock_queue:{NAME} [0] = dead:1
            Redisson: redisson_lock_queue:{NAME} is a list for ever
            redlatch: 2 answers true
            redlatch: NAME OWNER2 = 1
            redlatch: NAME is a hash for 60 s
    ",
    );
}

#[test]
fn readers() {
    compare(
        "
        1 lock read NAME -1 LEASE
        1 lock read NAME -1 LEASE
        2 lock read NAME -1 300000
        3 lock write NAME 0 LEASE
        1 unlock read NAME
        2 lock read NAME -1 60000
        2 unlock read NAME
        # The end has moved earlier: a writer that sleeps until then is woken.
        1 unlock read NAME
            redlatch: redisson_rwlock:{NAME} receives 0
        3 lock write NAME -1 LEASE | waits | subscribed
        2 unlock read NAME | then 3
        # `1` does not wake a Redisson thread that is about to sleep; `0` is stored for it.
        3 unlock write NAME
            Redisson: redisson_rwlock:{NAME} receives 1
            redlatch: redisson_rwlock:{NAME} receives 1, 0
        1 lock read NAME -1 -1
        1 lock read NAME -1 LEASE
        # All holds of a reader last as long as the longest; a released hold passes its lease on.
        1 unlock read NAME
            Redisson: NAME is a hash for 60 s
            Redisson: {NAME}:OWNER1:rwlock_timeout:1 is a string for 60 s
            redlatch: NAME is a hash for 600 s
            redlatch: {NAME}:OWNER1:rwlock_timeout:1 is a string for 600 s
        1 unlock read NAME
        # The lock is not held: Redisson wakes waiters before it throws; the old version reports success.
        1 unlock read NAME
            Redisson: redisson_rwlock:{NAME} receives 0
            Redisson 3.16: 1 answers true
            redlatch 3.16: 1 answers an error
    ",
    );
}

#[test]
fn writer() {
    compare(
        "
        1 lock write NAME -1 300000
        # Re-entering does not add up leases.
        1 lock write NAME -1 300000
            Redisson: NAME is a hash for 600 s
            redlatch: NAME is a hash for 300 s
        # A partial release does not change a lease that is not renewed: the requested lease stays in force.
        1 unlock write NAME
            Redisson: NAME is a hash for 60 s
            redlatch: NAME is a hash for 300 s
        2 lock read NAME 0 LEASE
            Redisson: NAME is a hash for 60 s
            redlatch: NAME is a hash for 300 s
        2 lock write NAME 0 LEASE
            Redisson: NAME is a hash for 60 s
            redlatch: NAME is a hash for 300 s
        2 lock read NAME -1 LEASE | waits | subscribed
            Redisson: NAME is a hash for 60 s
            redlatch: NAME is a hash for 300 s
        # `1` does not wake a Redisson thread that is about to sleep; `0` is stored for it.
        1 unlock write NAME | then 2
            Redisson: redisson_rwlock:{NAME} receives 1
            redlatch: redisson_rwlock:{NAME} receives 1, 0
        2 unlock read NAME
        # The lock is not held, as above.
        2 unlock write NAME
            Redisson: redisson_rwlock:{NAME} receives 1
            Redisson 3.16: 2 answers true
            redlatch 3.16: 2 answers an error
    ",
    );
}

#[test]
fn writer_with_read_hold() {
    compare(
        "
        1 lock write NAME -1 LEASE
        1 lock read NAME -1 300000
        1 lock read NAME -1 LEASE
        2 lock read NAME 0 LEASE
        # All holds of a reader last as long as the longest; a released hold passes its lease on.
        # The writer's lease is separate: it does not end with a shorter one of the same owner's reads.
        1 unlock read NAME
            Redisson: NAME is a hash for 300 s
            Redisson: {NAME}:OWNER1:rwlock_timeout:1 is a string for 300 s
            redlatch: NAME is a hash for 600 s
            redlatch: {NAME}:OWNER1:rwlock_timeout:1 is a string for 600 s
        1 unlock read NAME
            Redisson: NAME is a hash for 300 s
            redlatch: NAME is a hash for 600 s
        # `1` does not wake a Redisson thread that is about to sleep; `0` is stored for it.
        1 unlock write NAME
            Redisson: redisson_rwlock:{NAME} receives 1
            redlatch: redisson_rwlock:{NAME} receives 1, 0
        1 lock write NAME -1 LEASE
        1 lock read NAME -1 LEASE
        # Other readers may enter now, and are woken.
        1 unlock write NAME
            redlatch: redisson_rwlock:{NAME} receives 1, 0
        2 lock read NAME 0 LEASE
        1 unlock read NAME
        2 unlock read NAME
    ",
    );
}

#[test]
fn readers_and_writers_forced() {
    compare(
        "
        1 lock write NAME -1 LEASE
        2 force-unlock read NAME
        # `1` does not wake a Redisson thread that is about to sleep; `0` is stored for it.
        2 force-unlock write NAME
            Redisson: redisson_rwlock:{NAME} receives 1
            redlatch: redisson_rwlock:{NAME} receives 1, 0
        2 force-unlock write NAME
        3 lock read NAME -1 LEASE
        2 lock read NAME -1 LEASE
        4 force-unlock write NAME
        # Nothing is left that could be counted into a later hold.
        4 force-unlock read NAME
            Redisson: {NAME}:OWNER2:rwlock_timeout:1 = 1
            Redisson: {NAME}:OWNER2:rwlock_timeout:1 is a string for 600 s
            Redisson: {NAME}:OWNER3:rwlock_timeout:1 = 1
            Redisson: {NAME}:OWNER3:rwlock_timeout:1 is a string for 600 s
    ",
    );
}

#[test]
fn writer_with_read_hold_forced() {
    compare(
        "
        1 lock write NAME -1 LEASE
        1 lock read NAME -1 LEASE
        # Each side can be released by force separately.
        2 force-unlock read NAME
            Redisson: 2 answers false
            Redisson: NAME OWNER1 = 1
            Redisson: {NAME}:OWNER1:rwlock_timeout:1 = 1
            Redisson: {NAME}:OWNER1:rwlock_timeout:1 is a string for 600 s
            redlatch: 2 answers true
        # Nothing is left, and all waiters are woken.
        2 force-unlock write NAME
            Redisson: redisson_rwlock:{NAME} receives 1
            Redisson: {NAME}:OWNER1:rwlock_timeout:1 = 1
            Redisson: {NAME}:OWNER1:rwlock_timeout:1 is a string for 600 s
            redlatch: redisson_rwlock:{NAME} receives 1, 0
    ",
    );
}

#[test]
fn readers_with_a_dead_one() {
    compare(
        "
        1 lock read NAME -1 LEASE
        2 lock read NAME -1 LEASE
        0 DEL {NAME}:OWNER1:rwlock_timeout:1
        3 lock read NAME -1 LEASE
        # The next script removes dead readers.
        2 unlock read NAME
            Redisson: NAME OWNER1 = 1
        3 unlock read NAME
    ",
    );
}

#[test]
fn multi_lock() {
    compare(
        "
        1 lock multi lock:NAME-a,fair:NAME-b,write:NAME-c -1 LEASE
        1 lock multi lock:NAME-a,fair:NAME-b,write:NAME-c -1 LEASE
        # A partial release does not change a lease that is not renewed: the requested lease stays in force.
        1 unlock multi lock:NAME-a,fair:NAME-b,write:NAME-c
            Redisson: NAME-a is a hash for 60 s
            Redisson: NAME-b is a hash for 60 s
            Redisson: NAME-c is a hash for 60 s
            redlatch: NAME-a is a hash for 600 s
            redlatch: NAME-b is a hash for 600 s
            redlatch: NAME-c is a hash for 600 s
        # As each member does on its own.
        1 unlock multi lock:NAME-a,fair:NAME-b,write:NAME-c
            Redisson: redisson_rwlock:{NAME-c} receives 1
            redlatch: redisson_lock__channel:{NAME-b} receives 0
            redlatch: redisson_rwlock:{NAME-c} receives 1, 0
        1 lock multi lock:NAME-a,lock:NAME-b@1 -1 -1
        1 unlock multi lock:NAME-a,lock:NAME-b@1
    ",
    );
}

#[test]
fn multi_lock_without_waiting() {
    // Redisson 3.16.8 gives up if its first member takes a millisecond.
    compare_except_3_16(
        "
        1 lock lock NAME-a -1 LEASE
        # All are acquired in one step or none is: none has to be released.
        2 lock multi lock:NAME-x,lock:NAME-a 0 LEASE
            Redisson: redisson_lock__channel:{NAME-x} receives 0
        1 unlock lock NAME-a
        1 lock multi lock:NAME-a,read:NAME-b 0 LEASE
        1 unlock multi lock:NAME-a,read:NAME-b
    ",
    );
}

#[test]
fn multi_lock_with_a_token() {
    // Redisson 3.16.8 has no `RFencedLock`.
    compare_except_3_16(
        "
        # In Redisson the token expires with the lease; then tokens restart at 1.
        1 lock multi lock:NAME-a,fenced:NAME-b -1 LEASE
            Redisson: redisson_lock_token:{NAME-b} is a string for 600 s
            redlatch: redisson_lock_token:{NAME-b} is a string for ever
        1 unlock multi lock:NAME-a,fenced:NAME-b
            Redisson: redisson_lock_token:{NAME-b} is a string for 600 s
            redlatch: redisson_lock_token:{NAME-b} is a string for ever
        2 lock fenced NAME-b -1 LEASE
            Redisson: redisson_lock_token:{NAME-b} is a string for 600 s
            redlatch: redisson_lock_token:{NAME-b} is a string for ever
        2 unlock fenced NAME-b
            Redisson: redisson_lock_token:{NAME-b} is a string for 600 s
            redlatch: redisson_lock_token:{NAME-b} is a string for ever
        # Not if the watchdog renews.
        1 lock multi lock:NAME-a,fenced:NAME-t -1 -1
            Redisson: redisson_lock_token:{NAME-b} is a string for 600 s
            redlatch: redisson_lock_token:{NAME-b} is a string for ever
        1 unlock multi lock:NAME-a,fenced:NAME-t
            Redisson: redisson_lock_token:{NAME-b} is a string for 600 s
            redlatch: redisson_lock_token:{NAME-b} is a string for ever
    ",
    );
}

#[test]
fn red_lock() {
    compare(
        "
        1 lock red lock:NAME-a@0,lock:NAME-b@1,lock:NAME-c@2 -1 LEASE
        1 unlock red lock:NAME-a@0,lock:NAME-b@1,lock:NAME-c@2
        2 lock lock NAME-a -1 LEASE
        1 lock red lock:NAME-a@0,lock:NAME-b@1,lock:NAME-c@2 5000 LEASE
        1 unlock red lock:NAME-a@0,lock:NAME-b@1,lock:NAME-c@2
        2 unlock lock NAME-a
        1 lock red lock:NAME-a@0,lock:NAME-b@1,lock:NAME-c@2 0 -1
        1 unlock red lock:NAME-a@0,lock:NAME-b@1,lock:NAME-c@2
    ",
    );
}

#[test]
fn semaphore() {
    compare(
        "
        1 set-permits NAME 5
        2 set-permits NAME 9
        1 acquire NAME 2 0
        2 acquire NAME 4 0
        1 release NAME 1
        1 add-permits NAME 3
        # Fewer permits: no waiter can be served.
        1 add-permits NAME -2
            Redisson: redisson_sc:{NAME} receives 5
        1 add-permits NAME -7
            Redisson: redisson_sc:{NAME} receives -2
        1 release NAME 1
        1 release NAME 1
        1 release NAME 5
        1 drain NAME
        2 acquire NAME 2 -1 | waits | subscribed
        1 release NAME 2 | then 2
        1 set-permits NAME 4
        2 available NAME
        1 release NAME-new 2
        1 add-permits NAME-other 2
        # As above.
        1 add-permits NAME-less -2
            Redisson: redisson_sc:{NAME-less} receives -2
    ",
    );
}

#[test]
fn semaphore_with_time_to_live() {
    // Redisson 3.16.8 has no `trySetPermits` with a time to live.
    compare_except_3_16(
        "
        1 set-permits-for NAME 5 LEASE
        1 set-permits-for NAME 7 LEASE
        1 acquire NAME 1 0
        1 release NAME 1
        # The time to live belongs to the semaphore, not to its number.
        1 add-permits NAME 1
            Redisson: NAME is a string for ever
            redlatch: NAME is a string for 600 s
        1 set-permits-for NAME-2 5 LEASE
            Redisson: NAME is a string for ever
            redlatch: NAME is a string for 600 s
        1 drain NAME-2
            Redisson: NAME is a string for ever
            Redisson: NAME-2 is a string for ever
            redlatch: NAME is a string for 600 s
            redlatch: NAME-2 is a string for 600 s
    ",
    );
}

#[test]
fn semaphore_if_it_exists() {
    compare_newest(
        "
        1 release-if-exists NAME 1
        1 set-permits NAME 1
        1 release-if-exists NAME 2
    ",
    );
}

#[test]
fn expirable_semaphore() {
    // Redisson 3.16.8 has no methods for several expirable permits.
    compare_except_3_16(
        "
        1 x-set-permits NAME 5
        1 x-set-permits NAME 7
        1 x-acquire NAME 2 0 LEASE
        2 x-acquire NAME 4 0 LEASE
        2 x-acquire NAME 1 -1 300000
        # The end has moved earlier: waiters that sleep until then are woken.
        2 x-update-lease NAME $0 300000
            redlatch: redisson_sc:{NAME} receives 2
        2 x-update-lease NAME $0 LEASE
        # redlatch publishes the number available, Redisson the number released. Both wake all that can be served.
        2 x-release NAME $0
            Redisson: redisson_sc:{NAME} receives 1
            redlatch: redisson_sc:{NAME} receives 3
        2 x-release NAME $0
        2 x-release NAME $1,$0
        2 x-release NAME $1,$2
            Redisson: redisson_sc:{NAME} receives 2
            redlatch: redisson_sc:{NAME} receives 5
        1 x-acquire NAME 3 0 LEASE
        1 x-try-release NAME $3
            Redisson: redisson_sc:{NAME} receives 1
            redlatch: redisson_sc:{NAME} receives 3
        1 x-try-release NAME $3
        1 x-acquired NAME
        1 x-available NAME
        1 x-add-permits NAME 2
            Redisson: redisson_sc:{NAME} receives 2
            redlatch: redisson_sc:{NAME} receives 5
        1 x-add-permits NAME -3
            redlatch: redisson_sc:{NAME} receives 2
        # Redisson publishes the total here.
        1 x-resize NAME 6
            Redisson: redisson_sc:{NAME} receives 6
            redlatch: redisson_sc:{NAME} receives 4
        1 x-resize NAME 6
        1 x-resize NAME 1
            Redisson: redisson_sc:{NAME} receives 1
            redlatch: redisson_sc:{NAME} receives -1
        1 x-try-release NAME $4
            Redisson: redisson_sc:{NAME} receives 1
            redlatch: redisson_sc:{NAME} receives 0
        1 x-try-release NAME $5
    ",
    );
}

#[test]
fn expirable_semaphore_with_some_released() {
    // Redisson 3.16.8 has no methods for several expirable permits.
    compare_except_3_16(
        "
        1 x-set-permits NAME 5
        1 x-acquire NAME 3 0 LEASE
        1 x-try-release NAME $0
            Redisson: redisson_sc:{NAME} receives 1
            redlatch: redisson_sc:{NAME} receives 3
        # Those that are acquired are released; Redisson releases none if one of them is not acquired.
        1 x-try-release NAME $1,$0
            Redisson: 1 answers 0
            Redisson: NAME = 3
            Redisson: {NAME}:timeout PERMIT1 ends in 600 s
            redlatch: 1 answers 1
            redlatch: NAME = 4
            redlatch: redisson_sc:{NAME} receives 4
        1 x-try-release NAME $0,$2
            Redisson: 1 answers 0
            Redisson: NAME = 3
            Redisson: {NAME}:timeout PERMIT1 ends in 600 s
            Redisson: {NAME}:timeout PERMIT2 ends in 600 s
            Redisson: {NAME}:timeout is a zset for ever
            redlatch: 1 answers 1
            redlatch: NAME = 5
            redlatch: redisson_sc:{NAME} receives 5
    ",
    );
}

#[test]
fn expirable_semaphore_without_a_lease() {
    // Redisson 3.16.8 has no `setPermits` of expirable permits.
    compare_except_3_16(
        "
        1 x-set-permits NAME 2
        # Without a lease the watchdog renews it: the permits of dead processes expire.
        1 x-acquire NAME 1 0 -1
            Redisson: {NAME}:timeout PERMIT0 never ends
            redlatch: {NAME}:timeout PERMIT0 ends in 60 s
        1 x-release NAME $0
            Redisson: redisson_sc:{NAME} receives 1
            redlatch: redisson_sc:{NAME} receives 2
        1 x-resize NAME-new 2
        1 x-add-permits NAME-other 2
    ",
    );
}

#[test]
fn expirable_semaphore_whose_permits_expire() {
    // Redisson 3.16.8 has no methods for several expirable permits.
    compare_except_3_16(
        "
        1 x-set-permits NAME 3
        1 x-acquire NAME 2 0 LEASE
        0 ZADD {NAME}:timeout 1 $0
        1 x-available NAME
        0 ZADD {NAME}:timeout 1 $1
        # Expired permits have been released; Redisson delays that, although it reports that they cannot be released.
        1 x-release NAME $1
            Redisson: NAME = 2
            Redisson: {NAME}:timeout PERMIT1 has ended
            Redisson: {NAME}:timeout is a zset for ever
            redlatch: NAME = 3
            redlatch: redisson_sc:{NAME} receives 3
        1 x-acquire NAME 1 0 LEASE
            Redisson: redisson_sc:{NAME} receives 3
        0 ZADD {NAME}:timeout 1 $2
        2 x-acquire NAME 3 0 LEASE
    ",
    );
}

#[test]
fn latch() {
    compare(
        "
        1 set-count NAME 3
        1 set-count NAME 7
        2 await NAME -1 | waits | subscribed
        1 count-down NAME
        1 count-down NAME
        1 count-down NAME | then 2
        1 count-down NAME
        1 count NAME
        1 set-count NAME 2
        # At `1`, a new count, Redisson's waiters continue to wait; at `0` they return.
        1 delete-latch NAME
            Redisson: redisson_countdownlatch__channel__{NAME} receives 1
            redlatch: redisson_countdownlatch__channel__{NAME} receives 0
        1 delete-latch NAME
    ",
    );
}

#[test]
fn expirable_semaphore_waiting() {
    compare(
        "
        1 x-set-permits NAME 1
        2 x-acquire NAME 1 0 LEASE
        1 x-acquire NAME 1 -1 LEASE | waits | subscribed
        2 x-release NAME $0 | then 1
        1 x-release NAME $1
    ",
    );
}
