// A sweep's trials: chart of quality over compute, and table.

import { html } from "../vendor/htm-preact.js";
import { Table, formatNumber, formatPercent } from "../parts.js";

const WIDTH = 640;
const HEIGHT = 300;
const LEFT = 60;
const BOTTOM = 40;
const INNER = { width: WIDTH - LEFT - 90, height: HEIGHT - BOTTOM - 20 };

const sortMeasuredTrials = (rows) => rows.filter((row) => row.kl != null).sort((a, b) => a.prefill_flops_ratio - b.prefill_flops_ratio || a.kl - b.kl);

/** The Pareto frontier of compute and KL; `rows` as from `sortMeasuredTrials`. */
export function findParetoFrontier(rows) {
  return rows.filter((row, i) => rows.slice(0, i).every((other) => other.kl > row.kl));
}

/** Round numbers from 0 to at least `largest`. */
function makeTicks(largest) {
  const rough = largest / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
  return Array.from({ length: Math.ceil(largest / step - 1e-9) + 1 }, (_, i) => i * step);
}

/** `limit`: max KL of the quality gate, if the spec sets one. */
function Plot({ rows, taken, limit }) {
  const points = sortMeasuredTrials(rows);
  const [xs, ys] = [makeTicks(Math.max(...points.map((row) => row.prefill_flops_ratio))), makeTicks(Math.max(...points.map((row) => row.kl), limit ?? 0))];
  const x = (row) => LEFT + (row.prefill_flops_ratio / xs.at(-1)) * INNER.width;
  const y = (row) => 20 + (1 - row.kl / ys.at(-1)) * INNER.height;
  const best = findParetoFrontier(points);
  const line = best.map((row) => `${x(row)},${y(row)}`).join(" ");
  const gate = limit == null ? "" : ` The quality gate is at KL ${formatNumber(limit)}.`;
  const words = best.map((row) => `${row.trial}: ${formatPercent(row.prefill_flops_ratio)} of the compute, KL ${formatNumber(row.kl)}`).join("; ");
  return html`<svg class="plot" viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="KL over prefill compute. On the frontier are ${words}.${gate}">
    ${xs.map((value) => html`<g><line class="gridline" x1=${x({ prefill_flops_ratio: value })} x2=${x({ prefill_flops_ratio: value })} y1="20" y2=${20 + INNER.height} /><text x=${x({ prefill_flops_ratio: value })} y=${HEIGHT - BOTTOM + 36 - 18} text-anchor="middle">${formatPercent(value)}</text></g>`)}
    ${ys.map((value) => html`<g><line class="gridline" x1=${LEFT} x2=${LEFT + INNER.width} y1=${y({ kl: value })} y2=${y({ kl: value })} /><text x=${LEFT - 8} y=${y({ kl: value }) + 4} text-anchor="end">${formatNumber(value)}</text></g>`)}
    <text x=${LEFT + INNER.width / 2} y=${HEIGHT - 4} text-anchor="middle">prefill compute relative to the teacher</text>
    <text x=${LEFT} y="12">KL to the teacher, nats</text>
    ${limit != null && html`<g><line class="gate" x1=${LEFT} x2=${LEFT + INNER.width} y1=${y({ kl: limit })} y2=${y({ kl: limit })} /><text class="gate-name" x=${LEFT + INNER.width + 6} y=${y({ kl: limit }) + 4}>gate ${formatNumber(limit)}</text></g>`}
    <polyline class="frontier" points=${line} />
    ${points.map((row) => html`<g>
      <circle class=${row.trial === taken ? "taken" : best.includes(row) ? "best" : "other"} cx=${x(row)} cy=${y(row)} r="5"><title>${row.trial}</title></circle>
      ${(best.includes(row) || row.trial === taken) && html`<text x=${x(row) + 8} y=${y(row) - 6}>${row.trial}</text>`}
    </g>`)}
  </svg>`;
}

/** `rows`: trials as in the job's event; `taken`: name of the published trial, if any. */
export function Sweep({ rows, taken, limit: asked }) {
  const limit = typeof asked === "number" ? asked : null; // "auto" is resolved by the workers
  const best = new Set(findParetoFrontier(sortMeasuredTrials(rows)));
  const columns = [
    { name: "Trial", sort: (row) => row.trial, cell: (row) => row.trial },
    { name: "Prefill compute", number: true, sort: (row) => row.prefill_flops_ratio, cell: (row) => formatPercent(row.prefill_flops_ratio) },
    { name: "KV bytes", number: true, sort: (row) => row.kv_bytes_ratio, cell: (row) => formatPercent(row.kv_bytes_ratio) },
    { name: "KL, nats", number: true, sort: (row) => row.kl, cell: (row) => formatNumber(row.kl) },
    { name: "Perplexity, relative to the teacher", number: true, sort: (row) => row.perplexity_ratio, cell: (row) => formatNumber(row.perplexity_ratio) },
    { name: "Passes gates", cell: (row) => (row.error ? row.error : row.within_budget ? "yes" : "no") },
    { name: "Result", cell: (row) => (row.trial === taken ? "published" : best.has(row) ? "on the frontier" : "") },
  ];
  return html`${sortMeasuredTrials(rows).length > 0 && html`<div class="panel"><${Plot} rows=${rows} taken=${taken} limit=${limit} /></div><br />`}
    <${Table} caption="Trials" columns=${columns} rows=${rows} empty="" />`;
}
