package org.redlatch.interop;

import static java.util.concurrent.TimeUnit.MILLISECONDS;

import java.time.Duration;
import java.util.List;

import org.redisson.api.RFencedLock;
import org.redisson.api.RLock;
import org.redisson.api.RPermitExpirableSemaphore;
import org.redisson.api.RSemaphore;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * Methods that Redisson 3.16.8 does not have. For that version there is another class of this name, in
 * {@code src/3.16.8}.
 */
final class Newer {

    /** A day, in ms. */
    private static final long LONG = 24 * 60 * 60 * 1000;

    private Newer() {
    }

    static void setFairWait(Config config, long ms) {
        config.setFairLockWaitTimeout(ms);
    }

    static RLock group(RedissonClient client, String group, List<String> values) {
        return client.getMultiLock(group, List.copyOf(values));
    }

    static RLock fenced(RedissonClient client, String name) {
        return client.getFencedLock(name);
    }

    static Long token(RedissonClient client, String name) {
        return client.getFencedLock(name).getToken();
    }

    static boolean isFenced(RLock lock) {
        return lock instanceof RFencedLock;
    }

    /** Returns the token, or null if the lock was not acquired. */
    static Long lockFenced(RLock any, long wait, long lease) {
        var lock = (RFencedLock) any;
        if (wait == -1 && lease == -1) {
            return lock.lockAndGetToken();
        }
        if (wait == -1) {
            // lockAndGetToken(lease, unit) ignores the lease, and the watchdog renews, in all versions used here.
            Long token;
            do {
                token = lock.tryLockAndGetToken(LONG, lease, MILLISECONDS);
            } while (token == null);
            return token;
        }
        // Not tryLockAndGetToken(), which never returns when another owner holds the lock, in all versions used here.
        return lock.tryLockAndGetToken(wait, lease, MILLISECONDS);
    }

    static boolean setPermitsFor(RSemaphore semaphore, int permits, long ms) {
        return semaphore.trySetPermits(permits, Duration.ofMillis(ms));
    }

    static void resize(RPermitExpirableSemaphore semaphore, int permits) {
        semaphore.setPermits(permits);
    }

    /** Returns their ids, or null if they were not acquired. */
    static List<String> acquire(RPermitExpirableSemaphore semaphore, int permits, long wait, long lease)
            throws InterruptedException {
        if (wait == -1) {
            return lease == -1 ? semaphore.acquire(permits) : semaphore.acquire(permits, lease, MILLISECONDS);
        }
        if (wait == 0 && lease == -1) {
            return semaphore.tryAcquire(permits);
        }
        // A lease of -1 means no end, as in the protocol.
        return semaphore.tryAcquire(permits, wait, lease, MILLISECONDS);
    }

    static void release(RPermitExpirableSemaphore semaphore, List<String> ids) {
        semaphore.release(ids);
    }

    static int tryRelease(RPermitExpirableSemaphore semaphore, List<String> ids) {
        return semaphore.tryRelease(ids);
    }

    static long leaseTime(RPermitExpirableSemaphore semaphore, String id) {
        return semaphore.getLeaseTime(id);
    }

    static int acquired(RPermitExpirableSemaphore semaphore) {
        return semaphore.acquiredPermits();
    }

    static int total(RPermitExpirableSemaphore semaphore) {
        return semaphore.getPermits();
    }
}
