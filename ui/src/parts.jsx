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

export const Facts = ({ rows, across }) => (
  <dl class={across ? "facts" : ""}>
    {rows.map(([name, value]) => (
      <div key={name}>
        <dt>{name}</dt>
        <dd>{value}</dd>
      </div>
    ))}
  </dl>
);

// Numbers at a glance: [name, value, what it means].
export const Tiles = ({ rows }) => (
  <dl class="tiles">
    {rows.map(([name, value, text]) => (
      <div class="tile" key={name}>
        <dt>{name}</dt>
        <dd>{value}</dd>
        <span>{text}</span>
      </div>
    ))}
  </dl>
);

// Columns that hold sentences wrap; all others stay on one line and the table scrolls.
const WORDS = new Set(["facts", "found", "remedy", "events", "reason of state", "not shared because", "value", "ranks"]);

// Without rows it says what that means; `rows` undefined: nobody has answered yet.
export const Table = ({ columns, rows, empty }) =>
  !rows?.length ? (
    <p class="note">{rows ? empty : "Not known yet."}</p>
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
                <td key={j} class={columns[j] === "in words" ? "words words-short" : WORDS.has(columns[j]) && cell ? "words" : ""}>
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

const HEIGHT = 160;
const clock = (at) => new Date(at * 1000).toTimeString().slice(0, 8);
// The last five minutes, or as much of them as has been seen, at least one.
const window_of = (_, min, max) => [Math.min(min ?? max - 60, max - 60), max];

// The page's colours, for plots, which take none from style sheets.
export const plotStyle = () => {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return { color, axis };
};

export const Chart = ({ series, lines, unit }) => {
  const box = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    const { color, axis } = plotStyle();
    const made = new uPlot(
      {
        width: box.current.clientWidth || 400,
        height: HEIGHT,
        legend: { show: true, live: true },
        cursor: { show: true, y: false },
        scales: { x: { range: window_of }, y: { range: (_, __, max) => [0, Math.max(max ?? 0, 1) * 1.08] } },
        axes: [
          { ...axis, space: 80, size: 24, values: (_, ticks) => ticks.map(clock) },
          { ...axis, size: 72, space: 34, values: (_, ticks) => ticks.map(unit) },
        ],
        series: [
          { label: "at", value: (_, at) => (at == null ? "–" : clock(at)) },
          ...lines.map(([label, , name]) => ({
            label,
            stroke: color(name),
            fill: `${color(name)}22`,
            width: 1.5,
            points: { show: false },
            value: (_, v) => (v == null ? "–" : unit(v)),
          })),
        ],
      },
      [[], ...lines.map(() => [])],
      box.current,
    );
    plot.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: box.current.clientWidth, height: HEIGHT }));
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
