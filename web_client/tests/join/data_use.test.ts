import { expect, test } from "vitest";
import { DataMeter, ofCap, overCap, readCap, Span, spanName } from "../../src/join/data_use";
import { Saved } from "../../src/join/saved";
import { storage } from "./storage";

const counts = (down_bytes: number, up_bytes: number) => ({
  blocks: 0,
  flops: 0,
  graphs: 0,
  down_bytes,
  up_bytes,
});

test("hours, days and months are those of the local clock", () => {
  const now = new Date(2026, 0, 5, 7, 59);
  expect(spanName(Span.HOUR, now)).toBe("2026-01-05 07");
  expect(spanName(Span.DAY, now)).toBe("2026-01-05");
  expect(spanName(Span.MONTH, now)).toBe("2026-01");
});

test("bytes are counted in both directions, and each only once", () => {
  const meter = new DataMeter(new Saved(storage()), () => new Date(2026, 0, 5));
  meter.count(counts(70, 30));
  meter.count(counts(80, 40));
  expect(meter.used(Span.DAY)).toBe(120);
  meter.begin(); // the device starts anew, and its counters with it
  meter.count(counts(5, 5));
  expect(meter.used(Span.HOUR)).toBe(130);
  expect(meter.used(Span.MONTH)).toBe(130);
});

test("a new hour begins at zero, and its day goes on", () => {
  let now = new Date(2026, 0, 5, 7);
  const meter = new DataMeter(new Saved(storage()), () => now);
  meter.count(counts(100, 0));
  now = new Date(2026, 0, 5, 8);
  expect(meter.used(Span.HOUR)).toBe(0);
  meter.count(counts(150, 0));
  expect(meter.used(Span.HOUR)).toBe(50);
  expect(meter.used(Span.DAY)).toBe(150);
});

test("what was used before the page was closed counts", () => {
  const kept = storage();
  const now = () => new Date(2026, 0, 5, 7);
  const meter = new DataMeter(new Saved(kept), now);
  meter.count(counts(100, 20));
  meter.keep();
  const again = new DataMeter(new Saved(kept), now);
  again.count(counts(3, 0));
  expect(again.used(Span.DAY)).toBe(123);
  kept.setItem("cleave.data", "7");
  expect(new DataMeter(new Saved(kept), now).used(Span.DAY)).toBe(0);
});

test("a limit is said when it is reached, and what is no limit is none", () => {
  const cap = { bytes: 500e6, span: Span.HOUR };
  expect(overCap(cap, 499e6)).toBeNull();
  expect(overCap(cap, 500e6)).toBe("Your limit of 500 MB in this hour is reached.");
  expect(overCap(null, 1e15)).toBeNull();
  expect(ofCap(cap, 120e6)).toBe("120 MB of 500 MB in this hour");
  expect(readCap({ bytes: 5e9, span: "day" })).toEqual({ bytes: 5e9, span: Span.DAY });
  for (const none of [null, 3, {}, { bytes: NaN, span: "day" }, { bytes: 1, span: "year" }]) {
    expect(readCap(none)).toBeNull();
  }
  expect(readCap({ bytes: -1, span: "day" })).toBeNull();
});
