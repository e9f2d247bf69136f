/** Arrays of fp32 numbers in the memory of a GPU. They stay there between runs. */

import { GraphError } from "./errors";
import type { Kept } from "./graph_session";

const ITEM_BYTES = Float32Array.BYTES_PER_ELEMENT;

/** ONNX Runtime may bind four numbers at once, so every buffer has room for a multiple of four. */
const STEP_BYTES = 16;

/** The memory of the GPU that ONNX Runtime uses. */
export class GpuMemory {
  constructor(private readonly device: GPUDevice) {}

  /**
   * Make an array. Return null if the GPU has no memory for it, or if it would be empty.
   *
   * @param numbers the elements; zeros by default
   */
  async make(elements: number, numbers?: Float32Array): Promise<GpuArray | null> {
    if (elements === 0) return null;
    const { device } = this;
    // A buffer that could not be allocated reads as zeros. Only an error scope reports it.
    device.pushErrorScope("validation");
    device.pushErrorScope("out-of-memory");
    const buffer = device.createBuffer({
      size: Math.ceil((elements * ITEM_BYTES) / STEP_BYTES) * STEP_BYTES,
      usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST,
    });
    if (numbers) device.queue.writeBuffer(buffer, 0, numbers);
    const errors = await Promise.all([device.popErrorScope(), device.popErrorScope()]);
    if (errors.every((error) => error === null)) return new GpuArray(device, buffer, elements);
    buffer.destroy();
    return null;
  }

  /** Wait until the GPU has finished everything that it was given. */
  async finished(): Promise<void> {
    await this.device.queue.onSubmittedWorkDone();
  }
}

/** An array in the memory of a GPU. */
export class GpuArray implements Kept {
  constructor(
    private readonly device: GPUDevice,
    readonly buffer: GPUBuffer,
    readonly elements: number,
  ) {}

  read(): Promise<Float32Array<ArrayBuffer>> {
    return this.part(0, this.elements);
  }

  async part(from: number, to: number): Promise<Float32Array<ArrayBuffer>> {
    const size = (to - from) * ITEM_BYTES;
    if (size === 0) return new Float32Array();
    const { device } = this;
    // A copy that fails leaves zeros.
    device.pushErrorScope("validation");
    const copy = device.createBuffer({
      size,
      usage: GPUBufferUsage.COPY_DST | GPUBufferUsage.MAP_READ,
    });
    try {
      const commands = device.createCommandEncoder();
      commands.copyBufferToBuffer(this.buffer, from * ITEM_BYTES, copy, 0, size);
      device.queue.submit([commands.finish()]);
      const error = await device.popErrorScope();
      if (error) throw new GraphError(`an array cannot be read from the GPU: ${error.message}`);
      await copy.mapAsync(GPUMapMode.READ);
      return new Float32Array(copy.getMappedRange().slice(0));
    } finally {
      copy.destroy();
    }
  }

  async onGpu(): Promise<GpuArray> {
    return this;
  }

  free(): void {
    this.buffer.destroy();
  }
}
