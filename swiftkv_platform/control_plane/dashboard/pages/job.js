// One job, in tabs: summary, metrics, checkpoints, log with events, spec.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { fetchAll, followEvents, get, post } from "../api.js";
import { Checkpoints } from "../job/checkpoints.js";
import { Log } from "../job/log.js";
import { Report } from "../job/report.js";
import { Timeline } from "../job/timeline.js";
import { Charts, EmptyState, FactList, PageHeader, CopyableId, SearchableTable, Loading, ObjectPage, Problem, Snippet, Status, Table, Tabs, formatBytes, formatNumber, showToast, useAction, usePolling, formatTime } from "../parts.js";
import { ProgressBar } from "./jobs.js";
import { describeProgress } from "./overview.js";
import { METRICS } from "./runs.js";
import { Sweep } from "./sweep.js";

const LIVE = new Set(["queued", "starting", "running", "evaluating", "pausing", "paused", "cancelling"]);
const KL = "Held-out KL";
const CHARTS = [
  { title: "Loss", fits: (name) => name === "loss" || name.endsWith("_loss") },
  { title: KL, fits: (name) => name === "held_out_kl" },
  { title: "Learning rate", fits: (name) => name === "lr" },
  { title: "Gradient norm", fits: (name) => name === "grad_norm" },
  { title: "Tokens per second", fits: (name) => name === "tokens_per_second" },
];

/** A measure's name in a legend. */
const getMetricLabel = (name) => (METRICS[name] ? METRICS[name][0].toLowerCase() + METRICS[name].slice(1) : name);

/** The job's events so far; calls `onEvent` with each. */
function useEvents(jobId, onEvent) {
  const [events, setEvents] = useState([]);
  useEffect(() => {
    const seen = new Set();
    return followEvents(jobId, (event) => {
      if (seen.has(event.id)) return;
      seen.add(event.id);
      setEvents((old) => [...old, event]);
      onEvent(event);
    });
  }, [jobId]);
  return events;
}

function Actions({ job, onDone }) {
  const [act, busy, problem] = useAction();
  const button = (verb, style) => html`<button class=${style} disabled=${busy} onClick=${() => act(async () => {
    await post(`/jobs/${job.id}/${verb.toLowerCase()}`);
    showToast(`${verb} requested.`);
    await onDone();
  })}>${verb}</button>`;
  const pausable = ["queued", "starting", "running"].includes(job.status);
  return html`${job.distilled_model && html`<a class="button" href="#/models/${job.distilled_model}">View model</a>`}
    <a class="button plain" href="#/submit?job=${job.id}">Clone</a>
    ${pausable && button("Pause", "plain")}
    ${job.status === "paused" && button("Resume", "")}
    ${LIVE.has(job.status) && job.status !== "cancelling" && button("Cancel", "danger")}
    <${Problem} problem=${problem} />`;
}

/** Charts of a job's metrics. `chosen`: the checkpoint that became the model. */
function MetricCharts({ points, id, live, chosen }) {
  if (!points) return html`<${Loading} what="metrics" />`;
  if (!points.length) {
    return html`<div class="panel">${live ? html`<${EmptyState} title="No metrics yet">They appear after the first step.<//>` : html`<${EmptyState} title="No metrics">The job ended before its first step.<//>`}</div>`;
  }
  const names = [...new Set(points.flatMap((point) => Object.keys(point)))];
  const charts = CHARTS.map(({ title, fits }) => ({ title, shown: names.filter(fits) })).filter(({ shown }) => shown.length);
  return html`<${Charts} charts=${charts.map(({ title, shown }) => {
      const measured = points.filter((point) => shown.some((name) => point[name] != null));
      const series = Object.fromEntries(shown.map((name) => [getMetricLabel(name), measured.map((point) => point[name] ?? null)]));
      return { title, x: measured.map(({ step }) => step), series, marks: title === KL && chosen ? [{ x: chosen.step, label: "selected checkpoint" }] : [] };
    })} />
  <p class="small"><a href="#/runs?jobs=${id}">Open in the run comparison</a>. To compare runs, select jobs in the list of jobs.</p>`;
}

export const FILES = [
  { name: "File", sort: (file) => file.path, cell: (file) => html`<a href=${file.url} download=${file.path.split("/").pop()}>${file.path}</a>` },
  { name: "Size", number: true, sort: (file) => file.size, cell: (file) => formatBytes(file.size) },
];
const EVENTS = [
  { name: "Time", whole: true, cell: (event) => formatTime(event.created_at) },
  { name: "Event", cell: (event) => html`<span class="level-${event.level}">${event.message}</span>` },
];

