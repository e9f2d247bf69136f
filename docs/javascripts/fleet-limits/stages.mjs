/**
 * The fastest stages found: where layers and the loss are, on how many devices. Pure.
 *
 * Devices are alike, so layers are dealt in proportion; the loss is where the planner tries it.
 */

import { FP32_BYTES, costsOf, numbersTo, sum } from "./costs.mjs";
import { UNITS_AT_ONCE, lossOf, stepOf } from "./stage_times.mjs";

const RUNTIME_BYTES = 41e6; // of ONNX Runtime
const SPARE = 1.04; // memory over what adds up
const MOST_MICRO_BATCHES = 64;
const AT_SERVER = { onLast: false, slices: 0, sliceDevices: 0 };
const ON_LAST = { onLast: true, slices: 0, sliceDevices: 0 };

/** Return what stages take; `seconds(rates)` is the same plan with other rates. */
export function byStages(setup) {
  const plan = bestPlan(setup, false) ?? bestPlan(setup, true);
  if (!plan) return { refused: tooLarge(setup) };
  const { downBytes, upBytes } = stepOf(plan, setup.rates);
  return {
    seconds: (rates) => stepOf(plan, rates).seconds,
    devices: sum(plan.stages.map((stage) => stage.devices)) + plan.slices * plan.sliceDevices,
    memoryBytes: Math.max(...plan.stages.map((stage) => stage.memoryBytes)),
    ...{ downBytes, upBytes, plan },
  };
}

/** Return the fastest plan found, with layers whole or in parts; undefined if none fits. */
function bestPlan(setup, inParts) {
  const { units, loss } = costsOf(setup, inParts);
  const total = (value) => sum(units.map(value));
  const leastFlops = total((unit) => unit.forwardFlops + unit.backFlops - unit.sparedFlops);
  const weightBytes = total((unit) => unit.weightBytes);
  const base = { ...setup, units, loss, inParts, leastFlops, weightBytes };
  let best = { seconds: Infinity };
  for (const batches of microBatches(setup)) {
    const batchTokens = setup.sequence * Math.ceil(setup.sequences / batches);
    const given = { ...base, batches, batchTokens };
    best = fastest(given, [AT_SERVER, ON_LAST], best);
    // As the planner does: slices only where the server would be better than the last stage.
    if (best.plan && !best.plan.onLast) best = fastest(given, slicesOfLoss(given), best);
  }
  return best.plan;
}

/** Return the fastest of some plans and of another. */
function fastest(given, places, other) {
  let best = other;
  for (const plan of plansOf(given, places, (leastS) => leastS < best.seconds)) {
    const { seconds } = stepOf(plan, given.rates);
    if (seconds < best.seconds) best = { plan, seconds };
  }
  return best;
}

/** Return the numbers of micro-batches that are tried, as `cleave/planner/micro_batches.py`. */
function microBatches({ sequences, devices }) {
  const few = Math.max(4, 2 * devices);
  const wanted = [devices, few, 2 * few, MOST_MICRO_BATCHES];
  return new Set(wanted.map((number) => Math.min(sequences, number)));
}

/** Say what memory a layer and its parts take, where they do not fit. */
function tooLarge(setup) {
  const batches = Math.max(...microBatches(setup));
  const batchTokens = setup.sequence * Math.ceil(setup.sequences / batches);
  const largest = (inParts) => {
    const given = { ...setup, ...costsOf(setup, inParts), batches, batchTokens };
    const each = [0, 1].map((first) => stageOf(given, { first, stop: first + 1, devices: 1 }, 1));
    return `${(Math.max(...each.map((stage) => stage.leastBytes)) / 1e9).toFixed(1)} GB`;
  };
  const held = setup.devices === 1 ? "one device does not" : `${setup.devices} devices do not`;
  const parts = `the larger of its two parts ${largest(true)}`;
  const whole = `a layer takes ${largest(false)} of a device`;
  return `Does not fit: ${whole}, ${parts}, and ${held} hold them all.`;
}

/**
 * Yield plans that fit, with the loss in some places: how many stages, how many devices of each.
 *
 * Those are left out of which `mayWin` says that they cannot be the best, given the least seconds
 * that they take.
 */
function* plansOf(given, places, mayWin) {
  const known = new Map(); // stages that are alike cost the same
  const stageLike = (stage, count) => {
    const { first, stop, devices, loss } = stage;
    const key = `${count} ${first % 2} ${!first} ${stop - first} ${devices} ${loss}`;
    if (!known.has(key)) known.set(key, stageOf(given, stage, count));
    return known.get(key);
  };
  for (const where of places) {
    const placed = { ...given, ...where };
    const left = given.devices - where.slices * where.sliceDevices;
    for (let count = 1; count <= Math.min(given.units.length, left); count += 1) {
      const equal = numbersTo(Math.floor(left / count)).map((each) => each * count);
      for (const used of new Set([...equal, left])) {
        if (!mayWin(leastSeconds(placed, count, used))) continue;
        for (const byDevices of used % count ? [true, false] : [true]) {
          const stages = dealt(placed, count, used, byDevices).map((one) => stageLike(one, count));
          if (stages.every((one) => one.leastBytes <= given.memoryBytes)) {
            yield { ...placed, stages };
          }
        }
      }
    }
  }
}

