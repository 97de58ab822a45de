// One deployment: live metrics of its replicas, and changes without downtime.

import { html } from "../vendor/htm-preact.js";
import { fetchAll, get, patch, post } from "../api.js";
import { Chart, EmptyState, FactList, PageHeader, CopyableId, Loading, ObjectPage, Problem, ServingStatus, Snippet, Table, getDeploymentName, isServing, formatNumber, formatPercent, getModelName, describeReplicas, showToast, useAction, usePolling, formatTime } from "../parts.js";
import { EVERY_MS, WINDOW_S, computeRates, explainMissingRates, useSamples } from "../rates.js";

const CHARTS = [
  ["Tokens per second", ["generated tokens/s", "prompt tokens/s"]],
  ["Time to first token", ["time to first token, ms"]],
  ["Exit rate", ["exited early, %"]],
  ["KV cache", ["KV cache in use, %"]],
  ["Requests", ["running", "waiting"]],
];

/** Change the shown version of the deployment; a concurrent change is reported as a conflict, not overwritten. */
function useChange(deployment, onDone) {
  const [act, busy, problem] = useAction();
  const apply = async (body) => {
    await act(async () => {
      await patch(`/deployments/${deployment.id}`, body, { "If-Match": `"${deployment.version}"` });
      showToast("Change accepted. The replicas apply it without downtime.");
    });
    onDone();
  };
  return [apply, busy, problem];
}

const renderOptions = (models, except) => models.filter(({ id }) => id !== except).map(({ id, name }) => html`<option value=${id}>${name} (${id.slice(-6)})</option>`);

function SwapForm({ deployment, models, apply, busy }) {
  const submit = (event) => {
    event.preventDefault();
    apply({ model: new FormData(event.target).get("model") });
  };
  return html`<section class="panel"><h2>Swap model</h2>
    <p class="quiet small">The current model keeps serving while the new one loads. No request fails.</p>
    <form class="row" onSubmit=${submit} aria-label="Swap the model">
      <label>Model <select name="model" required><option value="">Select a model</option>${renderOptions(models, deployment.model)}</select></label>
      <button disabled=${busy}>Swap in</button>
    </form></section>`;
}

function CandidateForm({ deployment, models, apply, busy }) {
  const { candidate } = deployment;
  const submit = (event) => {
    event.preventDefault();
    const fields = new FormData(event.target);
    apply({ candidate: { model: candidate?.model ?? fields.get("model"), share: Number(fields.get("share")) / 100 } });
  };
  return html`<section class="panel"><h2>Candidate</h2>
    <p class="quiet small">${candidate ? html`<a href="#/models/${candidate.model}">${candidate.model}</a> serves ${formatPercent(candidate.share)} of the requests.` : "Serve a share of the requests with a second model."}</p>
    <form class="row" onSubmit=${submit} aria-label="Candidate">
      ${!candidate && html`<label>Model <select name="model" required><option value="">Select a model</option>${renderOptions(models, deployment.model)}</select></label>`}
      <label>Share, % <input name="share" type="number" min="0" max="100" step="any" defaultValue=${candidate ? 100 * candidate.share : 5} required /></label>
      <button disabled=${busy}>${candidate ? "Change share" : "Add"}</button>
      ${candidate && html`<button type="button" class="plain" disabled=${busy} onClick=${() => apply({ model: candidate.model, candidate: null })}>Promote</button>
        <button type="button" class="danger" disabled=${busy} onClick=${() => apply({ candidate: null })}>Remove</button>`}
    </form></section>`;
}

/** Further students over the model's base, which requests name by `model`. */
function AdaptersForm({ deployment, models, apply, busy }) {
  const adapters = (deployment.adapters ?? []).map(({ model, name }) => ({ model, name }));
  const served = new Set([deployment.model, ...adapters.map(({ model }) => model)]);
  const others = models.filter(({ id, lineage }) => lineage.base_digest && !served.has(id));
  const submit = (event) => {
    event.preventDefault();
    const { model, name } = Object.fromEntries(new FormData(event.target));
    apply({ adapters: [...adapters, { model, name: name || null }] });
    event.target.reset();
  };
  const renderAdapter = (adapter) => {
    const name = adapter.name ?? adapter.model;
    const remove = () => apply({ adapters: adapters.filter((each) => each !== adapter) });
    return html`<li key=${adapter.model}><a href="#/models/${adapter.model}">${name}</a>
      <button class="danger" disabled=${busy} onClick=${remove} aria-label="Remove ${name}">Remove</button></li>`;
  };
  return (adapters.length > 0 || others.length > 0) && html`<section class="panel"><h2>Adapters</h2>
    <p class="quiet small">Students of the same base model that share its weights. Requests select an adapter by the field <code>model</code>.</p>
    <ul class="plain" aria-label="Adapters">${adapters.map(renderAdapter)}</ul>
    <form class="row" onSubmit=${submit} aria-label="Adapters">
      <label>Model <select name="model" required><option value="">Select an adapter</option>${renderOptions(others)}</select></label>
      <label>Name <input name="name" size="12" /></label>
      <button disabled=${busy}>Add</button>
    </form></section>`;
}

