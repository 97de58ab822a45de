// Distilled models: where they come from, how good they are, two of them side by side.

import { html, useState } from "../vendor/htm-preact.js";
import { all, post } from "../api.js";
import { Facts, Problem, Table, bytes, figure, percent, useFresh, when } from "../parts.js";
import { Report } from "./job.js";

function Deploy({ model }) {
  const [problem, setProblem] = useState(null);
  async function submit(event) {
    event.preventDefault();
    const fields = new FormData(event.target);
    try {
      const replicas = { min_replicas: Number(fields.get("min")), max_replicas: Number(fields.get("max")) };
      const engine = fields.get("mode") === "teacher" ? { swiftkv: false } : {};
      await post("/deployments", { model: model.id, route_prefix: fields.get("route"), ...replicas, engine });
      location.hash = "#/deployments";
    } catch (error) {
      setProblem(error);
    }
  }
  return html`<form class="row" onSubmit=${submit} aria-label="Deploy ${model.name}">
      <label>Route <input name="route" value="/" required size="12" title="Where there are API keys, below /t/ and your tenant's name" /></label>
      <label>Serve <select name="mode"><option value="student">the student</option><option value="teacher">its teacher</option></select></label>
      <label>Replicas, least <input name="min" type="number" min="1" value="1" /></label>
      <label>most <input name="max" type="number" min="1" value="1" /></label>
      <button>Deploy</button>
    </form>
    <${Problem} problem=${problem} />`;
}

function Card({ model }) {
  const { lineage, metrics } = model;
  return html`<section class="panel">
    <h2>${model.name}</h2>
    <${Facts} of=${{
      model: html`<code>${model.id}</code>`,
      job: html`<a href="#/jobs/${model.job_id}">${model.job_id}</a>`,
      teacher: lineage.teacher,
      revision: lineage.revision,
      data: lineage.data_fingerprint,
      code: lineage.code_version,
      manifest: model.manifest_digest,
      size: bytes(model.size),
    }} />
    ${metrics.distilled && html`<${Report} report=${metrics} />`}
    <${Deploy} model=${model} />
  </section>`;
}

export function Models({ query }) {
  const [chosen, setChosen] = useState(query.get("model") ? [query.get("model")] : []);
  const [models, problem] = useFresh(() => all("/models"), [], 10000);
  const toggle = (id) => setChosen((old) => (old.includes(id) ? old.filter((other) => other !== id) : [...old, id].slice(-2)));
  const columns = [
    { name: "Compare", cell: (model) => html`<input type="checkbox" aria-label="Show ${model.name}" checked=${chosen.includes(model.id)} onChange=${() => toggle(model.id)} />` },
    { name: "Model", cell: (model) => html`${model.name}<br /><code class="quiet">${model.id}</code>` },
    { name: "Teacher", cell: (model) => model.lineage.teacher },
    { name: "Perplexity", number: true, cell: (model) => figure(model.metrics.distilled?.perplexity) },
    { name: "KL", number: true, cell: (model) => figure(model.metrics.distilled?.kl) },
    { name: "Prefill", number: true, cell: (model) => percent(model.metrics.prefill_flops_ratio) },
    { name: "KV bytes", number: true, cell: (model) => percent(model.metrics.kv_bytes_ratio) },
    { name: "Created", cell: (model) => when(model.created_at) },
  ];
  return html`<h1>Models</h1>
    <${Problem} problem=${problem} />
    ${models && html`<${Table} caption="Models" columns=${columns} rows=${models} empty="No model yet: a job that succeeds makes one." />`}
    <div class="grid">${models?.filter((model) => chosen.includes(model.id)).map((model) => html`<${Card} key=${model.id} model=${model} />`)}</div>`;
}
