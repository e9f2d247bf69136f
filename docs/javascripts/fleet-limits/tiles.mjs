/**
 * A step by tiles: each multiplication in equal shares on alike devices, or on the server. Pure.
 *
 * The time of a tile is that of `cleave/planner/cost.py`, its shape the best of a few.
 */

import { FP32_BYTES, numbersTo, sum } from "./costs.mjs";

const USABLE_MEMORY = 0.81; // of what a device offers; tiles turn out larger, messages need some
const FILL = 0.48 / 16; // what a finite number of strips adds to a tile's time
const MOST_PIECES = 64; // that a device's share is cut into to fit its memory

/** Return what a step by tiles takes; `seconds(rates)` is the same plan with other rates. */
export function byTiles(setup, aloneSeconds) {
  if (setup.rank) return { refused: "Tiles train whole models, not adapters." };
  const shares = multiplicationsOf(setup).map((gemm) => shareOf(setup, gemm));
  const fits = shares.filter((share) => share.seconds < Infinity);
  if (!fits.length) return { refused: "No device has the memory for a multiplication." };
  const sent = new Set(fits.filter((share) => share.seconds < share.flops / setup.rates.server));
  const seconds = (rates) => {
    const alone = shares.map((share) => share.flops / rates.server);
    const taken = shares.map((share, n) =>
      sent.has(share) ? tilesTimes(setup, share, rates).seconds : alone[n],
    );
    const counted = (times) => sum(times.map((time, n) => time * shares[n].count));
    const least = counted(taken) - savedTogether(setup, shares, sent, rates);
    return Math.max(aloneSeconds(rates) - counted(alone) + least, least);
  };
  const total = (name) =>
    sum([...sent].map((share) => share.count * share.devices * share.pieces * share[name]));
  const most = (name) => Math.max(0, ...[...sent].map((share) => share[name]));
  return {
    seconds,
    devices: most("devices"),
    memoryBytes: most("memoryBytes"),
    downBytes: total("downBytes"),
    upBytes: total("upBytes"),
    sent: sum([...sent].map((share) => share.count)),
    of: sum(shares.map((share) => share.count)),
  };
}

/** Return the multiplications of a step: sides, and how often each occurs. */
function multiplicationsOf({ model, tokens }) {
  const { family, layers, width, kvWidth, inner, vocabulary } = model;
  const linears = [
    [width, width + 2 * kvWidth, layers],
    [width, width, layers],
    [width, family === "llama" ? 2 * inner : inner, layers],
    [inner, width, layers],
    [width, vocabulary, 1],
  ];
  return linears.flatMap(([inputs, outputs, count]) => [
    { m: tokens, n: outputs, k: inputs, count },
    { m: tokens, n: inputs, k: outputs, count },
    { m: outputs, n: inputs, k: tokens, count },
  ]);
}

/** Return what a step saves because both gradients of a Linear are under way together. */
function savedTogether(setup, shares, sent, rates) {
  const pairs = shares.flatMap((share, n) => (n % 3 === 1 ? [[share, shares[n + 1]]] : []));
  return sum(
    pairs
      .filter((pair) => pair.every((share) => sent.has(share)))
      .map(([first, second]) => {
        const [one, two] = [first, second].map((share) => tilesTimes(setup, share, rates));
        const together = Math.max(one.down + two.seconds, one.seconds + two.slower);
        return first.count * Math.max(0, one.seconds + two.seconds - together);
      }),
  );
}

/** Return the fastest way found to share out a multiplication; infinite seconds if none fits. */
function shareOf(setup, gemm) {
  const { m, n, k } = gemm;
  const { rates, devices: all } = setup;
  const crowded = all * Math.max(rates.downlink, rates.uplink) > rates.card;
  let best = { ...gemm, flops: 2 * m * n * k, seconds: Infinity };
  for (const devices of crowded ? numbersTo(all) : [all]) {
    for (const slabs of numbersTo(Math.min(k, devices))) {
      for (let pieces = 1; pieces <= MOST_PIECES; pieces *= 2) {
        const area = (m * n * slabs) / devices / pieces;
        const narrow = Math.min(Math.sqrt(area), m, n);
        const tile = tileOf(setup, narrow, area / narrow, k / slabs, slabs === 1);
        if (tile.memoryBytes > USABLE_MEMORY * setup.memoryBytes) continue;
        const share = { ...best, ...tile, devices, pieces };
        share.seconds = tilesTimes(setup, share, rates).seconds;
        if (share.seconds < best.seconds) best = share;
        break;
      }
    }
  }
  return best;
}

/** Return a tile's bytes and FLOPs; one of full depth returns no partial sums. */
function tileOf({ elementBytes }, rows, columns, depth, full) {
  const downBytes = elementBytes * (rows + columns) * depth;
  const upBytes = (full ? elementBytes : FP32_BYTES) * rows * columns;
  const tileFlops = 2 * rows * columns * depth;
  return { downBytes, upBytes, tileFlops, memoryBytes: downBytes + upBytes };
}

/**
 * Return how long a device takes for its tiles of a multiplication, one after another: until all is
 * back, and of that for what it is sent, and for the longer of computing and returning.
 */
function tilesTimes(
  { downRatio, sumRatio },
  { downBytes, upBytes, tileFlops, devices, pieces },
  rates,
) {
  const card = rates.card / devices;
  const down = downBytes / Math.min(rates.downlink / downRatio, card);
  const up = upBytes / Math.min(rates.uplink / sumRatio, card);
  const slower = Math.max(tileFlops / rates.compute, up);
  const streamed = slower <= down / 2 ? down : slower + down ** 2 / (4 * slower);
  return {
    seconds: pieces * (streamed * (1 + FILL) + 2 / rates.latency),
    down: pieces * down,
    slower: pieces * slower,
  };
}
