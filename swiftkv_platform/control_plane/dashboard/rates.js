// Rates of a deployment over the last seconds, from its replicas' metrics.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { get } from "./api.js";
import { formatNumber, isServing, usePolling } from "./parts.js";

export const EVERY_MS = 2000;
const LIST_EVERY_MS = 5000;
export const WINDOW_S = 20; // averaging window of the rates, since requests finish in bursts
const KEPT = 300;

const sumOverReplicas = (metrics, name) => metrics.replicas.reduce((total, { values }) => total + (values[name] ?? 0), 0);

/** Increase of a counter between two samples, over replicas that are in both. */
function computeIncrease(before, after, name) {
  const old = new Map(before.replicas.map(({ replica, values }) => [replica, values[name] ?? 0]));
  return after.replicas.reduce((total, { replica, values }) => {
    const added = (values[name] ?? 0) - (old.get(replica) ?? Infinity);
    return total + Math.max(added, 0);
  }, 0);
}

/** Current figures from the samples so far; null if unknown. */
export function computeRates(samples) {
  const now = samples.at(-1);
  const before = samples.find((sample) => now.time - sample.time <= WINDOW_S);
  const seconds = now.time - before.time;
  const tokens = computeIncrease(before, now, "generation_tokens_total");
  const answers = computeIncrease(before, now, "time_to_first_token_seconds_count");
  const ratio = (part, whole) => (whole > 0 ? part / whole : null);
  return {
    time: now.time,
    "generated tokens/s": ratio(tokens, seconds),
    "prompt tokens/s": ratio(computeIncrease(before, now, "prompt_tokens_total"), seconds),
    "time to first token, ms": ratio(1000 * computeIncrease(before, now, "time_to_first_token_seconds_sum"), answers),
    "exited early, %": ratio(100 * computeIncrease(before, now, "tokens_exited_total"), tokens),
    "KV cache in use, %": ratio(100 * sumOverReplicas(now, "kv_cache_usage_perc"), now.replicas.length),
    running: sumOverReplicas(now, "num_requests_running"),
    waiting: sumOverReplicas(now, "num_requests_waiting"),
  };
}

/** A deployment's metrics since the page opened, and the last request's error. */
export function useSamples(id, everyMs = EVERY_MS) {
  const [samples, setSamples] = useState([]);
  const [metrics, problem] = usePolling(() => get(`/deployments/${id}/metrics`), [id], everyMs);
  useEffect(() => {
    if (metrics?.replicas.length) setSamples((old) => [...old, metrics].slice(-KEPT));
  }, [metrics]);
  return [samples, problem];
}

/** Why a deployment has no current rates; null if it has. */
export function explainMissingRates(deployment, samples, problem) {
  if (!isServing(deployment)) return `not serving: ${deployment.status}`;
  if (problem) return "unknown: the replicas report no metrics";
  if (!samples.length) return "no replica is ready yet";
  if (!sumOverReplicas(samples.at(-1), "time_to_first_token_seconds_count")) return "no requests yet";
  if (samples.length < 2) return "measuring…";
  return computeRates(samples)["time to first token, ms"] == null ? `no response finished in the last ${WINDOW_S} seconds` : null;
}

/** Current tokens per second and time to first token of a deployment in a list. */
export function CurrentLoad({ deployment }) {
  const [samples, problem] = useSamples(deployment.id, LIST_EVERY_MS);
  const reason = explainMissingRates(deployment, samples, problem);
  if (reason) return html`<span class="quiet" title=${problem?.message}>${reason}</span>`;
  const now = computeRates(samples);
  return html`<span class="figures"><span><b>${formatNumber(now["generated tokens/s"])}</b> tokens/s</span><span>TTFT <b>${formatNumber(now["time to first token, ms"])}</b> ms</span></span>`;
}
