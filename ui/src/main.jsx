// The page: a strip that is always there, and one view at a time, named by the address.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { open, useLive, usePoll } from "./live.js";
import { Actions, Doctor, Events, Namespaces, Settings, Strip } from "./node.jsx";
import { nodeQuery, Nodes } from "./nodes.jsx";
import { Overview } from "./overview.jsx";
import { InFlight, Request, Requests } from "./requests.jsx";

const VIEWS = [
  ["", "Overview"],
  ["requests", "Requests"],
  ["flight", "In flight"],
  ["namespaces", "Namespaces"],
  ["events", "Events"],
  ["doctor", "Doctor"],
  ["settings", "Settings"],
  ["actions", "Actions"],
];

const useAddress = () => {
  const read = () => location.hash.replace(/^#\/?/, "");
  const [address, set] = useState(read());
  useEffect(() => {
    const changed = () => set(read());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  const [path, query] = address.split("?");
  const [view, ...rest] = path.split("/");
  return { view, rest: decodeURIComponent(rest.join("/")), query: new URLSearchParams(query) };
};

const View = ({ view, rest, query, live, nodes }) => {
  const { status } = live;
  if (view === "nodes") return <Nodes nodes={nodes} />;
  if (view === "requests") return rest ? <Request name={rest} key={rest} /> : <Requests query={query} />;
  if (view === "flight") return <InFlight traces={status?.traces} />;
  if (view === "events") return <Events events={live.events} />;
  if (view === "settings") return <Settings />;
  if (view === "actions") return <Actions />;
  if (!status) return <p>{live.trouble}</p>;
  if (view === "namespaces") return <Namespaces status={status} />;
  if (view === "doctor") return <Doctor status={status} />;
  return <Overview live={live} />;
};

// Another node is another address, so that it can be sent to somebody. One that went stays chosen.
const Selector = ({ nodes, chosen }) => (
  <label>
    node{" "}
    <select value={chosen} onChange={(event) => (location.search = nodeQuery(event.target.value))}>
      {[...new Set([...nodes.map(({ name }) => name), chosen])].map((name) => (
        <option key={name} value={name}>
          {name}
        </option>
      ))}
    </select>
  </label>
);

const NODES_MS = 10_000; // nodes come and go

const Page = ({ nodes: first, chosen }) => {
  const live = useLive();
  const nodes = usePoll("nodes", NODES_MS, "../").data ?? first;
  const address = useAddress();
  const views = nodes.length > 1 ? [["nodes", "Nodes"], ...VIEWS] : VIEWS;
  return (
    <>
      <header>
        <div class="bar-top">
          <h1>kvferry</h1>
          {nodes.length > 1 && <Selector nodes={nodes} chosen={chosen} />}
          <nav aria-label="views">
            {views.map(([name, title]) => (
              <a key={name} href={`#/${name}`} aria-current={address.view === name ? "page" : undefined}>
                {title}
              </a>
            ))}
          </nav>
        </div>
        <Strip status={live.status} trouble={live.trouble} />
      </header>
      <main>
        <View {...address} live={live} nodes={nodes} />
      </main>
    </>
  );
};

open().then((found) => render(<Page {...found} />, document.getElementById("page")));
