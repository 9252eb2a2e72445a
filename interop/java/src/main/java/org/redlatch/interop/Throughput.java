package org.redlatch.interop;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;

import org.redisson.api.RLock;

/**
 * Counts pairs of lock and unlock in a given time.
 */
final class Throughput {

    private Throughput() {
    }

    static Object run(Servers servers, String command, List<String> args) throws Exception {
        if (args.size() != 4) {
            throw Worker.unknown(command, args);
        }
        return pairs(servers, args.get(0), args.get(1), command.equals("pairs"),
                Integer.parseInt(args.get(2)), Long.parseLong(args.get(3)));
    }

    /**
     * Acquires and releases in this many threads, each with a lock of its own or all with the same. Returns the number
     * of pairs of each thread.
     */
    private static List<Long> pairs(Servers servers, String kind, String name, boolean ownNames, int threads, long ms)
            throws Exception {
        // All threads start together.
        var begin = new CyclicBarrier(threads);
        List<FutureTask<Long>> tasks = new ArrayList<>();
        for (int number = 0; number < threads; number++) {
            RLock lock = Locks.of(servers, kind, ownNames ? name + number : name);
            var task = new FutureTask<>(() -> {
                begin.await();
                long end = System.nanoTime() + ms * 1_000_000;
                long pairs = 0;
                while (System.nanoTime() < end) {
                    lock.lock();
                    lock.unlock();
                    pairs++;
                }
                return pairs;
            });
            tasks.add(task);
            var thread = new Thread(task, kind + " " + number);
            thread.setDaemon(true);
            thread.start();
        }
        List<Long> pairs = new ArrayList<>();
        for (FutureTask<Long> task : tasks) {
            try {
                pairs.add(task.get());
            } catch (ExecutionException error) {
                throw error.getCause() instanceof Exception cause ? cause : error;
            }
        }
        return pairs;
    }
}
