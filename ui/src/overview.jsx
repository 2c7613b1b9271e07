// The panels, in the order of their weight for an operator.
import { bytes, count, percent, quantile, rate, seconds, total } from "./format.js";
import { Curve } from "./curve.jsx";
import { usePoll } from "./live.js";
import { Bars, Chart, Facts, Panel, Table, Tiles } from "./parts.jsx";

const entries = (object) => Object.entries(object ?? {});
const name_of = (session) => `${session.engine_id}/${session.instance_id}`;

const Glance = ({ status, series }) => {
  const { pipeline, pool } = status;
  const wanted = pipeline.hit_tokens + pipeline.missed_tokens;
  const last = series.at(-1);
  const saved_s = entries(pipeline.breaker).reduce((sum, [, one]) => sum + one.saved_s, 0);
  const parts = entries(pipeline.ends);
  const failed = parts.filter(([name]) => name.includes("/failed/")).reduce((sum, [, n]) => sum + n, 0);
  return (
    <Tiles
      rows={[
        ["Offered", percent(pipeline.hit_tokens, wanted), `of ${count(wanted)} tokens wanted`],
        ["Loaded", count(pipeline.journal.load_tokens.done), "tokens, not computed again"],
        ["Net time saved", entries(pipeline.breaker).length ? seconds(saved_s) : "–", "by loading, see Break-even"],
        ["Pool used", percent(pool.used_bytes, pool.total_bytes), `of ${bytes(pool.total_bytes)}`],
        ["Load now", last ? `${bytes(last.loaded)}/s` : "–", `save ${last ? bytes(last.saved) : "–"}/s`],
        ["Failed", count(failed), `of ${count(total(pipeline.ends))} parts of jobs`],
      ]}
    />
  );
};

const amount = (work, n) => (work.unit === "bytes" ? bytes(n) : `${count(n)} ${work.unit}`);

const Work = ({ progress, ended }) => (
  <Panel title="Long work" wide note={progress.length + ended.length ? "" : "None since this start."}>
    {progress.map((work) => (
      <div class="bar" key={work.name}>
        <span>{work.name}</span>
        <progress max={Math.max(work.total, 1)} value={work.done} aria-label={work.name} />
        <span class="number">
          {amount(work, work.done)} of {amount(work, work.total)}, {seconds(work.seconds)}
          {work.left_s != null ? `, about ${seconds(work.left_s)} left` : ""}
        </span>
      </div>
    ))}
    {ended.length > 0 && (
      <Facts
        across
        rows={ended.map((work) => [
          work.name,
          `${amount(work, work.done)}${work.done < work.total ? ` of ${amount(work, work.total)}, ended early` : ""} in ${seconds(work.seconds)}`,
        ])}
      />
    )}
  </Panel>
);

// Rank 1 of 4 in tensor parallel, and so on where there is more than one; of how many engines in data
// parallel is not known here.
const place = ({ identity }, half) => {
  const sizes = [["tp", identity.tp_size], ["pp", identity.pp_size], ["dcp", identity.dcp_size]];
  const told = sizes.map(([name, size], i) => [name, size, half.position?.[i]]).filter(([name, size, at]) => at != null && (name === "tp" ? size : size > 1));
  return [`dp ${half.dp_rank}`, ...told.map(([name, size, at]) => `${name} ${at} of ${size}`)].join(", ");
};

const Ranks = ({ status }) => {
  const { data: jobs, error } = usePoll("jobs", 2000);
  const in_flight = (engine, rank) =>
    (jobs ?? []).filter((job) => job.engine === engine && job.ranks.some((one) => one.rank === rank && !["ended", "absent", "missing"].includes(one.state))).length;
  return (
    <Panel title="Engines and ranks" wide note={error}>
      <Table
        empty="No engine is attached. Engines attach by themselves; see docs: When hits are missing."
        columns={["state", "half", "engine", "place", "pod or host", "in flight", "last message", "last beat", "pid", "generation", "memory mapped", "memory in", "namespace"]}
        rows={status.sessions.flatMap((session) => [
          ...session.halves.map((half) => [
            (session.ready ? "ready" : half.registered ? "registered" : "attached") +
              (half.connected ? "" : ", disconnected"),
            half.rank < 0 ? "scheduler" : `rank ${half.rank}`,
            name_of(session),
            place(session, half),
            half.host || "–",
            half.rank < 0 || !jobs ? "–" : count(in_flight(name_of(session), half.rank)),
            half.message_age_s == null ? "–" : `${seconds(half.message_age_s)} ago`,
            `${seconds(half.beat_age_s)} ago`,
            half.pid,
            half.generation,
            half.memory_bytes ? bytes(half.memory_bytes) : "–",
            half.memory || "–",
            session.namespace.slice(0, 12),
          ]),
          ...session.ranks
            .filter((rank) => !session.halves.some((half) => half.rank === rank))
            .map((rank) => [<span class="verdict-fail">missing</span>, `rank ${rank}`, name_of(session), ...Array(10).fill("–")]),
        ])}
      />
    </Panel>
  );
};

