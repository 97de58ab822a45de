// One deployment, live: what its replicas measure, as rates over the last seconds.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { get } from "../api.js";
import { Chart, Facts, Problem, Status, answering, figure, served, useFresh, when } from "../parts.js";

const EVERY_MS = 2000;
const WINDOW_S = 20; // rates are over so long: finished requests count, and they come in lumps
const KEPT = 300;

const sum = (metrics, name) => metrics.replicas.reduce((total, { values }) => total + (values[name] ?? 0), 0);

/** What the replicas of both samples have added between them; one that was replaced begins anew and is left out. */
function growth(before, after, name) {
  const old = new Map(before.replicas.map(({ replica, values }) => [replica, values[name] ?? 0]));
  return after.replicas.reduce((total, { replica, values }) => {
    const added = (values[name] ?? 0) - (old.get(replica) ?? Infinity);
    return total + Math.max(added, 0);
  }, 0);
}

/** The figures of a moment, from the samples up to it; null where nothing says. */
export function figures(samples) {
  const now = samples.at(-1);
  const before = samples.find((sample) => now.time - sample.time <= WINDOW_S);
  const seconds = now.time - before.time;
  const tokens = growth(before, now, "generation_tokens_total");
  const answers = growth(before, now, "time_to_first_token_seconds_count");
  const ratio = (part, whole) => (whole > 0 ? part / whole : null);
  return {
    time: now.time,
    "generated tokens/s": ratio(tokens, seconds),
    "prompt tokens/s": ratio(growth(before, now, "prompt_tokens_total"), seconds),
    "time to first token, ms": ratio(1000 * growth(before, now, "time_to_first_token_seconds_sum"), answers),
    "exited early, %": ratio(100 * growth(before, now, "tokens_exited_total"), tokens),
    "KV cache in use, %": ratio(100 * sum(now, "kv_cache_usage_perc"), now.replicas.length),
    running: sum(now, "num_requests_running"),
    waiting: sum(now, "num_requests_waiting"),
  };
}

const CHARTS = [
  ["Tokens per second", ["generated tokens/s", "prompt tokens/s"]],
  ["Time to first token", ["time to first token, ms"]],
  ["Exit rate", ["exited early, %"]],
  ["KV cache", ["KV cache in use, %"]],
  ["Requests", ["running", "waiting"]],
];

function useSamples(id) {
  const [samples, setSamples] = useState([]);
  const [metrics, problem] = useFresh(() => get(`/deployments/${id}/metrics`), [id], EVERY_MS);
  useEffect(() => {
    if (metrics?.replicas.length) setSamples((old) => [...old, metrics].slice(-KEPT));
  }, [metrics]);
  return [samples, problem];
}

export function Deployment({ id }) {
  const [deployment, problem] = useFresh(() => get(`/deployments/${id}`), [id], EVERY_MS);
  const [samples, silence] = useSamples(id);
  if (!deployment) return html`<h1>${id}</h1><${Problem} problem=${problem} />`;
  const points = samples.map((_, i) => figures(samples.slice(0, i + 1)));
  const now = points.at(-1);
  const x = points.map(({ time }) => Math.round(time - points[0].time));
  return html`<div class="row"><h1>${deployment.route_prefix}</h1><${Status} status=${deployment.status} /></div>
    <div aria-live="polite">${deployment.message && html`<p class="quiet">${deployment.message}</p>`}</div>
    <${Problem} problem=${problem ?? (answering(deployment) ? silence : null)} />
    <${Facts} of=${{
      deployment: html`<code>${deployment.id}</code>`,
      model: html`<a href="#/models?model=${deployment.model}">${served(deployment)}</a>`,
      address: html`<code>${deployment.url}</code>`,
      replicas: `${deployment.replicas} of ${deployment.min_replicas} to ${deployment.max_replicas}`,
      created: when(deployment.created_at),
      "": answering(deployment) && html`<a href="#/playground?a=${deployment.id}">Try it</a>`,
    }} />
    <h2>Now</h2>
    ${now
      ? html`<p class="quiet">Over the last ${WINDOW_S} seconds; tokens and times are those of answers that were finished.</p>
          <div class="tiles">
            ${CHARTS.flatMap(([, names]) => names).map((name) => html`<div class="panel"><strong>${now[name] == null ? "–" : figure(now[name])}</strong><span class="quiet">${name}</span></div>`)}
          </div>
          <div class="grid">
            ${CHARTS.map(([title, names]) => {
              const series = Object.fromEntries(names.map((name) => [name, points.map((point) => point[name])]));
              return html`<${Chart} key=${title} title=${title} unit="second" x=${x} series=${series} />`;
            })}
          </div>`
      : html`<p class="quiet">No replica has answered yet.</p>`}`;
}
