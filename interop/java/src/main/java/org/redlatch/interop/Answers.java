package org.redlatch.interop;

import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.stream.Collectors;

/**
 * Prints one line of JSON for each input line to standard output. Written by hand, because Redisson 4 depends on no
 * JSON library.
 */
final class Answers {

    private static final OutputStream OUT = new FileOutputStream(FileDescriptor.out);

    private Answers() {
    }

    static void ready(String library) {
        printLine("{\"ready\":" + json(library) + "}");
    }

    static void succeeded(long id, long started, long ended, Object value) {
        printLine("{\"id\":" + id + ",\"started\":" + started + ",\"ended\":" + ended + ",\"ok\":" + json(value) + "}");
    }

    static void failed(long id, long started, long ended, Throwable error) {
        String text = error.getClass().getSimpleName() + ": " + error.getMessage();
        // Some exceptions of Redisson have no message of their own.
        for (Throwable cause = error.getCause(); cause != null; cause = cause.getCause()) {
            text += "; " + cause.getClass().getSimpleName() + ": " + cause.getMessage();
        }
        printLine("{\"id\":" + id + ",\"started\":" + started + ",\"ended\":" + ended + ",\"error\":" + json(text)
                + "}");
    }

    /** Answers a line that is no command of a worker. Its id may be unknown. */
    static void refused(Long id, String why) {
        printLine("{\"id\":" + id + ",\"error\":" + json(why) + "}");
    }

    /** Prints one line; concurrent answers do not mix. */
    private static synchronized void printLine(String line) {
        try {
            OUT.write((line + "\n").getBytes(StandardCharsets.UTF_8));
        } catch (IOException error) {
            // The reader has closed the pipe.
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
                    // Surrogates, too, because the text of an error might hold an unpaired one.
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
