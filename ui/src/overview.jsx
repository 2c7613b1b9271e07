// The panels, in the order of their weight for an operator.
import { bytes, count, percent, quantile, seconds, total } from "./format.js";
import { usePoll } from "./live.js";
import { Bars, Chart, Facts, Panel, Table } from "./parts.jsx";

const entries = (object) => Object.entries(object ?? {});

const Ranks = ({ status }) => (
  <Panel title="Engines and ranks" wide>
    <Table
      empty="No engine is attached. Engines attach by themselves; see docs: When hits are missing."
      columns={["engine", "half", "state", "pid", "tp/pp", "generation", "last beat", "memory mapped", "namespace"]}
      rows={status.sessions.flatMap((session) => [
        ...session.halves.map((half) => [
          `${session.engine_id}/${session.instance_id}`,
          half.rank < 0 ? "scheduler" : `rank ${half.rank}`,
          (session.ready ? "ready" : half.registered ? "registered" : "attached") +
            (half.connected ? "" : ", disconnected"),
          half.pid,
          `${session.identity.tp_size ?? "?"}/${session.identity.pp_size ?? "?"}`,
          half.generation,
          `${seconds(half.beat_age_s)} ago`,
          half.memory_bytes ? bytes(half.memory_bytes) : "–",
          session.namespace.slice(0, 12),
        ]),
        ...session.ranks
          .filter((rank) => !session.halves.some((half) => half.rank === rank))
          .map((rank) => [`${session.engine_id}/${session.instance_id}`, `rank ${rank}`, "missing", "", "", "", "", "", ""]),
      ])}
    />
  </Panel>
);

const Funnel = ({ pipeline, series }) => {
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
      <Chart series={series} unit={count} lines={[["hit/s", "hit", "--good"], ["missed/s", "missed", "--bad"]]} />
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
      rows={[
        ["capacity", pool.total_bytes, bytes(pool.total_bytes)],
        ["used", pool.used_bytes, `${bytes(pool.used_bytes)} (${percent(pool.used_bytes, pool.total_bytes)})`],
      ]}
    />
    <Facts
      rows={[
        ["objects", `${count(pool.ready)} of ${count(pool.keys_max)}`],
        ["leased", `${count(pool.leased)} in ${count(pipeline.leases)} leases`],
        ["being written", count(pool.writing)],
        ["doomed", count(pool.doomed)],
        ["free slabs", `${count(pool.slabs_free)} of ${count(pool.slabs)}`],
      ]}
    />
  </Panel>
);

const Latency = ({ pipeline }) => (
  <Panel title="Latency by stage" note="Bounds of histogram buckets, since this start. fence: the engine's step.">
    <Table
      empty="No job has ended yet."
      columns={["stage", "p50", "p95", "p99", "mean"]}
      rows={entries(pipeline.stage_seconds)
        .map(([name, one]) => [name, one, total(one.counts)])
        .filter(([, , n]) => n > 0)
        .map(([name, one, n]) => [
          name.replace("/", " "),
          ...[0.5, 0.95, 0.99].map((share) => `≤ ${seconds(quantile(one, share))}`),
          seconds(one.sum / n),
        ])}
    />
  </Panel>
);

const BreakEven = ({ pipeline }) => {
  const copy = pipeline.stage_seconds["load/copy"];
  const tokens = pipeline.journal.load_tokens.done ?? 0;
  const ledger = pipeline.ledger;
  return (
    <Panel title="Break-even" note="Computing's own speed is known to the engine: compare with vllm:request_prefill_time_seconds.">
      <Facts
        rows={[
          ["loaded", `${count(tokens)} tokens, ${bytes(ledger.loaded_bytes)}`],
          ["at the copy engine", copy ? seconds(copy.sum) : "–"],
          ["tokens loaded per second of copying", copy?.sum ? count(tokens / copy.sum) : "–"],
          ["bytes per token", tokens ? bytes(ledger.loaded_bytes / tokens) : "–"],
        ]}
      />
    </Panel>
  );
};

const Errors = ({ status }) => (
  <Panel title="Failures and refusals">
    <Table
      empty="None since this start."
      columns={["what", "count"]}
      rows={[
        ...entries(status.pipeline.ends).filter(([name]) => !name.includes("/done/")),
        ...entries(status.pipeline.ledger.reasons).filter(([name]) => name.startsWith("refused/")),
        ...entries(status.pipeline.declines).filter(([name]) => name !== "absent").map(([name, n]) => [`declined: ${name}`, n]),
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
        ["oldest open job", seconds(pipeline.oldest_job_s)],
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

const Evictions = ({ pool, series }) => (
  <Panel title="Evictions" note="How long objects stay is not measured yet; a request that misses one says how long ago it went.">
    <Facts
      rows={[
        ["evicted", count(pool.evictions)],
        ["of these never loaded", `${count(pool.dropped_before_reuse)} (${percent(pool.dropped_before_reuse, pool.evictions)})`],
      ]}
    />
    <Chart series={series} unit={count} lines={[["evicted/s", "evicted", "--bad"]]} />
  </Panel>
);

const Prefixes = () => {
  const { data, error } = usePoll("prefixes?limit=10", 5000);
  return (
    <Panel title="Hottest prefixes" note={error}>
      <Table
        empty="Nothing has hit yet."
        columns={["first chunk", "engine", "hits", "tokens", "longest", "last use"]}
        rows={(data ?? []).map((p) => [p.key.slice(0, 12), p.engine, count(p.hits), count(p.hit_tokens), count(p.longest_tokens), `${seconds(p.last_use_s)} ago`])}
      />
    </Panel>
  );
};

const Tiers = ({ pipeline }) => (
  <Panel title="Slower tiers" note="Disk and remote stores, as configured in tiers.*.">
    <Table
      empty="None is configured."
      columns={["tier", "state", "reason", "calls open", "given up", "events"]}
      rows={(pipeline.tiers ?? []).map((tier) => [
        tier.name,
        tier.state,
        tier.reason,
        count(tier.calls_open),
        count(tier.calls_late),
        entries(tier.counts).map(([name, n]) => `${name} ${count(n)}`).join(", "),
      ])}
    />
  </Panel>
);

export const Overview = ({ live }) => {
  const { status, series } = live;
  const { pipeline, pool, loop } = status;
  const rates = [["load", "loaded", "--good"], ["save", "saved", "--accent"]];
  return (
    <div class="grid">
      <Ranks status={status} />
      <Funnel pipeline={pipeline} series={series} />
      <Misses pipeline={pipeline} />
      <Pool pool={pool} pipeline={pipeline} />
      <Panel title="Throughput">
        <Chart series={series} unit={(v) => `${bytes(v)}/s`} lines={rates} />
      </Panel>
      <Latency pipeline={pipeline} />
      <BreakEven pipeline={pipeline} />
      <Evictions pool={pool} series={series} />
      <Errors status={status} />
      <Queues pipeline={pipeline} />
      <Loop loop={loop} />
      <Prefixes />
      <Tiers pipeline={pipeline} />
    </div>
  );
};
