package cleave.core.graphs;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.IntStream;
import java.util.stream.LongStream;

/**
 * The operations that graphs have, and the sizes of what each computes. docs/protocol.md (<i>Working
 * memory</i>) has the list; {@code cleave/machine/graph_operations.py} is the same in Python.
 */
final class Operations {
    /** What an operation computes, and the memory that it needs meanwhile beside that. */
    static final class Made {
        final List<Sized> outputs;
        final long workingBytes;

        Made(List<Sized> outputs, long workingBytes) {
            this.outputs = outputs;
            this.workingBytes = workingBytes;
        }

        static Made of(Sized... outputs) {
            return new Made(Arrays.asList(outputs), 0);
        }
    }

    private interface Rule {
        Made made(Operation operation, List<Sized> given) throws UnboundedException;
    }

    /** Calculates with elements; null for what is not known. */
    private interface Calculate {
        Long of(long[] numbers);
    }

    private static final Map<String, Rule> RULES = rules();

    private Operations() {}

    /**
     * What an operation computes, of any but those that hold graphs.
     *
     * @param given what is known of each input; null for one that is left out
     */
    static Made made(Operation operation, List<Sized> given) throws UnboundedException {
        Rule rule = RULES.get(operation.name);
        if (rule == null) {
            throw new UnboundedException(
                    "operation",
                    "graphs have no operation "
                            + operation.name.substring(0, Math.min(60, operation.name.length())));
        }
        return rule.made(operation, given);
    }

    // --- parts of rules ----------------------------------------------------------------------

    private static Sized input(Operation operation, List<Sized> given, int number)
            throws UnboundedException {
        Sized found = number < given.size() ? given.get(number) : null;
        if (found == null) {
            throw operation.refused("it has no input " + number);
        }
        return found;
    }

    private static List<Sized> inputs(Operation operation, List<Sized> given, int count)
            throws UnboundedException {
        List<Sized> found = new ArrayList<>();
        for (int number = 0; number < count; number++) {
            found.add(input(operation, given, number));
        }
        return found;
    }

    /** The elements of an input that must be known. */
    private static long[] values(Operation operation, List<Sized> given, int number)
            throws UnboundedException {
        long[] found = input(operation, given, number).values;
        if (found == null) {
            throw operation.refused(
                    "its input " + number + " says a size and is not known before the run");
        }
        return found;
    }

    private static long[] optional(Operation operation, List<Sized> given, int number)
            throws UnboundedException {
        boolean there = number < given.size() && given.get(number) != null;
        return there ? values(operation, given, number) : null;
    }

    private static int axis(Operation operation, long axis, int rank) throws UnboundedException {
        if (axis < -rank || axis >= rank) {
            throw operation.refused("there is no axis " + axis + " of " + rank);
        }
        return (int) (axis < 0 ? axis + rank : axis);
    }

    private static int[] axes(Operation operation, long[] axes, int rank)
            throws UnboundedException {
        int[] found = new int[axes.length];
        for (int i = 0; i < axes.length; i++) {
            found[i] = axis(operation, axes[i], rank);
        }
        if (IntStream.of(found).distinct().count() < found.length) {
            throw operation.refused("an axis stands twice");
        }
        return found;
    }

    private static long[] upTo(int count) {
        return LongStream.range(0, count).toArray();
    }

    private static boolean has(int[] axes, int axis) {
        return IntStream.of(axes).anyMatch(each -> each == axis);
    }

    private static long[] broadcast(Operation operation, List<long[]> shapes)
            throws UnboundedException {
        int rank = shapes.stream().mapToInt(shape -> shape.length).max().orElse(0);
        long[] found = new long[rank];
        Arrays.fill(found, 1);
        for (long[] shape : shapes) {
            for (int i = 0; i < shape.length; i++) {
                int at = rank - shape.length + i;
                if (found[at] == 1) {
                    found[at] = shape[i];
                } else if (shape[i] != 1 && shape[i] != found[at]) {
                    throw operation.refused("the shapes of its inputs do not fit");
                }
            }
        }
        return found;
    }

