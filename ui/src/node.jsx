// The node: namespaces and their geometry, events, settings, doctor, actions.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { bytes, count, percent, seconds } from "./format.js";
import { act, bundle, usePoll } from "./live.js";
import { Panel, Table } from "./parts.jsx";

const Chunks = ({ group, tokens }) => {
  const width = 1000;
  const scale = width / Math.max(tokens, 1);
  return (
    <svg class="chunks" viewBox={`0 0 ${width} 22`} role="img" aria-label={`chunks of group ${group.group}`}>
      <rect class="all" x={0} y={3} width={Math.min(width, group.chunks * group.block_tokens * scale)} height={16} />
      <rect
        class="needed"
        x={group.first * group.block_tokens * scale}
        y={3}
        width={Math.max(0, (group.chunks - group.first) * group.block_tokens * scale)}
        height={16}
      />
    </svg>
  );
};

const Geometry = ({ session }) => {
  const [tokens, setTokens] = useState(4096);
  const name = `${session.engine_id}/${session.instance_id}`;
  const path = `groups?engine=${encodeURIComponent(name)}&tokens=${tokens}`;
  const { data, error } = usePoll(path, 10000);
  return (
    <Panel title={`Geometry of ${name}`} wide note={error || "Filled: the chunks that a hit of this length needs."}>
      <label>
        a hit of{" "}
        <input type="number" min={1} max={1000000} value={tokens} onChange={(e) => setTokens(Number(e.target.value) || 1)} /> tokens
      </label>
      {(data ?? []).map((group) => (
        <div key={group.group}>
          <p>
            group {group.group}: {group.kind}, blocks of {group.block_tokens} tokens
            {group.window_tokens ? `, window ${group.window_tokens}` : ""}, saved: {group.save_rule}, {bytes(group.stripe_bytes)} a
            chunk; needs {count(group.chunks - group.first)} of {count(group.chunks)} chunks
            {group.eagle ? "; a drafter drops the last" : ""}
          </p>
          <Chunks group={group} tokens={tokens} />
        </div>
      ))}
    </Panel>
  );
};

const Held = ({ pool }) => {
  const { data, error } = usePoll("namespaces", 3000);
  return (
    <Panel title="Held in the pool" wide note={error || "Quotas and times to live: docs, namespaces.rules. To drop or pin a namespace: Actions."}>
      <Table
        empty="The pool is empty."
        columns={["namespace", "last engine", "model", "tenant", "objects", "bytes", "of the pool", "quota", "time to live"]}
        rows={data?.map((n) => [
          n.namespace.slice(0, 16) || "not known",
          n.engine || "–",
          n.model || "–",
          n.tenant || "–",
          count(n.objects),
          bytes(n.total_bytes),
          percent(n.total_bytes, pool.total_bytes),
          n.quota_bytes ? `${bytes(n.quota_bytes)} (${percent(n.total_bytes, n.quota_bytes)} full)` : "none",
          n.ttl_s ? seconds(n.ttl_s) : "none",
        ])}
      />
    </Panel>
  );
};

export const Namespaces = ({ status }) => (
  <div class="grid">
    <Held pool={status.pool} />
    <Panel title="Namespaces of engines" wide>
      <Table
        empty="No engine is attached."
        columns={["namespace", "engine", "model", "tokens of a block", "saved", "not shared because"]}
        rows={status.sessions.map((s) => [s.namespace.slice(0, 16), `${s.engine_id}/${s.instance_id}`, s.identity.model ?? "", s.block_tokens.join(", "), s.save_rules.join(", "), s.notes.join(" ")])}
      />
    </Panel>
    {status.sessions.filter((s) => s.ready).map((s) => <Geometry key={s.engine_id + s.instance_id} session={s} />)}
  </div>
);

export const Events = ({ events }) => (
  <Panel title="Events" wide>
    <Table
      empty="None yet."
      columns={["time", "level", "event", "facts"]}
      rows={events && [...events].reverse().map(({ timestamp, level, event, part, ...facts }) => [
        (timestamp ?? "").slice(11, 23),
        level,
        `${part}: ${event}`,
        Object.entries(facts).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(" "),
      ])}
    />
  </Panel>
);

