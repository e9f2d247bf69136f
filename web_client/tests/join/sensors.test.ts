import { afterEach, expect, test, vi } from "vitest";
import { Sensors } from "../../src/join/sensors";

/** As much of the Compute Pressure API as is used. */
class FakeObserver {
  static knownSources = ["cpu"];
  static refused: string[] = [];
  static latest: FakeObserver;
  readonly observed: string[] = [];

  constructor(readonly changed: (records: { source: string; state: string }[]) => void) {
    FakeObserver.latest = this;
  }

  observe(source: string): Promise<void> {
    this.observed.push(source);
    return FakeObserver.refused.includes(source) ? Promise.reject(new Error()) : Promise.resolve();
  }

  disconnect(): void {
    this.observed.length = 0;
  }
}

function sensors(sources: string[], refused: string[] = []): Sensors {
  FakeObserver.knownSources = sources;
  FakeObserver.refused = refused;
  vi.stubGlobal("PressureObserver", FakeObserver);
  vi.stubGlobal("document", { addEventListener: () => undefined, visibilityState: "visible" });
  vi.stubGlobal("navigator", {});
  return new Sensors(() => undefined);
}

afterEach(() => vi.unstubAllGlobals());

test("a browser that tells only how busy its processor is tells no heat", () => {
  const device = sensors(["cpu"]);
  device.watchHeat();
  expect(device.now.hot).toBeNull();
});

test("a device is hot where the browser says so, until it cools down", () => {
  const device = sensors(["cpu", "thermals"]);
  expect(device.now.hot).toBe(false);
  device.watchHeat();
  expect(FakeObserver.latest.observed).toEqual(["thermals"]);
  FakeObserver.latest.changed([{ source: "thermals", state: "serious" }]);
  expect(device.now.hot).toBe(true);
  FakeObserver.latest.changed([{ source: "thermals", state: "nominal" }]);
  expect(device.now.hot).toBe(false);
});

test("a device that will not tell its heat offers no choice about it", async () => {
  const device = sensors(["cpu", "thermals"], ["thermals"]);
  device.watchHeat();
  await Promise.resolve();
  expect(device.now.hot).toBeNull();
});
