package cleave.core.graphs;

/** The memory of a run is not known before it. */
final class UnboundedException extends GraphException {
    private static final long serialVersionUID = 1;

    /** Why: a name of docs/protocol.md's vectors. */
    final String refusal;

    UnboundedException(String refusal, String text) {
        super(text);
        this.refusal = refusal;
    }

    /** A size that does not follow from the inputs. */
    static UnboundedException shape(String text) {
        return new UnboundedException("shape", text);
    }

    /** A name that nothing has, or two have. */
    static UnboundedException name(String text) {
        return new UnboundedException("name", text);
    }
}
