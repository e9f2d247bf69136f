import { expect, test } from "vitest";
import { leastWait_s } from "../../src/protocol/coming_back";
import { ByeCode, ErrorCode, make } from "../../src/protocol/messages";

test.each([
  [ByeCode.UNSTATED, 0, 0],
  [ByeCode.CLOSING, 2.5, 2.5],
  ["moving", 7, 7],
  [ByeCode.CLOSING, 1e300, 3600],
  [ByeCode.DRAINED, 5, null],
  [ByeCode.MEASURED, 0, null],
  [ByeCode.LEAVING, 0, null],
])("after bye with %j and %d", (code, retry_after_s, least_s) => {
  expect(leastWait_s(make("bye", { code, retry_after_s }))).toBe(least_s);
});

test.each([
  [ErrorCode.LIMIT, 30, 30],
  [ErrorCode.PROTOCOL, 0, 0],
  [ErrorCode.CREDENTIAL, 30, null],
  [ErrorCode.VERSION, 30, null],
  [ErrorCode.REQUEST, 30, null],
  [ErrorCode.QUARANTINED, 30, null],
  [ErrorCode.DUPLICATE, 30, null],
  ["tired", 0, null],
  ["tired", 30, 30],
])("after error %j and %d", (code, retry_after_s, least_s) => {
  expect(leastWait_s(make("error", { code, message: "", retry_after_s }))).toBe(least_s);
});