export const Settings = () => {
  const { data, error } = usePoll("config", 10000);
  const drift = usePoll("config/drift", 10000);
  const { file, settings = [], error: unreadable } = drift.data ?? {};
  return (
    <div class="grid">
      <Panel title="Not as on disk" wide note={drift.error || unreadable || `Compared with ${file ? `${file}, ` : ""}the environment and the flags, as they are now.`}>
        <Table
          empty={drift.data && !unreadable ? "Nothing: what runs is what is written." : "Not known."}
          columns={["key", "runs with", "on disk", "from", "takes effect"]}
          rows={settings.map((row) => [row.key, row.running, row.on_disk, row.origin, row.needs_restart ? "after a restart" : "when it is read again (reload)"])}
        />
      </Panel>
      <Panel title="Settings in effect" wide note={error}>
        <Table empty="None." columns={["key", "value", "from"]} rows={data?.map((row) => [row.key, row.value, row.origin])} />
      </Panel>
    </div>
  );
};

export const Doctor = ({ status }) => {
  const { data, error } = usePoll("doctor", 30000);
  return (
    <Panel title="Doctor" wide note={error}>
      <p>
        <a href={bundle()} download>
          Download a support bundle
        </a>
      </p>
      <Table
        empty="Not examined yet."
        columns={["verdict", "check", "found", "remedy"]}
        rows={[
          ...Object.entries(status.degraded ?? {}).map(([what, text]) => ["degraded", what, text, ""]),
          ...(data ?? []).map((line) => [<span class={`verdict-${line.verdict}`}>{line.verdict}</span>, line.check, line.text, line.remedy]),
        ]}
      />
    </Panel>
  );
};

const ACTIONS = [
  ["release-stale", "Release leases that no job owns and nothing confirmed for 5 s.", { idle_s: 5 }],
  ["clear-pool", "Drop every object that is neither leased nor being written.", {}],
  ["reload", "Read the configuration again.", {}],
  ["log-level", "Log everything (debug) until the next reload.", { level: "debug" }],
  ["pause-saves", "Refuse new saves, for example before weights change; loads go on.", {}],
  ["resume-saves", "Take saves again.", {}],
  ["flush", "Try paused tiers at once, and write on what waits for slower tiers.", {}],
  ["drain", "Take no new work, end what is in flight, and exit.", {}],
];

// Carry an action out; one that works page by page is asked again until it has seen all of the pool.
const whole = async (name, body, token) => {
  let all = await act(name, body, token);
  for (let told = all; told.next != null; ) {
    told = await act(name, { ...body, first: told.next }, token);
    all = { ...told, objects: all.objects + told.objects, bytes: all.bytes + told.bytes, refused: all.refused + told.refused };
  }
  return all;
};

const Action = ({ name, title = name, text, body, token, children }) => {
  const [planned, plan] = useState(null);
  const [told, tell] = useState("");
  const box = useRef(null);
  const was = useRef(null);
  // Whoever has no mouse goes on where the button was: at "Leave it", and afterwards at the button.
  useLayoutEffect(() => {
    if (planned || was.current) box.current.querySelector("button:last-of-type").focus();
    was.current = planned;
  }, [planned]);
  const run = (dry_run) =>
    whole(name, { ...body, dry_run }, token).then(
      (did) => (dry_run ? plan(did) : (plan(null), tell(`done: ${JSON.stringify(did)}`))),
      (error) => (plan(null), tell(error.message)),
    );
  return (
    <div class="action" ref={box}>
      <p class="what">
        <strong>{title}</strong> {text} {children}
      </p>
      {!planned && <button onClick={() => run(true)}>{title} …</button>}
      {planned && (
        <p role="alert" class="told">
          It would: <code>{JSON.stringify(planned)}</code>{" "}
          <button class="danger" onClick={() => run(false)}>
            Do it
          </button>{" "}
          <button onClick={() => plan(null)}>Leave it</button>
        </p>
      )}
      {told && (
        <p class="note told" role="status">
          {told}
        </p>
      )}
    </div>
  );
};

