// The quality report, worst gate first. Knows the report's keys, no route.

import { html } from "../vendor/htm-preact.js";
import { FactList, Status, Table, describeDeepTail, formatNumber, formatPercent } from "../parts.js";

const getOutcome = (gate) => gate.outcome ?? (gate.passed ? "passed" : "failed");

/** The first gate of the report: the one that exceeds its limit most, or is closest to it. */
function WorstGate({ gates }) {
  const [worst] = gates;
  if (!worst) return html`<p class="quiet">No quality gates are set; the figures below are for information.</p>`;
  const { interval } = worst;
  return html`<div class="worst ${getOutcome(worst)}">
    <span class="quiet">Worst of ${gates.length} quality gates</span>
    <strong>${worst.subject}: ${formatNumber(worst.value)} <span class="quiet small">limit ${formatNumber(worst.limit)}</span></strong>
    <span><${Status} status=${getOutcome(worst)} /> ${interval && html`<span class="quiet small">95% interval ${formatNumber(interval[0])} to ${formatNumber(interval[1])}${worst.samples_needed ? `; about ${worst.samples_needed} samples needed to decide` : ""}</span>`}</span>
  </div>`;
}

const GATES = [
  { name: "Metric", cell: (gate) => gate.subject },
  { name: "Value", number: true, cell: (gate) => formatNumber(gate.value) },
  { name: "Limit", number: true, cell: (gate) => formatNumber(gate.limit) },
  { name: "Outcome", cell: (gate) => html`<${Status} status=${getOutcome(gate)} />` },
  { name: "Spec field", cell: (gate) => html`<code>${gate.field}</code>` },
];
const formatInterval = (interval, shown) => html`<span class="quiet small">${shown(interval[0])} to ${shown(interval[1])}</span>`;
const QUALITY = [
  { name: "Model", cell: ([name]) => name },
  { name: "Perplexity", number: true, cell: ([, quality]) => quality.perplexity !== undefined ? formatNumber(quality.perplexity) : formatInterval(quality.perplexity_ratio, (ratio) => `${formatNumber(ratio)}×`) },
  { name: "KL to the teacher, nats", number: true, cell: ([, quality]) => Array.isArray(quality.kl) ? formatInterval(quality.kl, formatNumber) : formatNumber(quality.kl) },
  { name: "Top-1 agreement", number: true, cell: ([, quality]) => Array.isArray(quality.top1_agreement) ? formatInterval(quality.top1_agreement, formatPercent) : formatPercent(quality.top1_agreement) },
];
const STAGES = {
  teacher: "teacher",
  rewired: "student, projections copied",
  calibrated: "student, projections calibrated",
  parent: "student, before this training",
  distilled: "student, distilled",
};

/** `verdict`: one-sentence summary of the report; `spec`: of the job, if known. */
export function Report({ report, verdict, spec }) {
  const rows = Object.entries(STAGES).map(([name, label]) => [label, report[name]]).filter(([, quality]) => quality);
  const { intervals } = report;
  if (intervals) rows.push([`95% interval, ${intervals.num_units} ${intervals.unit}s`, intervals]);
  const gates = report.gates ?? [];
  const { dense, swiftkv } = report.ttft_ms ?? {};
  return html`${verdict && html`<p><strong>${verdict}</strong></p>`}<${WorstGate} gates=${gates} />
    <${Table} caption="Quality on held-out text" columns=${QUALITY} rows=${rows} empty="" />
    ${gates.length > 1 && html`<br /><${Table} caption="Quality gates, worst first" columns=${GATES} rows=${gates} empty="" />`}
    <br /><${FactList} of=${{
      "KL recovered": formatPercent(report.kl_recovered),
      "prefill compute": formatPercent(report.prefill_flops_ratio),
      "KV bytes": formatPercent(report.kv_bytes_ratio),
      "time to first token": report.ttft_ms && `${formatNumber(dense)} ms dense, ${formatNumber(swiftkv)} ms SwiftKV`,
      "deep tail": describeDeepTail(spec),
      "trained tokens": formatNumber(report.tokens_trained),
      "model from": report.training && `step ${report.training.step}${report.training.reason === "lowest_held_out_kl" ? ", lowest held-out KL" : ""}`,
      "tasks skipped": report.tasks_left_out?.join(", "),
    }} />`;
}
