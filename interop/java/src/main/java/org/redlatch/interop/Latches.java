package org.redlatch.interop;

import static java.util.concurrent.TimeUnit.MILLISECONDS;

import java.util.List;

import org.redisson.api.RCountDownLatch;

/**
 * Count-down latches.
 */
final class Latches {

    private Latches() {
    }

    static Object run(Servers servers, String command, List<String> args) throws Exception {
        RCountDownLatch latch = servers.first().getCountDownLatch(args.isEmpty() ? "" : args.get(0));
        return switch (command + "/" + args.size()) {
            case "set-count/2" -> latch.trySetCount(Long.parseLong(args.get(1)));
            case "count-down/1" -> {
                latch.countDown();
                yield true;
            }
            case "count/1" -> latch.getCount();
            case "await/2" -> await(latch, Long.parseLong(args.get(1)));
            case "delete-latch/1" -> latch.delete();
            default -> throw Worker.unknown(command, args);
        };
    }

    private static boolean await(RCountDownLatch latch, long wait) throws InterruptedException {
        if (wait == -1) {
            latch.await();
            return true;
        }
        return latch.await(wait, MILLISECONDS);
    }
}
