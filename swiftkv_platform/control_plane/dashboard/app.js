// The shell: routing, sign-in and the page frame. Pages live in pages/.

import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { get, send } from "./api.js";
import { EmptyState, PageHeader, Loading, Problem, Toasts, usePolling } from "./parts.js";
import { Audit } from "./pages/audit.js";
import { Deployment } from "./pages/deployment.js";
import { Deployments } from "./pages/deployments.js";
import { Files } from "./pages/files.js";
import { Job } from "./pages/job.js";
import { Jobs } from "./pages/jobs.js";
import { Model } from "./pages/model.js";
import { Models } from "./pages/models.js";
import { Overview } from "./pages/overview.js";
import { Playground } from "./pages/playground.js";
import { Runs } from "./pages/runs.js";
import { Submit } from "./pages/submit.js";
import { Traffic } from "./pages/traffic.js";
import { ThemeSwitch } from "./theme.js";

const PAGES = [
  { path: /^overview$/, page: Overview, title: "Overview" },
  { path: /^jobs$/, page: Jobs, title: "Jobs" },
  { path: /^jobs\/(\w+)$/, page: Job },
  { path: /^runs$/, page: Runs, section: "jobs" },
  { path: /^submit$/, page: Submit, title: "New job" },
  { path: /^files$/, page: Files, title: "Files" },
  { path: /^models$/, page: Models, title: "Models" },
  { path: /^models\/(\w+)$/, page: Model },
  { path: /^deployments$/, page: Deployments, title: "Deployments" },
  { path: /^deployments\/(\w+)$/, page: Deployment },
  { path: /^traffic\/(\w+)$/, page: Traffic, section: "deployments" },
  { path: /^playground$/, page: Playground, title: "Playground" },
  { path: /^audit$/, page: Audit, title: "Audit" },
];
const MENU = ["overview", "jobs", "submit", "files", "models", "deployments", "playground"];
const OPERATOR_MENU = ["audit"];

/** The page of the address. Addresses with the same `key` differ in the chosen tab only. */
function parseRoute() {
  const [path, words] = location.hash.replace(/^#\/?/, "").split("?");
  const query = new URLSearchParams(words);
  const tab = query.get("tab");
  query.delete("tab");
  for (const { path: pattern, page, section } of PAGES) {
    const match = pattern.exec(path || "overview");
    if (match) return { page, section: section ?? match[0].split("/")[0], id: match[1], query, tab, key: `${match[0]}?${query}` };
  }
  return null;
}

function SignIn({ onDone }) {
  const [problem, setProblem] = useState(null);
  async function submit(event) {
    event.preventDefault();
    try {
      await send("POST", "/session", { api_key: new FormData(event.target).get("key") });
      onDone();
    } catch (error) {
      setProblem(error);
    }
  }
  return html`<form class="panel" onSubmit=${submit}>
    <${PageHeader} title="Sign in" />
    <p>This server requires an API key. <code>swiftkv keys create</code> creates one.</p>
    <p class="row bottom">
      <label>API key <input name="key" type="password" autocomplete="off" required size="40" /></label>
      <button>Sign in</button>
    </p>
    <${Problem} problem=${problem} />
  </form>`;
}

const SERVICES = { ray: "Ray", object_store: "The object store", database: "The database" };

/** Warns that services are unavailable: pages may show old data, and jobs wait. */
function UnavailableServices() {
  const [, problem] = usePolling(() => get("/readyz"), [], 10000);
  const parts = problem?.status === 503 ? problem.errors : [];
  return parts.length > 0 && html`<div class="problem" role="status"><strong>Some services are unavailable. Pages may show old data, and jobs wait.</strong>
    ${parts.map(({ field, message }) => html`<p>${SERVICES[field] ?? field}: ${message}</p>`)}</div>`;
}

/** Focus the page's search on Ctrl K or Cmd K. */
function focusSearch(event) {
  const field = document.querySelector("[data-search]");
  if (!field || event.key !== "k" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  field.focus();
}

const focusMain = () => document.getElementById("main").focus();

// The fragment names the page, so this link must not be followed.
const SkipLink = () => html`<a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), focusMain())}>Skip to content</a>`;

function App() {
  const [shown, setShown] = useState(parseRoute());
  const [open, setOpen] = useState(null);
  const [{ session, reads_audit: readsAudit }, setSession] = useState({ session: null, reads_audit: false });
  async function checkAccess() {
    try {
      setSession(await get("/session"));
      await send("GET", "/jobs?limit=1");
      setOpen(true);
    } catch (error) {
      setOpen(error.status !== 401);
    }
  }
  async function signOut() {
    await send("DELETE", "/session");
    location.reload();
  }
  useEffect(() => {
    checkAccess();
    const changed = () => {
      const next = parseRoute();
      setShown(next);
      if (!next?.tab) focusMain(); // so that screen readers read the new page
    };
    addEventListener("hashchange", changed);
    addEventListener("keydown", focusSearch);
    return () => {
      removeEventListener("hashchange", changed);
      removeEventListener("keydown", focusSearch);
    };
  }, []);
  const link = (section) => {
    const { title } = PAGES.find(({ path }) => path.test(section));
    return html`<a href="#/${section}" aria-current=${shown?.section === section ? "page" : null}>${title}</a>`;
  };
  const menu = open && readsAudit ? [...MENU, ...OPERATOR_MENU] : MENU;
  let page = html`<${PageHeader} title="Page not found" /><${EmptyState} title="There is no page at this address"><a href="#/overview">Go to the overview</a><//>`;
  if (open === null) page = html`<${Loading} what="the dashboard" />`;
  else if (!open) page = html`<${SignIn} onDone=${checkAccess} />`;
  else if (shown) page = html`<${shown.page} key=${shown.key} id=${shown.id} query=${shown.query} tab=${shown.tab} />`;
  return html`<${SkipLink} /><header><strong>SwiftKV</strong><nav aria-label="Pages">${menu.map(link)}</nav>
      <span class="end"><${ThemeSwitch} />${session && html`<button class="plain" onClick=${signOut}>Sign out ${session.name}</button>`}</span></header>
    <main id="main" tabindex="-1">${open && html`<${UnavailableServices} />`}${page}</main><${Toasts} />`;
}

render(html`<${App} />`, document.getElementById("root"));
