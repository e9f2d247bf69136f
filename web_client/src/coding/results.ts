/** Results on their way to a PS that wants them coded. */

import { dtypeNamed } from "../kernels/kernel";
import type { MessageOf } from "../protocol/messages";
import { encodeIfShorter } from "./exponents";

/** The message with its elements coded; the message itself where that is not worth it. */
export function codedResult(
  message: MessageOf<"result">,
): MessageOf<"result"> | MessageOf<"result_coded"> {
  const dtype = dtypeNamed(message.dtype);
  const payload = dtype && encodeIfShorter(message.payload, dtype);
  return payload ? { ...message, type: "result_coded", payload } : message;
}
