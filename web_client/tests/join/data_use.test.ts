import { expect, test } from "vitest";
import {
  amount,
  DataMeter,
  isUnfinished,
  lasting,
  overCap,
  readCap,
  readGigabytes,
  refusedGigabytes,
  Span,
  spanName,
} from "../../src/join/data_use";
import { Saved } from "../../src/join/saved";
import { storage } from "./storage";

const counts = (down_bytes: number, up_bytes: number) => ({
  blocks: 0,
  flops: 0,
  graphs: 0,
  down_bytes,
  up_bytes,
  tests: 0,
});

test("hours, days and months are those of the local clock", () => {
  const now = new Date(2026, 0, 5, 7, 59);
  expect(spanName(Span.HOUR, now)).toBe("2026-01-05 07");
  expect(spanName(Span.DAY, now)).toBe("2026-01-05");
  expect(spanName(Span.MONTH, now)).toBe("2026-01");
});

test("bytes are counted in both directions, and each only once", () => {
  const meter = new DataMeter(new Saved(storage()), () => new Date(2026, 0, 5));
  meter.count(counts(70, 30), true);
  meter.count(counts(80, 40), true);
  expect(meter.of(Span.DAY).bytes).toBe(120);
  meter.begin(); // the device starts anew, and its counters with it
  meter.count(counts(5, 5), true);
  expect(meter.of(Span.HOUR).bytes).toBe(130);
  expect(meter.of(Span.MONTH).bytes).toBe(130);
});

test("a new hour begins at zero, and its day goes on", () => {
  let now = new Date(2026, 0, 5, 7);
  const meter = new DataMeter(new Saved(storage()), () => now);
  meter.count(counts(100, 0), true);
  now = new Date(2026, 0, 5, 8);
  expect(meter.of(Span.HOUR).bytes).toBe(0);
  meter.count(counts(150, 0), true);
  expect(meter.of(Span.HOUR).bytes).toBe(50);
  expect(meter.of(Span.DAY).bytes).toBe(150);
});

test("what was used before the page was closed counts", () => {
  const kept = storage();
  const now = () => new Date(2026, 0, 5, 7);
  const meter = new DataMeter(new Saved(kept), now);
  meter.count(counts(100, 20), true);
  meter.keep();
  const again = new DataMeter(new Saved(kept), now);
  again.count(counts(3, 0), true);
  expect(again.of(Span.DAY).bytes).toBe(123);
  kept.setItem("cleave.data", "7");
  expect(new DataMeter(new Saved(kept), now).of(Span.DAY).bytes).toBe(0);
});

test("a limit is said when it is reached, and what is no limit is none", () => {
  const cap = { bytes: 500e6, span: Span.HOUR };
  const now = new Date(2026, 11, 5, 23, 30);
  const over = (span: Span) => overCap({ bytes: 500e6, span }, 500e6, now);
  expect(overCap(cap, 499e6, now)).toBeNull();
  expect(over(Span.HOUR)).toBe(
    "Your limit of 500 MB an hour is reached. Helping continues at 0:00, or with a higher limit.",
  );
  expect(over(Span.DAY)).toContain("Helping continues at midnight, or");
  expect(over(Span.MONTH)).toContain("Helping continues on 1 January, or");
  expect(overCap(null, 1e15, now)).toBeNull();
  expect([2e9, 2.5e9, 1.25e6, 100e9, 1].map(amount)).toEqual([
    "2 GB",
    "2.5 GB",
    "1.25 MB",
    "100 GB",
    "1 B",
  ]);
  expect(readCap({ bytes: 5e9, span: "day" })).toEqual({ bytes: 5e9, span: Span.DAY });
  for (const none of [null, 3, {}, { bytes: NaN, span: "day" }, { bytes: 1, span: "year" }]) {
    expect(readCap(none)).toBeNull();
  }
  expect(readCap({ bytes: -1, span: "day" })).toBeNull();
});

