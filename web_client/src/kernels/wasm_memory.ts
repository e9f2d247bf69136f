/** A WASM memory with matrices in it, which grows as they come. */

import { Allocator } from "./allocator";
import { FIRST_FREE } from "./wasm";

const PAGE_BYTES = 65536;

/** Where matrices, results and scratch lie. */
export class WasmMemory {
  readonly #allocator: Allocator;

  /**
   * @param memory of which nothing is used yet
   * @param max_bytes what it may grow to
   */
  constructor(
    readonly memory: WebAssembly.Memory,
    readonly max_bytes: number,
  ) {
    this.#allocator = new Allocator(FIRST_FREE, memory.buffer.byteLength);
  }

  /** A new memory for at most so many bytes. */
  static create(max_bytes: number, shared: boolean): WasmMemory {
    const maximum = Math.ceil(max_bytes / PAGE_BYTES);
    const memory = new WebAssembly.Memory({ initial: Math.min(32, maximum), maximum, shared });
    return new WasmMemory(memory, maximum * PAGE_BYTES);
  }

  /**
   * The address of so many bytes.
   *
   * @throws Error where the memory cannot grow that far
   */
  take(bytes: number): number {
    const address = this.#allocator.take(bytes) ?? this.#grown(bytes);
    if (address === null) throw new Error(`${bytes} bytes do not fit into the kernel's memory`);
    return address;
  }

  /** The address of a copy of these bytes. */
  place(bytes: Uint8Array): number {
    const address = this.take(bytes.length);
    new Uint8Array(this.memory.buffer, address, bytes.length).set(bytes);
    return address;
  }

  /** A copy of what lies there. */
  read(address: number, bytes: number): Uint8Array<ArrayBuffer> {
    const copy = new Uint8Array(bytes);
    copy.set(new Uint8Array(this.memory.buffer, address, bytes));
    return copy;
  }

  /** Free what `take` or `place` gave. */
  give(address: number): void {
    this.#allocator.give(address);
  }

  #grown(bytes: number): number | null {
    const now = this.memory.buffer.byteLength;
    // A quarter more at once, so that growing stays rare.
    const wanted = Math.min(this.max_bytes, now + Math.max(bytes + PAGE_BYTES, now / 4));
    if (wanted - now < bytes) return null;
    try {
      this.memory.grow(Math.floor((wanted - now) / PAGE_BYTES));
    } catch {
      return null; // the system has no more
    }
    this.#allocator.extend(this.memory.buffer.byteLength);
    return this.#allocator.take(bytes);
  }
}
