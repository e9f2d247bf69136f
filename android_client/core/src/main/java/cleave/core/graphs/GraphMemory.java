package cleave.core.graphs;

import cleave.core.graphs.Operations.Made;
import cleave.core.graphs.ProtobufFields.ProtobufException;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;

/**
 * The memory that a run of a graph works in, found before it runs, as docs/protocol.md (<i>Working
 * memory</i>) has it. {@code cleave/machine/graph_memory.py} is the same in Python. Models are those
 * that {@link GraphCheck} accepted.
 */
final class GraphMemory {
    /** What a run gives to an input. */
    static final class Given {
        /** How many; negative for zeros. */
        final long elements;

        /** Whether they have 16 bits each, and are widened. */
        final boolean narrow;

        Given(long elements, boolean narrow) {
            this.elements = elements;
            this.narrow = narrow;
        }
    }

    private static final Set<String> VIEWS =
            new HashSet<>(
                    Arrays.asList("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"));
    private static final int MOST_KEPT = 16; // micro-batches of a step have two sizes at most

    private final GraphModel graph;
    private final List<String> inputs = new ArrayList<>();
    private final Map<String, Long> found = new HashMap<>();

    /** @throws GraphException where the memory of no run can be found */
    GraphMemory(ByteBuffer model) throws GraphException {
        try {
            graph = GraphModel.of(model);
        } catch (ProtobufException error) {
            throw new GraphException("it is not an ONNX model: " + error.getMessage());
        }
        for (String name : graph.inputs.keySet()) {
            if (!graph.constants.containsKey(name)) {
                inputs.add(name);
            }
        }
    }

    /**
     * The memory that a run works in, beside its inputs and the outputs that are kept.
     *
     * @param given for each input, in order; constants are no inputs
     * @param kept for each output, in order
     * @throws GraphException where it is not known before the run, or inputs do not fit
     */
    long peakBytes(List<Given> given, List<Boolean> kept) throws GraphException {
        StringBuilder key = new StringBuilder(kept.toString());
        for (Given one : given) {
            key.append(one.elements).append(one.narrow ? "n," : ",");
        }
        Long known = found.get(key.toString());
        if (known != null) {
            return known;
        }
        long peak;
        try {
            peak = peak(given, kept);
        } catch (ProtobufException error) {
            throw new GraphException("it is not an ONNX model: " + error.getMessage());
        }
        if (found.size() >= MOST_KEPT) {
            found.clear();
        }
        found.put(key.toString(), peak);
        return peak;
    }

    private long peak(List<Given> given, List<Boolean> kept)
            throws GraphException, ProtobufException {
        if (given.size() != inputs.size() || kept.size() != graph.outputs.size()) {
            throw UnboundedException.shape(
                    "the graph has " + inputs.size() + " inputs and " + graph.outputs.size()
                            + " outputs, not " + given.size() + " and " + kept.size());
        }
        Map<String, Sized> sized = new LinkedHashMap<>();
        for (int i = 0; i < inputs.size(); i++) {
            String name = inputs.get(i);
            sized.put(name, sized(name, graph.inputs.get(name), given.get(i)));
        }
        Pass pass = new Pass(graph, sized, Collections.emptyMap());
        Set<String> wanted = new HashSet<>();
        for (int i = 0; i < kept.size(); i++) {
            if (kept.get(i)) {
                wanted.add(graph.outputs.get(i));
            }
        }
        Map<String, Long> widened = new HashMap<>();
        long held = 0;
        for (int i = 0; i < inputs.size(); i++) {
            String name = inputs.get(i);
            long bytes = sized.get(name).bytes();
            boolean whole =
                    graph.inputs.get(name).open.contains(true) || pass.enclosed.contains(name);
            if (given.get(i).narrow && !whole) {
                widened.put(name, bytes);
            } else if (given.get(i).narrow
                    || (given.get(i).elements < 0 && !pass.isAddedTo(name, wanted))) {
                held += bytes;
            }
        }
        return held + pass.peakBytes(wanted, widened);
    }

