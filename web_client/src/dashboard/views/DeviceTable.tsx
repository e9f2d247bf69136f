/**
 * Every device a row, of which only those in sight are in the document. Arrow keys, Home and End
 * walk through all of them; Tab stops at one of them only, where the keys were last.
 */

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { concern, type Order, type SortKey } from "../fleet";
import type { Device } from "../overview";
import { percent } from "../text";
import { COLUMNS, type Column } from "./columns";
import { useSize } from "./useSize";

/** As in dashboard.css. */
const ROW_PX = 34;
/** Rows beyond what is in sight, so that scrolling shows no gap. */
const MORE = 8;

interface Props {
  readonly devices: readonly Device[];
  readonly order: Order;
  readonly setOrder: (order: Order) => void;
  readonly chosen: number;
  readonly choose: (device: number) => void;
}

export function DeviceTable({ devices, order, setOrder, chosen, choose }: Props) {
  const scroller = useRef<HTMLDivElement>(null);
  const { height } = useSize(scroller);
  const [top, setTop] = useState(0);
  const wanted = useRef<number | null>(null);
  const [latest, setLatest] = useState(0);
  const first = Math.max(0, Math.min(Math.floor(top / ROW_PX) - MORE, devices.length - 1));
  const end = Math.min(devices.length, Math.ceil((top + height) / ROW_PX) + MORE);
  const stop =
    latest >= first && latest < end ? latest : Math.min(Math.ceil(top / ROW_PX), end - 1);

  // In another order, the rows worth seeing are at the top.
  useLayoutEffect(() => {
    if (scroller.current !== null) scroller.current.scrollTop = 0;
  }, [order]);

  // A row that the keys go to may not be there yet: it is focused once it is.
  useLayoutEffect(() => {
    if (wanted.current === null) return;
    const button = rowButton(scroller.current, wanted.current);
    if (button === null) return;
    wanted.current = null;
    button.focus({ preventScroll: true });
  });

  const goTo = (index: number) => {
    const node = scroller.current;
    if (node === null) return;
    const target = Math.max(0, Math.min(index, devices.length - 1));
    const inSight = node.clientHeight - 2 * ROW_PX;
    if (target * ROW_PX < node.scrollTop) node.scrollTop = target * ROW_PX;
    else if (target * ROW_PX > node.scrollTop + inSight) node.scrollTop = target * ROW_PX - inSight;
    wanted.current = target;
    setTop(node.scrollTop);
    rowButton(node, target)?.focus({ preventScroll: true });
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const from = Number((event.target as HTMLElement).dataset.index ?? Number.NaN);
    const to = target(event.key, from, devices.length, Math.floor(height / ROW_PX) - 2);
    if (to === null) return;
    event.preventDefault();
    goTo(to);
  };
  return (
    <div
      class="scroll devices"
      ref={scroller}
      onScroll={(event) => setTop(event.currentTarget.scrollTop)}
    >
      <table
        aria-rowcount={devices.length + 1}
        onKeyDown={onKeyDown}
        onFocusIn={(event) => {
          const { index } = (event.target as HTMLElement).dataset;
          if (index !== undefined) setLatest(Number(index));
        }}
      >
        <caption class="spoken">
          Devices. The share after a figure is of what the profile or the first measurement said; of
          a link, of what crosses it now.
        </caption>
        <thead>
          <tr aria-rowindex={1}>
            {COLUMNS.map((column) => (
              <Heading key={column.key} column={column} order={order} setOrder={setOrder} />
            ))}
          </tr>
        </thead>
        <Gap rows={first} />
        <tbody>
          {devices.slice(first, end).map((device, index) => (
            <Row
              key={device.device}
              device={device}
              index={first + index}
              isStop={first + index === stop}
              chosen={device.device === chosen}
              choose={choose}
            />
          ))}
        </tbody>
        <Gap rows={devices.length - end} />
      </table>
    </div>
  );
}

/** The room of rows that are not in the document. */
function Gap(props: { readonly rows: number }) {
  if (props.rows <= 0) return null;
  return (
    <tbody aria-hidden="true">
      <tr>
        <td class="gap" colSpan={COLUMNS.length} height={props.rows * ROW_PX} />
      </tr>
    </tbody>
  );
}

function Heading(props: {
  readonly column: Column;
  readonly order: Order;
  readonly setOrder: (order: Order) => void;
}) {
  const { column, order, setOrder } = props;
  const active = order.key === column.key;
  const direction = order.descending ? "descending" : "ascending";
  return (
    <th scope="col" class={headingClass(column)} aria-sort={active ? direction : "none"}>
      <button type="button" onClick={() => setOrder(turned(order, column.key, column.isText))}>
        {column.title}
        <span class="arrow" aria-hidden="true">
          {active ? (order.descending ? "▾" : "▴") : ""}
        </span>
      </button>
    </th>
  );
}

/** Widths are those of the headings; a figure with its share needs more room than one alone. */
function headingClass(column: Column): string {
  if (column === COLUMNS[0]) return "first";
  if (column.isShort) return "short-word";
  if (column.isText) return "word";
  if (column.hasWord) return "number figure-and-word";
  return column.share === undefined ? "number figure-alone" : "number";
}

interface RowProps {
  readonly device: Device;
  readonly index: number;
  /** Whether Tab stops here. */
  readonly isStop: boolean;
  readonly chosen: boolean;
  readonly choose: (device: number) => void;
}

function Row({ device, index, isStop, chosen, choose }: RowProps) {
  const [name, ...others] = COLUMNS;
  return (
    <tr aria-rowindex={index + 2} class={chosen ? "chosen" : ""}>
      <th scope="row">
        <button
          type="button"
          class="name"
          data-index={index}
          tabIndex={isStop ? 0 : -1}
          aria-pressed={chosen}
          onClick={() => choose(device.device)}
        >
          {name.text(device)} <span class="soft">#{device.device}</span>
          {device.own && <span class="own"> own</span>}
        </button>
      </th>
      {others.map((column) => (
        <td key={column.key} class={column.isText ? "" : "number"}>
          {column.key === "state" && <span class={`dot ${concern(device.state)}`} />}
          {column.text(device)}
          {column.share !== undefined && (
            <Share value={column.share(device)} low={column.low ?? 0} />
          )}
        </td>
      ))}
    </tr>
  );
}

/** Much less than what was promised stands out; a link that has nothing to do does not. */
function Share(props: { readonly value: number | null; readonly low: number }) {
  const low = props.value !== null && props.value < props.low;
  return <span class={low ? "share warning-text" : "share soft"}>{percent(props.value)}</span>;
}

function rowButton(scroller: HTMLElement | null, index: number): HTMLElement | null {
  return scroller?.querySelector<HTMLElement>(`button[data-index="${index}"]`) ?? null;
}

/** The same column turns round; another begins with its largest figure, or its first word. */
function turned(order: Order, key: SortKey, isText = false): Order {
  return order.key === key ? { key, descending: !order.descending } : { key, descending: !isText };
}

function target(key: string, from: number, rows: number, page: number): number | null {
  if (Number.isNaN(from)) return null;
  switch (key) {
    case "ArrowDown":
      return from + 1;
    case "ArrowUp":
      return from - 1;
    case "PageDown":
      return from + page;
    case "PageUp":
      return from - page;
    case "Home":
      return 0;
    case "End":
      return rows - 1;
    default:
      return null;
  }
}
