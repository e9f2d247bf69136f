/** The peer sent what the protocol forbids: the session is to be ended. */
export class ProtocolError extends Error {
  override readonly name = "ProtocolError";
}
