// Requests: the last ones, and the story of one.
import { useState } from "preact/hooks";
import { bytes, count, seconds } from "./format.js";
import { usePoll } from "./live.js";
import { Facts, Panel, Table } from "./parts.jsx";

const link = (request) => <a href={`#/requests/${encodeURIComponent(request)}`}>{request || "–"}</a>;

export const Requests = ({ query }) => {
  const [hit, setHit] = useState("");
  const reason = query.get("reason");
  const filter = (reason ? `&reason=${reason}` : "") + (hit ? `&hit=${hit}` : "");
  const { data, error } = usePoll(`requests?limit=200${filter}`);
  return (
    <Panel title={reason ? `Requests: ${reason}` : "Last requests"} wide note={error}>
      <div class="filters">
        <label>
          show{" "}
          <select value={hit} onChange={(event) => setHit(event.target.value)}>
            <option value="">all</option>
            <option value="1">hits</option>
            <option value="0">misses</option>
          </select>
        </label>
        {reason && <a href="#/requests">every reason</a>}
      </div>
      <Table
        empty="None is remembered."
        columns={["request", "age", "prompt", "own", "hit", "load", "reason", "verdict"]}
        rows={(data ?? []).map((r) => [link(r.request), seconds(r.age_s), count(r.prompt_tokens), count(r.local_tokens), count(r.hit_tokens), r.load, r.reason, r.verdict])}
      />
    </Panel>
  );
};

const STAGES = ["fence", "queue", "copy"];

const Timeline = ({ record }) => {
  const width = 1000;
  const span = Math.max(record.took_s, 1e-6);
  const scale = (width - 330) / span;
  return (
    <svg class="timeline" viewBox={`0 0 ${width} ${record.timeline.length * 24 + 6}`} role="img" aria-label="timeline">
      {record.timeline.map((event, i) => {
        const end = event.after_s * scale;
        const length = event.seconds * scale;
        const stages = STAGES.map((name) => [name, (event.stages?.[name] ?? 0) * scale]);
        let at = end - stages.reduce((sum, [, long]) => sum + long, 0);
        return (
          <g key={i}>
            <rect x={Math.max(0, end - length)} y={i * 24 + 5} width={Math.max(length, 4)} height={13} rx={2} opacity={event.seconds ? 0.35 : 1} />
            {stages.map(([name, long]) => {
              const from = Math.max(0, at);
              at += long;
              return long > 0 && <rect key={name} class={name} x={from} y={i * 24 + 5} width={long} height={13} />;
            })}
            <text x={Math.max(end, 4) + 10} y={i * 24 + 16}>
              {event.what} {event.tokens ? `${count(event.tokens)} tokens` : ""} {seconds(event.after_s)}
            </text>
          </g>
        );
      })}
    </svg>
  );
};

const Admission = ({ record, first }) => (
  <details class="panel wide" open={first}>
    <summary>
      <strong>
        {record.request}, admission {record.admission}
      </strong>{" "}
      <span class="note">{seconds(record.age_s)} ago</span>
      <p class="verdict">{record.verdict}</p>
    </summary>
    {record.remedy && record.remedy !== "nothing to do" && <p>Remedy: {record.remedy}</p>}
    <Facts
      across
      rows={[
        ["engine", record.engine],
        ["prompt", `${count(record.prompt_tokens)} tokens`],
        ["the engine's own", `${count(record.local_tokens)} tokens`],
        ["could hit", `${count(record.wanted_tokens)} tokens`],
        ["hit", `${count(record.hit_tokens)} tokens`],
        ["saved", `${count(record.saved_objects)} objects`],
        ...(record.trace_id ? [["trace", <code>{record.trace_id}</code>]] : []),
      ]}
    />
    <Timeline record={record} />
    <Table
      empty="Nothing happened."
      columns={["after", "what", "tokens", "bytes", "took", "detail"]}
      rows={record.timeline.map((e) => [seconds(e.after_s), e.what, e.tokens ? count(e.tokens) : "", e.moved_bytes ? bytes(e.moved_bytes) : "", e.seconds ? seconds(e.seconds) : "", e.detail])}
    />
  </details>
);

export const Request = ({ name }) => {
  const { data, error } = usePoll(`requests/${encodeURIComponent(name)}`);
  if (!data) return <Panel title={name} wide note={error || "asking"} />;
  return (
    <section class="grid" aria-label={name}>
      <h2 class="wide">
        <a href="#/requests">Requests</a> / {name}
      </h2>
      {[...data].reverse().map((record, i) => (
        <Admission key={record.admission} record={record} first={i === 0} />
      ))}
    </section>
  );
};

export const InFlight = ({ traces }) => {
  const jobs = usePoll("jobs", 1000);
  const leases = usePoll("leases", 1000);
  const slow = usePoll("slow", 5000);
  return (
    <div class="grid">
      <Panel title="Jobs in flight" wide note={jobs.error}>
        <Table
          empty="None."
          columns={["age", "kind", "request", "engine", "tokens", "ranks"]}
          rows={(jobs.data ?? []).map((j) => [seconds(j.age_s), j.kind, link(j.request), j.engine, `${count(j.start_tokens)} to ${count(j.end_tokens)}`, j.ranks.map((r) => `${r.rank}: ${r.state} ${seconds(r.age_s)}`).join(", ")])}
        />
      </Panel>
      <Panel title="Leases" wide note={leases.error}>
        <Table
          empty="None."
          columns={["idle", "owner", "request", "engine", "objects", "tokens"]}
          rows={(leases.data ?? []).map((l) => [seconds(l.idle_s), l.job ? `job ${l.job}` : `admission ${l.admission}`, link(l.request), l.engine, count(l.objects), count(l.tokens)])}
        />
      </Panel>
      <Panel title="Slowest jobs" wide note={slow.error || (traces ? `Of the requests that are remembered; traces go to ${traces.endpoint}.` : "Of the requests that are remembered. Traces are off (traces.endpoint).")}>
        <Table
          empty="None has ended yet."
          columns={["took", "kind", "request", "status", "fence", "queue", "copy", "bytes", "ago", ...(traces ? ["trace"] : [])]}
          rows={(slow.data ?? []).map((j) => [seconds(j.seconds), j.kind, link(j.request), `${j.status} ${j.reason}`, seconds(j.fence), seconds(j.queue), seconds(j.copy), bytes(j.moved_bytes), seconds(j.age_s), ...(traces ? [<code>{j.trace_id || "–"}</code>] : [])])}
        />
      </Panel>
    </div>
  );
};
