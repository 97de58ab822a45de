// Comparison of runs: one chart per metric.

import { html } from "../vendor/htm-preact.js";
import { all, get } from "../api.js";
import { Chart, Empty, Loading, Problem, Status, Table, figure, percent, useFresh } from "../parts.js";

const KL = "held_out_kl";
export const METRICS = { loss: "Loss", [KL]: "Held-out KL", logits_loss: "Logits loss", hidden_loss: "Hidden loss", exit_loss: "Exit loss", lr: "Learning rate", grad_norm: "Gradient norm", tokens_per_second: "Tokens per second" };

/** `points` of each run on one axis of steps: {x, series}. */
export function mergeRuns(runs, measure) {
  const x = [...new Set(runs.flatMap(({ points }) => points.filter((point) => point[measure] != null).map(({ step }) => step)))].sort((a, b) => a - b);
  const series = {};
  for (const { name, points } of runs) {
    const at = new Map(points.map((point) => [point.step, point[measure]]));
    if (points.some((point) => point[measure] != null)) series[name] = x.map((step) => at.get(step) ?? null);
  }
  return { x, series };
}

async function load(id) {
  const [job, points, checkpoints] = await Promise.all([get(`/jobs/${id}`), all(`/jobs/${id}/metrics`), all(`/jobs/${id}/checkpoints`)]);
  return { job, points, chosen: checkpoints.find((item) => item.distilled_model) };
}

const COLUMNS = [
  { name: "Run", cell: ({ job, name }) => html`<a href="#/jobs/${job.id}">${name}</a>` },
  { name: "Status", cell: ({ job }) => html`<${Status} status=${job.status} />` },
  { name: "Step", number: true, sort: ({ job }) => job.progress.step, cell: ({ job }) => job.progress.step },
  { name: "KL, nats", number: true, sort: ({ job }) => job.result?.distilled?.kl, cell: ({ job }) => figure(job.result?.distilled?.kl) },
  { name: "Top-1", number: true, sort: ({ job }) => job.result?.distilled?.top1_agreement, cell: ({ job }) => percent(job.result?.distilled?.top1_agreement) },
  { name: "Prefill", number: true, sort: ({ job }) => job.result?.prefill_flops_ratio, cell: ({ job }) => percent(job.result?.prefill_flops_ratio) },
  { name: "Learning rate", number: true, cell: ({ job }) => figure(job.spec.optimizer.learning_rate) },
];

export function Runs({ query }) {
  const ids = (query.get("jobs") ?? "").split(",").filter(Boolean);
  const [runs, problem] = useFresh(() => Promise.all(ids.map(load)), [ids.join()], 5000);
  const names = runs?.map(({ job }) => job.name) ?? [];
  // Runs with the same name get the end of their id appended.
  const named = runs?.map((run, i) => ({ ...run, id: run.job.id, name: names.indexOf(names[i]) === names.lastIndexOf(names[i]) ? names[i] : `${names[i]} …${run.job.id.slice(-4)}` }));
  return html`<div class="head"><h1>Compare runs</h1><span class="end"><a class="button plain" href="#/jobs">Select other runs</a></span></div>
    <${Problem} problem=${problem} />
    ${named ? html`<${Table} caption="Runs" columns=${COLUMNS} rows=${named} empty=${html`<div class="panel"><${Empty} title="No runs selected"><a href="#/jobs">Select jobs to compare</a>.<//></div>`} />
        ${named.length > 0 && html`<h2>Metrics</h2>`}
        <div class="halves">${Object.entries(METRICS).map(([measure, title]) => {
          const { x, series } = mergeRuns(named, measure);
          const marks = measure === KL ? named.filter(({ chosen }) => chosen).map(({ name, chosen }) => ({ x: chosen.step, label: `selected checkpoint of ${name}` })) : [];
          return x.length > 0 && html`<${Chart} key=${title} title=${title} x=${x} series=${series} marks=${marks} />`;
        })}</div>`
      : !problem && html`<${Loading} what="runs" />`}`;
}
