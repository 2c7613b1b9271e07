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
        columns={["request", "age", "prompt", "own", "hit", "load", "reason", "in words"]}
        rows={data?.map((r) => [link(r.request), seconds(r.age_s), count(r.prompt_tokens), count(r.local_tokens), count(r.hit_tokens), r.load, r.reason, r.verdict])}
      />
    </Panel>
  );
};

const STAGES = ["fence", "queue", "copy"];

// One row per event; what took time is a bar, with a job's stages in it. Lengths are shares of the whole.
const Timeline = ({ record }) => {
  const span = Math.max(record.took_s, 1e-6);
  const share = (s) => `${Math.min(100, Math.max(0, (100 * s) / span)).toFixed(2)}%`;
  return (
    <div class="timeline" role="img" aria-label="timeline">
      {record.timeline.map((event, i) => {
        const stages = STAGES.map((name) => [name, event.stages?.[name] ?? 0]);
        let at = event.after_s - stages.reduce((sum, [, s]) => sum + s, 0);
        return (
          <div class="event" key={i}>
            <span>
              {event.what} {event.tokens ? `${count(event.tokens)} tokens` : ""}
            </span>
            <svg width="100%" height="14">
              <rect class="all" width="100%" height="14" rx="3" />
              {event.seconds > 0 && <rect class="took" x={share(event.after_s - event.seconds)} width={share(event.seconds)} height="14" />}
              {stages.map(([name, s]) => {
                const from = Math.max(0, at);
                at += s;
                return s > 0 && <rect key={name} class={name} x={share(from)} width={share(s)} height="14" />;
              })}
              {!event.seconds && <circle cx={share(event.after_s * 0.99 + span * 0.005)} cy="7" r="4" />}
            </svg>
            <span class="number">{seconds(event.after_s)}</span>
          </div>
        );
      })}
      <p class="note">
        <b class="fence">■</b> the engine's step <b class="queue">■</b> waiting for its turn <b class="copy">■</b> copying
      </p>
    </div>
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
          rows={jobs.data?.map((j) => [seconds(j.age_s), j.kind, link(j.request), j.engine, `${count(j.start_tokens)} to ${count(j.end_tokens)}`, j.ranks.map((r) => `${r.rank}: ${r.state} ${seconds(r.age_s)}`).join(", ")])}
        />
      </Panel>
      <Panel title="Leases" wide note={leases.error}>
        <Table
          empty="None."
          columns={["idle", "owner", "request", "engine", "objects", "tokens"]}
          rows={leases.data?.map((l) => [seconds(l.idle_s), l.job ? `job ${l.job}` : `admission ${l.admission}`, link(l.request), l.engine, count(l.objects), count(l.tokens)])}
        />
      </Panel>
      <Panel title="Slowest jobs" wide note={slow.error || (traces ? `Of the requests that are remembered; traces go to ${traces.endpoint}.` : "Of the requests that are remembered. Traces are off (traces.endpoint).")}>
        <Table
          empty="None has ended yet."
          columns={["took", "kind", "request", "status", "fence", "queue", "copy", "bytes", "ago", ...(traces ? ["trace"] : [])]}
          rows={slow.data?.map((j) => [seconds(j.seconds), j.kind, link(j.request), `${j.status} ${j.reason}`, seconds(j.fence), seconds(j.queue), seconds(j.copy), bytes(j.moved_bytes), seconds(j.age_s), ...(traces ? [<code>{j.trace_id || "–"}</code>] : [])])}
        />
      </Panel>
    </div>
  );
};
