package cleave.core.transport;

import cleave.core.protocol.Limits;
import cleave.core.session.Ending;
import cleave.core.session.Transport;
import cleave.core.session.Wire;
import cleave.core.session.WireListener;
import java.io.IOException;
import java.net.Proxy;
import java.nio.ByteBuffer;
import java.security.GeneralSecurityException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManager;
import okhttp3.Call;
import okhttp3.Callback;
import okhttp3.Dispatcher;
import okhttp3.OkHttpClient;
import okhttp3.Request;
import okhttp3.Response;
import okhttp3.WebSocket;
import okhttp3.WebSocketListener;
import okio.Buffer;
import okio.ByteString;

/** Reaches a server over WebSockets, with its certificate pinned where the join link names one. */
public final class OkHttpTransport implements Transport {
    /**
     * OkHttp closes a WebSocket with more than 16 MiB waiting, of which one is for other messages.
     */
    private static final long MOST_SENT_BYTES = 15 << 20;

    private static final int NORMAL_CLOSURE = 1000;
    private static final int TOO_LARGE = 1009;

    private final String address;
    private final Failures failures;
    private final long mostReceivedBytes;
    private final Meter meter;
    private final OkHttpClient client;
    private volatile Events latest; // of the connections

    /**
     * @param address {@code ws://HOST:PORT/PATH} or {@code wss://...}
     * @param fingerprint of the one certificate that the server may show, in lower case; empty to
     *     verify it as the system does
     * @param mostReceivedBytes a connection with a larger message is ended
     */
    public OkHttpTransport(String address, String fingerprint, long mostReceivedBytes) {
        this.address = address;
        failures = new Failures(address, fingerprint);
        this.mostReceivedBytes = Math.min(mostReceivedBytes, Limits.MAX_MESSAGE_BYTES);
        meter = new Meter(this.mostReceivedBytes);
        OkHttpClient.Builder builder =
                new OkHttpClient.Builder()
                        .dispatcher(new Dispatcher(threads()))
                        .socketFactory(new Sockets(meter))
                        .proxy(Proxy.NO_PROXY)
                        .followRedirects(false)
                        .connectTimeout((long) Limits.HANDSHAKE_S, TimeUnit.SECONDS)
                        .readTimeout((long) Limits.HANDSHAKE_S, TimeUnit.SECONDS)
                        .writeTimeout((long) Limits.SILENCE_S, TimeUnit.SECONDS);
        if (!fingerprint.isEmpty()) {
            pin(builder, new PinnedTrust(fingerprint));
        }
        client = builder.build();
    }

    @Override
    public long mostSentBytes() {
        return MOST_SENT_BYTES;
    }

    @Override
    public Wire open(WireListener listener) {
        Request request = new Request.Builder().url(address).build();
        meter.reset();
        latest = new Events(listener);
        return new SocketWire(client.newWebSocket(request, latest));
    }

    @Override
    public void ask(Consumer<Boolean> answer) {
        Request request = new Request.Builder().url(healthUrl()).build();
        client.newCall(request)
                .enqueue(
                        new Callback() {
                            @Override
                            public void onFailure(Call call, IOException error) {
                                answer.accept(false);
                            }

                            @Override
                            public void onResponse(Call call, Response response) {
                                response.close();
                                answer.accept(response.isSuccessful());
                            }
                        });
    }

    /** Let go of threads and connections. */
    public void close() {
        client.dispatcher().executorService().shutdown();
        client.connectionPool().evictAll();
    }

    private String healthUrl() {
        String url = "http" + address.substring("ws".length());
        return url.substring(0, url.indexOf('/', url.indexOf("://") + 3)) + "/healthz";
    }

    /**
     * Daemons, so that a process can end while a connection is half open. One that dies, as when a
     * message is larger than the memory there is, ends its connection and nothing else.
     */
    private ExecutorService threads() {
        return Executors.newCachedThreadPool(
                task -> {
                    Thread thread = new Thread(task, "cleave-net");
                    thread.setDaemon(true);
                    thread.setUncaughtExceptionHandler((dead, error) -> latest.died(error));
                    return thread;
                });
    }

    private static void pin(OkHttpClient.Builder builder, PinnedTrust trust) {
        try {
            SSLContext context = SSLContext.getInstance("TLS");
            context.init(null, new TrustManager[] {trust}, null);
            builder.sslSocketFactory(context.getSocketFactory(), trust);
        } catch (GeneralSecurityException error) {
            throw new IllegalStateException("this system has no TLS", error);
        }
        builder.hostnameVerifier((host, session) -> true); // the fingerprint says more than a name
    }

    private static final class SocketWire implements Wire {
        private final WebSocket socket;

        SocketWire(WebSocket socket) {
            this.socket = socket;
        }

        @Override
        public void send(byte[] header, ByteBuffer payload) {
            Buffer message = new Buffer().write(header);
            if (payload != null) {
                if (payload.hasArray()) {
                    int begin = payload.arrayOffset() + payload.position();
                    message.write(payload.array(), begin, payload.remaining());
                } else {
                    message.write(ByteString.of(payload));
                }
            }
            socket.send(message.readByteString()); // if it is not taken, the listener learns why
        }

        @Override
        public long waitingBytes() {
            return socket.queueSize();
        }

        @Override
        public void close() {
            socket.close(NORMAL_CLOSURE, null);
        }

        @Override
        public void cancel() {
            socket.cancel();
        }
    }

    private final class Events extends WebSocketListener {
        private final WireListener listener;
        private volatile boolean opened;

        Events(WireListener listener) {
            this.listener = listener;
        }

        void died(Throwable error) {
            listener.ended(Ending.lost("the connection could not be served (" + error + ")"));
        }

        @Override
        public void onOpen(WebSocket socket, Response response) {
            opened = true;
            listener.opened();
        }

        @Override
        public void onMessage(WebSocket socket, ByteString bytes) {
            meter.reset();
            if (bytes.size() > mostReceivedBytes) {
                socket.close(TOO_LARGE, null);
                listener.ended(Ending.lost("the server sent a message that is over the limit"));
            } else {
                listener.received(bytes.asByteBuffer());
            }
        }

        @Override
        public void onMessage(WebSocket socket, String text) {
            listener.receivedWrong("a message is binary, not text");
        }

        @Override
        public void onClosing(WebSocket socket, int code, String reason) {
            socket.close(NORMAL_CLOSURE, null);
        }

        @Override
        public void onClosed(WebSocket socket, int code, String reason) {
            listener.ended(Ending.lost(reason.isEmpty() ? "the connection was closed" : reason));
        }

        @Override
        public void onFailure(WebSocket socket, Throwable error, Response response) {
            listener.ended(failures.ending(error, response == null ? 0 : response.code(), opened));
        }
    }
}