const Funnel = ({ pipeline }) => {
  const wanted = pipeline.hit_tokens + pipeline.missed_tokens;
  const tiers = entries(pipeline.journal.hit_tokens);
  const loaded = pipeline.journal.load_tokens.done ?? 0;
  return (
    <Panel title="Hits, in tokens" note="Since this start. Wanted: beyond what engines had themselves.">
      <Bars
        whole={wanted}
        rows={[
          ["wanted", wanted, count(wanted)],
          ["offered", pipeline.hit_tokens, `${count(pipeline.hit_tokens)} (${percent(pipeline.hit_tokens, wanted)})`],
          ...tiers.map(([tier, tokens]) => [`from ${tier}`, tokens, count(tokens)]),
          ["loaded", loaded, `${count(loaded)} (${percent(loaded, wanted)})`],
        ]}
      />
    </Panel>
  );
};

const Misses = ({ pipeline }) => {
  const misses = entries(pipeline.journal.miss_tokens).sort((a, b) => b[1] - a[1]);
  const requests = pipeline.journal.miss_requests;
  return (
    <Panel title="Why tokens missed" note="Each request's own reason: Requests.">
      <Table
        empty="Nothing has missed yet."
        columns={["reason", "tokens", "share", "whole requests"]}
        rows={misses.map(([reason, tokens]) => [
          <a href={`#/requests?reason=${reason}`}>{reason}</a>,
          count(tokens),
          percent(tokens, pipeline.missed_tokens),
          count(requests[reason]),
        ])}
      />
    </Panel>
  );
};

const Pool = ({ pool, pipeline }) => (
  <Panel title="Host pool">
    <Bars
      whole={pool.total_bytes}
      rows={[["used", pool.used_bytes, `${bytes(pool.used_bytes)} of ${bytes(pool.total_bytes)}`]]}
    />
    <Facts
      rows={[
        ["objects", `${count(pool.ready)} of ${count(pool.keys_max)}`],
        ["leased", `${count(pool.leased)} in ${count(pipeline.leases)} leases`],
        ["pinned", `${count(pool.pinned_hard)} hard (${bytes(pool.pinned_hard_bytes)}), ${count(pool.pinned_soft)} soft`],
        ["being written", count(pool.writing)],
        ["doomed", count(pool.doomed)],
        ["free slabs", `${count(pool.slabs_free)} of ${count(pool.slabs)}`],
      ]}
    />
  </Panel>
);

const Latency = ({ pipeline }) => (
  <Panel title="Latency by stage" note="Since this start. Percentiles are at most as much: bounds of buckets. fence: the engine's step; stage-in: lookups that waited for slower tiers.">
    <Table
      empty="No job has ended yet."
      columns={["stage", "p50", "p95", "p99", "mean"]}
      rows={[...entries(pipeline.stage_seconds), ["stage-in", pipeline.stage_in_seconds]]
        .map(([name, one]) => [name, one, total(one?.counts)])
        .filter(([, , n]) => n > 0)
        .map(([name, one, n]) => [
          name.replace("/", " "),
          ...[0.5, 0.95, 0.99].map((share) => seconds(quantile(one, share))),
          seconds(one.sum / n),
        ])}
    />
  </Panel>
);

const micro = (us) => (us ? `${us.toFixed(us < 10 ? 2 : 0)} µs` : "–");
const judged = (one) => {
  if (!one.load_us || !one.compute_us) return "not measured yet";
  const ratio = one.compute_us / one.load_us;
  return one.open ? "computing is faster: hits are withheld" : `loading is ${ratio.toFixed(1)} times as fast`;
};

const BreakEven = ({ pipeline }) => {
  const tokens = pipeline.journal.load_tokens.done ?? 0;
  return (
    <Panel
      title="Break-even"
      wide
      note={`Per token, lately: loading from the engine's step to the last rank's end, computing as the engine measures it${
        tokens ? `. A loaded token was ${bytes(pipeline.ledger.loaded_bytes / tokens)}` : ""
      }.`}
    >
      <Table
        empty="No engine has said yet what computing a token costs it; it does with its heartbeats, after its first prefills."
        columns={["engine", "loading a token", "computing a token", "so", "net time saved", "hits withheld", "tried all the same"]}
        rows={entries(pipeline.breaker).map(([name, one]) => [
          name,
          micro(one.load_us),
          micro(one.compute_us),
          judged(one),
          seconds(one.saved_s),
          count(one.withheld),
          count(one.trials),
        ])}
      />
    </Panel>
  );
};

