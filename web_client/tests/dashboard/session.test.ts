import { expect, test } from "vitest";
import type { Model } from "../../src/dashboard/model";
import { Session } from "../../src/dashboard/session";
import { ByeCode, ErrorCode, make, type MessageOf, type Plain } from "../../src/protocol/messages";
import { job, overviewData, step } from "./example";
import { FakeWorld } from "./world";

function opened() {
  const world = new FakeWorld();
  const models: Model[] = [];
  const session = new Session("ws://ps/ws", "token", (model) => models.push(model), world);
  session.open();
  return { world, session, model: () => models.at(-1) as Model };
}

function asked(world: FakeWorld): MessageOf<"request">[] {
  return world.socket.sent.filter((message) => message.type === "request");
}

/** Open, let it ask once, and answer. */
function answered() {
  const page = opened();
  page.world.socket.opens();
  page.world.socket.welcomes();
  page.world.paint();
  page.world.pass(0);
  page.world.socket.says({ type: "reply", id: 1n, ok: true, data: overviewData() });
  return page;
}

test("it says hello as an operator with the viewer's token, then asks", () => {
  const { world } = answered();
  expect(world.socket.sent[0]).toMatchObject({
    type: "hello",
    role: "operator",
    credential: "token",
  });
  expect(asked(world)).toMatchObject([{ action: "overview", arguments: { after_event: 0 } }]);
});

test("it asks again a second after it asked, and not before it painted", () => {
  const { world, model } = answered();
  expect(model().overview?.server.name).toBe("home");
  world.pass(5);
  expect(asked(world).length).toBe(1);
  world.paint();
  world.pass(0);
  expect(asked(world).length).toBe(2);
  world.socket.says({ type: "reply", id: 2n, ok: true, data: overviewData() });
  world.paint();
  world.pass(0.9);
  expect(asked(world).length).toBe(2);
  world.pass(0.1);
  expect(asked(world).length).toBe(3);
});

test("a chosen device is asked for at once", () => {
  const { world, session } = answered();
  world.paint();
  session.choose(12);
  expect(asked(world).at(-1)).toMatchObject({ arguments: { device: 12 } });
  world.pass(5);
  expect(asked(world).length).toBe(2);
});

test("a refused token is final", () => {
  const { world, model } = opened();
  world.socket.opens();
  world.socket.says(make("error", { code: ErrorCode.CREDENTIAL, message: "no such token" }));
  expect(model().link).toEqual({ kind: "refused", code: "credential", text: "no such token" });
  world.socket.breaks();
  world.pass(100);
  expect(world.sockets.length).toBe(1);
});

test("one operator too many is tried again", () => {
  const { world, model } = opened();
  world.socket.opens();
  world.socket.says(make("error", { code: ErrorCode.LIMIT, message: "too many" }));
  world.socket.breaks();
  expect(model().link.kind).toBe("waiting");
  world.pass(1);
  expect(world.sockets.length).toBe(2);
});

test("who is told when to come back comes no sooner", () => {
  const { world, model } = opened();
  world.socket.opens();
  const code = ErrorCode.LIMIT;
  world.socket.says(make("error", { code, message: "too many", retry_after_s: 30 }));
  world.socket.breaks();
  expect(model().link).toEqual({ kind: "waiting", retry_s: 30.5 });
  world.pass(30.5);
  world.socket.opens();
  world.socket.welcomes();
  world.socket.says(make("bye", { code: ByeCode.CLOSING, retry_after_s: 2 }));
  world.socket.breaks();
  expect(model().link).toEqual({ kind: "waiting", retry_s: 2.5 });
});

test("a refusal that only newer servers know is shown", () => {
  const { world, model } = opened();
  world.socket.opens();
  world.socket.says(make("error", { code: "moved", message: "ask elsewhere" }));
  expect(model().link).toEqual({ kind: "refused", code: "moved", text: "ask elsewhere" });
});