/** Return seconds that a step takes at least: of processors, of the loss, and of the card. */
function leastSeconds(plan, count, devices) {
  const { rates, batches } = plan;
  const moved = plan.batchTokens * plan.model.width * plan.elementBytes;
  const passed = (plan.weightBytes * devices) / count + (2 * count - 1) * batches * moved;
  return Math.max(
    (plan.tokens * plan.leastFlops) / devices / rates.compute,
    batches * lossOf(plan, rates, moved).each,
    (passed * Math.max(plan.downRatio, plan.upRatio)) / rates.card,
  );
}

/** Yield ways to cut the loss by vocabulary into slices on devices of their own. */
function* slicesOfLoss(given) {
  let fewest = 1;
  while (fewest < given.devices && sliceBytes(given, fewest) > given.memoryBytes) fewest += 1;
  for (const slices of [fewest, 2 * fewest]) {
    for (const sliceDevices of numbersTo(Math.floor((given.devices - 1) / slices))) {
      yield { onLast: false, slices, sliceDevices };
    }
  }
}

/** Return the memory of a device with one of so many slices of the loss. */
function sliceBytes({ loss, model, batchTokens }, slices) {
  const held = loss.frozenBytes + loss.weightBytes + loss.sumBytes + loss.widenedBytes;
  const inputs = (1 + UNITS_AT_ONCE + 4 * UNITS_AT_ONCE) * FP32_BYTES * batchTokens * model.width;
  return SPARE * ((held + batchTokens * loss.workingBytes) / slices + RUNTIME_BYTES + inputs);
}

/**
 * Deal devices to stages evenly, and layers in proportion to these, or evenly too.
 *
 * The loss counts as layers of the last stage where it is there.
 */
function dealt({ units, loss, onLast }, count, devices, byDevices) {
  const flops = (cost) => cost.forwardFlops + cost.backFlops;
  const ofUnit = sum(units.slice(0, 2).map(flops)) / Math.min(2, units.length);
  const all = units.length + (onLast ? flops(loss) / ofUnit : 0);
  const devicesTo = (n) => Math.floor((n * devices) / count); // of the first n stages
  const stages = [];
  for (let n = 1, first = 0; n <= count; n += 1) {
    const wanted = Math.round(all * (byDevices ? devicesTo(n) / devices : n / count));
    const most = units.length - (count - n); // the others need a layer each
    const stop = n === count ? most : Math.min(Math.max(wanted, first + 1), most);
    const last = onLast && n === count;
    stages.push({ first, stop, devices: devicesTo(n) - devicesTo(n - 1), loss: last });
    first = stop;
  }
  return stages;
}

/** Return a stage with what it costs, the memory that it takes, and what it can keep there. */
function stageOf(given, { first, stop, devices, loss = false }, count) {
  const { batches, batchTokens, model, memoryBytes } = given;
  const here = [...given.units.slice(first, stop), ...(loss ? [given.loss] : [])];
  const total = (name) => sum(here.map((cost) => cost[name]));
  const most = (name) => Math.max(...here.map((cost) => cost[name]));
  const pieces = stop === first + 1 && !loss ? here[0].pieces : 1;
  const activation = FP32_BYTES * batchTokens * model.width;
  const inputs = activation * (stop - first);
  const parameters = total("frozenBytes") + total("weightBytes") + total("sumBytes");
  const run = most("widenedBytes") + (batchTokens * most("workingBytes")) / pieces;
  const coming = 4 * UNITS_AT_ONCE * activation + RUNTIME_BYTES;
  const leastBytes = SPARE * (parameters + run + coming + inputs);

  // Inputs of layers are kept of as many micro-batches as fit, then all activations of some.
  const spare = Math.max(0, memoryBytes - leastBytes) / SPARE;
  const kept = loss ? 0 : Math.min(batches, Math.floor(spare / inputs));
  const underWay = loss ? 1 : Math.min(kept, UNITS_AT_ONCE * (count + 1));
  const activations = batchTokens * total("keptBytes");
  const ofUnderWay = loss ? 0 : underWay * inputs;
  const room = Math.floor(Math.max(0, spare - ofUnderWay) / activations);
  const whole = Math.min(room, underWay);
  const again = loss ? 0 : Math.max(0, 1 - (kept * devices) / batches); // share not kept
  const forward = total("forwardFlops");
  const keptInputs = Math.min(kept, Math.ceil(batches / devices)) * inputs;
  return {
    ...{ devices, loss, pieces, again, leastBytes, layers: stop - first },
    memoryBytes: leastBytes + SPARE * Math.max(keptInputs, ofUnderWay + whole * activations),
    weightBytes: total("weightBytes"),
    forwardFlops: loss ? 0 : forward,
    backFlops:
      total("backFlops") +
      (loss ? forward : again * (forward - here.at(-1).forwardFlops)) -
      total("sparedFlops") * (underWay ? whole / underWay : 0),
    returns: first > 0 || !given.rank ? 1 : 0, // whether the gradient of its input is wanted
  };
}
