package cleave.core.profile;

import cleave.core.kernels.DType;

/** What of products is measured together: dtypes and how the operands lie. */
enum Series {
    FP32_NN(DType.FP32, DType.FP32, false, false),
    FP32_NT(DType.FP32, DType.FP32, false, true),
    FP32_TN(DType.FP32, DType.FP32, true, false),
    BF16_NN(DType.BF16, DType.BF16, false, false),
    BF16_NT(DType.BF16, DType.BF16, false, true),
    BF16_TN(DType.BF16, DType.BF16, true, false),
    BF16_SUMS_NN(DType.BF16, DType.FP32, false, false),
    BF16_SUMS_NT(DType.BF16, DType.FP32, false, true),
    BF16_SUMS_TN(DType.BF16, DType.FP32, true, false);

    final DType inputs;
    final DType out;
    final boolean transposeA;
    final boolean transposeB;

    Series(DType inputs, DType out, boolean transposeA, boolean transposeB) {
        this.inputs = inputs;
        this.out = out;
        this.transposeA = transposeA;
        this.transposeB = transposeB;
    }

    /** As profiles name it. */
    String dtype() {
        return inputs == out ? inputs.wireName : inputs.wireName + ">" + out.wireName;
    }

    /** In the letters of BLAS. */
    String layout() {
        return (transposeA ? "t" : "n") + (transposeB ? "t" : "n");
    }
}
