// One job: how far it is, its curves, what it says, and what it leaves.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { all, followEvents, get, post, send } from "../api.js";
import { Chart, Facts, Problem, Status, Table, bytes, duration, figure, percent, useFresh, when } from "../parts.js";
import { Progress } from "./jobs.js";
import { Sweep } from "./sweep.js";

const LIVE = new Set(["queued", "starting", "running", "evaluating", "pausing", "paused", "cancelling"]);
const CHARTS = [
  { title: "Loss", fits: (name) => name === "loss" || name.endsWith("_loss") },
  { title: "Held-out KL", fits: (name) => name === "held_out_kl" },
  { title: "Learning rate", fits: (name) => name === "lr" },
  { title: "Gradient norm", fits: (name) => name === "grad_norm" },
  { title: "Tokens per second", fits: (name) => name === "tokens_per_second" },
];

/** Events so far, and whatever `onEvent` makes of each. */
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
  return html`<div class="row">
      ${pausable && html`<button class="plain" onClick=${act("pause")}>Pause</button>`}
      ${job.status === "paused" && html`<button onClick=${act("resume")}>Resume</button>`}
      ${LIVE.has(job.status) && job.status !== "cancelling" && html`<button class="danger" onClick=${act("cancel")}>Cancel</button>`}
      ${job.distilled_model && html`<a href="#/models?model=${job.distilled_model}">Its model</a>`}
    </div>
    <${Problem} problem=${problem} />`;
}

function Curves({ points }) {
  if (!points?.length) return html`<p class="quiet">Curves appear with the first step.</p>`;
  const names = [...new Set(points.flatMap((point) => Object.keys(point)))];
  const x = points.map((point) => point.step);
  const charts = CHARTS.map(({ title, fits }) => ({ title, chosen: names.filter(fits) })).filter(({ chosen }) => chosen.length);
  return html`<div class="grid">
    ${charts.map(({ title, chosen }) => {
      const series = Object.fromEntries(chosen.map((name) => [name, points.map((point) => point[name] ?? null)]));
      return html`<${Chart} key=${title} title=${title} x=${x} series=${series} />`;
    })}
  </div>`;
}

const QUALITY = [
  { name: "Model", cell: ([name]) => name },
  { name: "Perplexity", number: true, cell: ([, quality]) => figure(quality.perplexity) },
  { name: "KL to the teacher, nats", number: true, cell: ([, quality]) => figure(quality.kl) },
  { name: "Top-1 agreement", number: true, cell: ([, quality]) => percent(quality.top1_agreement) },
];

export function Report({ report }) {
  const rows = ["teacher", "rewired", "calibrated", "distilled"].map((name) => [name, report[name]]).filter(([, quality]) => quality);
  return html`<${Table} caption="Quality on held-out text" columns=${QUALITY} rows=${rows} empty="" />
    <${Facts} of=${{
      "KL recovered": percent(report.kl_recovered),
      "prefill compute": percent(report.prefill_flops_ratio),
      "KV bytes": percent(report.kv_bytes_ratio),
      "time to first token": report.ttft_ms && `${figure(report.ttft_ms.dense)} ms dense, ${figure(report.ttft_ms.swiftkv)} ms SwiftKV`,
      "trained tokens": figure(report.tokens_trained),
      "state of": report.training && `step ${report.training.step}${report.training.reason === "lowest_held_out_kl" ? ", the lowest held-out KL" : ""}`,
    }} />`;
}

const LOG_LINES = 1000;

function Log({ job }) {
  const [shown, setShown] = useState(false);
  const load = async () => (shown ? (await send("GET", `/jobs/${job.id}/logs?tail_lines=${LOG_LINES}`)).text() : null);
  const [text, problem] = useFresh(load, [job.id, shown], LIVE.has(job.status) ? 3000 : null);
  return html`<details onToggle=${(event) => setShown(event.target.open)}>
    <summary>Log</summary>
    <${Problem} problem=${problem} />
    <p class="quiet">The last ${LOG_LINES} lines; <a href="/jobs/${job.id}/logs">the whole log</a>.</p>
    <pre tabindex="0" aria-label="Log">${text || "Nothing was printed yet."}</pre>
  </details>`;
}

const FILES = [
  { name: "File", cell: (file) => html`<a href=${file.url} download=${file.path.split("/").pop()}>${file.path}</a>` },
  { name: "Size", number: true, cell: (file) => bytes(file.size) },
];
const EVENTS = [
  { name: "Time", whole: true, cell: (event) => when(event.created_at) },
  { name: "Event", cell: (event) => html`<span class="level-${event.level}">${event.message}</span>` },
];

export function Job({ id }) {
  const [job, problem, reload] = useFresh(() => get(`/jobs/${id}`), [id], 2000);
  const [points, , reloadPoints] = useFresh(() => all(`/jobs/${id}/metrics`), [id], null);
  const [files] = useFresh(() => all(`/jobs/${id}/artifacts`), [id, job?.status], null);
  const events = useEvents(id, (event) => (event.type === "metrics" ? reloadPoints() : reload()));
  if (!job) return html`<h1>${id}</h1><${Problem} problem=${problem} />`;
  const reason = job.error ?? job.status_reason;
  const trials = events.findLast((event) => event.data.sweep);
  const turns = events.filter((event) => event.data.action && event.data.code);
  const said = events.filter((event) => event.type !== "metrics").toReversed();
  return html`<div class="row"><h1>${job.name}</h1><${Status} status=${job.status} /><${Progress} job=${job} /></div>
    <div aria-live="polite">${reason && html`<p class=${job.error ? "problem" : "quiet"}>${reason.code}: ${reason.message}</p>`}</div>
    <${Problem} problem=${problem} />
    <${Actions} job=${job} onDone=${reload} />
    <h2>Facts</h2>
    <${Facts} of=${{
      job: html`<code>${job.id}</code>`,
      attempt: job.attempt,
      teacher: job.spec.model.name_or_path,
      created: `${when(job.created_at)} by ${job.created_by}`,
      started: when(job.started_at),
      finished: when(job.finished_at),
      left: duration(job.progress.seconds_remaining),
      "trained tokens": job.progress.tokens ? figure(job.progress.tokens) : null,
      tracking: job.tracking?.url ?? job.tracking?.run_id,
      artifact: job.artifact_uri,
    }} />
    <h2>Curves</h2>
    <${Curves} points=${points} />
    ${turns.length > 0 && html`<h2>Course</h2><${Table} caption="Turns of the training run" columns=${EVENTS} rows=${turns} empty="" />`}
    ${trials && html`<h2>Sweep</h2><${Sweep} rows=${trials.data.sweep} taken=${trials.data.recommended} />`}
    ${job.result && html`<h2>Quality</h2><${Report} report=${job.result} />`}
    ${files?.length > 0 && html`<h2>Artifact</h2><${Table} caption="Files" columns=${FILES} rows=${files} empty="" />`}
    <h2>Events</h2>
    <${Table} caption="Events, newest first" columns=${EVENTS} rows=${said} empty="None yet." />
    <h2>More</h2>
    <${Log} job=${job} />
    <details><summary>Spec</summary><pre tabindex="0" aria-label="Spec">${JSON.stringify(job.spec, null, 2)}</pre></details>`;
}