const PINS = [["hard", "Never evict them"], ["soft", "Evict them last"], ["none", "Unpin them"]];

// Objects of one namespace: dropped or pinned.
const Objects = ({ token }) => {
  const { data } = usePoll("namespaces", 10000);
  const [chosen, choose] = useState("");
  const [pin, setPin] = useState("hard");
  const fits = { namespace: chosen };
  if (!data?.length) return null;
  return (
    <>
      <h2>Objects of a namespace</h2>
      <div class="filters">
        <label>
          namespace{" "}
          <select value={chosen} onChange={(e) => choose(e.target.value)}>
            <option value="">choose one</option>
            {data.map((n) => (
              <option key={n.namespace} value={n.namespace}>
                {n.namespace.slice(0, 16)} {n.model} ({bytes(n.total_bytes)})
              </option>
            ))}
          </select>
        </label>
      </div>
      {chosen && (
        <div key={chosen}>
          <Action name="drop-objects" title="drop" text="Forget them in the pool and in slower tiers." body={{ fits, tiers: "all" }} token={token} />
          <Action name="pin-objects" title="pin" text="" body={{ fits, pin }} token={token} key={pin}>
            <select aria-label="pin" value={pin} onChange={(e) => setPin(e.target.value)}>
              {PINS.map(([value, text]) => (
                <option key={value} value={value}>
                  {text}
                </option>
              ))}
            </select>
          </Action>
        </div>
      )}
    </>
  );
};

// The coldest objects go until so much of the pool is used.
const Evict = ({ token }) => {
  const [to_percent, set] = useState(80);
  const clamped = (text) => Math.min(100, Math.max(0, Math.round(text)));
  return (
    <>
      <h2>Room in the pool</h2>
      <div class="filters">
        <label>
          percent to be used{" "}
          <input type="number" min="0" max="100" value={to_percent} onInput={(e) => set(clamped(e.target.value))} />
        </label>
      </div>
      <Action name="evict" text={`Evict what is coldest, neither leased nor pinned, until at most ${to_percent} % of the pool is used.`} body={{ to_percent }} token={token} key={to_percent} />
    </>
  );
};

export const Actions = () => {
  const [token, setToken] = useState("");
  return (
    <Panel title="Actions" wide note="Each is first only planned. Without a token: kvferry act ACTION, on the node.">
      <label>
        token of http.token_file <input type="password" autocomplete="off" value={token} onInput={(e) => setToken(e.target.value)} />
      </label>
      {ACTIONS.map(([name, text, body]) => (
        <Action key={name} name={name} text={text} body={body} token={token} />
      ))}
      <Evict token={token} />
      <Objects token={token} />
    </Panel>
  );
};

export const Strip = ({ status, trouble }) => (
  <p class="strip" role="status">
    <span class={`state state-${trouble ? "bad" : status?.state}`}>{trouble || status.state}</span>
    {status && (
      <>
        {Object.values(status.degraded ?? {}).map((text) => (
          <span key={text} class="state-bad">
            {text}
          </span>
        ))}
        <span>kvferry {status.kvferry}</span>
        <span>up {seconds(status.uptime_s)}</span>
        <span>epoch {status.epoch.slice(0, 8)}</span>
        <span>pid {status.pid}</span>
        <span>
          {status.sessions.filter((s) => s.ready).length} of {status.sessions.length} engines ready
        </span>
        {(status.pipeline?.tiers ?? []).filter((tier) => tier.facts.transport || tier.state !== "on").map((tier) => (
          <span key={tier.name} class={tier.state === "on" ? "" : "state-bad"}>
            {tier.name} {tier.state === "on" ? `over ${tier.facts.transport}` : tier.state}
          </span>
        ))}
        {status.traces && <span class={status.traces.error ? "state-bad" : ""}>traces {status.traces.error ? "are lost" : "on"}</span>}
        {(status.progress ?? []).map((work) => (
          <span key={work.name}>
            {work.name}: {percent(work.done, work.total)}
          </span>
        ))}
      </>
    )}
  </p>
);
