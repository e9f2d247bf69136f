package ai.onnxruntime;

import com.sun.jna.Function;
import com.sun.jna.Memory;
import com.sun.jna.Native;
import com.sun.jna.NativeLibrary;
import com.sun.jna.Pointer;
import java.util.Arrays;

/**
 * For tests: ONNX Runtime's C API, as far as these classes use it. It is one table of functions,
 * to which each version adds at the end.
 */
final class Api {
    static final int CREATE_ENV = 3;
    static final int CREATE_SESSION_FROM_ARRAY = 8;
    static final int RUN = 9;
    static final int CREATE_SESSION_OPTIONS = 10;
    static final int ENABLE_MEM_PATTERN = 16;
    static final int DISABLE_MEM_PATTERN = 17;
    static final int ENABLE_CPU_MEM_ARENA = 18;
    static final int DISABLE_CPU_MEM_ARENA = 19;
    static final int SET_SESSION_LOG_SEVERITY_LEVEL = 22;
    static final int SET_INTRA_OP_NUM_THREADS = 24;
    static final int SET_INTER_OP_NUM_THREADS = 25;
    static final int SESSION_GET_INPUT_COUNT = 30;
    static final int SESSION_GET_OUTPUT_COUNT = 31;
    static final int SESSION_GET_INPUT_TYPE_INFO = 33;
    static final int SESSION_GET_INPUT_NAME = 36;
    static final int SESSION_GET_OUTPUT_NAME = 37;
    static final int CREATE_TENSOR_WITH_DATA = 49;
    static final int GET_TENSOR_MUTABLE_DATA = 51;
    static final int CAST_TYPE_INFO_TO_TENSOR_INFO = 55;
    static final int GET_TENSOR_ELEMENT_TYPE = 60;
    static final int GET_DIMENSIONS_COUNT = 61;
    static final int GET_DIMENSIONS = 62;
    static final int GET_TENSOR_TYPE_AND_SHAPE = 65;
    static final int CREATE_CPU_MEMORY_INFO = 69;
    static final int ALLOCATOR_FREE = 76;
    static final int GET_ALLOCATOR_WITH_DEFAULT_OPTIONS = 78;
    static final int RELEASE_MEMORY_INFO = 94;
    static final int RELEASE_SESSION = 95;
    static final int RELEASE_VALUE = 96;
    static final int RELEASE_TYPE_INFO = 98;
    static final int RELEASE_TENSOR_INFO = 99;
    static final int RELEASE_SESSION_OPTIONS = 100;
    static final int ADD_SESSION_CONFIG_ENTRY = 130;

    private static final int GET_ERROR_MESSAGE = 2;
    private static final int RELEASE_STATUS = 93;
    private static final int VERSION = 11; // which has all of these
    // A library that nothing refers to is closed by JNA, with all that it gave.
    private static final NativeLibrary LIBRARY =
            NativeLibrary.getInstance(System.getProperty("onnxruntime"));
    private static final Pointer TABLE = table();

    private Api() {}

    /** Call a function that returns a status; every argument that is a size is a long. */
    static void call(int function, Object... arguments) throws OrtException {
        Pointer status = (Pointer) found(function).invoke(Pointer.class, arguments);
        if (status != null) {
            String text = found(GET_ERROR_MESSAGE).invokeString(new Object[] {status}, false);
            release(RELEASE_STATUS, status);
            throw new OrtException(text);
        }
    }

    /** Call a function that makes something, which is its last argument. */
    static Pointer made(int function, Object... arguments) throws OrtException {
        return asked(function, arguments).getPointer(0);
    }

    /** Call a function that tells a number of 64 bits. */
    static long number(int function, Object... arguments) throws OrtException {
        return asked(function, arguments).getLong(0);
    }

    /** Call a function that tells a number of 32 bits. */
    static int smallNumber(int function, Object... arguments) throws OrtException {
        return asked(function, arguments).getInt(0);
    }

    static void release(int function, Pointer what) {
        found(function).invokeVoid(new Object[] {what});
    }

    private static Memory asked(int function, Object... arguments) throws OrtException {
        Memory answer = new Memory(Long.BYTES);
        Object[] all = Arrays.copyOf(arguments, arguments.length + 1);
        all[arguments.length] = answer;
        call(function, all);
        return answer;
    }

    private static Function found(int function) {
        return Function.getFunction(TABLE.getPointer((long) function * Native.POINTER_SIZE));
    }

    private static Pointer table() {
        Pointer base = LIBRARY.getFunction("OrtGetApiBase").invokePointer(new Object[0]);
        return Function.getFunction(base.getPointer(0)).invokePointer(new Object[] {VERSION});
    }
}
