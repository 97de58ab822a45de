// A model's lineage from left to right: data, teacher, job, model, aliases, deployments.

import { html } from "../vendor/htm-preact.js";
import { get } from "../api.js";
import { LoadingOrProblem, ServingStatus, usePolling, formatTime } from "../parts.js";

const Node = ({ kind, here, children }) => html`<li class=${here ? "here" : ""}><span class="kind">${kind}</span>${children}</li>`;

const shortenDigest = (digest) => html`<code title=${digest}>${digest.slice(0, 14)}…</code>`;

export function Lineage({ model }) {
  const [found, problem] = usePolling(() => get(`/models/${model.id}/lineage`), [model.id], 10000);
  if (!found) return html`<${LoadingOrProblem} what="the lineage" problem=${problem} />`;
  const sources = found.spec?.data?.sources?.map((source) => source.name_or_path) ?? [];
  return html`<ol class="lineage" aria-label="Lineage of ${model.name}">
      ${(found.data_fingerprint || sources.length > 0) && html`<${Node} kind="data">${sources.join(", ")}${found.data_fingerprint && html`<br />${shortenDigest(found.data_fingerprint)}`}<//>`}
      <${Node} kind="teacher">${found.teacher ?? "unknown"}${found.revision && html`<br /><code>${found.revision}</code>`}<//>
      ${found.job_id ? html`<${Node} kind="job, attempt ${found.attempt}"><a href="#/jobs/${found.job_id}">…${found.job_id.slice(-8)}</a>${found.code_version && html`<br />code ${found.code_version}`}<//>` : html`<${Node} kind="imported from">${found.imported_from}<//>`}
      <${Node} kind="model" here=${true}>${model.name}<br />${shortenDigest(found.manifest_digest)}<//>
      ${found.aliases.length > 0 && html`<${Node} kind="alias">${found.aliases.join(", ")}<//>`}
      ${found.deployments.map((item) => html`<${Node} kind="deployment"><a href="#/deployments/${item.id}">${item.route_prefix}</a> <${ServingStatus} deployment=${item} /><//>`)}
    </ol>
    ${found.promotions.length > 0 && html`<ul class="items">${found.promotions.map((item) => html`<li><span>${item.action === "rollback" ? "rollback of" : "promotion to"} ${item.alias}</span><span class="quiet small">${formatTime(item.created_at)}</span><span class="sub">${item.reason} (${item.by})</span></li>`)}</ul>`}`;
}
