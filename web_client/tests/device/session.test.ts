import { beforeEach, describe, expect, test } from "vitest";
import { decode, encode } from "../../src/coding/exponents";
import { End, type Ending, type Kept, Session } from "../../src/device/session";
import { DType } from "../../src/kernels/kernel";
import {
  ByeCode,
  ErrorCode,
  Feature,
  make,
  type Message,
  type MessageOf,
  Role,
} from "../../src/protocol/messages";
import { FakeClock, FakeGraphs, FakeKernel, FakeSocket, settled } from "./fakes";

const HELLO: MessageOf<"hello"> = make("hello", {
  role: Role.DEVICE,
  version: 1,
  credential: "code",
  name: "a phone",
  ops: ["matmul"],
  dtypes: ["fp32"],
  memory_bytes: 1000,
});

const WELCOME: Message = make("welcome", { device: 7n, server: "S", credential: "mine" });

let clock: FakeClock;
let socket: FakeSocket;
let kernel: FakeKernel;
let session: Session;
let ending: Ending | null;
let welcomes: MessageOf<"welcome">[];
/** Whether the server answers over HTTP; null: not yet. */
let healthy: boolean | null;
let asked: number;
let answer: (healthy: boolean) => void;

beforeEach(() => {
  clock = new FakeClock();
  socket = new FakeSocket();
  kernel = new FakeKernel();
  welcomes = [];
  ending = null;
  healthy = true;
  asked = 0;
  const probe = () => {
    asked += 1;
    return new Promise<boolean>((resolve) => {
      answer = resolve;
      if (healthy !== null) resolve(healthy);
    });
  };
  session = new Session(socket, kernel, HELLO, clock, probe, (welcome) => welcomes.push(welcome));
});

function begin(): void {
  session.run().then((ended) => {
    ending = ended;
  });
  socket.open();
  socket.receive(WELCOME);
}

function work(): void {
  const payload = new Uint8Array(Float32Array.of(1, 2, 3, 4).buffer);
  socket.receive({ type: "put", id: 1n, rows: 2, columns: 2, dtype: "fp32", payload });
  socket.receive({
    type: "run",
    id: 9n,
    op: "matmul",
    inputs: [1n, 1n],
    transpose_a: false,
    transpose_b: false,
    out: "fp32",
  });
}

test("it says hello, is welcomed, and answers what it is asked", async () => {
  begin();
  expect(socket.types).toEqual(["hello"]);
  expect(welcomes.map(({ credential }) => credential)).toEqual(["mine"]);
  work();
  await kernel.compute();
  const result = socket.sent.at(-1);
  if (result?.type !== "result") throw new Error("no result was sent");
  expect([...new Float32Array(result.payload.slice().buffer)]).toEqual([7, 10, 15, 22]);
  expect(session.counts.blocks).toBe(1);
});

test.each<Message>([
  { type: "put", id: 1n, rows: 1, columns: 1, dtype: "fp32", payload: new Uint8Array(4) },
  { type: "cancel", ids: [1n] },
  { type: "drop", ids: [1n] },
  { type: "code_results" },
])("work before the welcome breaks the protocol: $type", async (early) => {
  session.run().then((ended) => {
    ending = ended;
  });
  socket.open();
  socket.receive(early);
  await settled();
  expect(socket.types).toEqual(["hello", "error"]);
  const said = socket.sent.at(-1);
  expect(said?.type === "error" && said.code).toBe(ErrorCode.PROTOCOL);
  expect(ending?.end).toBe(End.LOST);
  expect(ending?.back_s).toBe(0);
});

test.each([
  [0, ["hello", "error"]],
  [1, ["hello"]],
])("a message that is %i bytes longer than it takes", async (over, types) => {
  begin();
  socket.receiveBytes(new ArrayBuffer(2 ** 20 + HELLO.memory_bytes + over));
  await settled();
  expect(socket.types).toEqual(types);
  expect(ending?.end).toBe(End.LOST);
  expect(ending?.back_s).toBe(0);
});

test("heartbeats go on while a multiplication takes its time", async () => {
  begin();
  work();
  await clock.pass(30);
  expect(socket.types.filter((type) => type === "heartbeat").length).toBe(30);
  expect(ending).toBeNull();
});

test("a server that takes nothing any more is noticed", async () => {
  begin();
  socket.bufferedAmount = 5000;
  await clock.pass(10);
  expect(ending).toBeNull();
  await clock.pass(10);
  expect(ending?.end).toBe(End.LOST);
});

test("a server that takes little is not lost", async () => {
  begin();
  for (let left = 5000; left > 0; left -= 100) {
    socket.bufferedAmount = left;
    await clock.pass(2);
  }
  expect(ending).toBeNull();
});

test("a server that vanished is noticed, though every heartbeat leaves", async () => {
  begin();
  healthy = false;
  await clock.pass(12);
  expect(ending).toBeNull();
  await clock.pass(1);
  expect(ending?.end).toBe(End.LOST);
  expect(asked).toBe(1);
  expect(socket.closed).toBe(true);
});

