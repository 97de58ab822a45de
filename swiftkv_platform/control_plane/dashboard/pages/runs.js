// Comparison of runs: one chart per metric.

import { html } from "../vendor/htm-preact.js";
import { fetchAll, get } from "../api.js";
import { Charts, EmptyState, PageHeader, Loading, Problem, Status, Table, formatNumber, formatPercent, usePolling } from "../parts.js";

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

async function loadRun(id) {
  const job = await get(`/jobs/${id}`); // first, for a single request if there is no such job
  const [points, checkpoints] = await Promise.all([fetchAll(`/jobs/${id}/metrics`), fetchAll(`/jobs/${id}/checkpoints`)]);
  return { job, points, chosen: checkpoints.find((item) => item.distilled_model) };
}

/** KL of the model, or the last one on validation rows while the job runs. */
const getKl = ({ job, points }) => job.result?.distilled?.kl ?? points.findLast((point) => point[KL] != null)?.[KL];
const getSpeed = ({ points }) => points.findLast((point) => point.tokens_per_second != null)?.tokens_per_second;
const getTtft = ({ job: { result } }) => result?.ttft_ms && result.ttft_ms.swiftkv / result.ttft_ms.dense;

const COLUMNS = [
  { name: "Run", cell: ({ job, name }) => html`<a href="#/jobs/${job.id}">${name}</a>` },
  { name: "Status", cell: ({ job }) => html`<${Status} status=${job.status} />` },
  { name: "Step", number: true, sort: ({ job }) => job.progress.step, cell: ({ job }) => job.progress.step },
  { name: "KL, nats", number: true, sort: getKl, cell: (run) => formatNumber(getKl(run)) },
  { name: "Top-1", number: true, sort: ({ job }) => job.result?.distilled?.top1_agreement, cell: ({ job }) => formatPercent(job.result?.distilled?.top1_agreement) },
  { name: "Prefill", number: true, sort: ({ job }) => job.result?.prefill_flops_ratio, cell: ({ job }) => formatPercent(job.result?.prefill_flops_ratio) },
  { name: "Time to first token", number: true, sort: getTtft, cell: (run) => formatPercent(getTtft(run)) },
  { name: "Trained tokens/s", number: true, sort: getSpeed, cell: (run) => formatNumber(getSpeed(run)) },
  { name: "Learning rate", number: true, cell: ({ job }) => formatNumber(job.spec.optimizer.learning_rate) },
];

export function Runs({ query }) {
  const ids = (query.get("jobs") ?? "").split(",").filter(Boolean);
  const [runs, problem] = usePolling(() => Promise.all(ids.map(loadRun)), [ids.join()], 5000);
  const names = runs?.map(({ job }) => job.name) ?? [];
  // Runs with the same name get the end of their id appended.
  const named = runs?.map((run, i) => ({ ...run, id: run.job.id, name: names.indexOf(names[i]) === names.lastIndexOf(names[i]) ? names[i] : `${names[i]} …${run.job.id.slice(-4)}` }));
  return html`<${PageHeader} title="Compare runs" parent=${["jobs", "Jobs"]}><a class="button plain" href="#/jobs">Select other runs</a><//>
    <${Problem} problem=${problem} />
    ${named ? html`<${Table} caption="Runs" columns=${COLUMNS} rows=${named} empty=${html`<div class="panel"><${EmptyState} title="No runs selected"><a href="#/jobs">Select jobs to compare</a>.<//></div>`} />
        ${named.length > 0 && html`<p class="quiet small">Prefill compute and time to first token are relative to the teacher.</p><h2>Metrics</h2>
          <${Charts} charts=${Object.entries(METRICS).map(([measure, title]) => {
            const marks = measure === KL ? named.filter(({ chosen }) => chosen).map(({ name, chosen }) => ({ x: chosen.step, label: `selected checkpoint of ${name}` })) : [];
            return { title, marks, ...mergeRuns(named, measure) };
          }).filter(({ x }) => x.length)} />`}`
      : !problem && html`<${Loading} what="runs" />`}`;
}
