package cleave.core.session;

import java.util.function.Consumer;

/** Reaches one server. */
public interface Transport {
    /** The largest message that its wires can send. */
    long mostSentBytes();

    /** Begin to connect; the listener learns what becomes of it. */
    Wire open(WireListener listener);

    /** Find out whether the server is still there, over a connection of its own. */
    void ask(Consumer<Boolean> answer);
}
