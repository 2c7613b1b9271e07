// The page: a strip that is always there, and one view at a time, named by the address.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useLive } from "./live.js";
import { Actions, Doctor, Events, Namespaces, Settings, Strip } from "./node.jsx";
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

const View = ({ view, rest, query, live }) => {
  const { status } = live;
  if (view === "requests") return rest ? <Request name={rest} key={rest} /> : <Requests query={query} />;
  if (view === "flight") return <InFlight />;
  if (view === "events") return <Events events={live.events} />;
  if (view === "settings") return <Settings />;
  if (view === "actions") return <Actions />;
  if (!status) return <p>{live.trouble}</p>;
  if (view === "namespaces") return <Namespaces status={status} />;
  if (view === "doctor") return <Doctor status={status} />;
  return <Overview live={live} />;
};

const Page = () => {
  const live = useLive();
  const address = useAddress();
  return (
    <>
      <header>
        <h1>kvferry</h1>
        <nav aria-label="views">
          {VIEWS.map(([name, title]) => (
            <a key={name} href={`#/${name}`} aria-current={address.view === name ? "page" : undefined}>
              {title}
            </a>
          ))}
        </nav>
        <Strip status={live.status} trouble={live.trouble} />
      </header>
      <main>
        <View {...address} live={live} />
      </main>
    </>
  );
};

render(<Page />, document.getElementById("page"));
