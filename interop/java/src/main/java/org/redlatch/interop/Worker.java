package org.redlatch.interop;

import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;

/**
 * A thread that runs commands one after the other. For Redisson the thread is the owner of its locks.
 */
final class Worker {

    private record Order(long id, List<String> words) {
    }

    private final BlockingQueue<Order> orders = new LinkedBlockingQueue<>();
    private final Servers servers;

    Worker(long number, Servers servers) {
        this.servers = servers;
        var thread = new Thread(this::work, "worker " + number);
        thread.setDaemon(true);
        thread.start();
    }

    void tell(long id, List<String> words) {
        orders.add(new Order(id, words));
    }

    private void work() {
        while (true) {
            Order order;
            try {
                order = orders.take();
            } catch (InterruptedException nobodyDoes) {
                return;
            }
            // This is the machine's monotonic clock, which all processes share.
            long from = System.nanoTime();
            try {
                Object value = obey(order.words.get(0), order.words.subList(1, order.words.size()));
                Answers.did(order.id, from, System.nanoTime(), value);
            } catch (Throwable error) {
                Answers.failed(order.id, from, System.nanoTime(), error);
            }
        }
    }

    private Object obey(String command, List<String> args) throws Exception {
        return switch (command) {
            case "owner" -> servers.first().getId() + ":" + Thread.currentThread().getId();
            case "lock", "unlock", "force-unlock", "is-locked", "is-held", "holds", "remaining", "token", "hold-many"
                -> Locks.obey(servers, command, args);
            case "set-permits", "set-permits-for", "acquire", "release", "release-if-exists", "add-permits", "drain",
                    "available" -> Permits.obey(servers, command, args);
            case "x-set-permits", "x-resize", "x-add-permits", "x-acquire", "x-release", "x-try-release",
                    "x-update-lease", "x-lease", "x-available", "x-acquired", "x-total"
                -> ExpirablePermits.obey(servers, command, args);
            case "set-count", "count-down", "count", "await", "delete-latch" -> Latches.obey(servers, command, args);
            case "crowd", "crowd-permits" -> Crowd.obey(servers, command, args);
            case "pairs", "contend" -> Rates.obey(servers, command, args);
            default -> throw unknown(command, args);
        };
    }

    static IllegalArgumentException unknown(String command, List<String> args) {
        return new IllegalArgumentException("unknown command " + command + " " + args);
    }
}
