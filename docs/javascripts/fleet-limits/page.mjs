/** The form and the results on the page "What limits a fleet". */

import { limitsOf } from "./limits.mjs";

const WAIT_MS = 60; // after the last key or movement
const MODELS = [
  ["smollm2-135m", "SmolLM2-135M"],
  ["opt-125m", "OPT-125M"],
  ["opt-1.3b", "OPT-1.3B"],
  ["llama2-7b", "Llama-2-7B"],
  ["opt-13b", "OPT-13B"],
];
const DTYPES = [
  ["bf16", "bf16"],
  ["fp32", "fp32"],
];

/** Legend, and fields: name, label, and choices, or value, least, most and whether it is whole. */
const FIELDS = [
  [
    "Model and batch",
    { name: "model", label: "Model", choices: MODELS, value: "opt-1.3b" },
    { name: "sequences", label: "Sequences a step", value: 64, min: 1, max: 1024, whole: true },
    { name: "sequence", label: "Tokens of each", value: 512, min: 32, max: 4096, whole: true },
    { name: "dtype", label: "What travels is", choices: DTYPES, value: "bf16" },
    { name: "rank", label: "LoRA rank (0: none)", value: 0, min: 0, max: 256, whole: true },
  ],
  [
    "Devices, all alike",
    { name: "devices", label: "Devices", value: 8, min: 1, max: 1024, whole: true },
    { name: "downlinkMbit", label: "Downlink, Mbit/s", value: 500, min: 1, max: 10000 },
    { name: "uplinkMbit", label: "Uplink, Mbit/s", value: 100, min: 1, max: 10000 },
    { name: "latencyMs", label: "Latency one way, ms", value: 10, min: 0.1, max: 500 },
    { name: "deviceGflops", label: "Arithmetic, GFLOP/s", value: 500, min: 1, max: 100000 },
    { name: "memoryGb", label: "Memory, GB", value: 16, min: 0.25, max: 256 },
  ],
  [
    "Server",
    { name: "cardGbit", label: "Network card, Gbit/s", value: 1, min: 0.01, max: 400 },
    { name: "serverGflops", label: "Arithmetic, GFLOP/s", value: 500, min: 1, max: 1000000 },
  ],
];

const METHODS = { alone: "Server alone", tiles: "Tiles", stages: "Stages" };
const LIMITS = {
  downlink: "the downlinks of devices",
  uplink: "the uplinks of devices",
  compute: "the arithmetic of devices",
  card: "the server’s network card",
  server: "the server’s arithmetic",
  latency: "latency",
};

/** Return a new element with properties, attributes where a name has a hyphen, and children. */
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** Return a number as people read it. */
function readable(value) {
  const digits = value >= 99.95 ? 0 : value >= 9.995 ? 1 : value >= 0.995 ? 2 : 3;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** Return bytes as people read them. */
function inBytes(value) {
  const [unit, name] = value >= 1e9 ? [1e9, "GB"] : value >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
  return `${readable(value / unit)} ${name}`;
}

// --- the form ---

/** Return a labelled choice, or a number with a logarithmic slider beside it. */
function control({ name, label, choices, value, min, max, whole }, changed) {
  const id = `fleet-limits-${name}`;
  const head = element("label", { htmlFor: id }, label);
  if (choices) {
    const options = choices.map(([key, text]) => element("option", { value: key }, text));
    const select = element("select", { id, name, oninput: changed }, ...options);
    select.value = value;
    return element("div", { className: "fleet-limits__field" }, head, select);
  }
  const lowest = min || 1; // of the slider, which has one more step for 0
  const toSlider = (number) =>
    number < lowest ? -1 : (100 * Math.log(number / lowest)) / Math.log(max / lowest);
  const fromSlider = (place) => {
    const exact = place < 0 ? min : lowest * (max / lowest) ** (place / 100);
    return whole ? Math.round(exact) : Number(exact.toPrecision(2));
  };
  const box = element("input", { id, name, type: "number", min, max, required: true });
  const slider = element("input", { type: "range", min: min ? 0 : -1, max: 100, step: 0.5 });
  slider.setAttribute("aria-label", `${label}, slider`);
  box.step = whole ? 1 : "any";
  box.value = value;
  slider.value = toSlider(value);
  const described = () => slider.setAttribute("aria-valuetext", box.value);
  box.oninput = () => {
    if (box.validity.valid) slider.value = toSlider(box.valueAsNumber);
    described();
    changed();
  };
  slider.oninput = () => {
    box.value = fromSlider(slider.valueAsNumber);
    described();
    changed();
  };
  described();
  return element("div", { className: "fleet-limits__field" }, head, box, slider);
}

/** Return what the form says; undefined, with a message, where a number cannot be. */
function read(form, problem) {
  const given = {};
  problem.textContent = "";
  for (const { name, label, min, max, whole, choices } of FIELDS.flatMap(
    ([, ...fields]) => fields,
  )) {
    const field = form.elements[name];
    field.setAttribute("aria-invalid", String(!field.validity.valid));
    if (!field.validity.valid) {
      const kind = whole ? "a whole number" : "a number";
      problem.textContent ||= `${label}: give ${kind} from ${min} to ${readable(max)}.`;
    }
    given[name] = choices ? field.value : field.valueAsNumber;
  }
  return problem.textContent ? undefined : given;
}

// --- the results ---

/** Return how a method's time splits, as a bar and in words. */
function parts({ shares }) {
  const named = Object.entries(shares).filter(([, share]) => share >= 0.005);
  const largest = named.toSorted(([, a], [, b]) => b - a);
  const percent = (share) => `${Math.round(100 * share)} %`;
  const bar = named.map(([name, share]) => {
    const segment = element("span", { className: `fleet-limits__part fleet-limits--${name}` });
    segment.style.flexGrow = share;
    return segment;
  });
  const list = largest.map(([name, share]) => {
    const swatch = element("span", { className: `fleet-limits__swatch fleet-limits--${name}` });
    return element("li", {}, swatch, `${percent(share)} ${LIMITS[name]}`);
  });
  return [
    element("div", { className: "fleet-limits__bar", "aria-hidden": "true" }, ...bar),
    element("ul", { className: "fleet-limits__shares" }, ...list),
  ];
}

/** Return what a device sends, gets and holds, as rows of terms. */
function traffic(name, found, given) {
  if (name === "alone" || !found.devices) return [];
  const rows = [
    ["Devices with work", `${found.devices} of ${given.devices}`],
    ["Down to each", inBytes(found.downBytes / found.devices)],
    ["Up from each", inBytes(found.upBytes / found.devices)],
    ["Memory of one", `${inBytes(found.memoryBytes)} of ${readable(given.memoryGb)} GB`],
  ];
  const items = rows.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)]);
  return [element("dl", {}, ...items)];
}

