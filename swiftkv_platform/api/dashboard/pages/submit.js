// A new job: its spec as YAML or JSON, checked and submitted.

import { load as parse } from "../vendor/js-yaml.js";
import { html, useState } from "../vendor/htm-preact.js";
import { post } from "../api.js";
import { Facts, Problem, bytes, duration, figure, percent } from "../parts.js";

const EXAMPLE = `name: python-half
model: {name_or_path: builtin:python-5m}
swiftkv: {prefill_reduction: 0.5, key_value_group_size: 2}
data:
  sources: [{name_or_path: builtin:python-stdlib}]
  max_length: 512
training: {max_steps: 100, batch_size: 16, micro_batch_size: 4}
resources: {num_workers: 2, cpus_per_worker: 1}
`;

const words = (name) => (name === "seconds" ? "time" : name.replaceAll("_", " "));

function shown(name, value) {
  if (typeof value !== "number") return typeof value === "object" ? null : value;
  if (name.endsWith("_ratio")) return percent(value);
  if (name === "seconds") return duration(value);
  return /memory|bytes/.test(name) ? bytes(value) : figure(value);
}

export function Submit() {
  const [text, setText] = useState(EXAMPLE);
  const [estimate, setEstimate] = useState(null);
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  async function attempt(use) {
    setBusy(true);
    setEstimate(null);
    try {
      await use(parse(text));
      setProblem(null);
    } catch (error) {
      setProblem(error);
    }
    setBusy(false);
  }
  const validate = () => attempt(async (spec) => setEstimate(await post("/jobs/validate", spec)));
  const submit = () =>
    attempt(async (spec) => {
      location.hash = `#/jobs/${(await post("/jobs", spec)).id}`;
    });
  const facts = estimate && Object.fromEntries(Object.entries(estimate).filter(([name]) => name !== "object").map(([name, value]) => [words(name), shown(name, value)]));
  return html`<h1>New job</h1>
    <label class="wide">Spec, YAML or JSON
      <textarea rows="22" spellcheck="false" value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
    </label>
    <p class="row">
      <button onClick=${submit} disabled=${busy}>Submit</button>
      <button class="plain" onClick=${validate} disabled=${busy}>Check</button>
    </p>
    <${Problem} problem=${problem} />
    <div aria-live="polite">${facts && html`<section class="panel"><h2>Accepted</h2><${Facts} of=${facts} /></section>`}</div>`;
}
