import { expect, test } from "vitest";
import { ScreenLock } from "../../src/join/sensors";
import { settled } from "../device/fakes";

/** A page, and a browser that grants locks when a test says so. */
class Phone {
  visibilityState: DocumentVisibilityState = "visible";
  held = 0;
  readonly #locks: { release: () => Promise<void> }[] = [];
  #asked: (() => void)[] = [];
  #changed: () => void = () => undefined;

  addEventListener(_: string, changed: () => void): void {
    this.#changed = changed;
  }

  request(): Promise<WakeLockSentinel> {
    return new Promise((resolve) => {
      this.#asked.push(() => {
        this.held += 1;
        const lock = {
          released: false,
          release: async () => {
            if (!lock.released) this.held -= 1;
            lock.released = true;
          },
        };
        this.#locks.push(lock);
        resolve(lock as unknown as WakeLockSentinel);
      });
    });
  }

  async grant(): Promise<void> {
    for (const grant of this.#asked.splice(0)) grant();
    await settled();
  }

  /** A browser takes its locks away from what nobody sees. */
  async turn(state: DocumentVisibilityState): Promise<void> {
    this.visibilityState = state;
    if (state === "hidden") for (const lock of this.#locks) await lock.release();
    this.#changed();
    await settled();
  }
}

function lockOn(phone: Phone): ScreenLock {
  return new ScreenLock(phone as unknown as Document, phone as unknown as WakeLock);
}

test("the screen is kept on while it is wanted, again after the page was hidden", async () => {
  const phone = new Phone();
  const lock = lockOn(phone);
  lock.wanted = true;
  await settled();
  await phone.grant();
  expect(phone.held).toBe(1);
  await phone.turn("hidden");
  expect(phone.held).toBe(0);
  await phone.turn("visible");
  await phone.grant();
  expect(phone.held).toBe(1);
  lock.wanted = false;
  await settled();
  expect(phone.held).toBe(0);
});

test("a lock that comes when it is not wanted any more is given back", async () => {
  const phone = new Phone();
  const lock = lockOn(phone);
  lock.wanted = true;
  await settled();
  lock.wanted = false;
  await phone.grant();
  expect(phone.held).toBe(0);
});

test("two reasons at once to ask make one lock", async () => {
  const phone = new Phone();
  const lock = lockOn(phone);
  lock.wanted = true;
  await phone.turn("visible");
  await phone.grant();
  await phone.grant();
  expect(phone.held).toBe(1);
});

test("without the browser's help the screen goes off as usual", async () => {
  const phone = new Phone();
  const lock = new ScreenLock(phone as unknown as Document, null);
  lock.wanted = true;
  await settled();
  expect(phone.held).toBe(0);
});
