package cleave.core.graphs;

/** A graph cannot be run here. */
public class GraphException extends Exception {
    private static final long serialVersionUID = 1;

    public GraphException(String text) {
        super(text);
    }
}