    /** An input in its shape, whose size that is not fixed follows from its elements. */
    private static Sized sized(String name, GraphModel.Input input, Given given)
            throws UnboundedException {
        long[] sizes = input.sizes.stream().mapToLong(n -> n).toArray();
        int free = Collections.frequency(input.open, true);
        long fixed = 1;
        for (int at = 0; at < sizes.length; at++) {
            fixed = input.open.get(at) ? fixed : Sized.times(fixed, sizes[at]);
        }
        if (given.elements < 0) {
            if (free > 0) {
                throw UnboundedException.shape(
                        "the input " + name + " cannot be zeros: its shape is " + input.sizes);
            }
            return Sized.of(input.type, sizes);
        }
        long batch = free > 0 && fixed > 0 ? given.elements / fixed : 1;
        if (free > 1 || fixed < 0 || batch * fixed != given.elements) {
            throw UnboundedException.shape(
                    "the input " + name + " has the shape " + input.sizes + ", and "
                            + given.elements + " elements came");
        }
        for (int at = 0; at < sizes.length; at++) {
            sizes[at] = input.open.get(at) ? batch : sizes[at];
        }
        return Sized.of(input.type, sizes);
    }

    /** One way through a graph with inputs of known shapes. */
    private static final class Pass {
        final Map<String, Sized> known;

        /** Names of arrays that graphs inside operations use. */
        final Set<String> enclosed = new HashSet<>();

        private final GraphModel graph;
        private final Set<String> free; // names of what the run does not make
        private final List<Set<String>> taken = new ArrayList<>(); // by operation
        private final Map<String, Integer> maker = new HashMap<>();
        private final List<Long> working = new ArrayList<>();

        Pass(GraphModel graph, Map<String, Sized> inputs, Map<String, Sized> outer)
                throws GraphException, ProtobufException {
            this.graph = graph;
            known = new HashMap<>(outer);
            known.putAll(graph.constants);
            known.putAll(inputs);
            free = new HashSet<>(graph.constants.keySet());
            free.addAll(inputs.keySet());
            for (int number = 0; number < graph.operations.size(); number++) {
                Operation operation = graph.operations.get(number);
                Set<String> takes = GraphModel.enclosed(operation);
                enclosed.addAll(takes);
                Made made = made(operation);
                if (operation.outputs.size() > made.outputs.size()) {
                    throw operation.refused("it has " + operation.outputs.size() + " outputs");
                }
                for (int i = 0; i < operation.outputs.size(); i++) {
                    String name = operation.outputs.get(i);
                    if (name.isEmpty()) {
                        continue;
                    }
                    if (free.contains(name) || maker.put(name, number) != null) {
                        throw UnboundedException.name("an array is made twice");
                    }
                    known.put(name, made.outputs.get(i));
                }
                takes.addAll(operation.inputs);
                takes.remove("");
                taken.add(takes);
                working.add(made.workingBytes);
            }
            for (String name : graph.outputs) {
                if (!known.containsKey(name)) {
                    throw UnboundedException.name("nothing makes an output");
                }
            }
        }

        private List<Sized> outputs() {
            List<Sized> found = new ArrayList<>();
            graph.outputs.forEach(name -> found.add(known.get(name)));
            return found;
        }

        private Made made(Operation operation) throws GraphException, ProtobufException {
            List<Sized> given = new ArrayList<>();
            for (String name : operation.inputs) {
                Sized found = known.get(name);
                if (found == null && !name.isEmpty()) {
                    throw UnboundedException.name("an array is taken before anything makes it");
                }
                given.add(name.isEmpty() ? null : found);
            }
            switch (operation.name) {
                case "Constant":
                case "ConstantOfShape":
                    return Made.of(constant(operation, given));
                case "If":
                    return branches(operation);
                case "Scan":
                    return scan(operation, given);
                default:
                    return Operations.made(operation, given);
            }
        }

