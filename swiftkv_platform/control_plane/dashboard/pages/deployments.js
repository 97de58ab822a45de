// Models in service.

import { html, useState } from "../vendor/htm-preact.js";
import { all, remove } from "../api.js";
import { Empty, Known, Loading, Problem, Search, Status, Table, answering, served, useFresh, when } from "../parts.js";
import { figures, silence, useSamples } from "../rates.js";

const EVERY_MS = 5000;

/** Tokens per second and time to first token of now. */
function Rates({ deployment }) {
  const [samples, problem] = useSamples(deployment.id, EVERY_MS);
  const now = samples.length > 1 ? figures(samples) : {};
  const why = silence(deployment, samples, problem);
  return html`<span><${Known} value=${now["generated tokens/s"]} unit="tokens/s" why=${why} /><br /><span class="quiet small">TTFT <${Known} value=${now["time to first token, ms"]} unit="ms" why=${why} /></span></span>`;
}

const text = (models) => (item) => [served(item, models), item.id, item.status, item.model, item.alias, item.route_prefix].join(" ");

export function Deployments() {
  const [refusal, setRefusal] = useState(null);
  const [search, setSearch] = useState("");
  const [deployments, problem, reload] = useFresh(() => all("/deployments"), [], 2000);
  const [models] = useFresh(() => all("/models"), [deployments?.map(({ model }) => model).join()], null);
  const end = (deployment) => async () => {
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
    { name: "Model", sort: (item) => served(item, models), cell: (item) => html`<span><a href="#/models?model=${item.model}">${served(item, models)}</a><br /><code class="quiet">${item.model}</code>${item.candidate && html`<br /><span class="quiet small">candidate ${item.candidate.model}</span>`}</span>` },
    { name: "Now", cell: (item) => html`<${Rates} key=${item.id} deployment=${item} />` },
    { name: "Replicas", sort: (item) => item.replicas, cell: (item) => `${item.replicas} of ${item.min_replicas} to ${item.max_replicas}` },
    { name: "Created", whole: true, sort: (item) => item.created_at, cell: (item) => when(item.created_at) },
    {
      name: "",
      cell: (item) => html`<span class="row">
        ${answering(item) && html`<a href="#/playground?a=${item.id}">Try it</a>`}
        ${item.status !== "deleting" && html`<button class="danger" onClick=${end(item)} aria-label="Stop ${item.route_prefix}">Stop</button>`}
      </span>`,
    },
  ];
  const empty = html`<div class="panel"><${Empty} title="Nothing is served">A model's page deploys it: <a href="#/models">choose a model</a>.<//></div>`;
  return html`<div class="head"><h1>Deployments</h1></div>
    <${Problem} problem=${problem ?? refusal} />
    <div class="toolbar"><${Search} value=${search} onInput=${setSearch} label="Search deployments" /></div>
    ${deployments ? html`<${Table} caption="Deployments" columns=${columns} rows=${deployments} empty=${empty} search=${search} find=${text(models)} />` : !problem && html`<${Loading} what="deployments" />`}`;
}
