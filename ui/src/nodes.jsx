// All nodes that `kvferry ui` was given, side by side.
import { bytes, count, percent, seconds, total } from "./format.js";
import { usePoll } from "./live.js";
import { Panel } from "./parts.jsx";

export const nodeQuery = (name) => `?node=${encodeURIComponent(name)}`;

const Row = ({ node }) => {
  const { data, error } = usePoll("status", 3000, node.base);
  const name = (
    <a href={`${nodeQuery(node.name)}#/`}>{node.name}</a>
  );
  if (!data || error)
    return (
      <tr>
        <td>{name}</td>
        <td class="state-bad">{error ? "no answer" : "asking"}</td>
        <td class="words" colSpan={7}>{error}</td>
      </tr>
    );
  const { pipeline, pool, sessions } = data;
  const wanted = pipeline.hit_tokens + pipeline.missed_tokens;
  const failed = total(Object.fromEntries(Object.entries(pipeline.ends).filter(([end]) => end.includes("/failed/"))));
  return (
    <tr>
      <td>{name}</td>
      <td class={`state-${data.state}`}>{data.state}</td>
      <td>{data.kvferry}</td>
      <td>{seconds(data.uptime_s)}</td>
      <td>
        {sessions.filter((s) => s.ready).length} of {sessions.length}
      </td>
      <td>{`${count(pipeline.hit_tokens)} (${percent(pipeline.hit_tokens, wanted)})`}</td>
      <td>{`${bytes(pool.used_bytes)} (${percent(pool.used_bytes, pool.total_bytes)})`}</td>
      <td>{count(pipeline.jobs_open.load + pipeline.jobs_open.save)}</td>
      <td>{count(failed)}</td>
    </tr>
  );
};

export const Nodes = ({ nodes }) => (
  <Panel title="Nodes" wide note="Tokens offered since each node's own start; rates of nodes cannot be added.">
    <div class="scroll" tabIndex={0} role="region" aria-label="table">
      <table>
        <thead>
          <tr>
            {["node", "state", "version", "up", "engines ready", "offered", "pool used", "jobs open", "failed parts"].map((column) => (
              <th key={column}>{column}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {nodes.map((node) => (
            <Row key={node.name} node={node} />
          ))}
        </tbody>
      </table>
    </div>
  </Panel>
);
