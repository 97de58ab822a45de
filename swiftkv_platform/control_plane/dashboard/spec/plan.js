// The plan of a spec, as POST /jobs/validate tells it. Knows its fields, no route.

import { html } from "../vendor/htm-preact.js";
import { Facts, Loading, Meter, bytes, count, duration, figure, percent } from "../parts.js";

const share = (value) => percent(value);
const unknown = (why) => html`<span class="unknown">unknown: ${why}</span>`;

/** Source of the speed: a link to the job that was measured, or words. */
function speedFrom(source) {
  if (source === "configured") return "the operator's figure";
  return source?.startsWith("job_") ? html`<a href="#/jobs/${source}">a job like it</a>` : source;
}

const Source = ({ source }) => html`<li>
  <code>${source.name_or_path}</code><span></span>
  <span class="sub">${[source.num_files != null && `${count(source.num_files)} files`, source.num_bytes != null && bytes(source.num_bytes), source.formats.join(", ")].filter(Boolean).join(" · ") || "read when the job runs"}</span>
</li>`;

export function Plan({ plan, spec }) {
  const { num_hidden_layers: layers, num_key_value_layers: kept } = plan;
  const speed = speedFrom(plan.speed_source);
  const endless = spec?.training?.max_steps == null;
  return html`
    <${Facts} of=${{
      "layers skipped": layers == null ? unknown("the teacher is on the hub") : `${layers - kept} of ${layers}`,
      "memory per worker": plan.memory_per_worker == null ? unknown("needs the teacher's shape") : bytes(plan.memory_per_worker),
      "process overhead": plan.process_memory && bytes(plan.process_memory),
      time: plan.seconds == null ? unknown(endless ? "epochs determine the steps" : "no job like it was measured") : duration(plan.seconds),
      cost: plan.cost == null ? unknown(plan.seconds == null ? "the time is" : "the operator has set no prices") : figure(plan.cost),
      tokens: plan.max_tokens == null ? null : `at most ${count(plan.max_tokens)}`,
      "speed from": plan.seconds != null && speed,
      trained: plan.trained_parameters != null && `${figure(plan.trained_parameters)} of ${figure(plan.parameters)} parameters`,
    }} />
    ${plan.prefill_flops_ratio != null && html`<${Meter} name="prefill compute kept" value=${plan.prefill_flops_ratio} most=${1} shown=${share} words=${`${percent(1 - plan.prefill_flops_ratio)} saved on prompts of data.max_length`} />`}
    ${plan.kv_bytes_ratio != null && html`<${Meter} name="KV cache kept" value=${plan.kv_bytes_ratio} most=${1} shown=${share} words=${`${percent(1 - plan.kv_bytes_ratio)} saved; ${bytes(plan.kv_bytes_per_token)} a token`} />`}
    ${plan.sources?.length > 0 && html`<h3>Data</h3><ul class="items">${plan.sources.map((source) => html`<${Source} source=${source} />`)}</ul>`}`;
}

/** The panel next to the editor: `state` is {plan, problem, busy}. */
export function PlanPanel({ state, spec, faults, onShow, children }) {
  const { plan, problem, busy } = state;
  const verdict = problem || faults.length ? "refused" : plan ? "passed" : "checking";
  const name = { refused: "does not fit", passed: "accepted", checking: "checking…" }[verdict];
  return html`<section class="panel plan" aria-label="Plan">
    <header><h2>Plan</h2><span class="end status ${verdict}" role="status">${busy && verdict === "passed" ? "checking…" : name}</span></header>
    ${children}
    ${faults.map(({ field, message }) => html`<div class="problem small">
      ${field ? html`<button type="button" class="link" onClick=${() => onShow(field)}><code>${field}</code></button>: ` : ""}${message}
    </div>`)}
    ${plan ? html`<div aria-busy=${busy}>${faults.length > 0 && html`<p class="quiet small">The last plan that was accepted:</p>`}<${Plan} plan=${plan} spec=${spec} /></div>` : !faults.length && html`<${Loading} what="the plan" />`}
  </section>`;
}
