package org.redlatch.interop;

import static java.util.concurrent.TimeUnit.MILLISECONDS;

import java.util.List;

import org.redisson.api.RLock;
import org.redisson.api.RPermitExpirableSemaphore;
import org.redisson.api.RSemaphore;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * Methods that newer versions have and this one does not: they throw, unless this version has an equivalent.
 */
final class Newer {

    /** Wait time of a fair lock's waiter, in ms: fixed in this version. */
    private static final long FAIR_WAIT = 5 * 60 * 1000;

    private Newer() {
    }

    static void setFairWait(Config config, long ms) {
        if (ms != FAIR_WAIT) {
            throw missing("fairLockWaitTimeout");
        }
    }

    static RLock group(RedissonClient client, String group, List<String> values) {
        throw missing("getMultiLock(String, Collection)");
    }

    static RLock fenced(RedissonClient client, String name) {
        throw missing("RFencedLock");
    }

    static Long token(RedissonClient client, String name) {
        throw missing("RFencedLock");
    }

    static boolean isFenced(RLock lock) {
        return false;
    }

    static Long lockFenced(RLock lock, long wait, long lease) {
        throw missing("RFencedLock");
    }

    static boolean setPermitsFor(RSemaphore semaphore, int permits, long ms) {
        throw missing("RSemaphore.trySetPermits(int, Duration)");
    }

    static void resize(RPermitExpirableSemaphore semaphore, int permits) {
        throw missing("RPermitExpirableSemaphore.setPermits");
    }

    /** Returns its id, or null if it was not acquired. */
    static List<String> acquire(RPermitExpirableSemaphore semaphore, int permits, long wait, long lease)
            throws InterruptedException {
        if (permits != 1) {
            throw missing("RPermitExpirableSemaphore.acquire(int)");
        }
        String id;
        if (wait == -1) {
            id = lease == -1 ? semaphore.acquire() : semaphore.acquire(lease, MILLISECONDS);
        } else if (wait == 0 && lease == -1) {
            id = semaphore.tryAcquire();
        } else {
            id = semaphore.tryAcquire(wait, lease, MILLISECONDS);
        }
        return id == null ? null : List.of(id);
    }

    static void release(RPermitExpirableSemaphore semaphore, List<String> ids) {
        semaphore.release(one(ids));
    }

    static int tryRelease(RPermitExpirableSemaphore semaphore, List<String> ids) {
        return semaphore.tryRelease(one(ids)) ? 1 : 0;
    }

    static long leaseTime(RPermitExpirableSemaphore semaphore, String id) {
        throw missing("RPermitExpirableSemaphore.getLeaseTime");
    }

    static int acquired(RPermitExpirableSemaphore semaphore) {
        throw missing("RPermitExpirableSemaphore.acquiredPermits");
    }

    static int total(RPermitExpirableSemaphore semaphore) {
        throw missing("RPermitExpirableSemaphore.getPermits");
    }

    private static String one(List<String> ids) {
        if (ids.size() != 1) {
            throw missing("RPermitExpirableSemaphore.release(List)");
        }
        return ids.get(0);
    }

    private static UnsupportedOperationException missing(String what) {
        return new UnsupportedOperationException(what + " is not in Redisson " + Servers.version());
    }
}
