/**
 * What is asked about, in SI units, and what the layers of its model cost. Pure.
 *
 * As `cleave/workload/stages.py` and `cleave/planner/layer_memory.py` have it.
 */

const model = (family, layers, width, heads, kvHeads, inner, vocabulary) => ({
  ...{ family, layers, width, heads, inner, vocabulary },
  kvWidth: (kvHeads * width) / heads,
});

/** Sizes of models, as in `cleave/workload/registry.py`. */
export const MODELS = {
  "smollm2-135m": model("llama", 30, 576, 9, 3, 1536, 49152),
  "opt-125m": model("opt", 12, 768, 12, 12, 3072, 50272),
  "opt-1.3b": model("opt", 24, 2048, 32, 32, 8192, 50272),
  "llama2-7b": model("llama", 32, 4096, 32, 32, 11008, 32000),
  "opt-13b": model("opt", 40, 5120, 40, 40, 20480, 50272),
};

export const FP32_BYTES = 4;
const CODED_RATIO = { bf16: 0.675, fp32: 0.837 }; // of plain bytes
const CODED_UP_TO_BYTES_PER_S = 37.5e6; // faster links carry plain payloads
const WHOLE_SCORES_BYTES = 64 * 2 ** 20; // larger ones are made by blocks of queries,
const BLOCK_BYTES = 24 * 2 ** 20; // each so large

export const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Return numbers up to `most`, farther apart the larger they are, and `most` itself. */
export function numbersTo(most) {
  const found = [];
  for (let n = 1; n < most; n = Math.max(n + 1, Math.floor(n * 1.34))) found.push(n);
  return most >= 1 ? [...found, most] : [];
}

/**
 * Return what was asked in SI units.
 *
 * A rate is the larger the faster things are; that of latency is the inverse of its seconds.
 */
export function readSetup(given) {
  const bytesPerS = (mbit) => (mbit * 1e6) / 8;
  const rates = {
    downlink: bytesPerS(given.downlinkMbit),
    uplink: bytesPerS(given.uplinkMbit),
    compute: given.deviceGflops * 1e9,
    card: bytesPerS(given.cardGbit * 1e3),
    server: given.serverGflops * 1e9,
    latency: 1e3 / given.latencyMs,
  };
  const share = rates.card / given.devices;
  const ratio = (rate, dtype) =>
    Math.min(rate, share) <= CODED_UP_TO_BYTES_PER_S ? CODED_RATIO[dtype] : 1;
  return {
    model: MODELS[given.model],
    sequences: given.sequences,
    sequence: given.sequence,
    tokens: given.sequences * given.sequence,
    elementBytes: given.dtype === "bf16" ? 2 : FP32_BYTES,
    rank: given.rank,
    devices: given.devices,
    memoryBytes: given.memoryGb * 1e9,
    downRatio: ratio(rates.downlink, given.dtype),
    upRatio: ratio(rates.uplink, given.dtype),
    sumRatio: ratio(rates.uplink, "fp32"), // of what tiles return
    rates,
  };
}

/**
 * Return a model's layers, or attention and MLP of each apart, and its LM head with the loss.
 *
 * FLOPs, working and kept bytes are for each token.
 */
export function costsOf(setup, inParts = false) {
  const { family, layers, width, heads, kvWidth, inner, vocabulary } = setup.model;
  const gated = family === "llama";
  const attention = {
    matrices: [
      [width, width],
      [kvWidth, width],
      [kvWidth, width],
      [width, width],
    ],
    vectors: gated ? width : 4 * width + 2 * kvWidth,
    adapted: [
      [width, width],
      [kvWidth, width],
    ],
    kept: 2 * (width + kvWidth),
    heads,
  };
  const mlp = {
    matrices: [...Array(gated ? 2 : 1).fill([inner, width]), [width, inner]],
    vectors: gated ? width : inner + 3 * width,
    adapted: [],
    kept: gated ? 2 * inner : inner,
    heads: 0,
  };
  const whole = {
    ...attention,
    matrices: [...attention.matrices, ...mlp.matrices],
    vectors: attention.vectors + mlp.vectors,
    kept: attention.kept + mlp.kept + width,
  };
  const parts = (inParts ? [attention, mlp] : [whole]).map((part) => costOf(setup, part));
  return { units: Array(layers).fill(parts).flat(), loss: lossOf(setup, vocabulary, gated) };
}

/** Return what a layer or a part of one costs. */
function costOf(setup, { matrices, vectors, adapted, kept, heads }) {
  const { rank, sequence } = setup;
  const plain = sum(matrices.map(([rows, columns]) => rows * columns));
  const adapters = rank * sum(adapted.map(([rows, columns]) => rows + columns));
  const scores = 2 * sequence * (heads ? setup.model.width : 0);
  const forwardFlops = 2 * (plain + adapters) + 2 * scores;
  const keptOfAdapters = rank ? sum(adapted.map(([rows]) => rank + rows)) : 0;
  return {
    ...bytesOf(setup, plain + vectors, rank ? adapters : plain + vectors, matrices),
    forwardFlops,
    // With the forward pass again; both products of attention need the gradients of two inputs.
    backFlops: 2 * forwardFlops + 2 * (rank ? adapters : plain) + 2 * scores,
    sparedFlops: forwardFlops - scores,
    keptBytes: FP32_BYTES * (kept + keptOfAdapters),
    workingBytes: workingBytes(setup, matrices, heads),
    pieces: heads ? 1 : ([4, 3, 2].find((n) => sequence % n === 0 && sequence / n >= 128) ?? 1),
  };
}

/** Return what the LM head and the loss cost. */
function lossOf(setup, vocabulary, gated) {
  const { width } = setup.model;
  const head = vocabulary * width;
  const elements = head + (gated ? width : 2 * width);
  return {
    ...bytesOf(setup, elements, setup.rank ? 0 : elements, [[vocabulary, width]]),
    forwardFlops: 2 * head,
    backFlops: (setup.rank ? 2 : 4) * head,
    sparedFlops: 0,
    keptBytes: 0,
    workingBytes: 16 * vocabulary,
    pieces: 1,
  };
}

/** Return bytes of parameters: frozen, sent in every step, in fp32 as sums and while used. */
function bytesOf({ elementBytes, rank }, elements, trained, matrices) {
  const largest = Math.max(...matrices.map(([rows, columns]) => rows * columns));
  return {
    frozenBytes: rank ? elementBytes * elements : 0,
    weightBytes: elementBytes * trained,
    sumBytes: FP32_BYTES * trained,
    widenedBytes: elementBytes < FP32_BYTES ? FP32_BYTES * largest : 0,
  };
}

/** Return the memory, for each token, that the graph of a layer works in. */
function workingBytes({ model: { width }, sequence }, matrices, heads) {
  const inner = Math.max(...matrices.flat());
  const isOfMlp = (sides) => Math.max(...sides) === inner && Math.min(...sides) === width;
  const rowBytes = FP32_BYTES * heads * sequence;
  const whole = rowBytes * sequence <= WHOLE_SCORES_BYTES;
  const rows = whole ? sequence : Math.max(1, Math.floor(BLOCK_BYTES / rowBytes));
  const scores = heads * rows;
  const mlp = 7.5 * width + (2 + 2 * matrices.filter(isOfMlp).length) * inner;
  return (
    FP32_BYTES * Math.max(mlp + (whole ? scores : 0), 7 * width + (whole ? 4.5 : 7.5) * scores)
  );
}