        private static Sized constant(Operation operation, List<Sized> given)
                throws GraphException, ProtobufException {
            Operation.Attribute value = operation.attributes.get("value");
            if (operation.name.equals("Constant")) {
                if (value != null) {
                    return GraphModel.tensor(value.tensor);
                }
                if (operation.attributes.containsKey("value_int")) {
                    long[] one = {operation.integer("value_int", 0)};
                    return Sized.followed(Sized.INT64, new long[0], one);
                }
                long[] several = operation.integers("value_ints");
                if (several != null) {
                    return Sized.followed(Sized.INT64, new long[] {several.length}, several);
                }
                if (operation.attributes.containsKey("value_float")) {
                    return Sized.of(Sized.FLOAT32);
                }
                throw operation.refused("it has no value");
            }
            long[] shape = given.isEmpty() || given.get(0) == null ? null : given.get(0).values;
            if (shape == null) {
                throw operation.refused("its shape is not known before the run");
            }
            Sized filled =
                    value == null ? Sized.of(Sized.FLOAT32, 1) : GraphModel.tensor(value.tensor);
            Sized made = Sized.of(filled.type, shape);
            if (filled.values == null
                    || filled.values.length != 1
                    || made.elements > Sized.MOST_VALUES) {
                return made;
            }
            long[] values = new long[(int) made.elements];
            Arrays.fill(values, filled.values[0]);
            return Sized.followed(filled.type, shape, values);
        }

        /** Go through a graph that an operation holds. */
        private Pass inside(Operation operation, String name, List<Sized> given)
                throws GraphException, ProtobufException {
            Operation.Attribute attribute = operation.attributes.get(name);
            if (attribute == null) {
                throw operation.refused("it has no graph " + name);
            }
            GraphModel inner = new GraphModel(attribute.graph, true);
            if (given.size() != inner.inputs.size()) {
                throw operation.refused("its graph has " + inner.inputs.size() + " inputs");
            }
            Map<String, Sized> inputs = new HashMap<>();
            int next = 0;
            for (String input : inner.inputs.keySet()) {
                inputs.put(input, given.get(next++));
            }
            return new Pass(inner, inputs, known);
        }

        private Made branches(Operation operation) throws GraphException, ProtobufException {
            Pass yes = inside(operation, "then_branch", Collections.emptyList());
            Pass no = inside(operation, "else_branch", Collections.emptyList());
            if (!areAlike(yes.outputs(), no.outputs())) {
                throw operation.refused("its branches do not make the same shapes");
            }
            List<Sized> made = new ArrayList<>();
            for (Sized one : yes.outputs()) {
                made.add(one.unfollowed());
            }
            return new Made(made, Math.max(yes.peakBytes(), no.peakBytes()));
        }

        private Made scan(Operation operation, List<Sized> given)
                throws GraphException, ProtobufException {
            long rows = operation.integer("num_scan_inputs", 0);
            if (rows < 1
                    || rows > given.size()
                    || given.contains(null)
                    || !operation.attributes.containsKey("body")) {
                throw operation.refused("its inputs do not fit its graph");
            }
            int states = given.size() - (int) rows;
            checkAxes(operation, "scan_input_axes", (int) rows);
            checkAxes(operation, "scan_output_axes", operation.outputs.size() - states);
            List<Sized> held = new ArrayList<>();
            long turning = 0;
            for (Sized state : given.subList(0, states)) {
                held.add(state.unfollowed());
                turning += state.bytes();
            }
            List<Sized> inputs = new ArrayList<>(held);
            long times = -1;
            for (Sized array : given.subList(states, given.size())) {
                if (array.shape.length == 0 || (times >= 0 && array.shape[0] != times)) {
                    throw operation.refused("the arrays that it goes along differ in rows");
                }
                times = array.shape[0];
                long[] row = Arrays.copyOfRange(array.shape, 1, array.shape.length);
                inputs.add(Sized.of(array.type, row));
            }
            Pass inside = inside(operation, "body", inputs);
            List<Sized> outputs = inside.outputs();
            if (outputs.size() != operation.outputs.size() || outputs.size() < states) {
                throw operation.refused("its graph has " + outputs.size() + " outputs");
            }
            if (!areAlike(outputs.subList(0, states), held)) {
                throw operation.refused("its state changes its shape");
            }
            List<Sized> made = new ArrayList<>(held);
            for (Sized row : outputs.subList(states, outputs.size())) {
                long[] shape = new long[row.shape.length + 1];
                shape[0] = times;
                System.arraycopy(row.shape, 0, shape, 1, row.shape.length);
                made.add(Sized.of(row.type, shape));
            }
            return new Made(made, inside.peakBytes() + turning);
        }