test("a lost server is tried again, less and less often, and the figures stay", () => {
  const { world, model } = answered();
  world.socket.breaks();
  expect(model().link).toEqual({ kind: "waiting", retry_s: 0.5 });
  expect(model().overview).not.toBeNull();
  world.pass(0.5);
  world.socket.breaks();
  expect(model().link).toEqual({ kind: "waiting", retry_s: 1 });
  for (let times = 0; times < 10; times += 1) {
    world.pass(15);
    world.socket.breaks();
  }
  expect(model().link).toEqual({ kind: "waiting", retry_s: 15 });
  world.pass(15);
  world.socket.opens();
  world.socket.welcomes();
  world.paint();
  world.pass(1);
  world.socket.breaks();
  expect(model().link).toEqual({ kind: "waiting", retry_s: 0.5 });
});

test("a server that does not answer is given up", () => {
  const { world, model } = answered();
  world.paint();
  world.pass(1);
  const silent = world.socket;
  world.pass(16);
  expect(silent.closed).toBe(true);
  expect(world.sockets.length).toBe(2);
  expect(model().overview).not.toBeNull();
});

test("a refused question is said, and asked again at the usual pace", () => {
  const { world, model } = opened();
  world.socket.opens();
  world.socket.welcomes();
  world.paint();
  world.pass(0);
  world.socket.says({ type: "reply", id: 1n, ok: false, data: { text: "still starting" } });
  expect(model().failure).toBe("still starting");
  world.paint();
  world.pass(1);
  expect(asked(world).length).toBe(2);
  world.socket.says({ type: "reply", id: 2n, ok: true, data: overviewData() });
  expect(model().failure).toBe("");
});

test("what cannot be read ends it with a sentence", () => {
  const { world, model } = answered();
  world.socket.saysBytes(new Uint8Array([1, 2, 3]));
  expect(model().link).toMatchObject({ kind: "refused", code: "protocol" });
  expect(world.socket.closed).toBe(true);
});

/** Answer the last question, and let the page ask the next one. */
function answers(world: FakeWorld, data: { [name: string]: Plain }) {
  const { id } = asked(world).at(-1) as MessageOf<"request">;
  world.socket.says({ type: "reply", id, ok: true, data });
  world.paint();
  world.pass(0);
}

test("the records of a compared job are read in turn with the current job's", () => {
  const { world, session, model } = answered();
  world.paint();
  session.compare("job-1");
  expect(asked(world).at(-1)).toMatchObject({ action: "overview", arguments: { job: "job-1" } });
  const part = job(0, [step(1), step(2)]);
  answers(world, overviewData({ job: { ...part, job: "job-1", last_step: step(3) } }));
  expect(asked(world).at(-1)).toMatchObject({ arguments: { job: "" } }); // nobody waits for long
  answers(world, overviewData());
  expect(asked(world).at(-1)).toMatchObject({ arguments: { job: "job-1", after_record: 2 } });
  answers(world, overviewData({ job: { ...job(2, [step(3)]), job: "job-1" } }));
  expect(
    model()
      .compared.get("job-1")
      ?.job?.step_records.map(({ step }) => step),
  ).toEqual([1, 2, 3]);
  expect(model().job).toBeNull(); // the current one, of which there is none here
  session.compare("job-1");
  expect(model().compared.size).toBe(0);
});

test("an operator changes a job and sees its new state", () => {
  const { world, session, model } = answered();
  world.paint();
  session.change("pause", "job-3");
  expect(asked(world).at(-1)).toMatchObject({ action: "pause", arguments: { job: "job-3" } });
  answers(world, { job: "job-3", state: "running" });
  expect(model().outcome).toBe("job-3 will pause after its current step.");
  session.change("resume", "job-3");
  const { id, action } = asked(world).at(-1) as MessageOf<"request">;
  expect(action).toBe("resume");
  world.socket.says({ type: "reply", id, ok: false, data: { text: "job-3 is not paused" } });
  expect(model().outcome).toBe("job-3 is not paused");
  expect(model().failure).toBe("");
});

test("an operator reads the end of a job's log", () => {
  const { world, session, model } = answered();
  world.paint();
  session.showLog("job-3");
  expect(asked(world).at(-1)).toMatchObject({ action: "records", arguments: { job: "job-3" } });
  const held_out = { event: "eval", step: 1, eval_loss: 4 };
  answers(world, { records: [{ event: "note", text: "building" }, step(1), held_out] });
  expect(model().log?.lines).toEqual([
    "building",
    expect.stringMatching(/^step 1: loss 10\.0000, /),
    "step 1: held-out loss 4.0000",
  ]);
  session.showLog("");
  expect(model().log).toBeNull();
});
