/** The GPU kernel: WebGPU, several products in flight. */

import { GpuBuffers } from "./gpu_buffers";
import {
  DType,
  depthOf,
  itemBytes,
  type Kernel,
  KernelName,
  type Matrix,
  type Outcome,
  type Product,
} from "./kernel";
import { multiplyShader, ROUND_WORKGROUP, roundShader, TILE } from "./shaders";

/** Products that the GPU is given before the first of them is done. */
const IN_FLIGHT = 6;

const MOST_WORKGROUPS = 65535; // in one dimension, on every GPU

interface Waiting {
  readonly product: Product;
  readonly wanted: () => boolean;
  readonly resolve: (outcome: Outcome | null) => void;
  readonly reject: (reason: unknown) => void;
}

/** Multiplies on a GPU. Made by `WebGpuKernel.create`. */
export class WebGpuKernel implements Kernel {
  readonly name = KernelName.WEBGPU;
  readonly lost: Promise<string>;
  readonly #buffers: GpuBuffers;
  readonly #operands = new Map<Matrix, GPUBuffer>();
  /** Matrices that were forgotten while products of them wait. */
  readonly #orphans = new Map<Matrix, { buffer: GPUBuffer; readers: number }>();
  readonly #waiting: Waiting[] = [];
  #inFlight = 0;
  #doneAt_s = 0;
  #closed = false;

  private constructor(
    readonly about: string,
    readonly device: GPUDevice,
    private readonly multiplying: ReadonlyMap<DType, GPUComputePipeline>,
    private readonly rounding: ReadonlyMap<DType, GPUComputePipeline>,
    private readonly now_s: () => number,
  ) {
    this.#buffers = new GpuBuffers(device);
    this.lost = new Promise((resolve) => {
      device.lost.then((info) => resolve(info.message || info.reason));
      // Out of memory, or a fault of this kernel: what it computes from now on is worth nothing.
      device.onuncapturederror = (event) => {
        event.preventDefault();
        resolve(event.error.message);
      };
    });
  }

  /**
   * The kernel on this browser's best GPU.
   *
   * @param gpu of the browser; undefined where it has none, or the page is not secure
   * @param now_s a clock
   * @throws Error where there is no GPU that can be used
   */
  static async create(gpu: GPU | undefined, now_s: () => number): Promise<WebGpuKernel> {
    if (!gpu) throw new Error("this browser has no WebGPU here");
    const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
    if (!adapter) throw new Error("no GPU offers WebGPU");
    const halves = adapter.features.has("shader-f16");
    const device = await adapter.requestDevice({
      requiredFeatures: halves ? ["shader-f16"] : [],
      requiredLimits: {
        maxStorageBufferBindingSize: adapter.limits.maxStorageBufferBindingSize,
        maxBufferSize: adapter.limits.maxBufferSize,
      },
    });
    const pipeline = (code: string) =>
      device.createComputePipelineAsync({
        layout: "auto",
        compute: { module: device.createShaderModule({ code }) },
      });
    const multiplying = new Map<DType, GPUComputePipeline>();
    for (const dtype of Object.values(DType)) {
      multiplying.set(dtype, await pipeline(multiplyShader(dtype, halves)));
    }
    const rounding = new Map<DType, GPUComputePipeline>();
    for (const dtype of [DType.BF16, DType.FP16] as const) {
      rounding.set(dtype, await pipeline(roundShader(dtype)));
    }
    const { vendor, architecture, description } = adapter.info;
    const about = description || [vendor, architecture].filter(Boolean).join(" ") || "GPU";
    return new WebGpuKernel(about, device, multiplying, rounding, now_s);
  }

  hold(matrix: Matrix): void {
    const bytes = matrix.payload;
    const whole = Math.ceil(bytes.length / 4) * 4;
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST;
    const buffer = this.#buffers.take(whole, usage);
    let padded = bytes;
    if (whole !== bytes.length) {
      padded = new Uint8Array(whole);
      padded.set(bytes);
    }
    this.device.queue.writeBuffer(buffer, 0, padded as Uint8Array<ArrayBuffer>);
    this.#operands.set(matrix, buffer);
    matrix.payload = new Uint8Array();
  }

