package cleave.app;

import cleave.core.Main;

/** A device without a phone that runs graphs as the app does. */
public final class GraphDevice {
    private GraphDevice() {}

    public static void main(String[] arguments) throws InterruptedException {
        Main.run(arguments, OnnxRuntime.graphs(1));
    }
}
