/** Buffers of a GPU that are used again instead of made anew for every product. */

/** Free buffers beyond this are given back to the system. */
const MOST_FREE_BYTES = 64 * 2 ** 20;

/** A store of free buffers, by usage and size. */
export class GpuBuffers {
  readonly #device: GPUDevice;
  readonly #free = new Map<string, GPUBuffer[]>();
  #free_bytes = 0;

  constructor(device: GPUDevice) {
    this.#device = device;
  }

  /** A buffer of at least so many bytes, with anything in it. */
  take(bytes: number, usage: GPUBufferUsageFlags): GPUBuffer {
    const size = rounded(Math.max(256, bytes));
    const found = this.#free.get(`${usage} ${size}`)?.pop();
    if (found) {
      this.#free_bytes -= size;
      return found;
    }
    return this.#device.createBuffer({ size, usage });
  }

  /** The buffer is not used any more, once what was submitted is done. */
  give(buffer: GPUBuffer): void {
    if (this.#free_bytes + buffer.size > MOST_FREE_BYTES) {
      buffer.destroy();
      return;
    }
    this.#free_bytes += buffer.size;
    const key = `${buffer.usage} ${buffer.size}`;
    const list = this.#free.get(key);
    if (list) list.push(buffer);
    else this.#free.set(key, [buffer]);
  }
}

/** Up to the next quarter of a power of two, so that few sizes serve all and little is wasted. */
function rounded(bytes: number): number {
  const step = 2 ** Math.max(8, Math.floor(Math.log2(bytes)) - 2);
  return Math.ceil(bytes / step) * step;
}
