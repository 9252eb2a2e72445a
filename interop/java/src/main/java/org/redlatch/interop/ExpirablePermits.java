package org.redlatch.interop;

import static java.util.concurrent.TimeUnit.MILLISECONDS;

import java.util.List;

import org.redisson.api.RPermitExpirableSemaphore;

/**
 * Expirable semaphores.
 */
final class ExpirablePermits {

    private ExpirablePermits() {
    }

    static Object run(Servers servers, String command, List<String> args) throws Exception {
        RPermitExpirableSemaphore semaphore =
                servers.first().getPermitExpirableSemaphore(args.isEmpty() ? "" : args.get(0));
        return switch (command + "/" + args.size()) {
            case "x-set-permits/2" -> semaphore.trySetPermits(Integer.parseInt(args.get(1)));
            case "x-resize/2" -> {
                Newer.resize(semaphore, Integer.parseInt(args.get(1)));
                yield true;
            }
            case "x-add-permits/2" -> {
                semaphore.addPermits(Integer.parseInt(args.get(1)));
                yield true;
            }
            case "x-acquire/4" -> acquire(semaphore, Integer.parseInt(args.get(1)),
                    Long.parseLong(args.get(2)), Long.parseLong(args.get(3)));
            case "x-release/2" -> {
                Newer.release(semaphore, ids(args.get(1)));
                yield true;
            }
            case "x-try-release/2" -> Newer.tryRelease(semaphore, ids(args.get(1)));
            case "x-update-lease/3" ->
                semaphore.updateLeaseTime(args.get(1), Long.parseLong(args.get(2)), MILLISECONDS);
            case "x-lease/2" -> Newer.leaseTime(semaphore, args.get(1));
            case "x-available/1" -> semaphore.availablePermits();
            case "x-acquired/1" -> Newer.acquired(semaphore);
            case "x-total/1" -> Newer.total(semaphore);
            default -> throw Worker.unknown(command, args);
        };
    }

    private static List<String> acquire(RPermitExpirableSemaphore semaphore, int permits, long wait, long lease)
            throws InterruptedException {
        List<String> ids = Newer.acquire(semaphore, permits, wait, lease);
        return ids == null ? List.of() : ids;
    }

    private static List<String> ids(String list) {
        return List.of(list.split(","));
    }
}