test("an idle device of a living server stays, and asks again after every silence", async () => {
  begin();
  await clock.pass(3600);
  expect(ending).toBeNull();
  expect(asked).toBeGreaterThan(3600 / 15);
  expect(asked).toBeLessThanOrEqual(3600 / 12);
});

test("a server that is heard is not asked", async () => {
  begin();
  for (let id = 1n; id <= 20n; id++) {
    await clock.pass(5);
    socket.receive({ type: "drop", ids: [] });
  }
  expect(asked).toBe(0);
});

test("a server is asked once at a time; one that is heard meanwhile is not lost", async () => {
  begin();
  healthy = null;
  await clock.pass(20);
  expect(asked).toBe(1);
  socket.receive({ type: "drop", ids: [] });
  answer(false);
  await settled();
  expect(ending).toBeNull();
  await clock.pass(13);
  expect(asked).toBe(2);
  answer(false);
  await settled();
  expect(ending?.end).toBe(End.LOST);
});

test("a server that does not answer is given up", async () => {
  session.run().then((ended) => {
    ending = ended;
  });
  await clock.pass(9);
  expect(ending).toBeNull();
  await clock.pass(2);
  expect(ending?.end).toBe(End.LOST);
  expect(socket.closed).toBe(true);
});

test("a refusal says why", async () => {
  session.run().then((ended) => {
    ending = ended;
  });
  socket.open();
  socket.receive(make("error", { code: ErrorCode.CREDENTIAL, message: "used up" }));
  await settled();
  const code = ErrorCode.CREDENTIAL;
  expect(ending).toEqual({ end: End.REFUSED, text: "used up", code, back_s: null });
});

test("an error with a code that only newer servers know is shown, and kept to", async () => {
  begin();
  socket.receive(make("error", { code: "tired", message: "\u001b[31mlater", retry_after_s: 30 }));
  await settled();
  expect(ending).toEqual({ end: End.REFUSED, text: "[31mlater", code: "tired", back_s: 30 });
});

test("a server that closes says when to come back", async () => {
  begin();
  socket.receive(make("bye", { reason: "closing", code: ByeCode.CLOSING, retry_after_s: 5 }));
  await settled();
  expect(ending).toEqual({ end: End.BYE, text: "closing", code: null, back_s: 5 });
});

test("a goodbye without a code, of an older server, is for now", async () => {
  begin();
  socket.receive(make("bye", { reason: "the server is closing" }));
  await settled();
  expect(ending?.back_s).toBe(0);
});

test("a welcome of another version is refused, and says so", async () => {
  session.run().then((ended) => {
    ending = ended;
  });
  socket.open();
  socket.receive(make("welcome", { device: 7n, version: 2 }));
  await settled();
  const said = socket.sent.at(-1);
  expect(said).toMatchObject({ type: "error", code: ErrorCode.VERSION, versions: [1] });
  expect(ending).toMatchObject({ end: End.REFUSED, code: ErrorCode.VERSION, back_s: null });
  expect(ending?.text).toContain("version 2 and this client speaks 1");
});

test("a message that breaks the protocol ends the session with an error", async () => {
  begin();
  socket.receive({ type: "heartbeat" });
  await settled();
  expect(socket.types.at(-1)).toBe("error");
  expect(ending?.end).toBe(End.LOST);
});

test("draining answers what is there, then bye ends it", async () => {
  begin();
  work();
  session.drain();
  await kernel.compute();
  expect(socket.types).toEqual(["hello", "drain", "result"]);
  socket.receive(make("bye", { reason: "drained", code: ByeCode.DRAINED }));
  await settled();
  expect(ending?.end).toBe(End.BYE);
});

test("after the end nothing is held, and late results go nowhere", async () => {
  begin();
  work();
  socket.break();
  await settled();
  expect(ending?.end).toBe(End.LOST);
  expect(kernel.held.size).toBe(0);
  const before = socket.sent.length;
  await kernel.compute();
  await clock.pass(20);
  expect(socket.sent.length).toBe(before);
});

test("a kernel that is lost ends the session", async () => {
  begin();
  kernel.lose("the GPU is gone");
  await settled();
  expect(ending?.text).toContain("the GPU is gone");
});

test("a session that is left before it began ends at once", async () => {
  session.leave("not now");
  expect((await session.run()).end).toBe(End.LEFT);
  expect(socket.closed).toBe(true);
});

