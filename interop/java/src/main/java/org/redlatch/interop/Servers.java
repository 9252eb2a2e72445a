package org.redlatch.interop;

import java.lang.reflect.InvocationHandler;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.util.ArrayList;
import java.util.List;
import java.util.function.Consumer;
import java.util.stream.Stream;

import org.redisson.Redisson;
import org.redisson.api.RedissonClient;
import org.redisson.client.codec.StringCodec;
import org.redisson.config.BaseConfig;
import org.redisson.config.BaseMasterSlaveServersConfig;
import org.redisson.config.Config;
import org.redisson.config.ReadMode;
import org.redisson.config.SubscriptionMode;

/**
 * The servers that the peer was started with, with a client for each.
 */
final class Servers {

    /** Connections to each server at first; Redisson opens more when it needs them. To open its default takes time. */
    private static final int CONNECTIONS = 2;

    private final List<RedissonClient> clients = new ArrayList<>();
    private RedissonClient counters;

    private Servers() {
    }

    static Servers connect(List<String> args) {
        List<Consumer<Config>> settings = new ArrayList<>();
        List<String> urls = new ArrayList<>();
        String prefix = null;
        String counters = null;
        boolean replicas = false;
        for (String arg : args) {
            String[] parts = arg.split("=", 2);
            switch (parts[0]) {
                case "watchdog" -> settings.add(config -> config.setLockWatchdogTimeout(Long.parseLong(parts[1])));
                case "fair-wait" -> settings.add(config -> Newer.setFairWait(config, Long.parseLong(parts[1])));
                case "codec" -> settings.add(config -> config.setCodec(StringCodec.INSTANCE));
                case "prefix" -> prefix = parts[1];
                case "counters" -> counters = parts[1];
                case "replicas" -> replicas = true;
                default -> {
                    if (!arg.contains("://")) {
                        throw new IllegalArgumentException("unknown argument \"" + arg + "\"");
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
            var server = deployment(config, url, replicas);
            if (prefix != null) {
                mapNames(server, prefix);
            }
            servers.clients.add(Redisson.create(config));
        }
        servers.counters = counters == null ? servers.first() : plain(counters);
        return servers;
    }

    private static RedissonClient plain(String url) {
        var config = new Config();
        config.useSingleServer().setAddress(url);
        return Redisson.create(config);
    }

    /** Parses the URL forms of redlatch. */
    private static BaseConfig<?> deployment(Config config, String url, boolean replicas) {
        String[] parts = url.split("://", 2);
        String[] path = parts[1].split("/", -1);
        String[] hosts = Stream.of(path[0].split(",")).map(host -> "redis://" + host).toArray(String[]::new);
        return switch (parts[0]) {
            case "redis+sentinel" ->
                from(replicas, config.useSentinelServers().setMasterName(path[1]).addSentinelAddress(hosts));
            case "redis+cluster" -> from(replicas, config.useClusterServers().addNodeAddress(hosts));
            default -> config.useSingleServer().setAddress(url).setConnectionMinimumIdleSize(CONNECTIONS);
        };
    }

    /**
     * Sets where Redisson reads and subscribes. By default it reads from replicas, which may be behind, and subscribes
     * at masters.
     */
    private static BaseConfig<?> from(boolean replicas, BaseMasterSlaveServersConfig<?> servers) {
        servers.setReadMode(replicas ? ReadMode.SLAVE : ReadMode.MASTER);
        servers.setSubscriptionMode(replicas ? SubscriptionMode.SLAVE : SubscriptionMode.MASTER);
        servers.setMasterConnectionMinimumIdleSize(CONNECTIONS).setSlaveConnectionMinimumIdleSize(CONNECTIONS);
        return servers;
    }

    /** Puts the prefix before all names. Uses reflection, because the mapper's interface has moved between versions. */
    private static void mapNames(BaseConfig<?> server, String prefix) {
        Method set = Stream.of(server.getClass().getMethods())
                .filter(method -> method.getName().equals("setNameMapper") && !method.isBridge())
                .findAny().orElseThrow();
        Class<?> mapper = set.getParameterTypes()[0];
        InvocationHandler handler = (self, method, args) -> switch (method.getName()) {
            case "map" -> prefix + args[0];
            case "unmap" -> ((String) args[0]).substring(prefix.length());
            default -> throw new UnsupportedOperationException(method.getName());
        };
        try {
            set.invoke(server, Proxy.newProxyInstance(mapper.getClassLoader(), new Class<?>[] {mapper}, handler));
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException(error);
        }
    }

    /** Returns server 0, which has all objects whose names select no other server. */
    RedissonClient first() {
        return clients.get(0);
    }

    RedissonClient client(int server) {
        if (server < 0 || server >= clients.size()) {
            throw new IllegalArgumentException("there is no server " + server);
        }
        return clients.get(server);
    }

    /** Returns the server with the numbers of {@code increment} and {@code count-holders}. */
    RedissonClient counters() {
        return counters;
    }

    static String version() {
        return Redisson.class.getPackage().getImplementationVersion();
    }
}