function ReplicasForm({ deployment, apply, busy }) {
  const submit = (event) => {
    event.preventDefault();
    const fields = new FormData(event.target);
    apply({ min_replicas: Number(fields.get("min")), max_replicas: Number(fields.get("max")) });
  };
  return html`<section class="panel"><h2>Replicas</h2>
    <p class="quiet small">The number of replicas follows the load.</p>
    <form class="row" onSubmit=${submit} aria-label="Replicas">
      <label>Min <input name="min" type="number" min="0" defaultValue=${deployment.min_replicas} required /></label>
      <label>Max <input name="max" type="number" min="1" defaultValue=${deployment.max_replicas} required /></label>
      <button class="plain" disabled=${busy}>Change</button>
    </form></section>`;
}

function Controls({ deployment, models, onDone }) {
  const [apply, busy, problem] = useChange(deployment, onDone);
  const shared = { deployment, models, apply, busy };
  return html`<h2>Changes</h2><${Problem} problem=${problem} />
    <div class="grid"><${SwapForm} ...${shared} /><${CandidateForm} ...${shared} /><${AdaptersForm} ...${shared} /><${ReplicasForm} ...${shared} /></div>`;
}

const SNIPPETS = {
  curl: (url, model) => `curl ${url}/v1/chat/completions -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" \\
  -d '{"model": "${model}", "messages": [{"role": "user", "content": "Hello"}]}'`,
  Python: (url, model) => `import os

from openai import OpenAI

client = OpenAI(base_url="${url}/v1", api_key=os.environ.get("API_KEY", "none"))
response = client.chat.completions.create(model="${model}", messages=[{"role": "user", "content": "Hello"}])
print(response.choices[0].message.content)`,
  Node: (url, model) => `import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${url}/v1", apiKey: process.env.API_KEY ?? "none" });
const response = await client.chat.completions.create({ model: "${model}", messages: [{ role: "user", content: "Hello" }] });
console.log(response.choices[0].message.content);`,
};

/** Code to call the deployment; the key comes from the environment. */
function Snippets({ deployment }) {
  const url = deployment.url.replace(/\/$/, "");
  return html`<details><summary>Code examples</summary>
    ${Object.entries(SNIPPETS).map(([name, text]) => html`<${Snippet} name=${name} code=${text(url, deployment.model)} />`)}</details>`;
}

const describeChange = ({ method, route }) => (method === "PATCH" ? "updated" : route.endsWith("/traffic") ? "deleted captured requests" : "deleted");

const CHANGES = [
  { name: "Time", whole: true, cell: (entry) => formatTime(entry.created_at) },
  { name: "Change", cell: (entry) => `${describeChange(entry)}${entry.status < 400 ? "" : ` (refused: ${entry.status})`}` },
  { name: "By", cell: (entry) => entry.actor ?? html`<span class="unknown">unknown</span>` },
];
const MAX_CHANGES = 20;

/** The deployment's changes and their authors, for callers who may read the audit trail. */
function History({ deployment: { id, version } }) {
  const load = async () => ((await get("/session")).reads_audit ? (await get(`/audit?about=${id}&limit=${MAX_CHANGES}`)).data : null);
  const [entries] = usePolling(load, [id, version], null);
  const changes = entries?.filter(({ method }) => ["PATCH", "DELETE"].includes(method));
  return changes && html`<h2>History</h2><${Table} caption="Changes, newest first" columns=${CHANGES} rows=${changes} empty="No changes since it was created." />`;
}

const ROLLOUTS = [
  { name: "Job", cell: ({ job_id }) => html`<a href="#/jobs/${job_id}">${job_id}</a>` },
  { name: "Model", cell: ({ model }) => html`<a href="#/models/${model}">${model}</a>` },
  { name: "Status", cell: ({ status, share }) => (status === "candidate" ? `candidate, ${formatPercent(share)} of the requests` : status.replace("_", " ")) },
  { name: "Steps", cell: ({ steps, promote_at }) => html`<ol class="plain">
      ${steps.map(({ status, at, by, message }) => html`<li>${formatTime(at)}: ${status.replace("_", " ")}${by.startsWith("rollout of") ? "" : ` by ${by}`}${message && ` (${message})`}</li>`)}
      ${promote_at && html`<li class="quiet">${formatTime(promote_at)}: promotion</li>`}</ol>` },
];