    private static boolean isWithin(int type, Long value) {
        long largest = type == Sized.INT32 ? 1L << 31 : Sized.LARGEST_NUMBER;
        return value != null && -largest < value && value < largest;
    }

    /** What is computed from elements at the same place of arrays, broadcast together. */
    private static Sized oneByOne(
            Operation operation, List<Sized> arrays, int type, Calculate each)
            throws UnboundedException {
        List<long[]> shapes = new ArrayList<>();
        boolean known = each != null;
        for (Sized array : arrays) {
            shapes.add(array.shape);
            known &= array.values != null;
        }
        long[] shape = broadcast(operation, shapes);
        long count = Sized.product(shape);
        if (!known || shape.length > 1 || count > Sized.MOST_VALUES) {
            return Sized.of(type, shape);
        }
        long[] values = new long[(int) count];
        for (int i = 0; i < count; i++) {
            long[] numbers = new long[arrays.size()];
            for (int j = 0; j < numbers.length; j++) {
                long[] row = arrays.get(j).values;
                numbers[j] = row[row.length == 1 ? 0 : i];
            }
            Long found = each.of(numbers);
            if (!isWithin(type, found)) {
                return Sized.of(type, shape);
            }
            values[i] = found;
        }
        return Sized.followed(type, shape, values);
    }

    /** A calculation that has no result where a number is too large to be told apart. */
    private static Calculate exact(Calculate calculate) {
        return numbers -> {
            for (long number : numbers) {
                if (Math.abs(number) >= Sized.LARGEST_NUMBER) {
                    return null;
                }
            }
            return calculate.of(numbers);
        };
    }

    private static long[] without(long[] shape, int[] axes, boolean keep) {
        return IntStream.range(0, shape.length)
                .filter(at -> keep || !has(axes, at))
                .mapToLong(at -> has(axes, at) ? 1 : shape[at])
                .toArray();
    }

    private static long[] replaced(long[] shape, int axis, long... sizes) {
        return joined(
                Arrays.copyOfRange(shape, 0, axis),
                sizes,
                Arrays.copyOfRange(shape, axis + 1, shape.length));
    }

    private static long[] joined(long[]... parts) {
        return Arrays.stream(parts).flatMapToLong(Arrays::stream).toArray();
    }

    private static UnboundedException unfit(Operation operation) {
        return operation.refused("the shapes of its inputs do not fit");
    }

    // --- rules -------------------------------------------------------------------------------

    private static Rule arithmetic(Calculate calculate) {
        return (operation, given) -> {
            List<Sized> arrays = inputs(operation, given, Math.max(given.size(), 1));
            Calculate each =
                    calculate != null && arrays.size() == 2 ? exact(calculate) : null;
            Sized found = oneByOne(operation, arrays, arrays.get(0).type, each);
            long working = arrays.size() > 2 ? found.bytes() : 0;
            return new Made(Collections.singletonList(found), working);
        };
    }

    private static Rule comparison(Calculate calculate) {
        return (operation, given) ->
                Made.of(
                        oneByOne(
                                operation,
                                inputs(operation, given, 2),
                                Sized.BOOL,
                                calculate == null ? null : exact(calculate)));
    }

    private static Made where(Operation operation, List<Sized> given) throws UnboundedException {
        List<Sized> arrays = inputs(operation, given, 3);
        Calculate each = exact(n -> n[0] != 0 ? n[1] : n[2]);
        Sized found = oneByOne(operation, arrays, arrays.get(1).type, each);
        return new Made(Collections.singletonList(found), 2 * found.bytes());
    }

    private static Made cast(Operation operation, List<Sized> given) throws UnboundedException {
        List<Sized> first = inputs(operation, given, 1);
        int to = (int) operation.integer("to", 0);
        Calculate each =
                to == Sized.BOOL ? n -> n[0] != 0 ? 1L : 0L : exact(n -> n[0]);
        return Made.of(oneByOne(operation, first, to, each));
    }

