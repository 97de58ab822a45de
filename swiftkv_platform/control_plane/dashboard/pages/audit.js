// The audit trail: changes and refused requests, with filters and pages.

import { html, useState } from "../vendor/htm-preact.js";
import { get } from "../api.js";
import { EmptyState, PageHeader, Loading, Problem, Table, formatCount, usePolling, formatTime } from "../parts.js";

const SHOWN = 50;
const OUTCOMES = {
  200: "OK",
  201: "created",
  202: "accepted",
  204: "no content",
  401: "unauthenticated",
  403: "forbidden",
  404: "not found",
  409: "conflict",
  412: "version changed",
  422: "invalid",
  429: "too many requests",
  500: "internal error",
  503: "unavailable",
};
/** Routes that are not in the OpenAPI document. */
const UNLISTED = ["/session", "unmatched"];

const classifyStatus = (status) => (status < 400 ? "succeeded" : [401, 403, 429].includes(status) ? "refused" : "undecided");
const PAGES = { job_: "jobs/", dep_: "deployments/", mdl_: "models?model=" };

/** The object of an entry, as a link if it has a page. */
function ObjectLink({ id }) {
  if (!id) return "";
  const page = PAGES[id.slice(0, 4)];
  return page ? html`<a href="#/${page}${id}"><code>${id}</code></a>` : html`<code>${id}</code>`;
}

const COLUMNS = [
  { name: "Time", whole: true, cell: (entry) => formatTime(entry.created_at) },
  { name: "Actor", cell: (entry) => (entry.actor ? html`<span>${entry.actor}${entry.credential && html`<br /><code class="quiet">${entry.credential}</code>`}</span>` : html`<span class="unknown">unknown</span>`) },
  { name: "Tenant", cell: (entry) => entry.tenant ?? "" },
  { name: "Address", cell: (entry) => html`<code>${entry.address}</code>` },
  { name: "Request", cell: (entry) => html`<code>${entry.method} ${entry.route}</code>` },
  { name: "Object", cell: (entry) => html`<${ObjectLink} id=${entry.about} />` },
  {
    name: "Outcome",
    cell: (entry) => html`<span><span class="status ${classifyStatus(entry.status)}">${entry.status} ${OUTCOMES[entry.status]}</span>${entry.left_out > 0 && html`<br /><span class="quiet small">${formatCount(entry.left_out)} earlier refusals not recorded</span>`}</span>`,
  },
];

const FIELDS = ["actor", "route", "status", "since", "until"];
const NONE = Object.fromEntries(FIELDS.map((name) => [name, ""]));

/** The query of a selection; times are given in the browser's time zone. */
function buildQuery(wanted, after) {
  const query = new URLSearchParams({ limit: SHOWN });
  for (const name of FIELDS) {
    const value = wanted[name];
    if (value) query.set(name, name === "since" || name === "until" ? new Date(value).getTime() / 1000 : value);
  }
  if (after) query.set("after", after);
  return query;
}

function FilterForm({ wanted, onChange, routes }) {
  const [draft, setDraft] = useState(wanted);
  const field = (name) => ({ name, value: draft[name], onInput: (event) => setDraft({ ...draft, [name]: event.target.value }) });
  const submit = (event) => {
    event.preventDefault();
    onChange(Object.fromEntries(FIELDS.map((name) => [name, draft[name].trim()])));
  };
  const clear = () => {
    setDraft(NONE);
    onChange(NONE);
  };
  return html`<form class="toolbar selection" onSubmit=${submit} aria-label="Filter entries">
    <label>Actor <input ...${field("actor")} maxlength="300" size="12" /></label>
    <label>Route <input ...${field("route")} maxlength="300" size="24" list="routes" placeholder="/jobs/{job_id}/cancel" /></label>
    <datalist id="routes">${routes.map((route) => html`<option value=${route}></option>`)}</datalist>
    <label>Outcome
      <select ...${field("status")}>
        <option value="">any</option>
        ${Object.entries(OUTCOMES).map(([status, words]) => html`<option value=${status}>${status} ${words}</option>`)}
      </select>
    </label>
    <label>From <input ...${field("since")} type="datetime-local" /></label>
    <label>Until <input ...${field("until")} type="datetime-local" /></label>
    <span class="row"><button>Show</button><button type="button" class="plain" onClick=${clear}>Clear</button></span>
  </form>`;
}

function Entries({ page, wanted, before, onTurn }) {
  const selected = FIELDS.some((name) => wanted[name]);
  const empty = html`<div class="panel"><${EmptyState} title=${selected ? "No matching entries" : "No entries yet"}>
    ${selected ? "Actor, route and outcome must match exactly. Times are in your time zone." : "Changes and refused requests will appear here."}
  <//></div>`;
  return html`<${Table} caption="Audit trail, newest first" columns=${COLUMNS} rows=${page.data} empty=${empty} />
    ${(before.length > 0 || page.has_more) && html`<div class="toolbar below">
      <button class="plain" disabled=${!before.length} onClick=${() => onTurn(before.slice(0, -1))}>Newer</button>
      <button class="plain" disabled=${!page.has_more} onClick=${() => onTurn([...before, page.last_id])}>Older</button>
      <span class="end" role="status">Page ${formatCount(before.length + 1)}</span>
    </div>`}`;
}

export function Audit({ query }) {
  const [wanted, setWanted] = useState(Object.fromEntries(FIELDS.map((name) => [name, query.get(name) ?? ""])));
  const [before, setBefore] = useState([]); // the last entries of the pages before this one
  const asked = buildQuery(wanted, before.at(-1)).toString();
  const [page, problem, reload] = usePolling(() => get(`/audit?${asked}`), [asked], null);
  const [routes] = usePolling(async () => [...Object.keys((await get("/openapi.json")).paths), ...UNLISTED], [], null);
  const change = (next) => {
    setBefore([]);
    setWanted(next);
    if (buildQuery(next).toString() === asked) reload();
  };
  if (problem?.status === 403) {
    return html`<${PageHeader} title="Audit" />
      <div class="panel"><${EmptyState} title="No access with this key">${problem.message}. Operator keys can read the audit trail of all tenants. Keys with the scope admin can read the audit trail of their tenant.<//></div>`;
  }
  return html`<${PageHeader} title="Audit" />
    <p class="lead small">All requests that change something, and all refused requests.</p><br />
    <${FilterForm} wanted=${wanted} onChange=${change} routes=${routes ?? []} />
    <${Problem} problem=${problem} />
    ${page ? html`<${Entries} page=${page} wanted=${wanted} before=${before} onTurn=${setBefore} />` : !problem && html`<${Loading} what="the audit trail" />`}`;
}
