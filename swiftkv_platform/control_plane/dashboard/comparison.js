// Comparison of two models: figures, evaluation tasks, and the rows on which their answers have different scores.

import { html, useState } from "./vendor/htm-preact.js";
import { get } from "./api.js";
import { LoadingOrProblem, Problem, Table, formatCount, formatNumber, usePolling } from "./parts.js";

const SHOWN = 20;
const CHANGES = { "": "worse or better", worse: "worse", better: "better" };

const formatValue = (value) => (typeof value === "number" ? formatNumber(value) : value == null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));

const makeComparisonColumns = (a, b) => [
  { name: "Metric", cell: (row) => html`<code>${row.name}</code>` },
  { name: a, number: true, cell: (row) => html`<span>${formatValue(row.a)}${row.better === "a" ? " ✓" : ""}</span>` },
  { name: b, number: true, cell: (row) => html`<span>${formatValue(row.b)}${row.better === "b" ? " ✓" : ""}</span>` },
];

const makeTaskColumns = (a, b) => [
  { name: "Task", cell: (row) => html`<span>${row.task} <span class="quiet">${row.metric}</span></span>` },
  { name: "Rows", number: true, cell: (row) => html`<span>${formatCount(row.num_rows)}${row.num_only_a + row.num_only_b > 0 && html`<br /><span class="quiet small">not compared: ${formatCount(row.num_only_a)} only of ${a}, ${formatCount(row.num_only_b)} only of ${b}</span>`}</span>` },
  { name: a, number: true, cell: (row) => formatValue(row.a) },
  { name: b, number: true, cell: (row) => formatValue(row.b) },
  { name: "Difference, 95% interval", number: true, cell: (row) => (row.interval ? `${formatNumber(row.interval[0])} to ${formatNumber(row.interval[1])}` : "too few rows") },
  { name: "Worse", number: true, cell: (row) => formatCount(row.num_worse) },
  { name: "Better", number: true, cell: (row) => formatCount(row.num_better) },
];

const Result = ({ result }) => html`<div><b>${formatNumber(result.score)}</b>${result.answer != null && html`<pre>${result.answer}</pre>`}</div>`;

const makeRowColumns = (a, b) => [
  { name: "Prompt", cell: (row) => html`<pre>${row.prompt}</pre>` },
  { name: "Expected", cell: (row) => (row.expected == null ? "" : html`<pre>${row.expected}</pre>`) },
  { name: "Change", whole: true, cell: (row) => html`<span class="status ${row.change === "worse" ? "failed" : "passed"}">${row.change}</span>` },
  { name: a, cell: (row) => html`<${Result} result=${row.a} />` },
  { name: b, cell: (row) => html`<${Result} result=${row.b} />` },
];

/** Pages of the rows of a task with different scores, the largest difference first, with both answers side by side. */
function ChangedRows({ address, tasks, names }) {
  const [task, setTask] = useState(tasks[0].task);
  const [change, setChange] = useState("");
  const [before, setBefore] = useState([]); // the last rows of the pages before this one
  const query = new URLSearchParams({ limit: SHOWN });
  if (change) query.set("change", change);
  if (before.length) query.set("after", before.at(-1));
  const asked = `${address}/rows/${encodeURIComponent(task)}?${query}`;
  const [page, problem] = usePolling(() => get(asked), [asked], null);
  const choose = (set) => (event) => {
    set(event.target.value);
    setBefore([]);
  };
  return html`<h2>Changed rows</h2>
    <div class="toolbar">
      <label>Task <select value=${task} onChange=${choose(setTask)}>${tasks.map((each) => html`<option value=${each.task}>${each.task}</option>`)}</select></label>
      <label>Change <select value=${change} onChange=${choose(setChange)}>${Object.entries(CHANGES).map(([value, words]) => html`<option value=${value}>${words}</option>`)}</select></label>
    </div>
    <${Problem} problem=${problem} />
    ${page && html`<${Table} caption="Changed rows" columns=${makeRowColumns(...names)} rows=${page.data} empty="No rows with different scores." />
    ${(before.length > 0 || page.has_more) && html`<div class="toolbar below">
      <button class="plain" disabled=${!before.length} onClick=${() => setBefore(before.slice(0, -1))}>Previous</button>
      <button class="plain" disabled=${!page.has_more} onClick=${() => setBefore([...before, page.last_id])}>Next</button>
      <span class="end" role="status">Page ${formatCount(before.length + 1)}</span>
    </div>`}`}`;
}

/** Comparison of two models; ✓ marks the better figure. */
export function Comparison({ a, b }) {
  const address = `/models/${a.id}/compare/${b.id}`;
  const [found, problem] = usePolling(() => get(address), [address], null);
  if (!found) return html`<${LoadingOrProblem} what="the comparison" problem=${problem} />`;
  const names = [a.name, b.name === a.name ? `${b.name} (${b.id.slice(-4)})` : b.name];
  const columns = makeComparisonColumns(...names);
  return html`<h2>Comparison</h2>
    ${found.differences.length > 0 && html`<p class="notice">Quality figures are not comparable: the models differ in ${found.differences.map(({ name }) => name).join(", ")}.</p>`}
    <${Table} caption="Figures of both models" columns=${columns} rows=${found.figures} empty="No common figures." />
    ${found.tasks.length > 0 && html`<h2>Evaluation tasks</h2>
      <${Table} caption="Evaluation tasks" columns=${makeTaskColumns(...names)} rows=${found.tasks} empty="" />
      <${ChangedRows} key=${address} address=${address} tasks=${found.tasks} names=${names} />`}
    ${found.spec_differences.length > 0 && html`<h3>Spec differences</h3><${Table} caption="Spec differences" columns=${columns} rows=${found.spec_differences} empty="" />`}`;
}