    private static Made softmax(Operation operation, List<Sized> given)
            throws UnboundedException {
        Sized first = input(operation, given, 0);
        int rank = Math.max(first.shape.length, 1);
        boolean last = axis(operation, operation.integer("axis", -1), rank) == rank - 1;
        return new Made(
                Collections.singletonList(first.unfollowed()), last ? 0 : 2 * first.bytes());
    }

    private static Made layerNormalization(Operation operation, List<Sized> given)
            throws UnboundedException {
        Sized first = input(operation, given, 0);
        int axis = axis(operation, operation.integer("axis", -1), first.shape.length);
        long[] rest = first.shape.clone();
        Arrays.fill(rest, axis, rest.length, 1);
        Sized small = Sized.of(Sized.FLOAT32, rest);
        return Made.of(first.unfollowed(), small, small);
    }

    private static Made reduced(Operation operation, List<Sized> given)
            throws UnboundedException {
        Sized first = input(operation, given, 0);
        long[] axes = optional(operation, given, 1);
        if (axes == null || axes.length == 0) {
            if (operation.integer("noop_with_empty_axes", 0) != 0) {
                return Made.of(first.unfollowed());
            }
            axes = upTo(first.shape.length);
        }
        int[] gone = axes(operation, axes, first.shape.length);
        long[] shape = without(first.shape, gone, operation.integer("keepdims", 1) != 0);
        if (!operation.name.equals("ReduceProd") || first.values == null || gone.length == 0) {
            return Made.of(Sized.of(first.type, shape));
        }
        long all = 1;
        boolean negative = false;
        for (long value : first.values) {
            negative |= value < 0;
            all = Sized.times(all, Math.abs(value));
        }
        boolean known = !negative && isWithin(first.type, all);
        return Made.of(Sized.followed(first.type, shape, known ? new long[] {all} : null));
    }

    private static Made arg(Operation operation, List<Sized> given) throws UnboundedException {
        long[] shape = input(operation, given, 0).shape;
        int axis = axis(operation, operation.integer("axis", 0), shape.length);
        boolean keep = operation.integer("keepdims", 1) != 0;
        return Made.of(Sized.of(Sized.INT64, without(shape, new int[] {axis}, keep)));
    }

    private static Made matmul(Operation operation, List<Sized> given) throws UnboundedException {
        Sized a = input(operation, given, 0);
        Sized b = input(operation, given, 1);
        if (a.shape.length == 0 || b.shape.length == 0) {
            throw operation.refused("an input has no dimension");
        }
        long[] one = {1};
        long[] left = a.shape.length > 1 ? a.shape : joined(one, a.shape);
        long[] right = b.shape.length > 1 ? b.shape : joined(b.shape, one);
        if (left[left.length - 1] != right[right.length - 2]) {
            throw unfit(operation);
        }
        long[] batch =
                broadcast(
                        operation,
                        Arrays.asList(
                                Arrays.copyOf(left, left.length - 2),
                                Arrays.copyOf(right, right.length - 2)));
        long[] rows = a.shape.length > 1 ? new long[] {left[left.length - 2]} : new long[0];
        long[] columns = b.shape.length > 1 ? new long[] {right[right.length - 1]} : new long[0];
        return Made.of(Sized.of(a.type, joined(batch, rows, columns)));
    }

    private static Made gemm(Operation operation, List<Sized> given) throws UnboundedException {
        Sized a = input(operation, given, 0);
        Sized b = input(operation, given, 1);
        if (a.shape.length != 2 || b.shape.length != 2) {
            throw operation.refused("an input is no matrix");
        }
        int turnedA = operation.integer("transA", 0) != 0 ? 1 : 0;
        int turnedB = operation.integer("transB", 0) != 0 ? 1 : 0;
        if (a.shape[1 - turnedA] != b.shape[turnedB]) {
            throw unfit(operation);
        }
        return Made.of(Sized.of(a.type, a.shape[turnedA], b.shape[1 - turnedB]));
    }

