// Models: lineage, quality, and comparison of two.

import { html, useState } from "../vendor/htm-preact.js";
import { all, get, post } from "../api.js";
import { DeployForm } from "../job/deploy.js";
import { Lineage } from "../job/lineage.js";
import { Report } from "../job/report.js";
import { Empty, Facts, Loading, Problem, Search, Table, bytes, figure, percent, useAction, useFresh, when } from "../parts.js";

function Promote({ model, onDone }) {
  const [act, busy, problem] = useAction();
  const submit = (event) => {
    event.preventDefault();
    const fields = new FormData(event.target);
    act(async () => {
      await post(`/models/${model.id}/promote`, { alias: fields.get("alias"), reason: fields.get("reason") });
      onDone();
    });
  };
  return html`<details><summary>Promote to an alias</summary>
    <form class="row" onSubmit=${submit} aria-label="Promote ${model.name}">
      <label>Alias <input name="alias" value="production" required size="12" /></label>
      <label>Reason <input name="reason" required size="24" /></label>
      <button class="plain" disabled=${busy}>Promote</button>
    </form>
    <${Problem} problem=${problem} /></details>`;
}

function Card({ model }) {
  const { lineage, metrics } = model;
  const [version, setVersion] = useState(0);
  async function deploy(body) {
    await post("/deployments", { model: model.id, ...body });
    location.hash = "#/deployments";
  }
  return html`<section class="panel" aria-label="Model ${model.name}">
    <header><h2>${model.name}</h2><code class="quiet end">${model.id}</code></header>
    <${Lineage} key=${version} model=${model} />
    ${metrics.distilled ? html`<br /><${Report} report=${metrics} verdict=${model.verdict} />` : ""}
    <br /><${Facts} of=${{ revision: lineage.revision, manifest: model.manifest_digest, size: bytes(model.size) }} />
    <${DeployForm} name=${model.name} route="/" onDeploy=${deploy} />
    <${Promote} model=${model} onDone=${() => setVersion(version + 1)} />
  </section>`;
}

const DIFFERENCES = (a, b) => [
  { name: "Metric", cell: (row) => html`<code>${row.name}</code>` },
  { name: a, number: true, cell: (row) => html`<span>${shown(row.a)}${row.better === "a" ? " ✓" : ""}</span>` },
  { name: b, number: true, cell: (row) => html`<span>${shown(row.b)}${row.better === "b" ? " ✓" : ""}</span>` },
];

const shown = (value) => (typeof value === "number" ? figure(value) : value == null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));

/** Comparison of two models; ✓ marks the better figure. */
function Comparison({ a, b }) {
  const [found, problem] = useFresh(() => get(`/models/${a.id}/compare/${b.id}`), [a.id, b.id], null);
  if (!found) return problem ? html`<${Problem} problem=${problem} />` : html`<${Loading} what="the comparison" />`;
  const columns = DIFFERENCES(a.name, b.name === a.name ? `${b.name} (${b.id.slice(-4)})` : b.name);
  return html`<h2>Comparison</h2>
    ${found.differences.length > 0 && html`<p class="notice">Quality figures are not comparable: the models differ in ${found.differences.map(({ name }) => name).join(", ")}.</p>`}
    <${Table} caption="Figures of both models" columns=${columns} rows=${found.figures} empty="No common figures." />
    ${found.spec_differences.length > 0 && html`<h3>Spec differences</h3><${Table} caption="Spec differences" columns=${columns} rows=${found.spec_differences} empty="" />`}`;
}

const text = (model) => [model.name, model.id, model.lineage.teacher, model.job_id ?? "imported"].join(" ");

export function Models({ query }) {
  const [chosen, setChosen] = useState(query.get("model") ? [query.get("model")] : []);
  const [search, setSearch] = useState("");
  const [models, problem] = useFresh(() => all("/models"), [], 10000);
  const toggle = (id) => setChosen((old) => (old.includes(id) ? old.filter((other) => other !== id) : [...old, id].slice(-2)));
  const columns = [
    { name: "Show", cell: (model) => html`<input type="checkbox" aria-label="Show ${model.name}" checked=${chosen.includes(model.id)} onChange=${() => toggle(model.id)} />` },
    { name: "Model", sort: (model) => model.name, cell: (model) => html`<span>${model.name}${model.job_id ? "" : html` <span class="quiet">imported</span>`}<br /><code class="quiet">${model.id}</code></span>` },
    { name: "Teacher", sort: (model) => model.lineage.teacher, cell: (model) => model.lineage.teacher },
    { name: "Perplexity", number: true, sort: (model) => model.metrics.distilled?.perplexity, cell: (model) => figure(model.metrics.distilled?.perplexity) },
    { name: "KL", number: true, sort: (model) => model.metrics.distilled?.kl, cell: (model) => figure(model.metrics.distilled?.kl) },
    { name: "Prefill", number: true, sort: (model) => model.metrics.prefill_flops_ratio, cell: (model) => percent(model.metrics.prefill_flops_ratio) },
    { name: "KV bytes", number: true, sort: (model) => model.metrics.kv_bytes_ratio, cell: (model) => percent(model.metrics.kv_bytes_ratio) },
    { name: "Created", sort: (model) => model.created_at, cell: (model) => when(model.created_at) },
  ];
  const empty = html`<div class="panel"><${Empty} title="No models yet"><a href="#/submit">Start a job</a> to distill one, or import one with <code>swiftkv models import</code>.<//></div>`;
  const shownModels = models?.filter((model) => chosen.includes(model.id)) ?? [];
  return html`<div class="head"><h1>Models</h1></div>
    <${Problem} problem=${problem} />
    <div class="toolbar"><${Search} value=${search} onInput=${setSearch} label="Search models" /><span class="end">Select two models to compare.</span></div>
    ${models ? html`<${Table} caption="Models" columns=${columns} rows=${models} empty=${empty} search=${search} find=${text} />` : !problem && html`<${Loading} what="models" />`}
    <br />
    ${shownModels.length === 2 && html`<${Comparison} a=${shownModels[0]} b=${shownModels[1]} /><br />`}
    <div class="grid">${shownModels.map((model) => html`<${Card} key=${model.id} model=${model} />`)}</div>`;
}
