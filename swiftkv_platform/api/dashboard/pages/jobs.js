// All jobs, newest first.

import { html, useState } from "../vendor/htm-preact.js";
import { get } from "../api.js";
import { Problem, Status, Table, count, duration, useFresh, when } from "../parts.js";

const STATUSES = ["queued", "starting", "running", "evaluating", "pausing", "paused", "cancelling", "succeeded", "failed", "cancelled"];

export const Progress = ({ job }) => {
  const { step, total_steps: total, percent } = job.progress;
  if (!total) return "";
  return html`<progress max="100" value=${percent} aria-label="${percent}% of ${total} steps"></progress> ${count(step)}/${count(total)}`;
};

const COLUMNS = [
  { name: "Job", cell: (job) => html`<a href="#/jobs/${job.id}">${job.name}</a><br /><code class="quiet">${job.id}</code>` },
  { name: "Status", cell: (job) => html`<${Status} status=${job.status} />` },
  { name: "Steps", cell: (job) => html`<${Progress} job=${job} />` },
  { name: "Left", cell: (job) => duration(job.progress.seconds_remaining) },
  { name: "Teacher", cell: (job) => job.spec.model.name_or_path },
  { name: "Created", cell: (job) => when(job.created_at) },
];

export function Jobs() {
  const [status, setStatus] = useState("");
  const load = () => get(`/jobs?limit=100${status && `&status=${status}`}`);
  const [page, problem] = useFresh(load, [status], 2000);
  return html`<div class="row">
      <h1>Jobs</h1>
      <label>Status
        <select value=${status} onChange=${(event) => setStatus(event.target.value)}>
          <option value="">all</option>
          ${STATUSES.map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
    </div>
    <${Problem} problem=${problem} />
    ${page && html`<${Table} caption="Jobs" columns=${COLUMNS} rows=${page.data} empty="No jobs. “New job” submits one." />`}
    ${page?.left_out.length > 0 && html`<p class="problem">Not shown, since this version cannot read them: ${page.left_out.join(", ")}</p>`}
    ${page?.has_more && html`<p class="quiet">The newest 100 are shown.</p>`}`;
}
