// One job: status, phases, metrics, checkpoints, artifact, log and events.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { all, followEvents, get, post } from "../api.js";
import { Checkpoints } from "../job/checkpoints.js";
import { Log } from "../job/log.js";
import { Report } from "../job/report.js";
import { Timeline } from "../job/timeline.js";
import { Chart, Empty, Facts, Loading, Problem, Search, Status, Table, bytes, figure, useFresh, when } from "../parts.js";
import { Progress } from "./jobs.js";
import { eta } from "./overview.js";
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
const label = (name) => (METRICS[name] ? METRICS[name][0].toLowerCase() + METRICS[name].slice(1) : name);

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
  const [problem, setProblem] = useState(null);
  const act = (verb) => async () => {
    try {
      await post(`/jobs/${job.id}/${verb}`);
      setProblem(null);
    } catch (error) {
      setProblem(error);
    }
    onDone();
  };
  const pausable = ["queued", "starting", "running"].includes(job.status);
  return html`<span class="end">
      ${job.distilled_model && html`<a class="button" href="#/models?model=${job.distilled_model}">View model</a>`}
      <a class="button plain" href="#/submit?job=${job.id}">Clone</a>
      ${pausable && html`<button class="plain" onClick=${act("pause")}>Pause</button>`}
      ${job.status === "paused" && html`<button onClick=${act("resume")}>Resume</button>`}
      ${LIVE.has(job.status) && job.status !== "cancelling" && html`<button class="danger" onClick=${act("cancel")}>Cancel</button>`}
    </span>
    <${Problem} problem=${problem} />`;
}

/** Charts of a job's metrics. `chosen`: the checkpoint that became the model. */
function Curves({ points, id, live, chosen }) {
  if (!points) return html`<${Loading} what="metrics" />`;
  if (!points.length) {
    return html`<div class="panel">${live ? html`<${Empty} title="No metrics yet">They appear after the first step.<//>` : html`<${Empty} title="No metrics">The job ended before its first step.<//>`}</div>`;
  }
  const names = [...new Set(points.flatMap((point) => Object.keys(point)))];
  const x = points.map((point) => point.step);
  const charts = CHARTS.map(({ title, fits }) => ({ title, shown: names.filter(fits) })).filter(({ shown }) => shown.length);
  return html`<div class="halves">
    ${charts.map(({ title, shown }) => {
      const series = Object.fromEntries(shown.map((name) => [label(name), points.map((point) => point[name] ?? null)]));
      return html`<${Chart} key=${title} title=${title} x=${x} series=${series} marks=${title === KL && chosen ? [{ x: chosen.step, label: "selected checkpoint" }] : []} />`;
    })}
  </div>
  <p class="small"><a href="#/runs?jobs=${id}">Show as a run</a>. To compare runs, select them in the list of jobs.</p>`;
}

const FILES = [
  { name: "File", sort: (file) => file.path, cell: (file) => html`<a href=${file.url} download=${file.path.split("/").pop()}>${file.path}</a>` },
  { name: "Size", number: true, sort: (file) => file.size, cell: (file) => bytes(file.size) },
];
const EVENTS = [
  { name: "Time", whole: true, cell: (event) => when(event.created_at) },
  { name: "Event", cell: (event) => html`<span class="level-${event.level}">${event.message}</span>` },
];

function Events({ events }) {
  const [search, setSearch] = useState("");
  const shown = events.filter((event) => event.type !== "metrics").toReversed();
  return html`<div class="toolbar"><${Search} value=${search} onInput=${setSearch} label="Search events" /></div>
    <${Table} caption="Events, newest first" columns=${EVENTS} rows=${shown} empty="No events yet." search=${search} find=${(event) => `${event.type} ${event.level} ${event.message}`} />`;
}

export function Job({ id }) {
  const [job, problem, reload] = useFresh(() => get(`/jobs/${id}`), [id], 2000);
  const [points, , reloadPoints] = useFresh(() => all(`/jobs/${id}/metrics`), [id], null);
  const [files] = useFresh(() => all(`/jobs/${id}/artifacts`), [id, job?.status], null);
  const [checkpoints, , reloadCheckpoints] = useFresh(() => all(`/jobs/${id}/checkpoints`), [id, job?.status], null);
  const refresh = { metrics: reloadPoints, checkpoint: reloadCheckpoints };
  const events = useEvents(id, (event) => (refresh[event.type] ?? reload)());
  if (!job) return html`<h1>${id}</h1><${Problem} problem=${problem} />${!problem && html`<${Loading} what="the job" />`}`;
  const reason = job.error ?? (job.status === "queued" ? null : job.status_reason); // the wait reason is shown below
  const trials = events.findLast((event) => event.data.sweep);
  const live = LIVE.has(job.status);
  const decisions = events.filter((event) => event.data.action && event.data.code);
  return html`<div class="head"><h1>${job.name}</h1><${Status} status=${job.status} /><${Actions} job=${job} onDone=${reload} /></div>
    <div aria-live="polite">${reason && html`<p class=${job.error ? "problem" : "quiet"}><strong>${reason.code}</strong>: ${reason.message}${job.error && html`<span class="cure"><strong>What to do:</strong> ${job.error.cure}</span>`}</p>`}</div>
    <${Problem} problem=${problem} />
    ${live && html`<p><${Progress} job=${job} /> <span class="quiet">${eta(job)}</span></p>`}
    <section class="panel"><h2>Phases</h2><${Timeline} events=${events} ended=${job.finished_at} /></section>
    ${job.result && html`<h2>Quality</h2><section class="panel"><${Report} report=${job.result} verdict=${job.verdict} /></section>`}
    ${trials && html`<h2>Sweep</h2><${Sweep} rows=${trials.data.sweep} taken=${trials.data.recommended} limit=${job.spec.evaluation.max_kl} />`}
    <h2>Metrics</h2>
    <${Curves} points=${points} id=${id} live=${live} chosen=${checkpoints?.find((item) => item.distilled_model)} />
    ${decisions.length > 0 && html`<h2>Steering decisions</h2><${Table} caption="Steering decisions" columns=${EVENTS} rows=${decisions} empty="" />`}
    ${checkpoints?.length > 0 && html`<h2>Checkpoints</h2><${Checkpoints} job=${job} checkpoints=${checkpoints} points=${points} />`}
    ${files?.length > 0 && html`<h2>Artifact</h2><${Table} caption="Files" columns=${FILES} rows=${files} empty="" />`}
    <h2>Details</h2>
    <section class="panel"><${Facts} of=${{
      job: html`<code>${job.id}</code>`,
      attempt: job.attempt,
      teacher: job.spec.model.name_or_path,
      created: `${when(job.created_at)} by ${job.created_by}`,
      started: when(job.started_at),
      finished: when(job.finished_at),
      "trained tokens": job.progress.tokens ? figure(job.progress.tokens) : null,
      cost: figure(job.cost),
      tracking: job.tracking?.url ?? job.tracking?.run_id,
      artifact: job.artifact_uri,
    }} /></section>
    <h2>Log and events</h2>
    <${Log} job=${job} live=${live} />
    <${Events} events=${events} />
    <details><summary>Spec</summary><pre tabindex="0" role="region" aria-label="Spec">${JSON.stringify(job.spec, null, 2)}</pre></details>`;
}
