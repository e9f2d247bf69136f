/** The columns of the table of devices. */

import { count, quantity } from "../../ui/figures";
import { kindOf, nameOf, type SortKey, share } from "../fleet";
import type { Device } from "../overview";
import { energyOf, seconds } from "../text";

export interface Column {
  readonly key: SortKey;
  readonly title: string;
  readonly text: (device: Device) => string;
  /** Of what its profile says, or was found when it joined. */
  readonly share?: (device: Device) => number | null;
  /** A share below this stands out. */
  readonly low?: number;
  readonly isText?: boolean;
  /** All of its texts are short. */
  readonly isShort?: boolean;
  /** Its figures are followed by a word. */
  readonly hasWord?: boolean;
}

/** The first names the row. */
export const COLUMNS: readonly [Column, ...Column[]] = [
  { key: "device", title: "Device", text: nameOf, isText: true },
  { key: "kind", title: "Kind", text: kindOf, isText: true, isShort: true },
  { key: "state", title: "State", text: (device) => device.state, isText: true },
  {
    key: "reputation",
    title: "Reputation",
    text: (device) => (device.reputation === null ? "–" : String(device.reputation)),
    isText: true,
  },
  { key: "blocks", title: "Blocks", text: (device) => whole(device.blocks) },
  {
    key: "flops_per_s",
    title: "Compute",
    text: (device) => quantity(device.flops_per_s, "FLOP/s"),
    share: (device) => share(device.flops_per_s, device.profile_flops_per_s),
    low: 0.5,
  },
  {
    key: "downlink_bytes_per_s",
    title: "Downlink",
    text: (device) => quantity(device.downlink_bytes_per_s, "B/s"),
    share: (device) => share(device.downlink_bytes_per_s, device.profile_downlink_bytes_per_s),
  },
  {
    key: "uplink_bytes_per_s",
    title: "Uplink",
    text: (device) => quantity(device.uplink_bytes_per_s, "B/s"),
    share: (device) => share(device.uplink_bytes_per_s, device.profile_uplink_bytes_per_s),
  },
  { key: "round_trip_s", title: "Round trip", text: (device) => seconds(device.round_trip_s) },
  { key: "down_bytes", title: "Sent to it", text: (device) => quantity(device.down_bytes, "B") },
  { key: "up_bytes", title: "Sent back", text: (device) => quantity(device.up_bytes, "B") },
  { key: "energy_j", title: "Energy", text: (device) => energyOf(device), hasWord: true },
];

function whole(number: number | null): string {
  return number === null ? "–" : count(number);
}
