// All deployments.

import { html } from "../vendor/htm-preact.js";
import { all, remove } from "../api.js";
import { Empty, Head, Id, List, ServingStatus, deploymentName, isServing, modelName, replicasOf, toast, useAction, useFresh, when } from "../parts.js";
import { Load } from "../rates.js";

const text = (models) => (item) => [modelName(item, models), item.id, item.status, item.model, item.alias, item.route_prefix].join(" ");

export function Deployments() {
  const [act, busy, refusal] = useAction();
  const [deployments, problem, reload] = useFresh(() => all("/deployments"), [], 2000);
  const [models] = useFresh(() => all("/models"), [deployments?.map(({ model }) => model).join()], null);
  const stop = (deployment) => () => {
    const name = deploymentName(deployment, models);
    if (!confirm(`Stop serving ${name}?`)) return;
    act(async () => {
      await remove(`/deployments/${deployment.id}`);
      toast(`Stopping ${name}.`);
      await reload();
    });
  };
  const columns = [
    { name: "Deployment", sort: (item) => deploymentName(item, models), cell: (item) => html`<span><a href="#/deployments/${item.id}">${deploymentName(item, models)}</a><br /><${Id} text=${item.id} quiet /></span>` },
    { name: "Status", sort: (item) => item.status, cell: (item) => html`<span><${ServingStatus} deployment=${item} />${item.message && html`<br /><span class="quiet small">${item.message}</span>`}</span>` },
    { name: "Model", sort: (item) => modelName(item, models), cell: (item) => html`<span><a href="#/models/${item.model}">${modelName(item, models)}</a><br /><${Id} text=${item.model} quiet />${item.candidate && html`<br /><span class="quiet small">candidate ${item.candidate.model}</span>`}</span>` },
    { name: "Current load", cell: (item) => html`<${Load} key=${item.id} deployment=${item} />` },
    { name: "Replicas", sort: (item) => item.replicas, cell: replicasOf },
    { name: "Created", whole: true, sort: (item) => item.created_at, cell: (item) => when(item.created_at) },
    {
      name: "",
      cell: (item) => html`<span class="row">
        ${isServing(item) && html`<a href="#/playground?a=${item.id}">Open in playground</a>`}
        ${item.status !== "deleting" && html`<button class="danger" disabled=${busy} onClick=${stop(item)} aria-label="Stop ${item.route_prefix}">Stop</button>`}
      </span>`,
    },
  ];
  const empty = html`<div class="panel"><${Empty} title="No deployments"><a href="#/models">Choose a model to deploy</a>.<//></div>`;
  return html`<${Head} title="Deployments" />
    <${List} what="deployments" columns=${columns} rows=${deployments} problem=${problem ?? refusal} empty=${empty} find=${text(models)} />`;
}