/** Say in a sentence how a method divides the work. */
function arrangement(name, found) {
  if (name === "alone") return "No device does anything.";
  if (name === "tiles") {
    return found.sent
      ? `${found.sent} of ${found.of} multiplications go to devices.`
      : "No multiplication is sooner on devices: all stay on the server.";
  }
  const { stages, slices, sliceDevices, onLast, batches, inParts } = found.plan;
  const many = (count, one, more = `${one}s`) => `${count} ${count === 1 ? one : more}`;
  let where = onLast ? "on the last stage" : "on the server";
  if (slices) {
    where = `in ${many(slices, "slice")} on ${many(slices * sliceDevices, "other device")}`;
  }
  const through = `${many(stages.length, "stage")}${inParts ? " of layers in two parts" : ""}`;
  return `${many(batches, "micro-batch", "micro-batches")} through ${through}; the loss ${where}.`;
}

/** Return what a method takes and why, as a part of the page. */
function card(name, found, given, fastest) {
  const title = element("h3", {}, METHODS[name]);
  if (found.refused) {
    const why = element("p", { className: "fleet-limits__refused" }, found.refused);
    return element("article", {}, title, why);
  }
  if (fastest) title.append(element("span", { className: "fleet-limits__fastest" }, "fastest"));
  return element(
    "article",
    {},
    title,
    element("p", { className: "fleet-limits__time" }, `${readable(found.seconds)} s`, " a step"),
    element("p", {}, "Limited most by ", element("strong", {}, LIMITS[found.limit]), "."),
    ...parts(found),
    element("p", { className: "fleet-limits__how" }, arrangement(name, found)),
    ...traffic(name, found, given),
  );
}

/** Return a fleet file and the command that asks the planner itself. */
function command(given) {
  if (given.model.startsWith("smollm2")) {
    return "cleave plan has no SmolLM2: cleave train plans it from its folder.";
  }
  const bytes = (mbit) => (mbit * 1e6) / 8;
  const lora = given.rank ? ` --lora ${given.rank}` : "";
  return `cat > fleet.toml <<'END'
[[group]]
name = "device"
count = ${given.devices}
flops_per_s = ${given.deviceGflops * 1e9}
downlink_bytes_per_s = ${bytes(given.downlinkMbit)}
uplink_bytes_per_s = ${bytes(given.uplinkMbit)}
memory_bytes = ${given.memoryGb * 1e9}
latency_s = ${given.latencyMs / 1e3}
END
cleave plan --model ${given.model} --batch ${given.sequences} --seq ${given.sequence} \\
  --dtype ${given.dtype}${lora} --fleet fleet.toml \\
  --ps-gbit ${given.cardGbit} --ps-gflops ${given.serverGflops}`;
}

/** Compute a step and show it. */
function show(given, { results, verdict, plan }) {
  const found = limitsOf(given);
  const possible = Object.keys(METHODS).filter((name) => !found[name].refused);
  const fastest = possible.reduce((a, b) => (found[b].seconds < found[a].seconds ? b : a));
  results.replaceChildren(
    ...Object.keys(METHODS).map((name) => card(name, found[name], given, name === fastest)),
  );
  const times = readable(Number((found.alone.seconds / found[fastest].seconds).toPrecision(2)));
  const limit = LIMITS[found[fastest].limit];
  verdict.textContent =
    fastest === "alone"
      ? `The server alone is fastest, limited by ${limit}: leave the devices out.`
      : `${METHODS[fastest]} are fastest, ${times} times as fast as the server alone, ` +
        `and limited most by ${limit}.`;
  plan.textContent = command(given);
}

/** Fill the page, and compute whenever the form changes. */
function start(root) {
  const results = element("div", { className: "fleet-limits__results" });
  const verdict = element("p", { className: "fleet-limits__verdict", role: "status" });
  const problem = element("p", { className: "fleet-limits__problem", role: "alert" });
  const plan = element("code");
  let waiting;
  const update = () => {
    const given = read(form, problem);
    if (given) show(given, { results, verdict, plan });
  };
  const changed = () => {
    clearTimeout(waiting);
    waiting = setTimeout(update, WAIT_MS);
  };
  const groups = FIELDS.map(([legend, ...fields]) =>
    element(
      "fieldset",
      {},
      element("legend", {}, legend),
      ...fields.map((field) => control(field, changed)),
    ),
  );
  const form = element("form", { onsubmit: (event) => event.preventDefault() }, ...groups);
  const ask = element("pre", { tabIndex: 0, "aria-label": "Commands" }, plan);
  const asked = element("details", {}, element("summary", {}, "Ask cleave plan the same"), ask);
  root.replaceChildren(form, problem, verdict, results, asked);
  update();
}

start(document.getElementById("fleet-limits"));
