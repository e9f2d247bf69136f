package cleave.core.transport;

import java.io.IOException;
import java.net.InetAddress;
import java.net.Socket;
import javax.net.SocketFactory;

/**
 * Sockets that send at once. By default the system waits with the last bytes of a message until the
 * server has acknowledged those before, which takes it up to 40 ms each time.
 */
final class PromptSockets extends SocketFactory {
    @Override
    public Socket createSocket() throws IOException {
        return prompt(new Socket());
    }

    @Override
    public Socket createSocket(String host, int port) throws IOException {
        return prompt(new Socket(host, port));
    }

    @Override
    public Socket createSocket(String host, int port, InetAddress from, int fromPort)
            throws IOException {
        return prompt(new Socket(host, port, from, fromPort));
    }

    @Override
    public Socket createSocket(InetAddress host, int port) throws IOException {
        return prompt(new Socket(host, port));
    }

    @Override
    public Socket createSocket(InetAddress host, int port, InetAddress from, int fromPort)
            throws IOException {
        return prompt(new Socket(host, port, from, fromPort));
    }

    private static Socket prompt(Socket socket) throws IOException {
        socket.setTcpNoDelay(true);
        return socket;
    }
}
