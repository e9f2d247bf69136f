import type { ComponentChildren } from "preact";

/** One figure with its name, and below it what puts it in proportion. To be put into a `dl`. */
export function Figure(props: {
  readonly name: string;
  readonly value: ComponentChildren;
  readonly note?: ComponentChildren;
}) {
  return (
    <div class="figure">
      <dt>{props.name}</dt>
      <dd>
        <span class="value">{props.value}</span>
        {props.note !== undefined && <span class="note">{props.note}</span>}
      </dd>
    </div>
  );
}
