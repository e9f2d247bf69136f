import { expect, test } from "vitest";
import { Turn } from "../../src/join/tabs";
import { settled } from "../device/fakes";

/** Locks of a browser: one holder, the others in line. */
class Locks {
  #line: Promise<unknown> = Promise.resolve();

  request(_: string, { signal }: { signal: AbortSignal }, take: () => unknown): Promise<unknown> {
    this.#line = this.#line.then(() => (signal.aborted ? undefined : take()));
    return this.#line;
  }
}

test("a tab learns when the tab that took its turn has ended", async () => {
  const locks = new Locks() as unknown as LockManager;
  const [first, second] = [new Turn(locks), new Turn(locks)];
  first.take("server");
  await settled();
  second.take("server"); // once the first has ended
  first.end();
  await settled();
  let free = false;
  first.await("server", () => {
    free = true;
  });
  await settled();
  expect(free).toBe(false);
  second.end();
  await settled();
  expect(free).toBe(true);
});

test("without locks a tab never learns it, and works", () => {
  const turn = new Turn(null);
  turn.take("server");
  turn.await("server", () => expect.unreachable());
  turn.end();
});
