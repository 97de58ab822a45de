// All deployments.

import { html } from "../vendor/htm-preact.js";
import { fetchAll, remove } from "../api.js";
import { EmptyState, PageHeader, CopyableId, SearchableTable, ServingStatus, getDeploymentName, isServing, getModelName, describeReplicas, showToast, useAction, usePolling, formatTime } from "../parts.js";
import { CurrentLoad } from "../rates.js";

const makeSearchText = (models) => (item) => [getModelName(item, models), item.id, item.status, item.model, item.alias, item.route_prefix].join(" ");

export function Deployments() {
  const [act, busy, refusal] = useAction();
  const [deployments, problem, reload] = usePolling(() => fetchAll("/deployments"), [], 2000);
  const [models] = usePolling(() => fetchAll("/models"), [deployments?.map(({ model }) => model).join()], null);
  const stop = (deployment) => () => {
    const name = getDeploymentName(deployment, models);
    if (!confirm(`Stop serving ${name}?`)) return;
    act(async () => {
      await remove(`/deployments/${deployment.id}`);
      showToast(`Stopping ${name}.`);
      await reload();
    });
  };
  const columns = [
    { name: "Deployment", sort: (item) => getDeploymentName(item, models), cell: (item) => html`<span><a href="#/deployments/${item.id}">${getDeploymentName(item, models)}</a><br /><${CopyableId} text=${item.id} quiet /></span>` },
    { name: "Status", sort: (item) => item.status, cell: (item) => html`<span><${ServingStatus} deployment=${item} />${item.message && html`<br /><span class="quiet small">${item.message}</span>`}</span>` },
    { name: "Model", sort: (item) => getModelName(item, models), cell: (item) => html`<span><a href="#/models/${item.model}">${getModelName(item, models)}</a><br /><${CopyableId} text=${item.model} quiet />${item.candidate && html`<br /><span class="quiet small">candidate ${item.candidate.model}</span>`}</span>` },
    { name: "Current load", cell: (item) => html`<${CurrentLoad} key=${item.id} deployment=${item} />` },
    { name: "Replicas", sort: (item) => item.replicas, cell: describeReplicas },
    { name: "Created", whole: true, sort: (item) => item.created_at, cell: (item) => formatTime(item.created_at) },
    {
      name: "",
      cell: (item) => html`<span class="row">
        ${isServing(item) && html`<a href="#/playground?a=${item.id}">Open in playground</a>`}
        ${item.status !== "deleting" && html`<button class="danger" disabled=${busy} onClick=${stop(item)} aria-label="Stop ${item.route_prefix}">Stop</button>`}
      </span>`,
    },
  ];
  const empty = html`<div class="panel"><${EmptyState} title="No deployments"><a href="#/models">Choose a model to deploy</a>.<//></div>`;
  return html`<${PageHeader} title="Deployments" />
    <${SearchableTable} what="deployments" columns=${columns} rows=${deployments} problem=${problem ?? refusal} empty=${empty} find=${makeSearchText(models)} />`;
}
