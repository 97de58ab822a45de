// A job's checkpoints, with actions: evaluate, deploy, continue, publish.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { get, makeIdempotencyKey, post } from "../api.js";
import { DeployForm } from "./deploy.js";
import { ENDED, Problem, Status, Table, formatBytes, formatNumber, useAction, usePolling } from "../parts.js";

const MAX_JOBS = 500;
const EVERY_MS = 3000;

/** The newest evaluation of each checkpoint, by the checkpoint's name: [jobs, problem, reload]. */
function useEvaluations(job) {
  const [busy, setBusy] = useState(false);
  async function load() {
    const query = new URLSearchParams({ model: job.spec.model.name_or_path, limit: MAX_JOBS });
    const found = new Map();
    for (const each of (await get(`/jobs?${query}`)).data) {
      const { from, max_steps: steps } = each.spec.training;
      if (from?.startsWith(`${job.id}:`) && steps === 0 && !found.has(from)) found.set(from, each);
    }
    setBusy([...found.values()].some(({ status }) => !ENDED.has(status)));
    return found;
  }
  return usePolling(load, [job.id], busy ? EVERY_MS : null);
}

const JobLink = ({ job, children }) => html`<a href="#/jobs/${job.id}">${children}</a>`;

function PublishForm({ name, button, onPublish }) {
  const [act, busy, problem] = useAction();
  const submit = (event) => {
    event.preventDefault();
    const fields = new FormData(event.target);
    act(() => onPublish({ to: fields.get("to"), private: fields.has("private") }));
  };
  return html`<form class="row" onSubmit=${submit} aria-label="Publish ${name}">
      <label class="grow">To <input name="to" required placeholder="hf://organization/name" title="hf://organization/name, s3://bucket/prefix or a directory that the operator allows" /></label>
      <label class="check"><input name="private" type="checkbox" checked /> private repository</label>
      <button disabled=${busy}>${button}</button>
    </form>
    <${Problem} problem=${problem} />`;
}

/** Actions on a checkpoint's model: word, request and message. */
const ACTIONS = {
  deploy: {
    words: "deployed",
    ask: (model, body) => post("/deployments", { model, ...body }),
    done: ({ id, route_prefix: route }) => html`<a href="#/deployments/${id}">${route}</a> is starting.`,
  },
  publish: {
    words: "published",
    ask: (model, body) => post(`/models/${model}/publish`, body),
    done: (job) => html`<${JobLink} job=${job}>${job.name}<//> publishes the model.`,
  },
};

/** Result of a checkpoint's evaluation: its job while it runs, then its model. */
function EvaluationResult({ evaluation }) {
  if (!evaluation) return "";
  const { status, distilled_model: model, error } = evaluation;
  if (model) return html`<a href="#/models/${model}">View model</a>`;
  return html`<${JobLink} job=${evaluation}>Evaluation<//> <${Status} status=${status} />${error && html`<${Problem} problem=${error} />`}`;
}

/**
 * Actions of a checkpoint. Only evaluated checkpoints are models, so other actions wait on this page for the evaluation.
 */
