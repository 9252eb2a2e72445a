package org.redlatch.interop;

import java.util.ArrayList;
import java.util.List;
import java.util.function.Consumer;

import org.redisson.Redisson;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * The servers that the peer was started with: a client of its own for each.
 */
final class Servers {

    private final List<RedissonClient> clients = new ArrayList<>();

    private Servers() {
    }

    static Servers connect(List<String> args) {
        List<Consumer<Config>> settings = new ArrayList<>();
        List<String> urls = new ArrayList<>();
        Integer pool = null;
        for (String arg : args) {
            String[] parts = arg.split("=", 2);
            switch (parts[0]) {
                case "watchdog" -> settings.add(config -> config.setLockWatchdogTimeout(Long.parseLong(parts[1])));
                case "fair-wait" -> settings.add(config -> config.setFairLockWaitTimeout(Long.parseLong(parts[1])));
                case "threads" -> settings.add(config -> config.setThreads(Integer.parseInt(parts[1])));
                case "netty" -> settings.add(config -> config.setNettyThreads(Integer.parseInt(parts[1])));
                case "pool" -> pool = Integer.valueOf(parts[1]);
                default -> {
                    if (!arg.contains("://")) {
                        throw new IllegalArgumentException("what is \"" + arg + "\"?");
                    }
                    urls.add(arg);
                }
            }
        }
        if (urls.isEmpty()) {
            throw new IllegalArgumentException("Peer [SETTING=VALUE ...] URL [URL ...]");
        }
        var servers = new Servers();
        for (String url : urls) {
            var config = new Config();
            settings.forEach(setting -> setting.accept(config));
            var server = config.useSingleServer().setAddress(url);
            if (pool != null) {
                server.setConnectionPoolSize(pool);
                // All of them from the start: none is opened while somebody measures.
                server.setConnectionMinimumIdleSize(pool);
            }
            servers.clients.add(Redisson.create(config));
        }
        return servers;
    }

    /** Server 0 is where everything is, unless its name says another. */
    RedissonClient first() {
        return clients.get(0);
    }

    RedissonClient client(int server) {
        if (server < 0 || server >= clients.size()) {
            throw new IllegalArgumentException("there is no server " + server);
        }
        return clients.get(server);
    }

    void close() {
        clients.forEach(RedissonClient::shutdown);
    }

    static String version() {
        return Redisson.class.getPackage().getImplementationVersion();
    }
}