    private static long[] orElse(long[] found, int count, long each) {
        if (found != null && found.length > 0) {
            return found;
        }
        long[] otherwise = new long[count];
        Arrays.fill(otherwise, each);
        return otherwise;
    }

    private static Made conv(Operation operation, List<Sized> given) throws UnboundedException {
        Sized x = input(operation, given, 0);
        Sized w = input(operation, given, 1);
        int rank = Math.max(x.shape.length - 2, 0);
        long[] strides = orElse(operation.integers("strides"), rank, 1);
        long[] dilations = orElse(operation.integers("dilations"), rank, 1);
        long[] pads = orElse(operation.integers("pads"), 2 * rank, 0);
        Operation.Attribute auto = operation.attributes.get("auto_pad");
        boolean fits =
                rank >= 1
                        && w.shape.length - 2 == rank
                        && strides.length == rank
                        && dilations.length == rank
                        && pads.length == 2 * rank
                        && (auto == null || auto.text.equals("NOTSET"))
                        && LongStream.concat(Arrays.stream(strides), Arrays.stream(dilations))
                                .allMatch(n -> n >= 1)
                        && Arrays.stream(pads).allMatch(n -> n >= 0);
        if (!fits) {
            throw operation.refused("its attributes do not fit its inputs");
        }
        long[] spatial = new long[rank];
        for (int at = 0; at < rank; at++) {
            long kernel = w.shape[2 + at];
            long window = Sized.times(dilations[at], kernel - 1) + 1;
            long room = x.shape[2 + at] + pads[at] + pads[rank + at] - window;
            if (room < 0 || kernel < 1) {
                throw unfit(operation);
            }
            spatial[at] = room / strides[at] + 1;
        }
        Sized found = Sized.of(x.type, joined(new long[] {x.shape[0], w.shape[0]}, spatial));
        long[] weights = Arrays.copyOfRange(w.shape, 1, w.shape.length);
        Sized columns = Sized.of(x.type, joined(weights, spatial));
        return new Made(
                Collections.singletonList(found), columns.bytes() + x.bytes() + found.bytes());
    }

    private static Made shape(Operation operation, List<Sized> given) throws UnboundedException {
        long[] shape = input(operation, given, 0).shape;
        int rank = shape.length;
        int from = place(operation.integer("start", 0), rank);
        int to = Math.max(from, place(operation.integer("end", rank), rank));
        long[] found = Arrays.copyOfRange(shape, from, to);
        return Made.of(Sized.followed(Sized.INT64, new long[] {found.length}, found));
    }

    private static int place(long at, int rank) {
        return (int) Math.min(Math.max(at < 0 ? at + rank : at, 0), rank);
    }

    private static Made reshape(Operation operation, List<Sized> given)
            throws UnboundedException {
        Sized first = input(operation, given, 0);
        long[] wanted = values(operation, given, 1).clone();
        boolean copies = operation.integer("allowzero", 0) == 0;
        int open = -1;
        long rest = 1;
        for (int at = 0; at < wanted.length; at++) {
            if (wanted[at] == 0 && copies) {
                if (at >= first.shape.length) {
                    throw operation.refused("its input has no axis " + at);
                }
                wanted[at] = first.shape[at];
            }
            if (wanted[at] == -1 && open < 0) {
                open = at;
            } else {
                rest = wanted[at] == 0 ? 0 : Sized.times(rest, wanted[at]);
            }
        }
        if (open >= 0) {
            wanted[open] = rest > 0 ? first.elements / rest : 0;
        }
        Sized found = Sized.of(first.type, wanted);
        if (found.elements != first.elements) {
            throw operation.refused("its input does not become " + Arrays.toString(wanted));
        }
        return Made.of(Sized.followed(first.type, wanted, first.values));
    }

