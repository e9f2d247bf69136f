package cleave.core;

import cleave.core.device.DeviceCore;
import cleave.core.kernels.DType;
import cleave.core.protocol.Codec;
import cleave.core.protocol.Feature;
import cleave.core.protocol.Limits;
import cleave.core.protocol.Message;
import cleave.core.protocol.MessageType;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;

/** A device's first message. */
final class Hello {
    private Hello() {}

    /**
     * What a device says of itself.
     *
     * @param kept the credential that the server gave it; empty where there is none
     * @param flopsPerS of large fp32 products; 0: unknown
     * @param measure whether it wants its link measured, and no work
     * @param graphs whether it can run graphs
     * @param holds what the server called the arrays that it still has; empty where it has none
     */
    static Message of(
            DeviceDescription device,
            JoinLink link,
            String kept,
            double flopsPerS,
            boolean measure,
            boolean graphs,
            String holds) {
        DType[] dtypes = DType.values();
        String[] names = new String[dtypes.length];
        for (int i = 0; i < names.length; i++) {
            names[i] = dtypes[i].wireName;
        }
        List<String> features = new ArrayList<>();
        if (measure) {
            features.add(Feature.MEASURE.wireName);
        } else {
            features.add(Feature.CODING.wireName);
            features.add(Feature.MOVES.wireName);
        }
        if (graphs) {
            features.add(Feature.GRAPHS.wireName);
            features.add(Feature.KEEPS.wireName);
        }
        boolean known = !kept.isEmpty();
        return Message.of(MessageType.HELLO)
                .with("role", "device")
                .with("version", Limits.VERSION)
                .with("credential", known ? kept : link.credential)
                .with("join_code", known ? link.credential : "")
                .with("name", Codec.cleanText(device.name))
                .with("ops", new String[] {DeviceCore.MATMUL})
                .with("dtypes", names)
                .with("memory_bytes", device.memoryBytes)
                .with("profile", Codec.cleanText(device.profile))
                .with("flops_per_s", flopsPerS)
                .with("measure", measure)
                .with("kind", device.kind)
                .with("versions", Collections.singletonList((long) Limits.VERSION))
                .with("features", features.toArray(new String[0]))
                .with("holds", holds)
                .build();
    }
}
