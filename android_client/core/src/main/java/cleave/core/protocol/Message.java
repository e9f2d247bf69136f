package cleave.core.protocol;

/** A message of docs/protocol.md. Its classes hold the fields under the names of that document. */
public interface Message {
    /** Its name on the wire. */
    String type();
}
