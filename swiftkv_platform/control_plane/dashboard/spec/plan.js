// The plan of a spec: the response of POST /jobs/validate. Knows its fields, no route.

import { html } from "../vendor/htm-preact.js";
import { FactList, Loading, Meter, formatBytes, formatCount, formatDuration, formatNumber, formatPercent } from "../parts.js";

const notAvailable = (why) => html`<span class="unknown">not available ${why}</span>`;

/** Source of the speed: a link to the measured job, or words. */
function formatSpeedSource(source) {
  if (source === "configured") return "the operator's setting";
  return source?.startsWith("job_") ? html`<a href="#/jobs/${source}">a similar job</a>` : source;
}

const Source = ({ source }) => html`<li>
  <code>${source.name_or_path}</code><span></span>
  <span class="sub">${[source.num_files != null && `${formatCount(source.num_files)} files`, source.num_bytes != null && formatBytes(source.num_bytes), source.formats.join(", "), source.unread_columns?.length > 0 && `columns not read: ${source.unread_columns.join(", ")}`].filter(Boolean).join(" · ") || "read when the job runs"}</span>
</li>`;

export function Plan({ plan, spec }) {
  const { num_hidden_layers: layers, num_key_value_layers: kept } = plan;
  const speed = formatSpeedSource(plan.speed_source);
  const byEpochs = spec?.training?.max_steps == null;
  return html`
    <${FactList} of=${{
      "layers skipped": layers == null ? notAvailable("for teachers on the hub") : `${layers - kept} of ${layers}`,
      "memory per worker": plan.memory_per_worker == null ? notAvailable("without the teacher's configuration") : formatBytes(plan.memory_per_worker),
      "process overhead": plan.process_memory && formatBytes(plan.process_memory),
      time: plan.seconds == null ? notAvailable(byEpochs ? "without training.max_steps" : "until a similar job has run") : formatDuration(plan.seconds),
      cost: plan.cost == null ? notAvailable(plan.seconds == null ? "without a time estimate" : "without prices from the operator") : formatNumber(plan.cost),
      tokens: plan.max_tokens == null ? null : `max ${formatCount(plan.max_tokens)}`,
      "speed source": plan.seconds != null && speed,
      "trained parameters": plan.trained_parameters != null && `${formatNumber(plan.trained_parameters)} of ${formatNumber(plan.parameters)}`,
    }} />
    ${plan.prefill_flops_ratio != null && html`<${Meter} name="Prefill compute, relative to the teacher" value=${plan.prefill_flops_ratio} max=${1} format=${formatPercent} note=${`${formatPercent(1 - plan.prefill_flops_ratio)} saved for prompts of data.max_length tokens`} />`}
    ${plan.kv_bytes_ratio != null && html`<${Meter} name="KV cache, relative to the teacher" value=${plan.kv_bytes_ratio} max=${1} format=${formatPercent} note=${`${formatPercent(1 - plan.kv_bytes_ratio)} saved; ${formatBytes(plan.kv_bytes_per_token)} per token`} />`}
    ${plan.sources?.length > 0 && html`<h3>Data</h3><ul class="items">${plan.sources.map((source) => html`<${Source} source=${source} />`)}</ul>`}`;
}

/** The panel next to the editor: `state` is {plan, problem, busy}. */
export function PlanPanel({ state, spec, faults, onShow, children }) {
  const { plan, problem, busy } = state;
  const verdict = problem || faults.length ? "refused" : plan ? "passed" : "checking";
  const name = { refused: "invalid", passed: "valid", checking: "checking…" }[verdict];
  return html`<section class="panel plan" aria-label="Plan">
    <header><h2>Plan</h2><span class="end status ${verdict}" role="status">${busy && verdict === "passed" ? "checking…" : name}</span></header>
    ${children}
    ${faults.map(({ field, message }) => html`<div class="problem small">
      ${field ? html`<button type="button" class="link" onClick=${() => onShow(field)}><code>${field}</code></button>: ` : ""}${message}
    </div>`)}
    ${plan ? html`<div aria-busy=${busy}>${faults.length > 0 && html`<p class="quiet small">Plan of the last valid spec:</p>`}<${Plan} plan=${plan} spec=${spec} /></div>` : !faults.length && html`<${Loading} what="the plan" />`}
  </section>`;
}
