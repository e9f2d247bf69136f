import { expect, test } from "vitest";
import type { Model } from "../../src/dashboard/model";
import { Session } from "../../src/dashboard/session";
import { ByeCode, ErrorCode, make, type MessageOf } from "../../src/protocol/messages";
import { overviewData } from "./example";
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
