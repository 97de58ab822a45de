// All deployments.

import { html, useState } from "../vendor/htm-preact.js";
import { all, remove } from "../api.js";
import { Empty, Figure, Loading, Problem, Search, Status, Table, isServing, modelName, useFresh, when } from "../parts.js";
import { figures, unknownReason, useSamples } from "../rates.js";

const EVERY_MS = 5000;

/** Current tokens per second and time to first token. */
function Rates({ deployment }) {
  const [samples, problem] = useSamples(deployment.id, EVERY_MS);
  const now = samples.length > 1 ? figures(samples) : {};
  const why = unknownReason(deployment, samples, problem);
  return html`<span><${Figure} value=${now["generated tokens/s"]} unit="tokens/s" why=${why} /><br /><span class="quiet small">TTFT <${Figure} value=${now["time to first token, ms"]} unit="ms" why=${why} /></span></span>`;
}

const text = (models) => (item) => [modelName(item, models), item.id, item.status, item.model, item.alias, item.route_prefix].join(" ");

export function Deployments() {
  const [refusal, setRefusal] = useState(null);
  const [search, setSearch] = useState("");
  const [deployments, problem, reload] = useFresh(() => all("/deployments"), [], 2000);
  const [models] = useFresh(() => all("/models"), [deployments?.map(({ model }) => model).join()], null);
  const stop = (deployment) => async () => {
    if (!confirm(`Stop serving ${deployment.model} at ${deployment.route_prefix}?`)) return;
    try {
      await remove(`/deployments/${deployment.id}`);
      setRefusal(null);
    } catch (error) {
      setRefusal(error);
    }
    reload();
  };
  const columns = [
    { name: "Deployment", sort: (item) => item.route_prefix, cell: (item) => html`<span><a href="#/deployments/${item.id}">${item.route_prefix}</a><br /><code class="quiet">${item.id}</code></span>` },
    { name: "Status", sort: (item) => item.status, cell: (item) => html`<span><${Status} status=${item.status} />${item.message && html`<br /><span class="quiet small">${item.message}</span>`}</span>` },
    { name: "Model", sort: (item) => modelName(item, models), cell: (item) => html`<span><a href="#/models?model=${item.model}">${modelName(item, models)}</a><br /><code class="quiet">${item.model}</code>${item.candidate && html`<br /><span class="quiet small">candidate ${item.candidate.model}</span>`}</span>` },
    { name: "Current load", cell: (item) => html`<${Rates} key=${item.id} deployment=${item} />` },
    { name: "Replicas", sort: (item) => item.replicas, cell: (item) => `${item.replicas} running (min ${item.min_replicas}, max ${item.max_replicas})` },
    { name: "Created", whole: true, sort: (item) => item.created_at, cell: (item) => when(item.created_at) },
    {
      name: "",
      cell: (item) => html`<span class="row">
        ${isServing(item) && html`<a href="#/playground?a=${item.id}">Open in playground</a>`}
        ${item.status !== "deleting" && html`<button class="danger" onClick=${stop(item)} aria-label="Stop ${item.route_prefix}">Stop</button>`}
      </span>`,
    },
  ];
  const empty = html`<div class="panel"><${Empty} title="No deployments"><a href="#/models">Choose a model to deploy</a>.<//></div>`;
  return html`<div class="head"><h1>Deployments</h1></div>
    <${Problem} problem=${problem ?? refusal} />
    <div class="toolbar"><${Search} value=${search} onInput=${setSearch} label="Search deployments" /></div>
    ${deployments ? html`<${Table} caption="Deployments" columns=${columns} rows=${deployments} empty=${empty} search=${search} find=${text(models)} />` : !problem && html`<${Loading} what="deployments" />`}`;
}
