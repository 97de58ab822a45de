// One model: lineage, quality, speed, files, and how to serve it.

import { html, useState } from "../vendor/htm-preact.js";
import { fetchAll, get, post } from "../api.js";
import { DeployForm } from "../job/deploy.js";
import { Lineage } from "../job/lineage.js";
import { Report } from "../job/report.js";
import { FactList, PageHeader, CopyableId, ObjectPage, Problem, Snippet, Table, formatBytes, showToast, useAction, usePolling, formatTime } from "../parts.js";
import { FILES } from "./job.js";

const PARENT = ["models", "Models"];

function Promote({ model, onDone }) {
  const [act, busy, problem] = useAction();
  const submit = (event) => {
    event.preventDefault();
    const fields = new FormData(event.target);
    act(async () => {
      const { alias } = await post(`/models/${model.id}/promote`, { alias: fields.get("alias"), reason: fields.get("reason") });
      showToast(`${alias} is now ${model.name}.`);
      onDone();
    });
  };
  return html`<h3>Promote to an alias</h3>
    <form class="row" onSubmit=${submit} aria-label="Promote ${model.name}">
      <label>Alias <input name="alias" value="production" required size="12" /></label>
      <label>Reason <input name="reason" required size="24" /></label>
      <button class="plain" disabled=${busy}>Promote</button>
    </form>
    <${Problem} problem=${problem} />`;
}

/** Commands that serve a model: here, and from a copy on another machine. */
const COMMANDS = {
  "on this platform": ({ id }) => `swiftkv deploy ${id}`,
  "on your machine": ({ job_id: job }) => job && `swiftkv jobs download ${job} model\nswiftkv serve model   # or: vllm serve model`,
};

export const Model = ({ id }) => html`<${ObjectPage} what="model" id=${id} parent=${PARENT} load=${() => get(`/models/${id}`)} page=${ModelPage} />`;

function ModelPage({ value: model, problem }) {
  const { id, lineage, metrics, job_id: job } = model;
  const [version, setVersion] = useState(0);
  const [files, filesProblem] = usePolling(() => (job ? fetchAll(`/jobs/${job}/artifacts`) : []), [job], null);
  async function deploy(body) {
    const deployment = await post("/deployments", { model: id, ...body });
    showToast(`${model.name} is starting at ${deployment.route_prefix}.`);
    location.hash = `#/deployments/${deployment.id}`;
  }
  return html`<${PageHeader} title=${model.name} parent=${PARENT}>${job && html`<a class="button plain" href="#/jobs/${job}">View job</a>`}<//>
    <${Problem} problem=${problem ?? filesProblem} />
    <section class="panel"><h2>Lineage</h2><${Lineage} key=${version} model=${model} /></section>
    ${metrics.distilled && html`<h2>Quality and speed</h2><section class="panel"><${Report} report=${metrics} verdict=${model.verdict} spec=${lineage.spec} /></section>`}
    <h2>Serve</h2>
    <section class="panel">
      <${DeployForm} name=${model.name} route="/" onDeploy=${deploy} />
      ${Object.entries(COMMANDS).map(([place, make]) => make(model) && html`<${Snippet} name="Command ${place}" code=${make(model)} />`)}
      <${Promote} model=${model} onDone=${() => setVersion(version + 1)} />
    </section>
    <h2>Files</h2>
    <section class="panel"><${FactList} of=${{
      model: html`<${CopyableId} text=${id} />`,
      revision: lineage.revision && html`<${CopyableId} text=${lineage.revision} />`,
      address: html`<${CopyableId} text=${model.artifact_uri} />`,
      "SHA-256 of the manifest": html`<${CopyableId} text=${model.manifest_digest} />`,
      size: formatBytes(model.size),
      created: formatTime(model.created_at),
    }} /></section>
    ${files?.length > 0 && html`<br /><${Table} caption="Files" columns=${FILES} rows=${files} empty="" />`}`;
}
