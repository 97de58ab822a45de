// All jobs: filter, search, sort, and select runs to compare.

import { html, useState } from "../vendor/htm-preact.js";
import { get } from "../api.js";
import { EmptyState, PageHeader, CopyableId, SearchableTable, Status, formatBytes, formatCount, formatDuration, formatNumber, usePolling, formatTime } from "../parts.js";

const STATUSES = ["queued", "starting", "running", "evaluating", "pausing", "paused", "cancelling", "succeeded", "failed", "cancelled"];
const SHOWN = 500;

export const ProgressBar = ({ job }) => {
  const { step, total_steps: total, percent } = job.progress;
  if (!total) return "";
  return html`<progress max="100" value=${percent} aria-label="${percent}% of ${total} steps"></progress> ${formatCount(step)}/${formatCount(total)}`;
};

/** Progress of the current phase; empty if workers do not report it. */
export function describePhaseProgress({ phase_progress: progress }) {
  if (!progress) return "";
  const show = progress.part === "bytes" ? formatBytes : formatCount;
  const left = progress.seconds_remaining ? `, ${formatDuration(progress.seconds_remaining)} left` : "";
  return `${progress.part} ${show(progress.done)} of ${show(progress.total)}${left}`;
}

const getSearchText = (job) => [job.name, job.id, job.status, job.spec.model.name_or_path, job.created_by, job.error?.message, ...Object.values(job.metadata)].join(" ");

export function Jobs({ query }) {
  const [status, setStatus] = useState(query.get("status") ?? "");
  const [chosen, setChosen] = useState([]);
  const [page, problem] = usePolling(() => get(`/jobs?limit=${SHOWN}${status && `&status=${status}`}`), [status], 2000);
  const toggle = (id) => setChosen((old) => (old.includes(id) ? old.filter((other) => other !== id) : [...old, id]));
  const columns = [
    { name: "Compare", cell: (job) => html`<input type="checkbox" aria-label="Compare ${job.name}" checked=${chosen.includes(job.id)} onChange=${() => toggle(job.id)} />` },
    { name: "Job", sort: (job) => job.name, cell: (job) => html`<span><a href="#/jobs/${job.id}">${job.name}</a><br /><${CopyableId} text=${job.id} quiet /></span>` },
    { name: "Status", sort: (job) => STATUSES.indexOf(job.status), cell: (job) => html`<span><${Status} status=${job.status} />${job.phase && html`<br /><span class="small quiet">${[job.phase, describePhaseProgress(job)].filter(Boolean).join(": ")}</span>`}${job.error && html`<br /><code class="small quiet">${job.error.code}</code>`}</span>` },
    { name: "Steps", sort: (job) => job.progress.percent, cell: (job) => (job.progress.total_steps ? html`<span><${ProgressBar} job=${job} /></span>` : "") },
    { name: "Time left", number: true, sort: (job) => job.progress.seconds_remaining, cell: (job) => formatDuration(job.progress.seconds_remaining) },
    { name: "KL", number: true, sort: (job) => job.result?.distilled?.kl, cell: (job) => formatNumber(job.result?.distilled?.kl) },
    { name: "Teacher", sort: (job) => job.spec.model.name_or_path, cell: (job) => job.spec.model.name_or_path },
    { name: "Created", sort: (job) => job.created_at, cell: (job) => formatTime(job.created_at) },
  ];
  const empty = html`<div class="panel"><${EmptyState} title=${status ? `No jobs are ${status}.` : "No jobs."}>Jobs distill models. <a href="#/submit">Start one from a recipe</a>.<//></div>`;
  return html`<${PageHeader} title="Jobs"><a class="button" href="#/submit">New job</a><//>
    <${SearchableTable} what="jobs" columns=${columns} rows=${page?.data} problem=${problem} empty=${empty} find=${getSearchText}>
      <label>Status
        <select value=${status} onChange=${(event) => setStatus(event.target.value)}>
          <option value="">all</option>
          ${STATUSES.map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
      ${chosen.length > 1 && html`<a class="button plain" href="#/runs?jobs=${chosen.join()}">Compare ${chosen.length} runs</a>`}
    <//>
    ${page?.left_out.length > 0 && html`<p class="problem">Not shown, because this version cannot read them: ${page.left_out.join(", ")}</p>`}
    ${page?.has_more && html`<p class="quiet">Showing the newest ${page.data.length} jobs.</p>`}`;
}