  forget(matrix: Matrix): void {
    const buffer = this.#operands.get(matrix);
    if (!buffer) return;
    this.#operands.delete(matrix);
    // Products that wait read it still; what is submitted is done before it is written again.
    const readers = this.#waiting.filter(({ product }) =>
      product.pairs.some((pair) => pair.includes(matrix)),
    );
    if (readers.length === 0) this.#buffers.give(buffer);
    else this.#orphans.set(matrix, { buffer, readers: readers.length });
  }

  multiply(product: Product, wanted: () => boolean): Promise<Outcome | null> {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ product, wanted, resolve, reject });
      this.#next();
    });
  }

  close(): void {
    this.#closed = true;
    this.#waiting.length = 0;
    this.device.destroy();
  }

  #next(): void {
    while (this.#inFlight < IN_FLIGHT && !this.#closed) {
      const job = this.#waiting.shift();
      if (!job) return;
      this.#inFlight += 1;
      const started = job.wanted() ? this.#start(job.product) : Promise.resolve(null);
      this.#release(job.product);
      started.then(job.resolve, job.reject).finally(() => {
        this.#inFlight -= 1;
        this.#next();
      });
    }
  }

  /** A product that waited is submitted: matrices that were forgotten meanwhile have a reader less. */
  #release(product: Product): void {
    if (this.#orphans.size === 0) return;
    for (const matrix of new Set(product.pairs.flat())) {
      const orphan = this.#orphans.get(matrix);
      if (!orphan) continue;
      orphan.readers -= 1;
      if (orphan.readers > 0) continue;
      this.#orphans.delete(matrix);
      this.#buffers.give(orphan.buffer);
    }
  }

  #operand(matrix: Matrix): GPUBuffer {
    const buffer = this.#operands.get(matrix) ?? this.#orphans.get(matrix)?.buffer;
    if (!buffer) throw new Error("a matrix of the product is not on the GPU");
    return buffer;
  }

  /** Submit a product; the commands are recorded before this returns its promise. */
  async #start(product: Product): Promise<Outcome> {
    const { rows, columns, out } = product;
    const bytes = rows * columns * itemBytes(out);
    if (bytes === 0) return { payload: new Uint8Array(), compute_s: 0 };
    const from_s = this.now_s();
    const used: GPUBuffer[] = [];
    const take = (size: number, usage: GPUBufferUsageFlags) => {
      const buffer = this.#buffers.take(size, usage);
      used.push(buffer);
      return buffer;
    };
    const sumBytes = rows * columns * 4;
    const copied = Math.ceil(bytes / 4) * 4;
    const sums = take(sumBytes, GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC);
    const encoder = this.device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    for (const [i, [a, b]] of product.pairs.entries()) {
      const parameters = take(32, GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST);
      this.device.queue.writeBuffer(parameters, 0, parametersOf(product, a, b, i > 0));
      const pipeline = this.multiplying.get(a.dtype) as GPUComputePipeline;
      pass.setPipeline(pipeline);
      pass.setBindGroup(
        0,
        this.#bind(pipeline, [
          { buffer: parameters, size: 32 },
          { buffer: this.#operand(a), size: wordBytes(a) },
          { buffer: this.#operand(b), size: wordBytes(b) },
          { buffer: sums, size: sumBytes },
        ]),
      );
      pass.dispatchWorkgroups(Math.ceil(columns / TILE), Math.ceil(rows / TILE));
    }
    let result = sums;
    const rounding = this.rounding.get(out);
    if (rounding) {
      result = take(copied, GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC);
      pass.setPipeline(rounding);
      const sources = [
        { buffer: sums, size: sumBytes },
        { buffer: result, size: copied },
      ];
      pass.setBindGroup(0, this.#bind(rounding, sources));
      const groups = Math.ceil(copied / 4 / ROUND_WORKGROUP);
      const across = Math.min(groups, MOST_WORKGROUPS);
      pass.dispatchWorkgroups(across, Math.ceil(groups / across));
    }
    pass.end();
    const staging = take(copied, GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST);
    encoder.copyBufferToBuffer(result, 0, staging, 0, copied);
    this.device.queue.submit([encoder.finish()]);
    // Forgotten matrices are safe from here on: the queue writes their buffers after this.
    await staging.mapAsync(GPUMapMode.READ, 0, copied);
    const payload = new Uint8Array(staging.getMappedRange(0, copied)).slice(0, bytes);
    staging.unmap();
    for (const buffer of used) this.#buffers.give(buffer);
    // The GPU does one after the other: this one began when the one before was done.
    const now_s = this.now_s();
    const compute_s = now_s - Math.max(from_s, this.#doneAt_s);
    this.#doneAt_s = now_s;
    return { payload, compute_s };
  }

  #bind(pipeline: GPUComputePipeline, buffers: GPUBufferBinding[]): GPUBindGroup {
    return this.device.createBindGroup({
      layout: pipeline.getBindGroupLayout(0),
      entries: buffers.map((resource, binding) => ({ binding, resource })),
    });
  }
}

/** A matrix's bytes in whole words, and at least one: an empty buffer cannot be bound. */
function wordBytes({ rows, columns, dtype }: Matrix): number {
  return Math.max(4, Math.ceil((rows * columns * itemBytes(dtype)) / 4) * 4);
}

function parametersOf(product: Product, a: Matrix, b: Matrix, add: boolean) {
  const [aRow, aDepth] = product.transposeA ? [1, a.columns] : [a.columns, 1];
  const [bDepth, bColumn] = product.transposeB ? [1, b.columns] : [b.columns, 1];
  const depth = depthOf(a, product.transposeA);
  const numbers = [product.rows, product.columns, depth, aRow, aDepth, bDepth, bColumn];
  return Uint32Array.from([...numbers, add ? 1 : 0]);
}