// Bounds that are no reason of a request's or a job's.
const bounds = ({ admissions_dropped, tombstone_collapses, staging }) => [
  ["admissions_max", admissions_dropped],
  ["tombstones_max", tombstone_collapses],
  ...entries(staging).filter(([name]) => name.endsWith("_max")),
];

const Errors = ({ status }) => (
  <Panel title="Failures and refusals">
    <Table
      empty="None since this start."
      columns={["what", "count"]}
      rows={[
        ...entries(status.pipeline.ends).filter(([name]) => !name.includes("/done/")),
        ...entries(status.pipeline.ledger.reasons).filter(([name]) => name.startsWith("refused/")),
        ...entries(status.pipeline.declines).filter(([name]) => name !== "absent").map(([name, n]) => [`declined: ${name}`, n]),
        ...entries(status.pipeline.skips).filter(([name]) => name !== "stored").map(([name, n]) => [`not saved: ${name}, objects`, n]),
        ...bounds(status.pipeline).map(([name, n]) => [`bound hit: ${name}`, n]),
        ...entries(status.loop.attach_refused).map(([name, n]) => [`attach: ${name}`, n]),
        ...entries(status.loop.frames_refused).map(([name, n]) => [`frame: ${name}`, n]),
        ...status.pipeline.violations.map((text) => [`violation: ${text}`, 1]),
      ].filter(([, n]) => n)}
    />
  </Panel>
);

const Queues = ({ pipeline }) => (
  <Panel title="Queues">
    <Facts
      rows={[
        ["at the engine's step", count(pipeline.queues.fence)],
        ["loads waiting", count(pipeline.queues.load)],
        ["saves waiting", count(pipeline.queues.save)],
        ["being copied", count(pipeline.queues.copy)],
        ["oldest open job", pipeline.oldest_job_s ? seconds(pipeline.oldest_job_s) : "none"],
        ["outcomes not acknowledged", count(pipeline.outcomes_unacked)],
        ["sent again", count(pipeline.outcomes_resent)],
      ]}
    />
  </Panel>
);

const Loop = ({ loop }) => {
  const turns = total(loop.turn_seconds.counts);
  return (
    <Panel title="Control loop">
      <Facts
        rows={[
          ["turns", count(loop.turns)],
          ["p99 of a turn", `≤ ${seconds(quantile(loop.turn_seconds, 0.99))}`],
          ["mean", seconds(turns ? loop.turn_seconds.sum / turns : null)],
          ["longest", seconds(loop.longest_turn_s)],
          ["errors in handlers", count(loop.handler_errors)],
          ["log lines lost", count(loop.log_lines_lost)],
          ...entries(loop.message_seconds).map(([name, one]) => [`${name}, p99`, `≤ ${seconds(quantile(one, 0.99))}`]),
        ]}
      />
    </Panel>
  );
};

const stay = (residence, share) => (quantile(residence, share) == null ? "–" : `≤ ${seconds(quantile(residence, share))}`);

const Evictions = ({ pool, residence, series }) => (
  <Panel
    title="Evictions"
    note={
      total(residence.counts)
        ? "Stay: from entering the pool to eviction, in whole seconds. A request that misses one says how long ago it went."
        : "How long objects stay is told once some of this start's have been evicted."
    }
  >
    <Facts
      rows={[
        ["evicted", count(pool.evictions)],
        ["of these never loaded", `${count(pool.dropped_before_reuse)} (${percent(pool.dropped_before_reuse, pool.evictions)})`],
        ["half stayed", stay(residence, 0.5)],
        ["a tenth stayed", stay(residence, 0.1)],
      ]}
    />
    <Chart series={series} unit={rate} lines={[["evicted/s", "evicted", "--bad"]]} />
  </Panel>
);

const Prefixes = () => {
  const { data, error } = usePoll("prefixes?limit=10", 5000);
  return (
    <Panel title="Hottest prefixes" note={error || "Of the requests that are remembered."}>
      <Table
        empty="Nothing has hit yet."
        columns={["first chunk", "hits", "tokens", "longest", "last use", "engine"]}
        rows={data?.map((p) => [p.key.slice(0, 8), count(p.hits), count(p.hit_tokens), count(p.longest_tokens), `${seconds(p.last_use_s)} ago`, p.engine])}
      />
    </Panel>
  );
};

