// What the sidecar says: a stream of its status and its log, and questions on demand.
import { useEffect, useState } from "preact/hooks";

const KEPT = 300; // points of the charts: five minutes
let base = "../"; // of the node that is shown

// Which nodes there are, and which one the address chooses; a sidecar names only itself.
export const open = async () => {
  const asked = new URLSearchParams(location.search).get("node");
  try {
    const nodes = await (await fetch("../api/v1/nodes")).json();
    const chosen = nodes.find(({ name }) => name === asked) ?? nodes[0];
    base = chosen.base;
    return { nodes, chosen: chosen.name };
  } catch {
    return { nodes: [{ name: "", base }], chosen: "" };
  }
};

export const bundle = () => `${base}debug/bundle`;

export const get = async (path, from = base) => {
  const answer = await fetch(`${from}api/v1/${path}`);
  const body = await answer.json();
  if (!answer.ok) throw new Error(`${body.message}; ${body.remedy}`);
  return body;
};

export const act = async (name, body, token) => {
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const answer = await fetch(`${base}api/v1/actions/${name}`, { method: "POST", headers, body: JSON.stringify(body) });
  const told = await answer.json();
  if (!answer.ok) throw new Error(`${told.message}; ${told.remedy}`);
  return told;
};

const SILENT_S = 5; // the status comes once a second
const AGAIN_MS = 3000; // browsers give a stream up that was refused, as behind a proxy

// The status, once a second; `series` holds rates between two of them.
export const useLive = () => {
  const [live, set] = useState({ status: null, trouble: "connecting", events: null, series: [] });
  useEffect(() => {
    get("events").then((events) => set((old) => ({ ...old, events })), () => {});
    let source, again;
    let heard = Date.now();
    const told = (trouble) => set((old) => ({ ...old, trouble }));
    const listen = () => {
      source = new EventSource(`${base}api/v1/stream`);
      source.addEventListener("status", (message) => {
        heard = Date.now();
        const status = JSON.parse(message.data);
        set((old) => ({ ...old, status, trouble: "", series: extend(old.series, old.status, status) }));
      });
      source.addEventListener("log", (message) => {
        const event = JSON.parse(message.data);
        set((old) => ({ ...old, events: [...(old.events ?? []).slice(-499), event] }));
      });
      source.addEventListener("unavailable", (message) => {
        heard = Date.now();
        told(JSON.parse(message.data));
      });
      source.onerror = () => {
        told("the sidecar does not answer; trying again");
        if (source.readyState === EventSource.CLOSED) again = setTimeout(listen, AGAIN_MS);
      };
    };
    listen();
    // A process that stands still, or a connection that died, ends no stream.
    const watch = setInterval(() => {
      const silent_s = (Date.now() - heard) / 1000;
      if (silent_s > SILENT_S && source.readyState === EventSource.OPEN)
        told(`no word from the sidecar for ${silent_s.toFixed(0)} s: what is shown is old`);
    }, 1000);
    return () => {
      clearInterval(watch);
      clearTimeout(again);
      source.close();
    };
  }, []);
  return live;
};

const extend = (series, before, after) => {
  if (!before || before.epoch !== after.epoch) return series;
  const span = Math.max(after.uptime_s - before.uptime_s, 0.1);
  const rate = (read) => Math.max(0, (read(after) - read(before)) / span);
  const point = {
    at: Date.now() / 1000,
    loaded: rate((s) => s.pipeline.ledger.loaded_bytes),
    saved: rate((s) => s.pipeline.ledger.saved_bytes),
    hit: rate((s) => s.pipeline.hit_tokens),
    missed: rate((s) => s.pipeline.missed_tokens),
    evicted: rate((s) => s.pool.evictions),
  };
  return [...series.slice(1 - KEPT), point];
};

// Ask again and again while the panel is shown.
export const usePoll = (path, every_ms = 2000, from = undefined) => {
  const [answer, set] = useState({ data: null, error: "" });
  useEffect(() => {
    let shown = true;
    const ask = () =>
      get(path, from).then(
        (data) => shown && set({ data, error: "" }),
        (error) => shown && set((old) => ({ ...old, error: String(error.message) })),
      );
    ask();
    const timer = setInterval(ask, every_ms);
    return () => {
      shown = false;
      clearInterval(timer);
    };
  }, [path, every_ms, from]);
  return answer;
};
