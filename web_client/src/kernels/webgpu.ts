/** The GPU kernel: WebGPU, several products in flight. */

import { GpuBuffers } from "./gpu_buffers";
import { MOST_WORKGROUPS, type Multiplying, Pipelines } from "./gpu_pipelines";
import {
  depthOf,
  itemBytes,
  type Kernel,
  KernelName,
  type Matrix,
  type Outcome,
  type Product,
  type Shape,
} from "./kernel";
import { ROUND_WORKGROUP } from "./shaders";

/** Products that the GPU is given before the first of them is done. */
const IN_FLIGHT = 6;

/** A matrix on the GPU. */
interface Operand extends Shape {
  readonly buffer: GPUBuffer;
  readers: number; // products that are not submitted yet
  forgotten: boolean;
}

interface Waiting {
  readonly product: Product<Operand>;
  readonly wanted: () => boolean;
  readonly resolve: (outcome: Outcome | null) => void;
  readonly reject: (reason: unknown) => void;
}

/** A product that the GPU has been given. */
interface Submitted {
  /** Where its result comes to lie. */
  readonly staging: GPUBuffer;
  /** The buffers that are free again once it has. */
  readonly used: readonly GPUBuffer[];
  readonly from_s: number;
}

/** Multiplies on a GPU. Made by `WebGpuKernel.create`. */
export class WebGpuKernel implements Kernel {
  readonly name = KernelName.WEBGPU;
  readonly lost: Promise<string>;
  readonly #buffers: GpuBuffers;
  readonly #operands = new Map<Matrix, Operand>();
  readonly #waiting: Waiting[] = [];
  #inFlight = 0;
  #doneAt_s = 0;
  #closed = false;

