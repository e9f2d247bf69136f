package cleave.core;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import okhttp3.HttpUrl;

/**
 * A join URL taken apart: where to connect, and what never leaves in a URL.
 *
 * <p>Two forms mean the same, {@code https://HOST:PORT/join#c=...} (a page) and {@code
 * wss://HOST:PORT/ws#c=...} (what is connected to), with {@code http} and {@code ws} where there is
 * no TLS. A third opens the app: {@code cleave://join?url=} and one of the others, percent-encoded.
 */
public final class JoinLink {
    private static final String PAGE_PATH = "/join";
    private static final String APP_LINK = "cleave://join";

    /** {@code wss://HOST:PORT/ws} or {@code ws://...}: without anything secret. */
    public final String address;

    /** For people; to be shown before the owner says yes. */
    public final String host;

    /** Whether the connection is encrypted. */
    public final boolean isSecure;

    /** A credential or a join code; may be empty. */
    public final String credential;

    /** The server's id; empty where the link does not tell. */
    public final String server;

    /**
     * {@code sha256:} and the SHA-256 of the one certificate that the server may show, in lower
     * case; empty to verify the certificate as the system does.
     */
    public final String fingerprint;

    private JoinLink(
            String address,
            String host,
            boolean isSecure,
            String credential,
            String server,
            String fingerprint) {
        this.address = address;
        this.host = host;
        this.isSecure = isSecure;
        this.credential = credential;
        this.server = server;
        this.fingerprint = fingerprint;
    }

    /**
     * Read a link in any of the three forms.
     *
     * @throws InvalidLinkException when it is none
     */
    public static JoinLink parse(String text) throws InvalidLinkException {
        String trimmed = text.trim();
        if (trimmed.regionMatches(true, 0, APP_LINK, 0, APP_LINK.length())) {
            return parseUrl(urlOf(trimmed));
        }
        return parseUrl(trimmed);
    }

    /** The address that a browser opens for the same server, without anything secret. */
    public String origin() {
        HttpUrl url = HttpUrl.parse("http" + address.substring(2));
        return url.scheme() + "://" + authority(url);
    }

    /** The same without its credential: what is kept to come back with. */
    public String withoutCredential() {
        String pin = fingerprint.isEmpty() ? "" : "&fp=" + fingerprint;
        return address + "#s=" + encoded(server) + pin;
    }

    private static String urlOf(String appLink) throws InvalidLinkException {
        String rest = appLink.substring(APP_LINK.length());
        String query = rest.startsWith("/") ? rest.substring(1) : rest;
        String url = query.startsWith("?") ? fields(query.substring(1)).get("url") : null;
        if (url == null) {
            throw new InvalidLinkException(
                    "the link has no join URL in it; use one of the form " + APP_LINK + "?url=...");
        }
        return url;
    }

    private static JoinLink parseUrl(String text) throws InvalidLinkException {
        int hash = text.indexOf('#');
        String base = hash < 0 ? text : text.substring(0, hash);
        int colon = base.indexOf("://");
        String scheme = colon < 0 ? "" : base.substring(0, colon).toLowerCase(Locale.ROOT);
        boolean page = scheme.equals("http") || scheme.equals("https");
        boolean socket = scheme.equals("ws") || scheme.equals("wss");
        boolean secure = scheme.equals("https") || scheme.equals("wss");
        HttpUrl url = null;
        if (page || socket) {
            url = HttpUrl.parse((secure ? "https" : "http") + base.substring(colon));
        }
        if (url == null || (page && !url.encodedPath().endsWith(PAGE_PATH))) {
            throw new InvalidLinkException(
                    "'" + base + "' is no join URL; use the one that the server shows, like "
                            + "https://192.168.1.20:8765" + PAGE_PATH + "#c=...");
        }
        Map<String, String> fields = fields(hash < 0 ? "" : text.substring(hash + 1));
        String fingerprint = fingerprint(field(fields, "fp"), secure, scheme);
        String path = page ? pathOfPage(url) : pathOfSocket(url);
        return new JoinLink(
                (secure ? "wss://" : "ws://") + authority(url) + path,
                url.host(),
                secure,
                field(fields, "c"),
                field(fields, "s"),
                fingerprint);
    }

    private static String pathOfPage(HttpUrl url) {
        String path = url.encodedPath();
        return path.substring(0, path.length() - PAGE_PATH.length()) + "/ws";
    }

    private static String pathOfSocket(HttpUrl url) {
        return url.encodedPath().equals("/") ? "/ws" : url.encodedPath();
    }

    private static String authority(HttpUrl url) {
        String host = url.host().indexOf(':') < 0 ? url.host() : "[" + url.host() + "]";
        boolean usual = url.port() == HttpUrl.defaultPort(url.scheme());
        return usual ? host : host + ":" + url.port();
    }

    private static String fingerprint(String text, boolean secure, String scheme)
            throws InvalidLinkException {
        String found = text.toLowerCase(Locale.ROOT);
        if (found.isEmpty()) {
            return "";
        }
        if (!found.matches("sha256:[0-9a-f]{64}")) {
            throw new InvalidLinkException(
                    "'" + text + "' is no fingerprint of a certificate; it is sha256: and 64 "
                            + "hexadecimal digits");
        }
        if (!secure) {
            throw new InvalidLinkException(
                    "the join URL names a certificate, and " + scheme + ":// shows none; use the "
                            + "URL that the server shows, with https:// or wss://");
        }
        return found;
    }

    private static String field(Map<String, String> fields, String name) {
        String value = fields.get(name);
        return value == null ? "" : value;
    }

    private static Map<String, String> fields(String text) {
        Map<String, String> fields = new HashMap<>();
        for (String part : text.split("&")) {
            int at = part.indexOf('=');
            if (at >= 0) {
                fields.put(part.substring(0, at), decoded(part.substring(at + 1)));
            }
        }
        return fields;
    }

    /** Percent-decoded UTF-8; a plus is a plus, and a percent sign without two digits stays. */
    private static String decoded(String text) {
        byte[] bytes = text.getBytes(StandardCharsets.UTF_8);
        ByteBuffer found = ByteBuffer.allocate(bytes.length);
        for (int i = 0; i < bytes.length; i++) {
            int high = i + 2 < bytes.length ? Character.digit(bytes[i + 1], 16) : -1;
            int low = i + 2 < bytes.length ? Character.digit(bytes[i + 2], 16) : -1;
            if (bytes[i] == '%' && high >= 0 && low >= 0) {
                found.put((byte) (16 * high + low));
                i += 2;
            } else {
                found.put(bytes[i]);
            }
        }
        return new String(found.array(), 0, found.position(), StandardCharsets.UTF_8);
    }

    private static String encoded(String text) {
        StringBuilder found = new StringBuilder();
        for (byte b : text.getBytes(StandardCharsets.UTF_8)) {
            boolean plain = b >= 0 && (Character.isLetterOrDigit(b) || "-._~".indexOf(b) >= 0);
            found.append(plain ? String.valueOf((char) b) : String.format("%%%02X", b));
        }
        return found.toString();
    }
}
