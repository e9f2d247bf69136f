/**
 * How long a step by given stages takes, and what the server sends and gets. Pure.
 *
 * The closed form of `cleave/planner/stage_estimate.py` for alike devices: the first and the last
 * micro-batch are followed through the stages, forward and back.
 */

import { sum } from "./costs.mjs";

export const UNITS_AT_ONCE = 2; // of a device

/** Return the seconds of a step by a plan, and the bytes that the server sends and gets. */
export function stepOf(plan, rates) {
  const { batches, downRatio, upRatio } = plan;
  const moved = plan.batchTokens * plan.model.width * plan.elementBytes;
  const loss = lossOf(plan, rates, moved);
  let weightBytes = 0;
  let downBytes = loss.downBytes;
  let upBytes = loss.upBytes;
  const courses = plan.stages.map((stage) => {
    const forwards = stage.loss ? 0 : 1; // with the loss there is one pass, not two
    const ofStage = stage.weightBytes * stage.devices;
    weightBytes += ofStage;
    downBytes += downRatio * (ofStage + batches * moved * (forwards + 1 + stage.again));
    upBytes += upRatio * (ofStage + batches * moved * (forwards + stage.returns));
    const loaded = Math.max(stage.weightBytes / rates.downlink, weightBytes / rates.card);
    return {
      ...courseOf(plan, stage, rates, moved),
      ready: downRatio * loaded,
      card: (upRatio * ofStage) / rates.card,
    };
  });
  const seconds = Math.max(
    endOf(courses, loss, batches),
    downBytes / rates.card,
    upBytes / rates.card,
  );
  return { seconds, downBytes, upBytes };
}

/** Return how long a stage takes for one micro-batch, and for the others of a device. */
function courseOf({ batches, batchTokens, downRatio, upRatio }, stage, rates, moved) {
  const down = (moved * downRatio) / rates.downlink;
  const up = (moved * upRatio) / rates.uplink;
  const compute = (flops) => (batchTokens * flops) / rates.compute;
  const ahead = stage.loss ? [0, 0, 0] : [down, compute(stage.forwardFlops), up];
  const back = [down * (1 + stage.again), compute(stage.backFlops), up * stage.returns];
  const oneAhead = inPieces(ahead, stage.pieces) + (stage.loss ? 0 : 2 / rates.latency);
  const oneBack = inPieces(back, stage.pieces) + 2 / rates.latency;
  const others = Math.ceil(batches / stage.devices) - 1;
  const both = ahead.map((seconds, n) => seconds + back[n]);
  return {
    ...{ oneAhead, oneBack },
    othersAhead: others * Math.max(...ahead, oneAhead / UNITS_AT_ONCE),
    othersBack: others * Math.max(...back, oneBack / UNITS_AT_ONCE),
    others: others * Math.max(...both, (oneAhead + oneBack) / UNITS_AT_ONCE),
    gradients: (stage.weightBytes * upRatio) / rates.uplink + 2 / rates.latency,
  };
}

/** Return how long it takes if one piece comes while another is computed and another goes. */
function inPieces(parts, pieces) {
  return sum(parts) / pieces + (1 - 1 / pieces) * Math.max(...parts);
}

/** Return the seconds of the loss of one micro-batch and of each further one, and its bytes. */
export function lossOf(plan, rates, moved) {
  const { loss, batches, batchTokens, slices, sliceDevices, downRatio, upRatio } = plan;
  if (plan.onLast) return { ready: 0, one: 0, each: 0, gradients: 0, downBytes: 0, upBytes: 0 };
  if (!slices) {
    const one = (batchTokens * (loss.forwardFlops + loss.backFlops)) / rates.server;
    return { ready: 0, one, each: one, gradients: 0, downBytes: 0, upBytes: 0 };
  }
  const flops = (2 * loss.forwardFlops + loss.backFlops) / slices; // logits are computed again
  const parts = [
    (moved * downRatio) / rates.downlink,
    (batchTokens * flops) / rates.compute,
    (moved * upRatio) / rates.uplink,
  ];
  const bytes = batches * moved * slices + loss.weightBytes * sliceDevices;
  return {
    ready: ((loss.weightBytes / slices) * downRatio) / rates.downlink,
    one: sum(parts) + 4 / rates.latency,
    each: (Math.max(...parts) * Math.ceil(batches / sliceDevices)) / batches,
    gradients: ((loss.weightBytes / slices) * upRatio) / rates.uplink,
    downBytes: downRatio * bytes,
    upBytes: upRatio * bytes,
  };
}

/** Return when all gradients are up, by following the first and the last micro-batch. */
function endOf(courses, loss, batches) {
  const reversed = courses.toReversed();
  let first = 0;
  for (const course of courses) {
    first = Math.max(first, course.ready) + course.oneAhead;
    course.ahead = first;
  }
  first = Math.max(first, loss.ready) + loss.one;
  for (const course of reversed) {
    course.back = first;
    first += course.oneBack;
  }
  let last = 0;
  for (const course of courses) {
    // Once backward passes return, they are done before other forward passes.
    const alone = Math.min(1, (course.back - course.ahead) / Math.max(1e-12, course.othersAhead));
    const others = alone * course.othersAhead + (1 - alone) * course.others;
    last = Math.max(last + course.oneAhead, course.ahead + others);
  }
  const begun = Math.max(courses.at(-1).ahead, loss.ready);
  last = Math.max(last + loss.one, begun + loss.one + (batches - 1) * loss.each);
  let [end, received] = [last + loss.gradients, 0];
  for (const course of reversed) {
    last = Math.max(last, course.back + course.othersBack, course.ahead + course.others);
    last += course.oneBack;
    received = Math.max(received, last) + course.card;
    end = Math.max(end, last + course.gradients, received);
  }
  return end;
}