const Events = ({ events }) => html`<${SearchableTable} what="events" caption="Events, newest first" columns=${EVENTS} empty="No events yet."
  rows=${events.filter((event) => event.type !== "metrics").toReversed()} find=${(event) => `${event.type} ${event.level} ${event.message}`} />`;

const TABS = { summary: "Summary", metrics: "Metrics", checkpoints: "Checkpoints", log: "Log and events", spec: "Spec" };
const PARENT = ["jobs", "Jobs"];

export const Job = ({ id, tab }) => html`<${ObjectPage} what="job" id=${id} parent=${PARENT} load=${() => get(`/jobs/${id}`)} everyMs=${2000} page=${JobPage} tab=${tab} />`;

function JobPage({ value: job, problem, onChange, tab }) {
  const { id } = job;
  const [points, , reloadPoints] = usePolling(() => fetchAll(`/jobs/${id}/metrics`), [id], null);
  const [files] = usePolling(() => fetchAll(`/jobs/${id}/artifacts`), [id, job.status], null);
  const [checkpoints, , reloadCheckpoints] = usePolling(() => fetchAll(`/jobs/${id}/checkpoints`), [id, job.status], null);
  const refresh = { metrics: reloadPoints, checkpoint: reloadCheckpoints };
  const events = useEvents(id, (event) => (refresh[event.type] ?? onChange)());
  const reason = job.error ?? (job.status === "queued" ? null : job.status_reason); // the wait reason is shown below
  const trials = events.findLast((event) => event.data.sweep);
  const live = LIVE.has(job.status);
  const decisions = events.filter((event) => event.data.action && event.data.code);
  const shown = TABS[tab] ? tab : "summary";
  const panels = {
    summary: () => html`
      <section class="panel"><h2>Phases</h2><${Timeline} events=${events} ended=${job.finished_at} /></section>
      ${job.result && html`<h2>Quality</h2><section class="panel"><${Report} report=${job.result} verdict=${job.verdict} spec=${job.spec} /></section>`}
      ${trials && html`<h2>Sweep</h2><${Sweep} rows=${trials.data.sweep} taken=${trials.data.recommended} limit=${job.spec.evaluation.max_kl} />`}
      <h2>Details</h2>
      <section class="panel"><${FactList} of=${{
        job: html`<${CopyableId} text=${id} />`,
        attempt: job.attempt,
        teacher: html`<${CopyableId} text=${job.spec.model.name_or_path} />`,
        created: `${formatTime(job.created_at)} by ${job.created_by}`,
        started: formatTime(job.started_at),
        finished: formatTime(job.finished_at),
        "trained tokens": job.progress.tokens ? formatNumber(job.progress.tokens) : null,
        cost: formatNumber(job.cost),
        tracking: job.tracking?.url ?? job.tracking?.run_id,
        artifact: job.artifact_uri && html`<${CopyableId} text=${job.artifact_uri} />`,
      }} /></section>`,
    metrics: () => html`<${MetricCharts} points=${points} id=${id} live=${live} chosen=${checkpoints?.find((item) => item.distilled_model)} />
      ${decisions.length > 0 && html`<h2>Automatic training decisions</h2><${Table} caption="Automatic training decisions" columns=${EVENTS} rows=${decisions} empty="" />`}`,
    checkpoints: () => html`${checkpoints ? html`<${Checkpoints} job=${job} checkpoints=${checkpoints} points=${points} />` : html`<${Loading} what="checkpoints" />`}
      ${files?.length > 0 && html`<h2>Files of the model</h2><${Table} caption="Files" columns=${FILES} rows=${files} empty="" />`}`,
    log: () => html`<${Log} job=${job} live=${live} /><h2>Events</h2><${Events} events=${events} />`,
    spec: () => html`<${Snippet} name="Spec" code=${JSON.stringify(job.spec, null, 2)} />`,
  };
  return html`<${PageHeader} title=${job.name} parent=${PARENT} status=${html`<${Status} status=${job.status} />`}><${Actions} job=${job} onDone=${onChange} /><//>
    <div aria-live="polite">${reason && html`<p class=${job.error ? "problem" : "quiet"}><strong>${reason.code}</strong>: ${reason.message}${job.error && html`<span class="cure"><strong>What to do:</strong> ${job.error.cure}</span>`}</p>`}</div>
    <${Problem} problem=${problem} />
    ${live && html`<p><${ProgressBar} job=${job} /> <span class="quiet">${describeProgress(job)}</span></p>`}
    <${Tabs} address="jobs/${id}" tabs=${TABS} chosen=${shown} />
    ${panels[shown]()}`;
}