    private static Made transpose(Operation operation, List<Sized> given)
            throws UnboundedException {
        Sized first = input(operation, given, 0);
        int rank = first.shape.length;
        long[] order = operation.integers("perm");
        if (order == null) {
            order = LongStream.range(0, rank).map(at -> rank - 1 - at).toArray();
        }
        if (!Arrays.equals(Arrays.stream(order).sorted().toArray(), upTo(rank))) {
            throw operation.refused("perm is no order of " + rank + " axes");
        }
        return Made.of(
                Sized.of(
                        first.type,
                        Arrays.stream(order).map(at -> first.shape[(int) at]).toArray()));
    }

    private static Made squeeze(Operation operation, List<Sized> given)
            throws UnboundedException {
        Sized first = input(operation, given, 0);
        long[] axes = optional(operation, given, 1);
        int[] gone =
                axes != null
                        ? axes(operation, axes, first.shape.length)
                        : IntStream.range(0, first.shape.length)
                                .filter(at -> first.shape[at] == 1)
                                .toArray();
        if (IntStream.of(gone).anyMatch(at -> first.shape[at] != 1)) {
            throw operation.refused("an axis that goes is not 1");
        }
        long[] shape = without(first.shape, gone, false);
        return Made.of(Sized.followed(first.type, shape, first.values));
    }

    private static Made unsqueeze(Operation operation, List<Sized> given)
            throws UnboundedException {
        Sized first = input(operation, given, 0);
        long[] axes = values(operation, given, 1);
        int rank = first.shape.length + axes.length;
        int[] added = axes(operation, axes, rank);
        long[] shape = new long[rank];
        int next = 0;
        for (int at = 0; at < rank; at++) {
            shape[at] = has(added, at) ? 1 : first.shape[next++];
        }
        return Made.of(Sized.followed(first.type, shape, first.values));
    }

    private static Made flatten(Operation operation, List<Sized> given)
            throws UnboundedException {
        Sized first = input(operation, given, 0);
        int rank = first.shape.length;
        long axis = operation.integer("axis", 1);
        if (axis < -rank || axis > rank) {
            throw operation.refused("there is no axis " + axis + " of " + rank);
        }
        int at = (int) (axis < 0 ? axis + rank : axis);
        long rows = Sized.product(Arrays.copyOf(first.shape, at));
        long columns = Sized.product(Arrays.copyOfRange(first.shape, at, rank));
        return Made.of(Sized.of(first.type, rows, columns));
    }

    private static Made expand(Operation operation, List<Sized> given) throws UnboundedException {
        Sized first = input(operation, given, 0);
        long[] wanted = values(operation, given, 1);
        if (Arrays.stream(wanted).anyMatch(size -> size < 0)) {
            throw operation.refused("there is no shape " + Arrays.toString(wanted));
        }
        long[] shape = broadcast(operation, Arrays.asList(first.shape, wanted));
        long[] values = first.values;
        if (values != null && values.length == 1 && Sized.product(shape) <= Sized.MOST_VALUES) {
            values = new long[(int) Sized.product(shape)];
            Arrays.fill(values, first.values[0]);
        }
        return Made.of(Sized.followed(first.type, shape, values));
    }

    private static Made tile(Operation operation, List<Sized> given) throws UnboundedException {
        Sized first = input(operation, given, 0);
        long[] times = values(operation, given, 1);
        if (times.length != first.shape.length) {
            throw operation.refused("it says not as many times as there are axes");
        }
        long[] shape = new long[times.length];
        for (int at = 0; at < shape.length; at++) {
            shape[at] = Sized.times(first.shape[at], times[at]);
        }
        return Made.of(Sized.of(first.type, shape));
    }

