package org.redlatch.interop;

import java.util.List;
import java.util.Objects;

import org.redisson.api.RBucket;
import org.redisson.api.RLock;
import org.redisson.api.RSemaphore;
import org.redisson.client.codec.StringCodec;

/**
 * Checked work for workers that compete for one name: it fails if too many of them work at the same time.
 */
final class Contention {

    private Contention() {
    }

    static Object run(Servers servers, String command, List<String> args) throws Exception {
        return switch (command + "/" + args.size()) {
            case "increment/4" -> increment(servers, args.get(0), args.get(1), args.get(2), Long.parseLong(args.get(3)));
            case "count-holders/3" -> countHolders(servers, args.get(0), args.get(1), Long.parseLong(args.get(2)));
            default -> throw Worker.unknown(command, args);
        };
    }

    private static long increment(Servers servers, String kind, String name, String key, long rounds) {
        RLock lock = Locks.of(servers, kind, name);
        // Plain text, so that the other library can read it, too.
        RBucket<String> counter = servers.counters().getBucket(key, StringCodec.INSTANCE);
        for (long round = 0; round < rounds; round++) {
            lock.lock();
            try {
                String number = counter.get();
                if (kind.equals("read")) {
                    String again = counter.get();
                    if (!Objects.equals(number, again)) {
                        throw new IllegalStateException(number + " became " + again + " while it was read");
                    }
                } else {
                    counter.set(Long.toString(number == null ? 1 : Long.parseLong(number) + 1));
                }
            } finally {
                lock.unlock();
            }
        }
        return rounds;
    }

    private static long countHolders(Servers servers, String name, String key, long rounds) throws InterruptedException {
        RSemaphore semaphore = servers.first().getSemaphore(name);
        var holders = servers.counters().getAtomicLong(key);
        long most = 0;
        for (long round = 0; round < rounds; round++) {
            semaphore.acquire();
            try {
                most = Math.max(most, holders.incrementAndGet());
                holders.decrementAndGet();
            } finally {
                semaphore.release();
            }
        }
        return most;
    }
}
