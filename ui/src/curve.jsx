// What a pool of another size would hold: estimated by the sidecar from a sample of keys.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { bytes, count } from "./format.js";
import { Facts, Panel, plotStyle } from "./parts.jsx";

const HEIGHT = 160;

const Plot = ({ sizes, shares, poolBytes }) => {
  const box = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    const { color, axis } = plotStyle();
    const made = new uPlot(
      {
        width: box.current.clientWidth || 400,
        height: HEIGHT,
        legend: { show: false },
        scales: { x: { time: false, distr: 3, log: 2 }, y: { range: [0, 100] } },
        axes: [
          { ...axis, splits: () => sizes, values: (_, splits) => splits.map((size) => bytes(size * poolBytes)) },
          { ...axis, values: (_, ticks) => ticks.map((v) => `${v} %`) },
        ],
        series: [{}, { stroke: color("--accent"), width: 1.5, points: { show: true, size: 6 } }],
      },
      [sizes, shares],
      box.current,
    );
    plot.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    watch.observe(box.current);
    return () => {
      watch.disconnect();
      made.destroy();
    };
  }, [poolBytes]);
  useEffect(() => plot.current?.setData([sizes, shares]), [shares.join()]);
  return <div class="chart" ref={box} />;
};

export const Curve = ({ curve }) => {
  const wanted = curve.recent_wanted_tokens;
  const shares = curve.recent_missed_tokens.map((missed) => Math.min(100, Math.max(0, 100 * (1 - missed / wanted))));
  const at = (size) => `${shares[curve.sizes.indexOf(size)].toFixed(0)} % of the tokens`;
  return (
    <Panel
      title="Hits by the size of the pool"
      note={
        wanted
          ? `Of ${count(wanted)} tokens wanted in the last hour or two; estimated from ${count(curve.tracked)} keys.`
          : "Nothing has been looked up in the last hour."
      }
    >
      {wanted > 0 && (
        <>
          <Facts
            rows={[
              ["half the size", at(0.5)],
              ["this size", at(1)],
              ["twice the size", at(2)],
            ]}
          />
          <Plot sizes={curve.sizes} shares={shares} poolBytes={curve.pool_bytes} />
        </>
      )}
    </Panel>
  );
};
