/** The compiled shaders of a GPU, made when they are first needed. */

import { DType, type Product, type Shape } from "./kernel";
import { dotShader, type Each, FEW, multiplyShader, roundShader, SIDE } from "./shaders";

/** Workgroups that every GPU takes, in one dimension. */
export const MOST_WORKGROUPS = 65535;

/** How to compute the products of a pair: the shader, and how many workgroups of it. */
export interface Multiplying {
  readonly pipeline: GPUComputePipeline;
  readonly workgroups: readonly [number, number];
}

/** The pipelines of one GPU. */
export class Pipelines {
  readonly #made = new Map<string, Promise<GPUComputePipeline>>();

  /** @param halves whether the GPU has 16-bit floats */
  constructor(
    private readonly device: GPUDevice,
    private readonly halves: boolean,
  ) {}

  /**
   * For a product's pairs: the shader that fits the shape of the result.
   *
   * @throws RangeError for a result that no GPU takes at once
   */
  async multiplying({ rows, columns, pairs }: Product<Shape>): Promise<Multiplying> {
    const dtype = pairs[0]?.[0].dtype ?? DType.FP32;
    if (rows * columns <= FEW) {
      const code = () => dotShader(dtype, this.halves);
      const pipeline = await this.#pipeline(`dot ${dtype}`, code);
      return { pipeline, workgroups: [rows * columns, 1] };
    }
    const rowsEach = each(rows);
    const columnsEach = each(columns);
    const pipeline = await this.#pipeline(`${dtype} ${rowsEach}x${columnsEach}`, () =>
      multiplyShader(dtype, this.halves, rowsEach, columnsEach),
    );
    const across = Math.ceil(columns / (SIDE * columnsEach));
    const down = Math.ceil(rows / (SIDE * rowsEach));
    if (Math.max(across, down) > MOST_WORKGROUPS) {
      throw new RangeError(`a result of ${rows}x${columns} is too long for the GPU`);
    }
    return { pipeline, workgroups: [across, down] };
  }

  /** For rounding the sums; null where they are the result. */
  async rounding(out: DType): Promise<GPUComputePipeline | null> {
    return out === DType.FP32 ? null : this.#pipeline(`round ${out}`, () => roundShader(out));
  }

  #pipeline(key: string, code: () => string): Promise<GPUComputePipeline> {
    let made = this.#made.get(key);
    if (!made) {
      const module = this.device.createShaderModule({ code: code() });
      made = this.device.createComputePipelineAsync({ layout: "auto", compute: { module } });
      this.#made.set(key, made);
    }
    return made;
  }
}

/** A thin result would leave most of a large tile empty. */
function each(side: number): Each {
  return side > SIDE ? 4 : 1;
}
