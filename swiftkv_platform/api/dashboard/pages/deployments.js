// Models in service.

import { html, useState } from "../vendor/htm-preact.js";
import { all, remove } from "../api.js";
import { Problem, Status, Table, answering, served, useFresh, when } from "../parts.js";

export function Deployments() {
  const [refusal, setRefusal] = useState(null);
  const [deployments, problem, reload] = useFresh(() => all("/deployments"), [], 2000);
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
    { name: "Deployment", cell: (item) => html`<a href="#/deployments/${item.id}">${item.id}</a>` },
    { name: "Status", cell: (item) => html`<${Status} status=${item.status} />${item.message && html`<br /><span class="quiet">${item.message}</span>`}` },
    { name: "Model", cell: (item) => html`<a href="#/models?model=${item.model}">${served(item)}</a>` },
    { name: "Route", cell: (item) => html`<code>${item.route_prefix}</code>` },
    { name: "Replicas", cell: (item) => `${item.replicas} of ${item.min_replicas} to ${item.max_replicas}` },
    { name: "Created", cell: (item) => when(item.created_at) },
    {
      name: "",
      cell: (item) => html`<span class="row">
        ${answering(item) && html`<a href="#/playground?a=${item.id}">Try it</a>`}
        ${item.status !== "deleting" && html`<button class="danger" onClick=${end(item)}>Stop</button>`}
      </span>`,
    },
  ];
  return html`<h1>Deployments</h1>
    <${Problem} problem=${problem ?? refusal} />
    ${deployments && html`<${Table} caption="Deployments" columns=${columns} rows=${deployments} empty="Nothing is served. A model's page deploys it." />`}`;
}
