package cleave.core.transport;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import java.io.InputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import org.junit.Test;

public class SocketsTest {
    @Test
    public void whatComesBetweenTwoMessagesIsBounded() throws Exception {
        Meter meter = new Meter(1600); // and a sixteenth for what is around a message
        try (ServerSocket server = new ServerSocket(0, 1, InetAddress.getLoopbackAddress());
                Socket client = new Sockets(meter).createSocket()) {
            client.connect(server.getLocalSocketAddress());
            assertTrue(client.getTcpNoDelay());
            try (Socket peer = server.accept()) {
                peer.getOutputStream().write(new byte[5000]);
                InputStream in = client.getInputStream();
                assertEquals(1000, read(in, 1000));
                meter.reset();
                assertEquals(1700, read(in, 1700));
                assertThrows(Meter.ExceededException.class, in::read);
                byte[] more = new byte[10];
                assertThrows(Meter.ExceededException.class, () -> in.read(more));
            }
        }
    }

    private static int read(InputStream in, int count) throws Exception {
        int found = 0;
        while (found < count) {
            found += in.read(new byte[count - found]);
        }
        return found;
    }
}
