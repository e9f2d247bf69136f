import { beforeEach, expect, test } from "vitest";
import { Guest, type Notice, State, STEADY_S, type Visit, wait_s } from "../../src/device/guest";
import { End, type Ending } from "../../src/device/session";
import { ErrorCode } from "../../src/protocol/messages";
import { FakeClock, settled } from "./fakes";

/** A session that a test ends. */
class FakeVisit implements Visit {
  readonly counts = { blocks: 1, flops: 10, graphs: 0, down_bytes: 100, up_bytes: 50, tests: 0 };
  readonly calls: string[] = [];
  #end: (ending: Ending) => void = () => undefined;

  run(): Promise<Ending> {
    return new Promise((resolve) => {
      this.#end = resolve;
    });
  }

  drain(): void {
    this.calls.push("drain");
  }

  leave(): void {
    this.calls.push("leave");
    this.end(End.LEFT);
  }

  drop(): void {
    this.end(End.LOST);
  }

  end(end: End, code: ErrorCode | null = null, back_s: number | null = 0): void {
    this.#end({ end, text: "why", code, back_s });
  }
}

let clock: FakeClock;
let visits: FakeVisit[];
let notices: Notice[];
let guest: Guest;

beforeEach(async () => {
  clock = new FakeClock();
  visits = [];
  notices = [];
  const connect = async () => {
    const visit = new FakeVisit();
    visits.push(visit);
    return visit;
  };
  guest = new Guest(
    connect,
    (notice) => notices.push(notice),
    clock,
    () => 1,
  );
  void guest.run();
  await settled();
});

function states(): State[] {
  return notices.map(({ state }) => state);
}

function latest(): FakeVisit {
  const visit = visits.at(-1);
  if (!visit) throw new Error("there was no session");
  return visit;
}

test("waits grow to a minute, and differ", () => {
  expect([0, 1, 2, 9, 50].map((failures) => wait_s(failures, 1))).toEqual([1, 2, 4, 60, 60]);
  expect(wait_s(3, 0)).toBe(4);
});

test("a lost connection is tried again, and its work is counted on", async () => {
  guest.welcomed();
  latest().end(End.LOST);
  await settled();
  expect(states()).toEqual([State.CONNECTING, State.WORKING, State.WAITING]);
  expect(notices.at(-1)?.retry_s).toBe(1);
  await clock.pass(1);
  expect(visits.length).toBe(2);
  expect(guest.counts.blocks).toBe(2);
});

test("a wait counts down, and says whether the server is silent or refuses", async () => {
  latest().end(End.LOST);
  await settled();
  await clock.pass(1);
  latest().end(End.LOST);
  await settled();
  expect(guest.notice).toMatchObject({ retry_s: 2, lost: true });
  await clock.pass(0.5);
  expect(guest.notice.retry_s).toBe(1.5);
  await clock.pass(1.5);
  latest().end(End.REFUSED, ErrorCode.LIMIT);
  await settled();
  expect(guest.notice.lost).toBe(false);
});

test("after a good connection the first wait is short, whatever failed before", async () => {
  for (const seconds of [1, 2, 4]) {
    latest().end(End.LOST);
    await settled();
    await clock.pass(seconds);
  }
  await clock.pass(STEADY_S); // an answer that does not come is no success, however long it takes
  latest().end(End.LOST);
  await settled();
  expect(guest.notice.retry_s).toBe(8);
  await clock.pass(8);
  guest.welcomed();
  await clock.pass(STEADY_S);
  latest().end(End.LOST);
  await settled();
  expect(guest.notice.retry_s).toBe(1);
});

test("when the network returns, the device connects at once, and waits start from a second again", async () => {
  for (const seconds of [1, 2, 4]) {
    latest().end(End.LOST);
    await settled();
    await clock.pass(seconds);
  }
  guest.offline();
  await settled();
  expect(guest.notice).toMatchObject({ state: State.WAITING, retry_s: 1 });
  guest.online();
  await settled();
  expect(visits.length).toBe(5);
});

test.each([ErrorCode.CREDENTIAL, ErrorCode.VERSION, ErrorCode.QUARANTINED, ErrorCode.DUPLICATE])(
  "a refusal for %s is for good",
  async (code) => {
    latest().end(End.REFUSED, code, null);
    await clock.pass(1000);
    expect(states().at(-1)).toBe(State.ENDED);
    expect(visits.length).toBe(1);
  },
);

test("a refusal for silence passes", async () => {
  latest().end(End.REFUSED, ErrorCode.LIMIT, 30);
  await settled();
  expect(notices.at(-1)?.retry_s).toBe(31);
  await clock.pass(30);
  expect(visits.length).toBe(1);
  await clock.pass(1);
  expect(visits.length).toBe(2);
});

test("a pause drains, and comes back when it is over", async () => {
  guest.welcomed();
  guest.pause("The battery is low.");
  expect(latest().calls).toEqual(["drain"]);
  latest().end(End.BYE);
  await settled();
  expect(states().slice(-2)).toEqual([State.DRAINING, State.PAUSED]);
  await clock.pass(1000);
  expect(visits.length).toBe(1);
  guest.resume();
  await settled();
  expect(visits.length).toBe(2);
});

test("a pause for another reason says the latest one", async () => {
  guest.welcomed();
  guest.pause("The page is not in front.");
  guest.pause("The battery is low.");
  latest().end(End.BYE);
  await settled();
  expect(notices.at(-1)).toMatchObject({ state: State.PAUSED, reason: "The battery is low." });
  guest.pause("The device is hot.");
  expect(notices.at(-1)).toMatchObject({ state: State.PAUSED, reason: "The device is hot." });
  expect(visits.length).toBe(1);
});

test("a pause that was over before the session was comes back all the same", async () => {
  guest.welcomed();
  guest.pause("hidden");
  guest.resume();
  latest().end(End.BYE);
  await settled();
  expect(visits.length).toBe(2);
});

test("draining that takes too long is cut short", async () => {
  guest.welcomed();
  guest.pause("hidden");
  await clock.pass(31);
  expect(latest().calls).toEqual(["drain", "leave"]);
  expect(states().at(-1)).toBe(State.PAUSED);
});

test("stopping drains; stopping again leaves at once", async () => {
  guest.welcomed();
  guest.stop();
  expect(latest().calls).toEqual(["drain"]);
  guest.stop();
  await settled();
  expect(latest().calls).toEqual(["drain", "leave"]);
  expect(states().at(-1)).toBe(State.ENDED);
});

test("a server that closed is tried again, and again", async () => {
  guest.welcomed();
  latest().end(End.BYE);
  await settled();
  expect(states().at(-1)).toBe(State.WAITING);
  await clock.pass(1);
  latest().end(End.LOST);
  await clock.pass(2);
  expect(visits.length).toBe(3);
});

test("a server that is done with it is the end", async () => {
  guest.welcomed();
  latest().end(End.BYE, null, null);
  await clock.pass(100);
  expect(states().at(-1)).toBe(State.ENDED);
});
