/** A GPU in the processor's memory, which counts what goes there and comes back. */

import { vi } from "vitest";
import { GpuMemory } from "../../src/graphs/gpu_memory";

vi.stubGlobal("GPUBufferUsage", { MAP_READ: 1, COPY_SRC: 4, COPY_DST: 8, STORAGE: 128 });
vi.stubGlobal("GPUMapMode", { READ: 1 });

class FakeBuffer {
  readonly bytes: ArrayBuffer;

  constructor(
    readonly size: number,
    private readonly living: Set<FakeBuffer>,
  ) {
    this.bytes = new ArrayBuffer(size);
    living.add(this);
  }

  async mapAsync(): Promise<void> {
    this.refuseDestroyed();
  }

  getMappedRange(): ArrayBuffer {
    return this.bytes;
  }

  destroy(): void {
    this.living.delete(this);
  }

  refuseDestroyed(): void {
    if (!this.living.has(this)) throw new Error("the buffer is destroyed");
  }
}

/** WebGPU's device, as far as `GpuMemory` uses it. */
export class FakeGpu {
  uploaded_bytes = 0;
  downloaded_bytes = 0;
  /** The bytes that it has room for. */
  room_bytes = Infinity;
  /** How often its work was awaited. */
  awaited = 0;
  readonly living = new Set<FakeBuffer>();
  readonly #scopes: (object | null)[] = [];

  get memory(): GpuMemory {
    return new GpuMemory(this as unknown as GPUDevice);
  }

  get living_bytes(): number {
    return [...this.living].reduce((sum, { size }) => sum + size, 0);
  }

  readonly queue = {
    writeBuffer: (buffer: FakeBuffer, _: number, data: Float32Array) => {
      buffer.refuseDestroyed();
      this.uploaded_bytes += data.byteLength;
      new Float32Array(buffer.bytes).set(data);
    },
    submit: (commands: readonly (() => void)[]) => commands.forEach((command) => command()),
    onSubmittedWorkDone: async () => void this.awaited++,
  };

  createBuffer({ size, usage }: { size: number; usage: number }): FakeBuffer {
    if (usage & GPUBufferUsage.STORAGE && this.living_bytes + size > this.room_bytes) {
      this.#scopes[this.#scopes.length - 1] = new Error("out of memory");
    }
    return new FakeBuffer(size, this.living);
  }

  createCommandEncoder() {
    let copy = () => {};
    return {
      copyBufferToBuffer: (from: FakeBuffer, at: number, to: FakeBuffer, _: 0, size: number) => {
        copy = () => {
          from.refuseDestroyed();
          this.downloaded_bytes += size;
          new Uint8Array(to.bytes).set(new Uint8Array(from.bytes, at, size));
        };
      },
      finish: () => copy,
    };
  }

  pushErrorScope(): void {
    this.#scopes.push(null);
  }

  async popErrorScope(): Promise<object | null> {
    return this.#scopes.pop() ?? null;
  }
}
