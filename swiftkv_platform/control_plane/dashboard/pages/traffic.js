// Captured traffic of a deployment: settings, size by day, newest requests, and deletion.

import { html, useState } from "../vendor/htm-preact.js";
import { get, patch, remove } from "../api.js";
import { EmptyState, FactList, Meter, ObjectPage, PageHeader, CopyableId, LoadingOrProblem, Problem, formatBytes, formatCount, formatPercent, formatTime, showToast, useAction, usePolling } from "../parts.js";

const EVERY_MS = 10000;
const SHOWN = 20;
const EXCERPT_CHARS = 80;
const KINDS = { email: "email addresses", phone: "phone numbers", credit_card: "credit cards", ip_address: "IP addresses", secret: "keys and passwords" };
const PLACEHOLDER = new RegExp(`(\\[(?:${Object.keys(KINDS).join("|")})\\])`);
const GIB = 1024 ** 3;

/** A text with its redacted passages marked. */
const RedactedText = ({ text }) => text.split(PLACEHOLDER).map((part, i) => (i % 2 ? html`<mark title="Redacted before storage">${part}</mark>` : part));

const describeSettings = ({ share, retention_days: days, max_bytes: most }) => `${formatPercent(share)} of requests, kept for ${formatCount(days)} days, at most ${formatBytes(most)}`;

function SettingsForm({ deployment, onDone }) {
  const [act, busy, problem] = useAction();
  const { capture } = deployment;
  const change = (body, done) =>
    act(async () => {
      await patch(`/deployments/${deployment.id}`, { capture: body }, { "If-Match": `"${deployment.version}"` });
      showToast(done);
      onDone();
    });
  const submit = (event) => {
    event.preventDefault();
    const fields = new FormData(event.target);
    const settings = { share: Number(fields.get("share")) / 100, retention_days: Number(fields.get("days")), max_bytes: Math.round(Number(fields.get("most")) * GIB), redact: fields.getAll("redact") };
    change(settings, "Settings accepted. Replicas apply them without a restart.");
  };
  const erase = () => confirm("Stop capturing and delete all captured requests of this deployment? This cannot be undone.") && change(null, "Capturing stopped. Captured requests are being deleted.");
  return html`<section class="panel"><h2>Settings</h2>
    <p class="quiet small">${capture ? "Replicas store a share of the requests with their answers. Requests with store: false are never captured." : "Nothing is captured. Store a share of the requests with their answers to train and compare models on them."}</p>
    <${Problem} problem=${problem} />
    <form onSubmit=${submit} aria-label="Capture settings">
      <div class="row">
        <label>Share, % <input name="share" type="number" min="0" max="100" step="any" defaultValue=${capture ? 100 * capture.share : 10} required /></label>
        <label>Days kept <input name="days" type="number" min="1" max="3650" defaultValue=${capture?.retention_days ?? 30} required /></label>
        <label>Max GiB <input name="most" type="number" min="0.001" step="any" defaultValue=${(capture?.max_bytes ?? GIB) / GIB} required /></label>
      </div>
      <p class="row" role="group" aria-label="Redact">Redact:
        ${Object.entries(KINDS).map(([kind, words]) => html`<label class="check"><input type="checkbox" name="redact" value=${kind} defaultChecked=${capture?.redact.includes(kind) ?? true} />${words}</label>`)}
      </p>
      <p class="row"><button disabled=${busy}>${capture ? "Change" : "Start capturing"}</button>
        ${capture && html`<button type="button" class="danger" disabled=${busy} onClick=${erase}>Stop and delete all</button>`}</p>
    </form></section>`;
}

function SizePanel({ traffic }) {
  const { capture, days } = traffic;
  const largest = Math.max(...days.map((day) => day.bytes));
  return html`<section class="panel"><h2>Stored</h2>
    <${FactList} of=${{
      capture: capture ? describeSettings(capture) : "off",
      redacted: capture && (capture.redact.map((kind) => KINDS[kind] ?? kind).join(", ") || "nothing"),
      "pending deletions": traffic.pending_deletions.length,
    }} />
    <${Meter} name="All days" value=${traffic.bytes} max=${capture?.max_bytes} format=${formatBytes} />
    ${days.map((day) => html`<${Meter} key=${day.day} name=${day.day} value=${day.bytes} max=${null} format=${formatBytes} note=${html`<progress class="wide" max=${largest} value=${day.bytes} aria-label="Share of ${day.day}"></progress>`} />`)}
  </section>`;
}

function Turn({ message }) {
  return html`<div class="turn ${message.role}"><span class="who">${message.role}</span>${message.content && html`<${RedactedText} text=${message.content} />`}
    ${message.tool_calls?.map(({ function: called }) => html`<div><b>calls ${called.name}</b>(<${RedactedText} text=${called.arguments} />)</div>`)}</div>`;
}