  private constructor(
    readonly about: string,
    readonly device: GPUDevice,
    private readonly pipelines: Pipelines,
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
   * @param software whether a GPU that the processor emulates will do; WASM is faster
   * @param now_s a clock
   * @throws Error where there is no GPU that can be used
   */
  static async create(
    gpu: GPU | undefined,
    software: boolean,
    now_s: () => number,
  ): Promise<WebGpuKernel> {
    if (!gpu) throw new Error("this browser has no WebGPU here");
    const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
    if (!adapter) throw new Error("no GPU offers WebGPU");
    if (adapter.info.isFallbackAdapter && !software) {
      throw new Error("the GPU is only emulated by the processor");
    }
    const halves = adapter.features.has("shader-f16");
    const device = await adapter.requestDevice({
      requiredFeatures: halves ? ["shader-f16"] : [],
      requiredLimits: {
        maxStorageBufferBindingSize: adapter.limits.maxStorageBufferBindingSize,
        maxBufferSize: adapter.limits.maxBufferSize,
      },
    });
    const pipelines = new Pipelines(device, halves);
    const { vendor, architecture, description } = adapter.info;
    const about = description || [vendor, architecture].filter(Boolean).join(" ") || "GPU";
    return new WebGpuKernel(about, device, pipelines, now_s);
  }

  hold(matrix: Matrix): void {
    const bytes = matrix.payload;
    const whole = words(bytes.length);
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST;
    const buffer = this.#buffers.take(whole, usage);
    let padded = bytes;
    if (whole !== bytes.length) {
      padded = new Uint8Array(whole);
      padded.set(bytes);
    }
    this.device.queue.writeBuffer(buffer, 0, padded as Uint8Array<ArrayBuffer>);
    const { rows, columns, dtype } = matrix;
    this.#operands.set(matrix, { rows, columns, dtype, buffer, readers: 0, forgotten: false });
    matrix.payload = new Uint8Array();
  }

  forget(matrix: Matrix): void {
    const operand = this.#operands.get(matrix);
    if (!operand) return;
    this.#operands.delete(matrix);
    operand.forgotten = true;
    // What is submitted is done before the buffer is written again; what waits has to read it yet.
    if (operand.readers === 0) this.#buffers.give(operand.buffer);
  }

  multiply(product: Product, wanted: () => boolean): Promise<Outcome | null> {
    return new Promise((resolve, reject) => {
      const pairs = product.pairs.map(([a, b]) => [this.#find(a), this.#find(b)] as const);
      for (const operand of pairs.flat()) operand.readers += 1;
      this.#waiting.push({ product: { ...product, pairs }, wanted, resolve, reject });
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
      this.#start(job)
        .then(job.resolve, job.reject)
        .finally(() => {
          this.#inFlight -= 1;
          this.#next();
        });
    }
  }

  /** A product is submitted, or will not be: it reads its operands no more. */
  #release(product: Product<Operand>): void {
    for (const operand of product.pairs.flat()) {
      operand.readers -= 1;
      if (operand.forgotten && operand.readers === 0) this.#buffers.give(operand.buffer);
    }
  }

  #find(matrix: Matrix): Operand {
    const operand = this.#operands.get(matrix);
    if (!operand) throw new Error("a matrix of the product is not held");
    return operand;
  }

  async #start({ product, wanted }: Waiting): Promise<Outcome | null> {
    const { rows, columns, out } = product;
    const bytes = rows * columns * itemBytes(out);
    let submitted: Submitted;
    try {
      const multiplying = await this.pipelines.multiplying(product);
      const rounding = await this.pipelines.rounding(out);
      if (!wanted()) return null;
      if (bytes === 0) return { payload: new Uint8Array(), compute_s: 0 };
      submitted = this.#submit(product, multiplying, rounding);
    } finally {
      this.#release(product);
    }
    const { staging, used, from_s } = submitted;
    await staging.mapAsync(GPUMapMode.READ, 0, words(bytes));
    const payload = new Uint8Array(staging.getMappedRange(0, words(bytes))).slice(0, bytes);
    staging.unmap();
    for (const buffer of used) this.#buffers.give(buffer);
    // The GPU does one after the other: this one began when the one before was done.
    const now_s = this.now_s();
    const compute_s = now_s - Math.max(from_s, this.#doneAt_s);
    this.#doneAt_s = now_s;
    return { payload, compute_s };
  }

  #submit(
    product: Product<Operand>,
    { pipeline, workgroups }: Multiplying,
    rounding: GPUComputePipeline | null,
  ): Submitted {
    const { rows, columns, out } = product;
    const from_s = this.now_s();
    const used: GPUBuffer[] = [];
    const take = (size: number, usage: GPUBufferUsageFlags) => {
      const buffer = this.#buffers.take(size, usage);
      used.push(buffer);
      return buffer;
    };
    const sumBytes = rows * columns * 4;
    const copied = words(rows * columns * itemBytes(out));
    const sums = take(sumBytes, GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC);
    const encoder = this.device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    for (const [i, [a, b]] of product.pairs.entries()) {
      const parameters = take(32, GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST);
      this.device.queue.writeBuffer(parameters, 0, parametersOf(product, a, b, i > 0));
      pass.setPipeline(pipeline);
      pass.setBindGroup(
        0,
        this.#bind(pipeline, [
          { buffer: parameters, size: 32 },
          { buffer: a.buffer, size: wordBytes(a) },
          { buffer: b.buffer, size: wordBytes(b) },
          { buffer: sums, size: sumBytes },
        ]),
      );
      pass.dispatchWorkgroups(...workgroups);
    }
    let result = sums;
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
    return { staging, used, from_s };
  }

  #bind(pipeline: GPUComputePipeline, buffers: GPUBufferBinding[]): GPUBindGroup {
    return this.device.createBindGroup({
      layout: pipeline.getBindGroupLayout(0),
      entries: buffers.map((resource, binding) => ({ binding, resource })),
    });
  }
}

/** A length in bytes, up to whole words. */
function words(bytes: number): number {
  return Math.ceil(bytes / 4) * 4;
}

/** A matrix's bytes in whole words, and at least one: an empty buffer cannot be bound. */
function wordBytes({ rows, columns, dtype }: Shape): number {
  return Math.max(4, words(rows * columns * itemBytes(dtype)));
}

function parametersOf(product: Product<Shape>, a: Shape, b: Shape, add: boolean) {
  const [aRow, aDepth] = product.transposeA ? [1, a.columns] : [a.columns, 1];
  const [bDepth, bColumn] = product.transposeB ? [1, b.columns] : [b.columns, 1];
  const depth = depthOf(a, product.transposeA);
  const numbers = [product.rows, product.columns, depth, aRow, aDepth, bDepth, bColumn];
  return Uint32Array.from([...numbers, add ? 1 : 0]);
}