        private static void checkAxes(Operation operation, String name, int count)
                throws UnboundedException {
            long[] axes = operation.integers(name);
            if (axes != null && !Arrays.equals(axes, new long[Math.max(count, 0)])) {
                throw operation.refused("it goes along another axis than the first");
            }
        }

        private static boolean areAlike(List<Sized> some, List<Sized> others) {
            boolean alike = some.size() == others.size();
            for (int i = 0; alike && i < some.size(); i++) {
                alike = some.get(i).isLike(others.get(i));
            }
            return alike;
        }

        /** Whether an output that is kept is an input plus something, and nothing else takes it. */
        boolean isAddedTo(String name, Set<String> wanted) {
            Operation taker = null;
            for (int number = 0; number < taken.size(); number++) {
                if (taken.get(number).contains(name)) {
                    if (taker != null) {
                        return false;
                    }
                    taker = graph.operations.get(number);
                }
            }
            return taker != null
                    && !graph.outputs.contains(name)
                    && taker.name.equals("Add")
                    && Collections.frequency(taker.inputs, name) == 1
                    && wanted.contains(taker.output())
                    && Arrays.equals(known.get(taker.output()).shape, known.get(name).shape);
        }

        private long peakBytes() {
            return peakBytes(Collections.emptySet(), Collections.emptyMap());
        }

        /**
         * The most bytes that are there at the same time: in the order of the model, or two thirds
         * of those in the order in which each operation comes as late as can be.
         *
         * @param kept names of outputs that do not count
         * @param widened by input, its bytes in each operation that takes it
         */
        long peakBytes(Set<String> kept, Map<String, Long> widened) {
            Map<String, String> memory = memory(kept);
            List<Integer> written = new ArrayList<>();
            for (int number = 0; number < taken.size(); number++) {
                written.add(number);
            }
            long late = most(late(), memory, kept, widened);
            return Math.max(most(written, memory, kept, widened), late * 2 / 3);
        }

        private long most(
                List<Integer> order,
                Map<String, String> memory,
                Set<String> kept,
                Map<String, Long> widened) {
            Map<String, Integer> uses = new HashMap<>();
            List<Set<String>> owners = new ArrayList<>();
            for (Set<String> takes : taken) {
                Set<String> of = new HashSet<>();
                for (String name : takes) {
                    if (memory.containsKey(name)) {
                        of.add(memory.get(name));
                    }
                }
                owners.add(of);
                of.forEach(name -> uses.merge(name, 1, Integer::sum));
            }
            for (String name : new HashSet<>(graph.outputs)) { // to the end
                uses.merge(memory.getOrDefault(name, ""), 1, Integer::sum);
            }
            long live = 0;
            long peak = 0;
            for (int number : order) {
                Set<String> ended = new HashSet<>(owners.get(number));
                for (String name : graph.operations.get(number).outputs) {
                    if (!name.isEmpty() && name.equals(memory.get(name)) && !kept.contains(name)) {
                        live += known.get(name).bytes();
                        ended.add(name);
                    }
                }
                long now = live + working.get(number);
                for (String name : taken.get(number)) {
                    now += widened.getOrDefault(name, 0L);
                }
                peak = Math.max(peak, now);
                owners.get(number).forEach(name -> uses.merge(name, -1, Integer::sum));
                for (String name : ended) {
                    if (!name.isEmpty()
                            && !kept.contains(name)
                            && uses.getOrDefault(name, 0) == 0) {
                        live -= known.get(name).bytes();
                    }
                }
            }
            return peak;
        }

