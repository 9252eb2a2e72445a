package org.redlatch.interop;

import static java.util.concurrent.TimeUnit.MILLISECONDS;

import java.lang.reflect.InvocationTargetException;
import java.util.List;

import org.redisson.api.RSemaphore;

/**
 * Semaphores.
 */
final class Permits {

    private Permits() {
    }

    static Object run(Servers servers, String command, List<String> args) throws Exception {
        RSemaphore semaphore = servers.first().getSemaphore(args.isEmpty() ? "" : args.get(0));
        return switch (command + "/" + args.size()) {
            case "set-permits/2" -> semaphore.trySetPermits(Integer.parseInt(args.get(1)));
            case "set-permits-for/3" -> Newer.setPermitsFor(semaphore,
                    Integer.parseInt(args.get(1)), Long.parseLong(args.get(2)));
            case "acquire/3" -> acquire(semaphore, Integer.parseInt(args.get(1)), Long.parseLong(args.get(2)));
            case "release/2" -> {
                semaphore.release(Integer.parseInt(args.get(1)));
                yield true;
            }
            case "release-if-exists/2" -> releaseIfExists(semaphore, Integer.parseInt(args.get(1)));
            case "add-permits/2" -> {
                semaphore.addPermits(Integer.parseInt(args.get(1)));
                yield true;
            }
            case "drain/1" -> semaphore.drainPermits();
            case "available/1" -> semaphore.availablePermits();
            default -> throw Worker.unknown(command, args);
        };
    }

    private static boolean acquire(RSemaphore semaphore, int permits, long wait) throws InterruptedException {
        if (wait == -1) {
            semaphore.acquire(permits);
            return true;
        }
        return wait == 0
                ? semaphore.tryAcquire(permits)
                : semaphore.tryAcquire(permits, wait, MILLISECONDS);
    }

    /** Uses reflection, because this is also compiled for late 3.x versions, which lack the method. */
    private static Object releaseIfExists(RSemaphore semaphore, int permits) throws IllegalAccessException {
        try {
            return RSemaphore.class.getMethod("releaseIfExists", int.class).invoke(semaphore, permits);
        } catch (NoSuchMethodException error) {
            throw new UnsupportedOperationException("releaseIfExists is not in Redisson " + Servers.version());
        } catch (InvocationTargetException error) {
            throw new IllegalStateException("releaseIfExists", error.getCause());
        }
    }
}
