import type { ComponentChildren } from "preact";

/**
 * One figure with its name, and below it what puts it in proportion. To be put into a `dl`.
 * `about` explains the name, as a tooltip.
 */
export function Figure(props: {
  readonly name: string;
  readonly value: ComponentChildren;
  readonly note?: ComponentChildren;
  readonly about?: string;
}) {
  return (
    <div class="figure" title={props.about}>
      <dt>{props.name}</dt>
      <dd>
        <span class="value">{props.value}</span>
        {props.note !== undefined && <span class="note">{props.note}</span>}
      </dd>
    </div>
  );
}