// Names of the sidecar's own, such as regions_free and total_bytes, with their numbers.
const told = (facts) =>
  entries(facts)
    .map(([name, value]) => `${name.replace(/_bytes$/, "").replaceAll("_", " ")} ${name.endsWith("_bytes") ? bytes(value) : typeof value === "number" ? count(value) : value}`)
    .join(", ");

const Tiers = ({ pipeline }) => (
  <Panel title="Slower tiers" wide note="Disk and remote stores, as configured in tiers.*.">
    <Table
      empty="None is configured."
      columns={["tier", "state", "reason of state", "facts", "calls open", "given up", "events"]}
      rows={(pipeline.tiers ?? []).map((tier) => [
        tier.name,
        tier.state,
        tier.reason,
        told(tier.facts),
        count(tier.calls_open),
        count(tier.calls_late),
        told(tier.counts),
      ])}
    />
  </Panel>
);

// How bytes travel, and what of it is not the best this machine could do.
const Paths = ({ status }) => {
  const { data, error } = usePoll("doctor", 30000);
  const { data: paths, error: unread } = usePoll("paths", 5000);
  const lines = (data ?? []).filter((line) => ["GPU", "NUMA", "RDMA", "huge pages", "locked memory"].includes(line.check));
  const places = [...new Set(status.sessions.flatMap((s) => s.halves.map((half) => half.memory)).filter(Boolean))];
  const nodes = entries(paths?.pool_nodes).map(([node, n]) => `node ${node}: ${bytes(n)}`);
  return (
    <Panel title="Paths of the bytes" wide note={error || unread || "Of the pool a sample of pages is asked where it lies; cards count everybody's bytes."}>
      <Facts
        rows={[
          ["engines' KV memory", places.join(", ") || "no engine is attached"],
          ["halves that left, their memory still mapped", count(status.loop.leaving_halves)],
          ["pool on NUMA nodes", nodes.join(", ") || paths?.pool_nodes_missing || "being asked"],
        ]}
      />
      {status.gpus?.length > 0 && (
        <Table
          columns={["GPU", "engines' memory mapped here", "held for copies", "free", "total"]}
          rows={status.gpus.map((gpu) => [gpu.device.slice(0, 16), bytes(gpu.mapped_bytes), bytes(gpu.staging_bytes), bytes(gpu.free_bytes), bytes(gpu.total_bytes)])}
        />
      )}
      <Table
        empty={paths?.nics_missing || "Being asked."}
        columns={["network card or RDMA port", "kind", "received", "sent"]}
        rows={[
          ...(paths?.nics ?? []).map((nic) => [nic.name, nic.kind, bytes(nic.received_bytes), bytes(nic.sent_bytes)]),
          ...(paths?.nics_left_out ? [[`${count(paths.nics_left_out)} more are not shown`, "", "", ""]] : []),
        ]}
      />
      <Table empty="Being examined." columns={["check", "verdict", "found"]} rows={lines.map((line) => [line.check, <span class={`verdict-${line.verdict}`}>{line.verdict}</span>, line.text])} />
    </Panel>
  );
};

export const Overview = ({ live }) => {
  const { status, series } = live;
  const { pipeline, pool, loop } = status;
  return (
    <div class="grid">
      <Glance status={status} series={series} />
      <Work progress={status.progress ?? []} ended={status.ended ?? []} />
      <Ranks status={status} />
      <Funnel pipeline={pipeline} />
      <Misses pipeline={pipeline} />
      <Pool pool={pool} pipeline={pipeline} />
      <Panel title="Tokens looked up">
        <Chart series={series} unit={rate} lines={[["hit/s", "hit", "--good"], ["missed/s", "missed", "--bad"]]} />
      </Panel>
      <Panel title="Throughput">
        <Chart series={series} unit={(v) => `${bytes(v)}/s`} lines={[["load", "loaded", "--good"], ["save", "saved", "--accent"]]} />
      </Panel>
      <Latency pipeline={pipeline} />
      <BreakEven pipeline={pipeline} />
      <Evictions pool={pool} residence={pipeline.residence_seconds} series={series} />
      <Curve curve={pipeline.journal.curve} />
      <Errors status={status} />
      <Queues pipeline={pipeline} />
      <Loop loop={loop} />
      <Prefixes />
      <Tiers pipeline={pipeline} />
      <Paths status={status} />
    </div>
  );
};