/** Beginning of the last text before the answer. */
const findQuestion = (messages) => (messages.slice(0, -1).findLast(({ content }) => content)?.content ?? "").slice(0, EXCERPT_CHARS);

function CapturedRequest({ row, busy, onDelete }) {
  const messages = row.messages ?? [{ role: "user", content: row.prompt }, { role: "assistant", content: row.completion }];
  return html`<li>
    <details><summary>${formatTime(row.time)} <span class="quiet">${findQuestion(messages)}</span></summary>
      <div class="turns">${messages.map((message) => html`<${Turn} message=${message} />`)}</div>
      ${row.tools && html`<details><summary>${formatCount(row.tools.length)} tools</summary><pre tabindex="0" role="region" aria-label="Tools">${JSON.stringify(row.tools, null, 2)}</pre></details>`}
    </details>
    <span><button class="danger" disabled=${busy} aria-label="Delete request ${row.id}" onClick=${() => onDelete({ request_id: row.id }, `request ${row.id}`)}>Delete</button></span>
    <span class="sub">${row.path} · ${row.model} · ${formatCount(row.prompt_tokens)} + ${formatCount(row.completion_tokens)} tokens · ${row.finish_reason}
      ${row.user && ` · user ${row.user}`} ${row.redacted > 0 && ` · ${formatCount(row.redacted)} redacted`} <${CopyableId} text=${row.id} quiet /></span>
  </li>`;
}

/** Newest requests, page by page. They are loaded once, since each reading is in the audit trail. */
function Requests({ id, onDeleted }) {
  const [user, setUser] = useState("");
  const [before, setBefore] = useState([]); // the positions of the pages before this one
  const [act, busy, refusal] = useAction();
  const query = new URLSearchParams({ limit: SHOWN, ...(user && { user }), ...(before.length && { after: before.at(-1) }) });
  const [page, problem, reload] = usePolling(() => get(`/deployments/${id}/traffic/rows?${query}`), [id, `${query}`], null);
  const erase = (condition, what) => {
    if (!confirm(`Delete ${what} from captured traffic? Later jobs do not see it. This cannot be undone.`)) return;
    act(async () => {
      await remove(`/deployments/${id}/traffic?${new URLSearchParams(condition)}`);
      showToast(`Deleted ${what}.`);
      await reload();
      onDeleted();
    });
  };
  const submit = (event) => {
    event.preventDefault();
    setBefore([]);
    setUser(new FormData(event.target).get("user").trim());
  };
  const empty = user ? "None of the requests on this page is of this user." : "Requests appear seconds after they have ended.";
  return html`<section class="panel"><h2>Newest requests</h2>
    <p class="quiet small">Reading them is recorded in the audit trail. Redacted passages are marked.</p>
    <form class="toolbar" onSubmit=${submit} aria-label="Select requests">
      <label>End user <input name="user" maxlength="512" size="24" /></label>
      <button class="plain">Show</button>
      ${user && html`<button type="button" class="danger" disabled=${busy} onClick=${() => erase({ user }, `all requests of user ${user}`)}>Delete all of this user</button>`}
    </form>
    <${Problem} problem=${refusal} />
    ${page
      ? html`<${Problem} problem=${problem} />${page.data.length
          ? html`<ul class="items">${page.data.map((row) => html`<${CapturedRequest} key=${row.id} row=${row} busy=${busy} onDelete=${erase} />`)}</ul>`
          : html`<${EmptyState} title="No captured requests">${empty}<//>`}
        ${(before.length > 0 || page.has_more) && html`<div class="toolbar below">
          <button class="plain" disabled=${!before.length} onClick=${() => setBefore(before.slice(0, -1))}>Newer</button>
          <button class="plain" disabled=${!page.has_more} onClick=${() => setBefore([...before, page.last_id])}>Older</button></div>`}`
      : html`<${LoadingOrProblem} what="captured requests" problem=${problem} />`}
  </section>`;
}

const loadTraffic = async (id) => {
  const [deployment, traffic] = await Promise.all([get(`/deployments/${id}`), get(`/deployments/${id}/traffic`)]);
  return { deployment, traffic };
};

export const Traffic = ({ id }) => html`<${ObjectPage} what="deployment" id=${id} parent=${["deployments", "Deployments"]} load=${() => loadTraffic(id)} everyMs=${EVERY_MS} page=${TrafficPage} />`;

function TrafficPage({ value: { deployment, traffic }, problem, onChange }) {
  return html`<${PageHeader} title="Captured traffic" parent=${[`deployments/${deployment.id}`, `Deployment ${deployment.route_prefix}`]} />
    <${Problem} problem=${problem} />
    <div class="grid"><${SettingsForm} key=${deployment.version} deployment=${deployment} onDone=${onChange} /><${SizePanel} traffic=${traffic} /></div><br />
    <${Requests} key=${deployment.id} id=${deployment.id} onDeleted=${onChange} />`;
}
