package org.redlatch.interop;

import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;

/**
 * A thread that runs commands one after the other. For Redisson the thread is the owner of its locks.
 */
final class Worker {

    private record Request(long id, List<String> words) {
    }

    private final BlockingQueue<Request> requests = new LinkedBlockingQueue<>();
    private final Servers servers;

    Worker(long number, Servers servers) {
        this.servers = servers;
        var thread = new Thread(this::work, "worker " + number);
        thread.setDaemon(true);
        thread.start();
    }

    void send(long id, List<String> words) {
        requests.add(new Request(id, words));
    }

    private void work() {
        while (true) {
            Request request;
            try {
                request = requests.take();
            } catch (InterruptedException impossible) {
                // No code interrupts this thread.
                return;
            }
            // This is the machine's monotonic clock, which all processes share.
            long started = System.nanoTime();
            try {
                Object value = run(request.words.get(0), request.words.subList(1, request.words.size()));
                Answers.succeeded(request.id, started, System.nanoTime(), value);
            } catch (Throwable error) {
                Answers.failed(request.id, started, System.nanoTime(), error);
            }
        }
    }

    private Object run(String command, List<String> args) throws Exception {
        return switch (command) {
            case "owner" -> servers.first().getId() + ":" + Thread.currentThread().getId();
            case "lock", "unlock", "force-unlock", "is-locked", "is-held", "holds", "remaining", "token", "hold-many"
                -> Locks.run(servers, command, args);
            case "set-permits", "set-permits-for", "acquire", "release", "release-if-exists", "add-permits", "drain",
                    "available" -> Permits.run(servers, command, args);
            case "x-set-permits", "x-resize", "x-add-permits", "x-acquire", "x-release", "x-try-release",
                    "x-update-lease", "x-lease", "x-available", "x-acquired", "x-total"
                -> ExpirablePermits.run(servers, command, args);
            case "set-count", "count-down", "count", "await", "delete-latch" -> Latches.run(servers, command, args);
            case "increment", "count-holders" -> Contention.run(servers, command, args);
            case "pairs", "contend" -> Throughput.run(servers, command, args);
            default -> throw unknown(command, args);
        };
    }

    static IllegalArgumentException unknown(String command, List<String> args) {
        return new IllegalArgumentException("unknown command " + command + " " + args);
    }
}
