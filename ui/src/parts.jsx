// The building blocks of panels.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

export const Panel = ({ title, note, wide, children }) => (
  <section class={wide ? "panel wide" : "panel"} aria-label={title}>
    <h2>{title}</h2>
    {children}
    {note && <p class="note">{note}</p>}
  </section>
);

export const Facts = ({ rows }) => (
  <dl>
    {rows.map(([name, value]) => (
      <div key={name}>
        <dt>{name}</dt>
        <dd>{value}</dd>
      </div>
    ))}
  </dl>
);

export const Table = ({ columns, rows, empty }) =>
  rows.length === 0 ? (
    <p class="note">{empty}</p>
  ) : (
    <div class="scroll" tabIndex={0} role="region" aria-label="table">
      <table>
        <thead>
          <tr>
            {columns.map((column) => (
              <th key={column}>{column}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row, i) => (
            <tr key={i}>
              {row.map((cell, j) => (
                <td key={j} class={typeof cell === "number" ? "number" : ""}>
                  {cell}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );

// Bars of shares of a whole.
export const Bars = ({ rows, whole }) => (
  <div class="bars">
    {rows.map(([name, value, text]) => (
      <div class="bar" key={name}>
        <span>{name}</span>
        <progress max={Math.max(whole, 1)} value={value} aria-label={name} />
        <span class="number">{text}</span>
      </div>
    ))}
  </div>
);

export const Chart = ({ series, lines, unit }) => {
  const box = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const axis = { stroke: style.getPropertyValue("--quiet"), grid: { stroke: style.getPropertyValue("--line") } };
    const made = new uPlot(
      {
        width: box.current.clientWidth || 400,
        height: 150,
        legend: { show: true },
        cursor: { show: true },
        scales: { x: { range: (_, __, max) => [max - 300, max] } }, // seconds: as much as is kept
        axes: [axis, { ...axis, size: 70, values: (_, ticks) => ticks.map(unit) }],
        series: [
          {},
          ...lines.map(([label, , color]) => ({
            label,
            stroke: style.getPropertyValue(color),
            width: 2,
            value: (_, v) => (v == null ? "–" : unit(v)),
          })),
        ],
      },
      [[], ...lines.map(() => [])],
      box.current,
    );
    plot.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: box.current.clientWidth, height: 150 }));
    watch.observe(box.current);
    return () => {
      watch.disconnect();
      made.destroy();
    };
  }, []);
  useEffect(() => {
    plot.current?.setData([series.map((p) => p.at), ...lines.map(([, key]) => series.map((p) => p[key]))]);
  }, [series]);
  return <div class="chart" ref={box} />;
};
