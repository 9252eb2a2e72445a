package org.redlatch.interop;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/**
 * The peer on Redisson: runs commands from standard input. See {@code interop/PROTOCOL.md}.
 */
public final class Peer {

    private Peer() {
    }

    public static void main(String[] args) {
        Servers servers;
        try {
            servers = Servers.connect(List.of(args));
        } catch (Exception error) {
            System.err.println("peer: " + error);
            Runtime.getRuntime().halt(1);
            return;
        }
        Answers.ready("redisson " + Servers.version());
        try {
            read(servers);
        } catch (IOException error) {
            System.err.println("peer: " + error);
        }
        // As if killed: nothing is released, not even by a shutdown hook.
        Runtime.getRuntime().halt(0);
    }

    private static void read(Servers servers) throws IOException {
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        Map<Long, Worker> workers = new HashMap<>();
        for (String line; (line = lines.readLine()) != null;) {
            String[] words = line.split(" ", -1);
            Long id = number(words, 0);
            Long worker = number(words, 1);
            if (id == null || worker == null || words.length < 3) {
                Answers.refused(id, "unknown command \"" + line + "\"");
                continue;
            }
            workers.computeIfAbsent(worker, number -> new Worker(number, servers))
                    .send(id, List.of(words).subList(2, words.length));
        }
    }

    private static Long number(String[] words, int at) {
        try {
            return at < words.length ? Long.valueOf(words[at]) : null;
        } catch (NumberFormatException error) {
            return null;
        }
    }
}
