import { expect, test } from "vitest";
import { OverviewError, readOverview } from "../../src/dashboard/overview";
import { readTraffic } from "../../src/dashboard/traffic";
import { deviceRow, job, overviewData, step } from "./example";

test("figures that the PS does not know stay unknown", () => {
  const overview = readOverview(overviewData());
  expect(overview.card).toEqual({ egress_bytes_per_s: 1.25e8, ingress_bytes_per_s: null });
  expect(overview.energy.devices_j).toBeNull();
  expect(overview.energy.ps_j).toBe(5);
  expect(overview.energy.ps_basis).toBe("measured");
});

test("devices are read by the names of their columns, in any order", () => {
  const row = deviceRow({ device: 7, name: "phone", state: "busy", flops_per_s: 2e9 });
  const [device] = readOverview(
    overviewData({ devices: { columns: ["state", "new", "device"], rows: [["busy", 1, 7]] } }),
  ).devices;
  expect(device).toMatchObject({ device: 7, state: "busy", name: "", flops_per_s: null });
  const { columns } = overviewData().devices as { columns: string[] };
  const [full] = readOverview(overviewData({ devices: { columns, rows: [row] } })).devices;
  expect(full).toMatchObject({ device: 7, name: "phone", flops_per_s: 2e9, energy_j: null });
});

test("a plan's tiles, a timeline's spans and finished GEMMs have names", () => {
  const overview = readOverview(
    overviewData({
      plan: {
        name: "fc1",
        m: 4,
        n: 4,
        k: 2,
        predicted_s: 1.5,
        elapsed_s: 0.5,
        generation: 3,
        tiles: [[9, 0, 4, 0, 2, 0, 1, 6, 2]],
      },
      timeline: {
        device: 9,
        spans: [
          ["receive", 1, 2],
          ["nap", 2, 3],
          ["send", 3, 4],
        ],
      },
      gemms: [
        [2, "fc1", 1, 1.25],
        [1, "fc2", 0, 1],
      ],
    }),
  );
  expect(overview.plan?.tiles).toEqual([
    { device: 9, m0: 0, m1: 4, n0: 0, n1: 2, k0: 0, k1: 1, blocks: 6, done: 2 },
  ]);
  expect(overview.timeline?.spans.map((span) => span.lane)).toEqual(["receive", "send"]);
  expect(overview.gemms).toEqual([{ generation: 2, name: "fc1", predicted_s: 1, took_s: 1.25 }]);
});

test("a stream's times are seconds before the overview; what has no lane is left out", () => {
  const stream = {
    window_s: 30,
    hidden: 3,
    devices: [
      [
        9,
        [
          [1, 2500, 1500],
          [7, 1, 1],
          [2, 900, null],
        ],
      ],
    ],
  };
  expect(readOverview(overviewData({ stream })).stream).toEqual({
    window_s: 30,
    hidden: 3,
    devices: [{ device: 9, spans: [{ lane: "compute", start_s: -2.5, end_s: -1 }] }],
  });
  expect(readOverview(overviewData()).stream).toBeNull();
});

test("who is the operator's own is read, and nobody is where an older PS does not say", () => {
  const { columns } = overviewData().devices as { columns: string[] };
  const rows = [deviceRow({ device: 1, own: true }), deviceRow({ device: 2, own: false })];
  const { devices } = readOverview(overviewData({ devices: { columns, rows } }));
  expect(devices.map((device) => device.own)).toEqual([true, false]);
  const [old] = readOverview(
    overviewData({ devices: { columns: ["device"], rows: [[1]] } }),
  ).devices;
  expect(old?.own).toBe(false);
});

test("traffic has the kinds of which something travelled, new ones last", () => {
  expect(readOverview(overviewData()).traffic).toEqual([
    { kind: "weights", down_bytes: 900, up_bytes: 0 },
    { kind: "gradients", down_bytes: 0, up_bytes: 500 },
    { kind: "graphs", down_bytes: 100, up_bytes: 0 },
  ]);
  const newer = { down: { sketches: 7, tiles: 5 }, up: null };
  expect(readTraffic(newer).map(({ kind }) => kind)).toEqual(["tiles", "sketches"]);
  expect(readTraffic(undefined)).toEqual([]);
});

test("records keep a loss that is no number, and leave out what is not known here", () => {
  const records = [step(1, { loss: Number.NaN }), { event: "other" }, { event: "note", text: "a" }];
  const part = readOverview(overviewData({ job: job(5, records) })).job;
  expect(part?.records).toMatchObject([{ event: "step", loss: Number.NaN }, { text: "a" }]);
  expect(part?.next_record).toBe(8);
});

test.each(["disk", "servers"])("what training waits for is told: %s", (event) => {
  const record = { event, state: "waiting", text: "training waits" };
  const { job: read } = readOverview(overviewData({ job: job(0, [record]) }));
  expect(read?.records).toEqual([{ event, text: "training waits" }]);
});

test("a sample is told with its step", () => {
  const record = { event: "sample", step: 20, prompt: "Once", text: " upon a time" };
  const { job: read } = readOverview(overviewData({ job: job(0, [record]) }));
  expect(read?.records).toEqual([{ event: "note", text: "Sample after step 20:  upon a time" }]);
});

test("a step has the compared run's loss where the PS sent one", () => {
  const sent = [{}, { against_loss: 9.5 }, { against_loss: 9n }, { against_loss: Number.NaN }];
  const wrong = [{ against_loss: null }, { against_loss: "9.5" }, { against_loss: [9.5] }];
  const records = [...sent, ...wrong].map((more, index) => step(index + 1, more));
  const read = readOverview(overviewData({ job: job(0, records) })).job?.records;
  expect(read?.map((record) => "loss" in record && record.against_loss)).toEqual([
    null,
    9.5,
    9,
    Number.NaN,
    null,
    null,
    null,
  ]);
});

test("what is no overview is refused with a sentence", () => {
  for (const data of [null, [], {}, { server: 3 }])
    expect(() => readOverview(data)).toThrow(OverviewError);
});
