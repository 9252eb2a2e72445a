package org.redlatch.interop;

import static java.util.concurrent.TimeUnit.MILLISECONDS;

import java.lang.reflect.InvocationTargetException;
import java.util.List;
import java.util.stream.Stream;

import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;

/**
 * Locks of all kinds, multi-locks and RedLocks.
 */
final class Locks {

    private Locks() {
    }

    static Object run(Servers servers, String command, List<String> args) throws Exception {
        // Selected by command and number of arguments.
        return switch (command + "/" + args.size()) {
            case "lock/4" -> lock(of(servers, args.get(0), args.get(1)),
                    Long.parseLong(args.get(2)), Long.parseLong(args.get(3)));
            case "unlock/2" -> {
                of(servers, args.get(0), args.get(1)).unlock();
                yield true;
            }
            case "force-unlock/2" -> of(servers, args.get(0), args.get(1)).forceUnlock();
            case "is-locked/2" -> of(servers, args.get(0), args.get(1)).isLocked();
            case "is-held/2" -> of(servers, args.get(0), args.get(1)).isHeldByCurrentThread();
            case "holds/2" -> of(servers, args.get(0), args.get(1)).getHoldCount();
            case "remaining/2" -> of(servers, args.get(0), args.get(1)).remainTimeToLive();
            case "token/1" -> Newer.token(servers.first(), args.get(0));
            case "hold-many/2" -> holdMany(servers, args.get(0), Integer.parseInt(args.get(1)));
            default -> throw Worker.unknown(command, args);
        };
    }

    /** Returns whether the lock was acquired; for a fenced lock the token instead of {@code true}. */
    private static Object lock(RLock lock, long wait, long lease) throws InterruptedException {
        if (Newer.isFenced(lock)) {
            Long token = Newer.lockFenced(lock, wait, lease);
            return token == null ? (Object) false : token;
        }
        if (wait == -1) {
            if (lease == -1) {
                lock.lock();
            } else {
                lock.lock(lease, MILLISECONDS);
            }
            return true;
        }
        if (wait == 0 && lease == -1) {
            // Unlike a wait of 0, this never joins the queue of a fair lock.
            return lock.tryLock();
        }
        return lock.tryLock(wait, lease, MILLISECONDS);
    }

    private static boolean holdMany(Servers servers, String prefix, int locks) {
        for (int number = 0; number < locks; number++) {
            servers.first().getLock(prefix + number).lock();
        }
        return true;
    }

    /** Returns a lock of this kind on server 0; members of a multi-lock or RedLock may name another server. */
    static RLock of(Servers servers, String kind, String name) {
        return switch (kind) {
            case "multi" -> servers.first().getMultiLock(members(servers, name));
            case "red" -> servers.first().getRedLock(members(servers, name));
            case "group" -> group(servers.first(), name);
            default -> ofKind(servers.first(), kind, name);
        };
    }

    /** Parses {@code KIND:NAME[@SERVER]}, separated by commas. */
    private static RLock[] members(Servers servers, String list) {
        return Stream.of(list.split(",")).map(member -> {
            int colon = member.indexOf(':');
            if (colon < 0) {
                throw new IllegalArgumentException("a member is KIND:NAME, not \"" + member + "\"");
            }
            int at = member.lastIndexOf('@');
            boolean namesServer = at > colon;
            int server = namesServer ? Integer.parseInt(member.substring(at + 1)) : 0;
            String name = member.substring(colon + 1, namesServer ? at : member.length());
            return ofKind(servers.client(server), member.substring(0, colon), name);
        }).toArray(RLock[]::new);
    }

    /** Parses {@code GROUP:VALUE}, with further values after commas. */
    private static RLock group(RedissonClient client, String name) {
        String[] parts = name.split(":", 2);
        return Newer.group(client, parts[0], List.of(parts[1].split(",")));
    }

    private static RLock ofKind(RedissonClient client, String kind, String name) {
        return switch (kind) {
            case "lock" -> client.getLock(name);
            case "nonreentrant" -> ofNewer(client, "getNonReentrantLock", name);
            case "fair" -> client.getFairLock(name);
            case "nonreentrant-fair" -> ofNewer(client, "getNonReentrantFairLock", name);
            case "read" -> client.getReadWriteLock(name).readLock();
            case "write" -> client.getReadWriteLock(name).writeLock();
            case "fenced" -> Newer.fenced(client, name);
            case "spin" -> client.getSpinLock(name);
            default -> throw new IllegalArgumentException("there is no lock of the kind \"" + kind + "\"");
        };
    }

    /** Uses reflection, because this is also compiled for late 3.x versions, which lack the method. */
    private static RLock ofNewer(RedissonClient client, String method, String name) {
        try {
            return (RLock) RedissonClient.class.getMethod(method, String.class).invoke(client, name);
        } catch (NoSuchMethodException error) {
            throw new UnsupportedOperationException(method + " is not in Redisson " + Servers.version());
        } catch (IllegalAccessException | InvocationTargetException error) {
            throw new IllegalStateException(method, error);
        }
    }
}
