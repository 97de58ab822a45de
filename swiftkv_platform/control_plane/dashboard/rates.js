// What replicas measure, as rates over the last seconds. Knows the metrics route of deployments, no page.

import { useEffect, useState } from "./vendor/htm-preact.js";
import { get } from "./api.js";
import { answering, useFresh } from "./parts.js";

export const EVERY_MS = 2000;
export const WINDOW_S = 20; // rates are over so long: finished requests count, and they come in lumps
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

/** A deployment's metrics from now on, and the problem of the last time that they were asked for. */
export function useSamples(id, everyMs = EVERY_MS) {
  const [samples, setSamples] = useState([]);
  const [metrics, problem] = useFresh(() => get(`/deployments/${id}/metrics`), [id], everyMs);
  useEffect(() => {
    if (metrics?.replicas.length) setSamples((old) => [...old, metrics].slice(-KEPT));
  }, [metrics]);
  return [samples, problem];
}

/** Why a figure of a deployment is not known, in words. */
export function silence(deployment, samples, problem) {
  if (!answering(deployment)) return `the deployment is ${deployment.status}`;
  if (problem) return problem.message;
  if (samples.length < 2) return samples.length ? "a rate needs two measurements" : "no replica has answered yet";
  return "no answer was finished in the last seconds";
}