    private static Made concat(Operation operation, List<Sized> given) throws UnboundedException {
        List<Sized> arrays = inputs(operation, given, Math.max(given.size(), 1));
        Sized first = arrays.get(0);
        int axis = axis(operation, operation.integer("axis", 0), first.shape.length);
        long total = 0;
        boolean known = true;
        for (Sized array : arrays) {
            if (array.shape.length != first.shape.length
                    || !Arrays.equals(
                            replaced(array.shape, axis, 1), replaced(first.shape, axis, 1))) {
                throw unfit(operation);
            }
            total = Sized.within(total + array.shape[axis]);
            known &= array.values != null;
        }
        long[] values = null;
        if (known && total <= Sized.MOST_VALUES) {
            values = arrays.stream().flatMapToLong(array -> Arrays.stream(array.values)).toArray();
        }
        return Made.of(Sized.followed(first.type, replaced(first.shape, axis, total), values));
    }

    private static Made split(Operation operation, List<Sized> given) throws UnboundedException {
        Sized first = input(operation, given, 0);
        int axis = axis(operation, operation.integer("axis", 0), first.shape.length);
        long size = first.shape[axis];
        int count = operation.outputs.size();
        long[] parts = optional(operation, given, 1);
        if (parts == null) {
            if (count == 0 || operation.integer("num_outputs", count) != count) {
                throw operation.refused("it has not as many outputs as it says");
            }
            long each = (size + count - 1) / count;
            parts =
                    LongStream.range(0, count)
                            .map(at -> Math.max(0, Math.min(each, size - at * each)))
                            .toArray();
        }
        if (Arrays.stream(parts).sum() != size || parts.length != count) {
            throw operation.refused(size + " is not cut into its parts");
        }
        List<Sized> outputs = new ArrayList<>();
        for (long part : parts) {
            outputs.add(Sized.of(first.type, replaced(first.shape, axis, part)));
        }
        return new Made(outputs, 0);
    }

    private static Made slice(Operation operation, List<Sized> given) throws UnboundedException {
        Sized first = input(operation, given, 0);
        long[] starts = values(operation, given, 1);
        long[] ends = values(operation, given, 2);
        long[] named = optional(operation, given, 3);
        int[] axes =
                axes(
                        operation,
                        named == null ? upTo(starts.length) : named,
                        first.shape.length);
        long[] steps = orElse(optional(operation, given, 4), starts.length, 1);
        if (ends.length != starts.length
                || axes.length != starts.length
                || steps.length != starts.length
                || Arrays.stream(steps).anyMatch(step -> step == 0)) {
            throw operation.refused("its inputs do not fit each other");
        }
        long[] shape = first.shape.clone();
        long[] values = first.values;
        for (int i = 0; i < axes.length; i++) {
            long size = shape[axes[i]];
            long step = steps[i];
            long from = starts[i] < 0 ? starts[i] + size : starts[i];
            long to = ends[i] < 0 ? ends[i] + size : ends[i];
            // A start is always in the axis.
            from = Math.min(Math.max(from, 0), step > 0 ? size : size - 1);
            to = Math.min(Math.max(to, step > 0 ? 0 : -1), step > 0 ? size : size - 1);
            long count = steps(from, to, step);
            shape[axes[i]] = count;
            if (values != null) {
                long[] before = values;
                long first0 = from;
                values =
                        LongStream.range(0, count)
                                .map(at -> before[(int) (first0 + at * step)])
                                .toArray();
            }
        }
        return Made.of(Sized.followed(first.type, shape, values));
    }

    /** How many steps there are from one number to another, without the latter. */
    private static long steps(long from, long to, long step) {
        long apart = step > 0 ? to - from : from - to;
        return apart <= 0 ? 0 : (apart - 1) / Math.abs(step) + 1;
    }

