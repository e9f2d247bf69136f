package cleave.core.transport;

import java.io.FilterInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.net.InetAddress;
import java.net.Socket;
import javax.net.SocketFactory;

/**
 * Sockets that send at once, and whose reading is metered. By default the system waits with the
 * last bytes of a message until the server has acknowledged those before, which takes it up to 40
 * ms each time.
 */
final class Sockets extends SocketFactory {
    private final Meter meter;

    Sockets(Meter meter) {
        this.meter = meter;
    }

    @Override
    public Socket createSocket() throws IOException {
        Socket socket = new MeteredSocket(meter);
        socket.setTcpNoDelay(true);
        return socket;
    }

    @Override
    public Socket createSocket(String host, int port) {
        throw notAsked();
    }

    @Override
    public Socket createSocket(String host, int port, InetAddress from, int fromPort) {
        throw notAsked();
    }

    @Override
    public Socket createSocket(InetAddress host, int port) {
        throw notAsked();
    }

    @Override
    public Socket createSocket(InetAddress host, int port, InetAddress from, int fromPort) {
        throw notAsked();
    }

    /** OkHttp connects its sockets itself. */
    private static UnsupportedOperationException notAsked() {
        return new UnsupportedOperationException("sockets are made unconnected here");
    }

    private static final class MeteredSocket extends Socket {
        private final Meter meter;

        MeteredSocket(Meter meter) {
            this.meter = meter;
        }

        @Override
        public InputStream getInputStream() throws IOException {
            return new MeteredStream(super.getInputStream(), meter);
        }
    }

    private static final class MeteredStream extends FilterInputStream {
        private final Meter meter;

        MeteredStream(InputStream in, Meter meter) {
            super(in);
            this.meter = meter;
        }

        @Override
        public int read() throws IOException {
            int found = super.read();
            meter.add(found < 0 ? 0 : 1);
            return found;
        }

        @Override
        public int read(byte[] bytes, int begin, int length) throws IOException {
            int count = super.read(bytes, begin, length);
            meter.add(Math.max(0, count));
            return count;
        }
    }
}
