/** The peer sent what the protocol forbids: the session is to be ended. */
export class ProtocolError extends Error {
  override readonly name: string = "ProtocolError";
}

/** The peer speaks another version of the protocol. */
export class VersionError extends ProtocolError {
  override readonly name = "VersionError";
}