    private static Made gather(Operation operation, List<Sized> given) throws UnboundedException {
        Sized first = input(operation, given, 0);
        Sized places = input(operation, given, 1);
        int axis = axis(operation, operation.integer("axis", 0), first.shape.length);
        long[] shape = replaced(first.shape, axis, places.shape);
        long[] values = null;
        if (first.values != null && places.values != null) {
            int count = first.values.length;
            if (Arrays.stream(places.values).allMatch(at -> -count <= at && at < count)) {
                values =
                        Arrays.stream(places.values)
                                .map(at -> first.values[(int) (at < 0 ? at + count : at)])
                                .toArray();
            }
        }
        return Made.of(Sized.followed(first.type, shape, values));
    }

    private static Made scatter(Operation operation, List<Sized> given)
            throws UnboundedException {
        Sized first = input(operation, given, 0);
        long working = input(operation, given, 1).bytes();
        return new Made(Collections.singletonList(first.unfollowed()), working);
    }

    private static Made gatherNd(Operation operation, List<Sized> given)
            throws UnboundedException {
        Sized first = input(operation, given, 0);
        long[] places = input(operation, given, 1).shape;
        long batch = operation.integer("batch_dims", 0);
        if (places.length == 0 || batch < 0 || batch >= places.length) {
            throw operation.refused("its indices have no last dimension");
        }
        long at = batch + places[places.length - 1];
        if (at > first.shape.length) {
            throw operation.refused("its input has no " + at + " axes");
        }
        return Made.of(
                Sized.of(
                        first.type,
                        joined(
                                Arrays.copyOf(places, places.length - 1),
                                Arrays.copyOfRange(first.shape, (int) at, first.shape.length))));
    }

    private static Made pad(Operation operation, List<Sized> given) throws UnboundedException {
        Sized first = input(operation, given, 0);
        long[] pads = values(operation, given, 1);
        long[] named = optional(operation, given, 3);
        int rank = first.shape.length;
        int[] axes = axes(operation, named == null ? upTo(rank) : named, rank);
        if (pads.length != 2 * axes.length) {
            throw operation.refused(pads.length + " sizes do not pad " + axes.length + " axes");
        }
        long[] shape = first.shape.clone();
        for (int i = 0; i < axes.length; i++) {
            shape[axes[i]] += pads[i] + pads[axes.length + i];
        }
        return Made.of(Sized.of(first.type, shape));
    }

    private static Made range(Operation operation, List<Sized> given) throws UnboundedException {
        long[] numbers =
                joined(
                        values(operation, given, 0),
                        values(operation, given, 1),
                        values(operation, given, 2));
        if (numbers.length != 3
                || numbers[2] == 0
                || Arrays.stream(numbers).anyMatch(n -> Math.abs(n) >= Sized.LARGEST_NUMBER)) {
            throw operation.refused("there is no range of " + Arrays.toString(numbers));
        }
        long count = steps(numbers[0], numbers[1], numbers[2]);
        long[] values =
                count > Sized.MOST_VALUES
                        ? null
                        : LongStream.range(0, count)
                                .map(at -> numbers[0] + at * numbers[2])
                                .toArray();
        int type = input(operation, given, 0).type;
        return Made.of(Sized.followed(type, new long[] {count}, values));
    }

    private static Made top(Operation operation, List<Sized> given) throws UnboundedException {
        Sized first = input(operation, given, 0);
        long[] count = values(operation, given, 1);
        int axis = axis(operation, operation.integer("axis", -1), first.shape.length);
        if (count.length != 1) {
            throw operation.refused("it says no number of elements");
        }
        long[] shape = replaced(first.shape, axis, count[0]);
        return new Made(
                Arrays.asList(Sized.of(first.type, shape), Sized.of(Sized.INT64, shape)),
                first.bytes());
    }