function Actions({ job, item, evaluation, onChange }) {
  const name = `${job.id}:${item.id}`;
  const [act, busy, problem] = useAction();
  const [open, setOpen] = useState(null);
  const [waiting, setWaiting] = useState(null);
  const [done, setDone] = useState(null);
  const key = useRef(makeIdempotencyKey());
  const model = evaluation?.distilled_model;
  const live = evaluation && !ENDED.has(evaluation.status);

  async function evaluate() {
    // Reuse the key until there is a response, so that a retry creates no second job.
    const job = await post("/models", { from_checkpoint: name }, { "Idempotency-Key": key.current });
    key.current = makeIdempotencyKey();
    await onChange();
    return job;
  }
  async function finish(kind, body, of) {
    setDone(ACTIONS[kind].done(await ACTIONS[kind].ask(of, body)));
  }
  const ask = (kind) => async (body) => {
    setDone(null);
    if (model) await finish(kind, body, model);
    else {
      const { id } = live ? evaluation : await evaluate();
      setWaiting({ kind, body, evaluation: id });
    }
    setOpen(null);
  };
  useEffect(() => {
    if (!waiting || waiting.evaluation !== evaluation?.id || live) return;
    setWaiting(null);
    if (model) act(() => finish(waiting.kind, waiting.body, model));
  }, [waiting, evaluation?.id, evaluation?.status]);

  const words = (verb) => (model ? verb : live ? `${verb} after evaluation` : `Evaluate and ${verb.toLowerCase()}`);
  const toggle = (kind, label) => html`<button class="plain small" aria-expanded=${open === kind} aria-label="${label} ${item.id}" onClick=${() => setOpen(open === kind ? null : kind)}>${label}</button>`;
  return html`<div class="uses">
    <div class="row">
      ${!model && !live && html`<button class="plain small" disabled=${busy} aria-label="Evaluate ${item.id}" onClick=${() => act(evaluate)}>Evaluate</button>`}
      ${toggle("deploy", "Deploy")}
      <a class="button plain small" aria-label="Continue from ${item.id}" href="#/submit?job=${job.id}&from=${name}">Continue</a>
      ${toggle("publish", "Publish")}
    </div>
    <div class="small" role="status">
      <${EvaluationResult} evaluation=${evaluation} />
      ${waiting && html`<p>The checkpoint will be ${ACTIONS[waiting.kind].words} after its evaluation. Keep this page open.</p>`}
      ${done && html`<p>${done}</p>`}
    </div>
    <${Problem} problem=${problem} />
    ${open === "deploy" && html`<${DeployForm} name=${item.id} route="/step-${item.step}" button=${words("Deploy")} onDeploy=${ask("deploy")} />`}
    ${open === "publish" && html`<${PublishForm} name=${item.id} button=${words("Publish")} onPublish=${ask("publish")} />`}
  </div>`;
}

/** Table of checkpoints with training loss, held-out KL, evaluated KL and actions. */
export function Checkpoints({ job, checkpoints, points }) {
  const [evaluations, problem, reload] = useEvaluations(job);
  const measured = new Map((points ?? []).map((point) => [point.step, point.loss ?? point.logits_loss]));
  const best = Math.min(...checkpoints.map((item) => item.held_out_kl ?? Infinity));
  const of = (item) => evaluations?.get(`${job.id}:${item.id}`);
  const kl = (item) => of(item)?.result?.distilled?.kl;
  const columns = [
    { name: "Checkpoint", whole: true, sort: (item) => item.id, cell: (item) => html`<span><code>${item.id}</code>${item.distilled_model && html` <a class="status passed" href="#/models/${item.distilled_model}">selected</a>`}<br /><code class="quiet" title="SHA-256 ${item.sha256}">${item.sha256.slice(0, 12)}…</code></span>` },
    { name: "Step", number: true, sort: (item) => item.step, cell: (item) => formatNumber(item.step) },
    { name: "Attempt", number: true, sort: (item) => item.attempt, cell: (item) => item.attempt },
    { name: "Training loss", number: true, sort: (item) => measured.get(item.step), cell: (item) => formatNumber(measured.get(item.step)) },
    { name: "Held-out KL", number: true, sort: (item) => item.held_out_kl, cell: (item) => html`<span>${formatNumber(item.held_out_kl)}${item.held_out_kl === best ? html` <span class="status passed">lowest</span>` : ""}</span>` },
    { name: "Evaluated KL", number: true, sort: kl, cell: (item) => formatNumber(kl(item)) },
    { name: "Size", number: true, sort: (item) => item.size, cell: (item) => formatBytes(item.size) },
    { name: "", cell: (item) => html`<${Actions} job=${job} item=${item} evaluation=${of(item)} onChange=${reload} />` },
  ];
  return html`<${Problem} problem=${problem} /><${Table} caption="Checkpoints" columns=${columns} rows=${checkpoints} empty="No checkpoints." />`;
}