/** Rollouts of jobs' models, each of which can be undone while it is the newest that had an effect. */
function Rollouts({ deployment, onDone }) {
  const [rollouts] = usePolling(() => fetchAll(`/deployments/${deployment.id}/rollouts`), [deployment.id, deployment.version], EVERY_MS);
  const [act, busy, problem] = useAction();
  const undo = async (event, { job_id }) => {
    event.preventDefault();
    await act(async () => {
      await post(`/deployments/${deployment.id}/rollouts/${job_id}/rollback`, { reason: new FormData(event.target).get("reason") });
      showToast("Rolled back. The replicas apply it without downtime.");
    });
    onDone();
  };
  const canUndo = ({ model, status }) => ["waiting", "candidate"].includes(status) || (status === "promoted" && model === deployment.model);
  const renderForm = (rollout) => html`<form class="row" onSubmit=${(event) => undo(event, rollout)} aria-label="Roll back">
      <label>Reason <input name="reason" required size="16" /></label><button class="danger" disabled=${busy}>Roll back</button></form>`;
  const columns = [...ROLLOUTS, { name: "Undo", cell: (rollout) => canUndo(rollout) && renderForm(rollout) }];
  return rollouts?.length > 0 && html`<h2>Rollouts</h2><${Problem} problem=${problem} />
    <${Table} caption="Rollouts of jobs' models, newest first" columns=${columns} rows=${rollouts} empty="" />`;
}

const PARENT = ["deployments", "Deployments"];

export const Deployment = ({ id }) => html`<${ObjectPage} what="deployment" id=${id} parent=${PARENT} load=${() => get(`/deployments/${id}`)} everyMs=${EVERY_MS} page=${DeploymentPage} />`;

function DeploymentPage({ value: deployment, problem, onChange }) {
  const [models] = usePolling(() => fetchAll("/models"), [], 10000);
  const [samples, metricsProblem] = useSamples(deployment.id);
  const idle = explainMissingRates(deployment, samples, null);
  const points = samples.map((_, i) => computeRates(samples.slice(0, i + 1)));
  const now = points.at(-1);
  const x = points.map(({ time }) => Math.round(time - points[0].time));
  return html`<${PageHeader} title=${getDeploymentName(deployment, models)} parent=${PARENT} status=${html`<${ServingStatus} deployment=${deployment} />`}>
      ${isServing(deployment) && html`<a class="button" href="#/playground?a=${deployment.id}">Open in playground</a>`}<//>
    <div aria-live="polite">${deployment.message && html`<p class="quiet">${deployment.message}</p>`}</div>
    <${Problem} problem=${problem ?? (isServing(deployment) ? metricsProblem : null)} />
    <section class="panel"><${FactList} of=${{
      deployment: html`<${CopyableId} text=${deployment.id} />`,
      model: html`<a href="#/models/${deployment.model}">${getModelName(deployment, models)}</a> <${CopyableId} text=${deployment.model} quiet />`,
      alias: deployment.alias,
      address: html`<${CopyableId} text=${deployment.url} />`,
      replicas: describeReplicas(deployment),
      "captured traffic": html`<a href="#/traffic/${deployment.id}">${deployment.capture ? `${formatPercent(deployment.capture.share)} of requests` : "off"}</a>`,
      created: formatTime(deployment.created_at),
    }} /></section>
    ${deployment.url && html`<${Snippets} deployment=${deployment} />`}
    <h2>Current load</h2>
    ${now
      ? html`<p class="quiet small">Average of the last ${WINDOW_S} seconds. Tokens and times are of finished responses.${idle && ` Now: ${idle}`}</p>
          <div class="tiles">
            ${CHARTS.flatMap(([, names]) => names).map((name) => html`<div class="tile"><strong>${now[name] == null ? "–" : formatNumber(now[name])}</strong><span>${name}</span></div>`)}
          </div>
          <div class="grid">
            ${CHARTS.map(([title, names]) => {
              const series = Object.fromEntries(names.map((name) => [name, points.map((point) => point[name])]));
              const measured = x.length > 1 && Object.values(series).flat().some((value) => value != null);
              return measured
                ? html`<${Chart} key=${title} title=${title} unit="second" x=${x} series=${series} />`
                : html`<section class="panel"><h3>${title}</h3><${EmptyState} title="No data yet">${x.length > 1 ? "Data appears with the next finished responses." : "Waiting for a second measurement."}<//></section>`;
            })}
          </div>`
      : isServing(deployment) && !metricsProblem
        ? html`<${Loading} what="metrics of the replicas" />`
        : html`<p class="quiet">No replica is ready yet.</p>`}
    ${deployment.status !== "deleting" && html`<${Controls} deployment=${deployment} models=${models ?? []} onDone=${onChange} />`}
    <${Rollouts} deployment=${deployment} onDone=${onChange} />
    <${History} deployment=${deployment} />`;
}