    private static Map<String, Rule> rules() {
        Map<String, Rule> rules = new HashMap<>();
        all(
                rules,
                "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Clip Cos Cosh CumSum "
                        + "Elu Erf Exp Floor Gelu HardSigmoid HardSwish LeakyRelu Log Mish PRelu "
                        + "Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign "
                        + "Sqrt Tan Tanh ThresholdedRelu Trilu",
                (o, given) -> Made.of(input(o, given, 0).unfollowed()));
        all(
                rules,
                "IsInf IsNaN Not",
                (o, given) -> Made.of(Sized.of(Sized.BOOL, input(o, given, 0).shape)));
        all(rules, "BitShift BitwiseAnd BitwiseOr BitwiseXor Pow Sum", arithmetic(null));
        all(rules, "And Or Xor", comparison(null));
        all(
                rules,
                "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin "
                        + "ReduceProd ReduceSum ReduceSumSquare",
                Operations::reduced);
        all(rules, "ArgMax ArgMin", Operations::arg);
        all(rules, "LogSoftmax Softmax", Operations::softmax);
        all(rules, "ScatterElements ScatterND", Operations::scatter);
        rules.put("Add", arithmetic(n -> n[0] + n[1]));
        rules.put("Sub", arithmetic(n -> n[0] - n[1]));
        rules.put("Mul", arithmetic(n -> Sized.times(n[0], n[1])));
        rules.put("Div", arithmetic(n -> n[0] >= 0 && n[1] > 0 ? n[0] / n[1] : null));
        rules.put("Mod", arithmetic(n -> n[0] >= 0 && n[1] > 0 ? n[0] % n[1] : null));
        rules.put("Max", arithmetic(n -> Math.max(n[0], n[1])));
        rules.put("Min", arithmetic(n -> Math.min(n[0], n[1])));
        rules.put("Equal", comparison(n -> n[0] == n[1] ? 1L : 0L));
        rules.put("Greater", comparison(n -> n[0] > n[1] ? 1L : 0L));
        rules.put("GreaterOrEqual", comparison(n -> n[0] >= n[1] ? 1L : 0L));
        rules.put("Less", comparison(n -> n[0] < n[1] ? 1L : 0L));
        rules.put("LessOrEqual", comparison(n -> n[0] <= n[1] ? 1L : 0L));
        rules.put(
                "Neg",
                (o, given) -> {
                    List<Sized> first = inputs(o, given, 1);
                    return Made.of(oneByOne(o, first, first.get(0).type, exact(n -> -n[0])));
                });
        rules.put(
                "CastLike",
                (o, given) ->
                        Made.of(Sized.of(input(o, given, 1).type, input(o, given, 0).shape)));
        rules.put(
                "GatherElements",
                (o, given) ->
                        Made.of(Sized.of(input(o, given, 0).type, input(o, given, 1).shape)));
        rules.put("Identity", (o, given) -> Made.of(input(o, given, 0)));
        rules.put(
                "Size",
                (o, given) ->
                        Made.of(
                                Sized.followed(
                                        Sized.INT64,
                                        new long[0],
                                        new long[] {input(o, given, 0).elements})));
        rules.put("Cast", Operations::cast);
        rules.put("Concat", Operations::concat);
        rules.put("Conv", Operations::conv);
        rules.put("Expand", Operations::expand);
        rules.put("Flatten", Operations::flatten);
        rules.put("Gather", Operations::gather);
        rules.put("GatherND", Operations::gatherNd);
        rules.put("Gemm", Operations::gemm);
        rules.put("LayerNormalization", Operations::layerNormalization);
        rules.put("MatMul", Operations::matmul);
        rules.put("Pad", Operations::pad);
        rules.put("Range", Operations::range);
        rules.put("Reshape", Operations::reshape);
        rules.put("Shape", Operations::shape);
        rules.put("Slice", Operations::slice);
        rules.put("Split", Operations::split);
        rules.put("Squeeze", Operations::squeeze);
        rules.put("Tile", Operations::tile);
        rules.put("TopK", Operations::top);
        rules.put("Transpose", Operations::transpose);
        rules.put("Unsqueeze", Operations::unsqueeze);
        rules.put("Where", Operations::where);
        return rules;
    }

    private static void all(Map<String, Rule> rules, String names, Rule rule) {
        for (String name : names.split(" ")) {
            rules.put(name, rule);
        }
    }
}
