// Models, and the choice of two to compare.

import { html, useState } from "../vendor/htm-preact.js";
import { fetchAll } from "../api.js";
import { Comparison } from "../comparison.js";
import { EmptyState, PageHeader, CopyableId, SearchableTable, formatNumber, formatPercent, usePolling, formatTime } from "../parts.js";

const getSearchText = (model) => [model.name, model.id, model.lineage.teacher, model.job_id ?? "imported"].join(" ");

export function Models() {
  const [chosen, setChosen] = useState([]);
  const [models, problem] = usePolling(() => fetchAll("/models"), [], 10000);
  const toggle = (id) => setChosen((old) => (old.includes(id) ? old.filter((other) => other !== id) : [...old, id].slice(-2)));
  const columns = [
    { name: "Compare", cell: (model) => html`<input type="checkbox" aria-label="Compare ${model.name}" checked=${chosen.includes(model.id)} onChange=${() => toggle(model.id)} />` },
    { name: "Model", sort: (model) => model.name, cell: (model) => html`<span><a href="#/models/${model.id}">${model.name}</a>${model.job_id ? "" : html` <span class="quiet">imported</span>`}<br /><${CopyableId} text=${model.id} quiet /></span>` },
    { name: "Teacher", sort: (model) => model.lineage.teacher, cell: (model) => model.lineage.teacher },
    { name: "Perplexity", number: true, sort: (model) => model.metrics.distilled?.perplexity, cell: (model) => formatNumber(model.metrics.distilled?.perplexity) },
    { name: "KL", number: true, sort: (model) => model.metrics.distilled?.kl, cell: (model) => formatNumber(model.metrics.distilled?.kl) },
    { name: "Prefill", number: true, sort: (model) => model.metrics.prefill_flops_ratio, cell: (model) => formatPercent(model.metrics.prefill_flops_ratio) },
    { name: "KV bytes", number: true, sort: (model) => model.metrics.kv_bytes_ratio, cell: (model) => formatPercent(model.metrics.kv_bytes_ratio) },
    { name: "Created", sort: (model) => model.created_at, cell: (model) => formatTime(model.created_at) },
  ];
  const empty = html`<div class="panel"><${EmptyState} title="No models yet"><a href="#/submit">Start a job</a> to distill one, or import one with <code>swiftkv models import</code>.<//></div>`;
  const shownModels = chosen.map((id) => models?.find((model) => model.id === id)).filter(Boolean);
  return html`<${PageHeader} title="Models" />
    <${SearchableTable} what="models" columns=${columns} rows=${models} problem=${problem} empty=${empty} find=${getSearchText}><span class="end">Select two models to compare.</span><//>
    ${shownModels.length === 2 && html`<${Comparison} a=${shownModels[0]} b=${shownModels[1]} />`}`;
}
