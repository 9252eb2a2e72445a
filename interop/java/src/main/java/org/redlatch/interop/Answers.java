package org.redlatch.interop;

import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.stream.Collectors;

/**
 * One line of JSON for each line that was read, on standard output. Written by hand: Redisson 4 brings no JSON library along.
 */
final class Answers {

    private static final OutputStream OUT = new FileOutputStream(FileDescriptor.out);

    private Answers() {
    }

    static void ready(String library) {
        say("{\"ready\":" + json(library) + "}");
    }

    static void did(long id, long from, long at, Object value) {
        say("{\"id\":" + id + ",\"from\":" + from + ",\"at\":" + at + ",\"ok\":" + json(value) + "}");
    }

    static void failed(long id, long from, long at, Throwable error) {
        String what = error.getClass().getSimpleName() + ": " + error.getMessage();
        // Some that Redisson throws say nothing themselves.
        for (Throwable cause = error.getCause(); cause != null; cause = cause.getCause()) {
            what += "; " + cause.getClass().getSimpleName() + ": " + cause.getMessage();
        }
        say("{\"id\":" + id + ",\"from\":" + from + ",\"at\":" + at + ",\"error\":" + json(what) + "}");
    }

    /** A line that nobody could be given. Its id may be unknown. */
    static void refused(Long id, String why) {
        say("{\"id\":" + id + ",\"error\":" + json(why) + "}");
    }

    /** One line, whole, whoever else has something to say. */
    private static synchronized void say(String line) {
        try {
            OUT.write((line + "\n").getBytes(StandardCharsets.UTF_8));
        } catch (IOException error) {
            // Nobody listens any more.
            Runtime.getRuntime().halt(0);
        }
    }

    private static String json(Object value) {
        if (value == null || value instanceof Boolean || value instanceof Number) {
            return String.valueOf(value);
        }
        if (value instanceof List<?> list) {
            return list.stream().map(Answers::json).collect(Collectors.joining(",", "[", "]"));
        }
        var text = new StringBuilder("\"");
        value.toString().chars().forEach(c -> {
            switch (c) {
                case '"' -> text.append("\\\"");
                case '\\' -> text.append("\\\\");
                default -> {
                    // Halves of a pair, too, which an error's text might hold one without the other.
                    if (c < ' ' || Character.isSurrogate((char) c)) {
                        text.append(String.format("\\u%04x", c));
                    } else {
                        text.append((char) c);
                    }
                }
            }
        });
        return text.append('"').toString();
    }
}
