/** The server alone, tiles and stages side by side, and what limits each. Pure. */

import { costsOf, readSetup, sum } from "./costs.mjs";
import { byStages } from "./stages.mjs";
import { byTiles } from "./tiles.mjs";

const SLOWER = 1.001;

/**
 * Return what a step takes by each method: seconds, shares of what limits it, bytes, memory.
 *
 * A share says how much of the time follows a rate: 0.3 for the uplink means that uplinks slower by
 * 1 % make the step longer by 0.3 %. Shares add up to 1, as all times halve if all rates double.
 */
export function limitsOf(given) {
  const setup = readSetup(given);
  const alone = { seconds: (rates) => aloneSeconds(setup, rates) };
  const tiles = byTiles(setup, alone.seconds);
  return {
    alone: limited(alone, setup),
    tiles: limited(tiles, setup),
    stages: limited(byStages(setup), setup),
  };
}

/** Return the seconds of a step that the server does alone: it computes no forward pass twice. */
function aloneSeconds(setup, rates) {
  const { units, loss } = costsOf(setup);
  const flops = sum(units.map((unit) => unit.backFlops)) + loss.forwardFlops + loss.backFlops;
  return (setup.tokens * flops) / rates.server;
}

/** Return a method with its seconds, the shares of what limits it, and the largest of these. */
function limited(method, { rates }) {
  if (method.refused) return method;
  const seconds = method.seconds(rates);
  const longer = Object.keys(rates).map((name) => {
    const slowed = method.seconds({ ...rates, [name]: rates[name] / SLOWER });
    return [name, Math.max(0, slowed - seconds)];
  });
  const all = sum(longer.map(([, more]) => more));
  const shares = Object.fromEntries(longer.map(([name, more]) => [name, more / all]));
  const limit = Object.keys(shares).reduce((a, b) => (shares[b] > shares[a] ? b : a));
  return { ...method, seconds, shares, limit };
}