test("only an amount above 0 is a limit, with a point or a comma", () => {
  expect(["2", " 0.5 ", "2,5", "2.", ".25"].map(readGigabytes)).toEqual([2, 0.5, 2.5, 2, 0.25]);
  for (const typed of [
    "",
    "-5",
    "abc",
    "0",
    "0.0",
    "1e9",
    "1001",
    "0.0009",
    "2 GB",
    "1.2.3",
    "Infinity",
    "9".repeat(400),
  ]) {
    expect(readGigabytes(typed), typed).toBeNull();
  }
});

test("why an amount is refused is said, and that the old limit stays", () => {
  const cap = { bytes: 2e9, span: Span.DAY };
  const stays = "Enter 0.001 to 1000 GB. Until then, the limit stays 2 GB a day.";
  expect(refusedGigabytes("-5", cap)).toBe(`“-5” is not an amount. ${stays}`);
  expect(refusedGigabytes(" ", cap)).toBe(`No amount is entered. ${stays}`);
  expect(refusedGigabytes("99999", cap)).toContain("99999 GB would be no limit: untick the box");
  expect(refusedGigabytes("0", cap)).toContain("0 GB is too little to help.");
  expect(refusedGigabytes("0,0001", cap)).toContain("0,0001 GB is too little to help.");
});

test("nobody is corrected in the middle of an amount", () => {
  const typed = ["", "0", "0.", "0,00", ".0", "abc", "0x", "5000", "1.2.3"];
  expect(typed.map(isUnfinished)).toEqual([
    true,
    true,
    true,
    true,
    true,
    false,
    false,
    false,
    false,
  ]);
});

test("how long a limit lasts is said in minutes or hours", () => {
  const now = new Date(2026, 0, 31, 17);
  const cap = { bytes: 3e9, span: Span.DAY };
  expect(lasting(cap, 1e9, 5e6, now)).toBe("about 7 minutes");
  expect(lasting(cap, 1e9, 5e9, now)).toBe("about a minute");
  expect(lasting(cap, 4e9, 5e9, now)).toBe("about a minute");
  expect(lasting(cap, 1e9, 1e5, now)).toBe("about 6 hours");
});

test("a limit that is not reached before its span ends has no time", () => {
  const now = new Date(2026, 0, 31, 23, 30); // half an hour before the next hour, day and month
  for (const span of Object.values(Span)) {
    expect(lasting({ bytes: 29 * 60, span }, 0, 1, now)).toBe("about 30 minutes");
    expect(lasting({ bytes: 31 * 60, span }, 0, 1, now)).toBeNull();
  }
  expect(lasting({ bytes: 1, span: Span.DAY }, 0, 0, now)).toBeNull();
});

test("a tab that starts counts on from what another tab used", () => {
  const saved = new Saved(storage());
  const [first, second] = [1, 2].map(() => new DataMeter(saved, () => new Date(2026, 0, 5)));
  first!.begin();
  first!.count(counts(3, 4), true);
  first!.keep();
  second!.begin();
  second!.count(counts(1, 0), true);
  expect(second!.of(Span.DAY).bytes).toBe(8);
});

test("time and operations of a day are counted while the device works", () => {
  let now = new Date(2026, 0, 5, 7);
  const meter = new DataMeter(new Saved(storage()), () => now);
  const passed = (seconds: number, flops: number, works: boolean) => {
    now = new Date(now.getTime() + 1000 * seconds);
    meter.count({ ...counts(0, 0), flops }, works);
  };
  passed(0, 0, true);
  passed(2, 100, true);
  passed(3, 150, false); // until now it worked
  passed(4, 150, false);
  passed(4, 150, true);
  passed(3600, 200, true); // the phone slept in between
  expect(meter.of(Span.DAY)).toMatchObject({ seconds: 2 + 3 + 5, flops: 200 });
  expect(meter.visit_s).toBe(2 + 3 + 5);
  now = new Date(2026, 0, 6);
  expect(meter.of(Span.DAY)).toMatchObject({ seconds: 0, flops: 0 });
});
