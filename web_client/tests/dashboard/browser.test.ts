import { afterEach, expect, test, vi } from "vitest";
import { type Address, browserWorld, takeToken } from "../../src/dashboard/browser";
import { allowedStorage } from "../../src/ui/storage";

class FakeStorage {
  readonly kept = new Map<string, string>();
  full = false;

  getItem(name: string): string | null {
    return this.kept.get(name) ?? null;
  }

  setItem(name: string, value: string): void {
    if (this.full) throw new DOMException("full", "QuotaExceededError");
    this.kept.set(name, value);
  }
}

class FakeAddress implements Address {
  constructor(
    public hash: string,
    readonly pathname = "/",
    readonly search = "?theme=dark",
  ) {}

  /** As `history.replaceState`. */
  replace(url: string): void {
    this.hash = url.includes("#") ? url.slice(url.indexOf("#")) : "";
  }
}

function take(storage: FakeStorage | null, address: FakeAddress): string {
  return takeToken(storage, address, (url) => address.replace(url));
}

test("a token in the address is kept for the tab, and leaves the address", () => {
  const storage = new FakeStorage();
  const address = new FakeAddress("#c=viewer%20token");
  expect(take(storage, address)).toBe("viewer token");
  expect(address.hash).toBe("");
  expect(take(storage, address)).toBe("viewer token");
});

test("without a token anywhere there is none", () => {
  expect(take(new FakeStorage(), new FakeAddress(""))).toBe("");
  expect(take(null, new FakeAddress("#s=server"))).toBe("");
});

test("a token that cannot be kept is used, and stays in the address for a reload", () => {
  const full = new FakeStorage();
  full.full = true;
  for (const storage of [null, full]) {
    const address = new FakeAddress("#c=token");
    expect(take(storage, address)).toBe("token");
    expect(take(storage, address)).toBe("token");
    expect(address.hash).toBe("#c=token");
  }
});

test("a storage that the browser forbids is none; another fault is not hidden", () => {
  const forbidden = () => {
    throw new DOMException("The operation is insecure.", "SecurityError");
  };
  expect(allowedStorage(forbidden)).toBeNull();
  const storage = {} as Storage;
  expect(allowedStorage(() => storage)).toBe(storage);
  expect(() =>
    allowedStorage(() => {
      throw new TypeError("a mistake");
    }),
  ).toThrow("a mistake");
});

afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

test("a page that is seen asks after its frame, one that is not now and then", () => {
  vi.useFakeTimers();
  let frame: (() => void) | null = null;
  vi.stubGlobal("requestAnimationFrame", (run: () => void) => {
    frame = run;
    return 1;
  });
  vi.stubGlobal("cancelAnimationFrame", () => {
    frame = null;
  });
  let times = 0;
  const paint = () => browserWorld().painted(() => (times += 1));
  paint();
  vi.advanceTimersByTime(1000);
  expect(times).toBe(0);
  (frame as (() => void) | null)?.();
  vi.advanceTimersByTime(60_000);
  expect(times).toBe(1);
  paint();
  vi.advanceTimersByTime(60_000); // a tab behind another gets no frames
  expect(times).toBe(2);
  expect(frame).toBeNull();
});