        /**
         * By array that a run makes, the one in whose memory it is; empty for inputs. A product
         * that is only added to an input, for an output that is kept, is in that output's.
         */
        private Map<String, String> memory(Set<String> kept) {
            Map<String, String> found = new HashMap<>();
            Set<String> ends = new HashSet<>(graph.outputs);
            ends.addAll(enclosed);
            Set<String> turned = turned(ends);
            Map<String, Integer> takers = new HashMap<>();
            taken.forEach(takes -> takes.forEach(n -> takers.merge(n, 1, Integer::sum)));
            for (Operation operation : graph.operations) {
                String output = operation.output();
                boolean view = VIEWS.contains(operation.name) && !ends.contains(output);
                if (view || turned.contains(output)) {
                    found.put(output, found.getOrDefault(operation.inputs.get(0), ""));
                    continue;
                }
                List<String> others = new ArrayList<>(operation.inputs);
                others.removeIf(free::contains);
                if (operation.name.equals("Add") && kept.contains(output) && others.size() == 1) {
                    String name = others.get(0);
                    Sized sum = known.get(output);
                    if (found.containsKey(name)
                            && graph.operations.get(maker.get(name)).name.equals("MatMul")
                            && sum.shape.length == 2
                            && Arrays.equals(known.get(name).shape, sum.shape)
                            && takers.get(name) == 1
                            && !ends.contains(name)) {
                        found.put(name, "");
                    }
                }
                for (String name : operation.outputs) {
                    if (!name.isEmpty()) {
                        found.put(name, name);
                    }
                }
            }
            return found;
        }

        /** The matrices turned round that only products take: these read them as they are. */
        private Set<String> turned(Set<String> ends) {
            Set<String> found = new HashSet<>();
            Set<String> others = new HashSet<>(ends); // what anything but a product takes
            for (int number = graph.operations.size() - 1; number >= 0; number--) {
                Operation operation = graph.operations.get(number);
                if (operation.name.equals("Transpose")
                        && !others.contains(operation.output())
                        && swapsLastAxes(operation, known.get(operation.output()))) {
                    found.add(operation.output());
                } else if (!operation.name.equals("MatMul")) {
                    others.addAll(operation.inputs);
                }
            }
            return found;
        }

        private static boolean swapsLastAxes(Operation operation, Sized turned) {
            int rank = turned.shape.length;
            if (rank < 2 || turned.type != Sized.FLOAT32) {
                return false;
            }
            long[] order = operation.integers("perm");
            boolean swaps = order == null || order.length == 0 ? rank == 2 : true;
            for (int at = 0; order != null && at < order.length; at++) {
                long swapped = at < rank - 2 ? at : at == rank - 2 ? rank - 1 : rank - 2;
                swaps &= order[at] == swapped;
            }
            return swaps;
        }

        /**
         * The operations, each as late as can be: from the last of those that nothing needs, each
         * after all that it needs; of these the one that stands last first.
         */
        private List<Integer> late() {
            List<TreeSet<Integer>> needs = new ArrayList<>();
            Set<Integer> needed = new HashSet<>();
            for (Set<String> takes : taken) {
                TreeSet<Integer> makers = new TreeSet<>();
                for (String name : takes) {
                    if (maker.containsKey(name)) {
                        makers.add(maker.get(name));
                    }
                }
                needs.add(makers);
                needed.addAll(makers);
            }
            List<Integer> todo = new ArrayList<>(); // a negative one is done: -1 for 0
            for (int number = 0; number < needs.size(); number++) {
                if (!needed.contains(number)) {
                    todo.add(number);
                }
            }
            Set<Integer> seen = new HashSet<>();
            List<Integer> order = new ArrayList<>();
            while (!todo.isEmpty()) {
                int number = todo.remove(todo.size() - 1);
                if (number < 0) {
                    order.add(-number - 1);
                } else if (seen.add(number)) {
                    todo.add(-number - 1);
                    for (int other : needs.get(number)) {
                        if (!seen.contains(other)) {
                            todo.add(other);
                        }
                    }
                }
            }
            return order;
        }
    }
}
