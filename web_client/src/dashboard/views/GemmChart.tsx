import { useMemo } from "preact/hooks";
import type uPlot from "uplot";
import type { FinishedGemm } from "../overview";
import { percent } from "../text";
import { Chart } from "./Chart";

/** What GEMMs took, of what their plans predicted: those that the page saw finish. */
export function GemmChart(props: { readonly gemms: readonly FinishedGemm[] }) {
  const { gemms } = props;
  const ratios = gemms.map((gemm) => gemm.took_s / gemm.predicted_s);
  const data = useMemo(
    () => [
      gemms.map((_, i) => i + 1),
      gemms.map((gemm) => gemm.took_s / gemm.predicted_s),
      gemms.map(() => 1),
    ],
    [gemms],
  ) as uPlot.AlignedData;
  const median = [...ratios].sort((a, b) => a - b)[ratios.length >> 1] ?? 1;
  return (
    <Chart
      title="Time taken, of predicted"
      summary={`Median ${percent(median)} of ${gemms.length} multiplications.`}
      data={data}
      fromZero
      axisText={percent}
      series={[
        {
          label: "GEMM",
          colour: "accent",
          points: true,
          value: (i) => `${gemms[i]?.name ?? ""} ${percent(ratios[i] ?? null)}`,
        },
        { label: "as predicted", colour: "soft", dashed: true, value: () => "" },
      ]}
    />
  );
}