test("what comes coded is as what comes plain, and large results go coded once the PS says so", async () => {
  const features = [Feature.CODING];
  const hello = { ...HELLO, memory_bytes: 2 ** 20, features };
  session = new Session(
    socket,
    kernel,
    hello,
    clock,
    () => Promise.resolve(true),
    () => undefined,
  );
  session.run();
  socket.open();
  socket.receive(make("welcome", { device: 7n, features }));
  const shape = { rows: 64, columns: 64, dtype: DType.FP32 };
  const payload = new Uint8Array(Float32Array.from({ length: 64 ** 2 }, (_, n) => n % 50).buffer);
  const coded = encode(payload, DType.FP32);
  const multiply = async (id: bigint) => {
    socket.receive({ type: "put_coded", id, ...shape, payload: coded });
    const turn = { transpose_a: false, transpose_b: false };
    socket.receive({ type: "run", id, op: "matmul", inputs: [id, id], ...turn, out: "fp32" });
    await kernel.compute();
    return socket.sent.at(-1);
  };
  const plain = await multiply(1n);
  socket.receive({ type: "code_results" });
  const other = await multiply(2n);
  if (plain?.type !== "result" || other?.type !== "result_coded") throw new Error("other answers");
  expect(other.payload.length).toBeLessThan(plain.payload.length);
  expect(decode(other.payload, DType.FP32, plain.payload.length)).toEqual(plain.payload);
});

test("what was not agreed on is refused", async () => {
  begin();
  socket.receive({ type: "code_results" });
  await settled();
  expect(socket.sent.at(-1)).toMatchObject({ type: "error", code: ErrorCode.PROTOCOL });
});

describe("a device that runs graphs", () => {
  const features = [Feature.GRAPHS, Feature.KEEPS];
  let graphs: FakeGraphs;

  function sessionWith(kept: Kept | null): void {
    socket = new FakeSocket();
    const hello = { ...HELLO, features };
    const probe = () => Promise.resolve(true);
    const runner = kept?.graphs ?? graphs;
    const held = kept?.arrays ?? null;
    session = new Session(socket, kernel, hello, clock, probe, () => undefined, runner, held);
    session.run().then((ended) => {
      ending = ended;
    });
    socket.open();
  }

  function welcome(arrays: string): void {
    socket.receive(make("welcome", { device: 7n, features, arrays }));
  }

  /** It has a graph, and an output that no run has made. */
  beforeEach(() => {
    graphs = new FakeGraphs();
    sessionWith(null);
    welcome("A");
    socket.receive({ type: "graph", id: 1n, products: "", payload: new Uint8Array(10) });
    const outputs = { outputs: [2n], output_bytes: [8] };
    socket.receive({ type: "run_graph", id: 1n, graph: 1n, inputs: [], ...outputs, flops: 1 });
  });

  test("continues with its arrays after a lost connection", () => {
    socket.break();
    expect(graphs.closed).toBe(false);
    const kept = session.take();
    expect(session.take()).toBeNull();
    sessionWith(kept);
    expect(socket.sent[0]).toMatchObject({ type: "hello", holds: "A" });
    welcome("A");
    expect(socket.sent.slice(1)).toEqual([{ type: "held", ids: [1n] }]);
    expect([...graphs.kept]).toEqual([1n]);
    session.leave("stopped");
    expect(graphs.closed).toBe(true);
    expect(session.take()).toBeNull();
  });

  test("drops its arrays where the server has others, and keeps those of the new session", () => {
    socket.break();
    sessionWith(session.take());
    welcome("B");
    expect(socket.types).toEqual(["hello"]);
    expect(graphs.kept.size).toBe(0);
    socket.receive({ type: "graph", id: 1n, products: "", payload: new Uint8Array(10) });
    session.drop("the network is gone");
    expect(session.take()?.arrays.of).toBe("B");
  });

  test.each<[string, () => void]>([
    ["goodbye", () => socket.receive(make("bye", { code: ByeCode.CLOSING }))],
    ["a refusal", () => socket.receive(make("error", { code: ErrorCode.LIMIT, message: "" }))],
    ["a fault of the server", () => socket.receive({ type: "heartbeat" })],
    ["leaving", () => session.leave("stopped")],
    ["a lost kernel", () => kernel.lose("no GPU")],
    ["lost graphs", () => graphs.lose("no GPU")],
    [
      "a lost connection while it drained",
      () => {
        session.drain();
        socket.break();
      },
    ],
  ])("keeps nothing after %s", async (_, end) => {
    end();
    await settled();
    expect(ending).not.toBeNull();
    expect(session.take()).toBeNull();
    expect(graphs.closed).toBe(true);
  });

  test("keeps its arrays while no server welcomes it", async () => {
    socket.break();
    sessionWith(session.take());
    socket.break();
    sessionWith(session.take());
    socket.receive(make("error", { code: ErrorCode.LIMIT, message: "", retry_after_s: 5 }));
    sessionWith(session.take());
    expect(socket.sent[0]).toMatchObject({ type: "hello", holds: "A" });
    expect(graphs.closed).toBe(false);
  });

  test("frees what it kept when it is told to, or when graphs stop", async () => {
    socket.break();
    session.forget();
    expect(graphs.closed).toBe(true);
    expect(session.take()).toBeNull();
    graphs = new FakeGraphs();
    sessionWith(null);
    welcome("A");
    socket.receive({ type: "graph", id: 1n, products: "", payload: new Uint8Array(10) });
    socket.break();
    graphs.lose("the GPU is gone");
    await settled();
    expect(graphs.closed).toBe(true);
    expect(session.take()).toBeNull();
  });
});
