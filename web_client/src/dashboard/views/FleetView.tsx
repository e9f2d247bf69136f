/** The fleet: how many of which kind in which state, every device in a table, and the chosen one. */

import { useMemo, useState } from "preact/hooks";
import { count } from "../../ui/figures";
import { arrange, census, concern, type Filter, NO_FILTER, type Order } from "../fleet";
import type { Overview } from "../overview";
import { counted } from "../text";
import { DeviceDetail } from "./DeviceDetail";
import { DeviceTable } from "./DeviceTable";

interface Props {
  readonly overview: Overview;
  readonly chosen: number;
  readonly choose: (device: number) => void;
}

export function FleetView({ overview, chosen, choose }: Props) {
  const { devices, devices_total, timeline, totals } = overview;
  const [filter, setFilter] = useState<Filter>(NO_FILTER);
  const [order, setOrder] = useState<Order>({ key: "device", descending: false });
  const shown = useMemo(() => arrange(devices, filter, order), [devices, filter, order]);
  const picked = devices.find((device) => device.device === chosen);
  return (
    <section class="card wide" aria-labelledby="fleet">
      <div class="title">
        <h2 id="fleet">Fleet</h2>
        <p class="soft small end">
          {known(totals.joined)} joined, {known(totals.left)} left, {known(totals.reissued)} blocks
          reissued, {known(totals.wrong)} wrong
        </p>
      </div>
      {devices.length === 0 ? (
        <p class="empty">
          No device is connected. <code>cleave pair</code> prints a code that a phone's camera or{" "}
          <code>cleave join</code> takes.
        </p>
      ) : (
        <>
          <div class="survey">
            <CensusTable overview={overview} filter={filter} setFilter={setFilter} />
            <Filters filter={filter} setFilter={setFilter} overview={overview} />
          </div>
          <p class="soft small">
            {shown.length === devices_total
              ? counted(devices_total, "device")
              : `${count(shown.length)} of ${counted(devices_total, "device")}`}
            {devices.length < devices_total &&
              `; the server sends only ${count(devices.length)} of them`}
          </p>
          <div class={picked === undefined ? "fleet" : "fleet with-detail"}>
            <DeviceTable
              devices={shown}
              order={order}
              setOrder={setOrder}
              chosen={chosen}
              choose={choose}
            />
            {picked !== undefined && (
              <DeviceDetail
                device={picked}
                timeline={timeline?.device === chosen ? timeline : null}
                close={() => choose(chosen)}
              />
            )}
          </div>
        </>
      )}
    </section>
  );
}

interface FilterProps {
  readonly overview: Overview;
  readonly filter: Filter;
  readonly setFilter: (filter: Filter) => void;
}

/** Devices by kind and state; a count is a button that shows only these. */
function CensusTable({ overview, filter, setFilter }: FilterProps) {
  const { kinds, states, counts } = useMemo(() => census(overview.crowds), [overview.crowds]);
  return (
    <section class="scroll" aria-label="Devices by kind and state">
      <table class="plain census">
        <thead>
          <tr>
            <th scope="col">kind</th>
            {states.map((state) => (
              <th scope="col" key={state}>
                <span class={`dot ${concern(state)}`} />
                {state}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {kinds.map((kind) => (
            <tr key={kind}>
              <th scope="row">{kind}</th>
              {states.map((state) => {
                const number = counts.get(kind)?.get(state) ?? 0;
                const pressed = filter.kind === kind && filter.state === state;
                return (
                  <td key={state}>
                    {number === 0 ? (
                      <span class="soft">0</span>
                    ) : (
                      <button
                        type="button"
                        class="quiet"
                        aria-pressed={pressed}
                        aria-label={`${number} ${kind} ${state}: show only these`}
                        onClick={() => setFilter(pressed ? NO_FILTER : { text: "", kind, state })}
                      >
                        {count(number)}
                      </button>
                    )}
                  </td>
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

function Filters({ overview, filter, setFilter }: FilterProps) {
  const { kinds, states } = useMemo(() => census(overview.crowds), [overview.crowds]);
  return (
    <search class="filters">
      <div class="field">
        <label for="find">Find</label>
        <input
          id="find"
          type="search"
          value={filter.text}
          placeholder="name, number, kind"
          onInput={(event) => setFilter({ ...filter, text: event.currentTarget.value })}
        />
      </div>
      <Choice
        id="kind"
        label="Kind"
        value={filter.kind}
        options={kinds}
        change={(kind) => setFilter({ ...filter, kind })}
      />
      <Choice
        id="state"
        label="State"
        value={filter.state}
        options={states}
        change={(state) => setFilter({ ...filter, state })}
      />
      {filter !== NO_FILTER && (
        <button type="button" class="quiet" onClick={() => setFilter(NO_FILTER)}>
          show all
        </button>
      )}
    </search>
  );
}

function Choice(props: {
  readonly id: string;
  readonly label: string;
  readonly value: string;
  readonly options: readonly string[];
  readonly change: (value: string) => void;
}) {
  // What was chosen stays in the list even when its last device has gone.
  const options =
    props.options.includes(props.value) || props.value === ""
      ? props.options
      : [...props.options, props.value];
  return (
    <div class="field">
      <label for={props.id}>{props.label}</label>
      <select
        id={props.id}
        value={props.value}
        onChange={(event) => props.change(event.currentTarget.value)}
      >
        <option value="">all</option>
        {options.map((option) => (
          <option key={option} value={option}>
            {option}
          </option>
        ))}
      </select>
    </div>
  );
}

function known(number: number | null): string {
  return number === null ? "–" : count(number);
}
