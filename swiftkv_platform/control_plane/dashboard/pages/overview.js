// The overview: jobs, recent failures, deployments and the use of the cluster.

import { html } from "../vendor/htm-preact.js";
import { fetchAll, get } from "../api.js";
import { EmptyState, PageHeader, Loading, Meter, Problem, ServingStatus, Status, formatAge, isServing, formatClockTime, getDeploymentName, formatDuration, formatNumber, describeReplicas, usePolling } from "../parts.js";
import { CurrentLoad } from "../rates.js";
import { ProgressBar, describePhaseProgress } from "./jobs.js";

const EVERY_MS = 5000;
const BUSY = ["running", "evaluating", "starting", "pausing", "cancelling"];
const WAITING = ["queued", "paused"];
const MAX_FAILED = 5;

const getByStatus = async (statuses) => (await Promise.all(statuses.map((status) => fetchAll(`/jobs?status=${status}`)))).flat();

/** Why a queued job waits, since when, and its position in the queue. */
function describeWait({ status_reason: reason, queue_place: position, waiting_since: since }) {
  const message = reason?.message || "queued behind other jobs";
  const text = /^wait/i.test(message) ? message : `Waiting: ${message}`;
  return [text, since && `since ${formatClockTime(since)}`, position && `position ${position} in the queue`].filter(Boolean).join(" · ");
}

/** Descriptions of phases without a time estimate. */
const PHASES = {
  write: "Generating teacher answers",
  prepare: "Preparing data",
  calibrate: "Calibrating the student",
  train: "Training. No time estimate until two steps are measured",
  evaluate: "Evaluating the trained model",
  publish: "Storing the evaluated model",
};

/** Remaining time of a job, or its current activity if there is no estimate. */
export function describeProgress(job) {
  if (job.status === "paused") return "Paused. Resume it to continue";
  if (job.status === "queued") return describeWait(job);
  const doing = [PHASES[job.status === "evaluating" ? (job.phase === "publish" ? "publish" : "evaluate") : job.phase], describePhaseProgress(job)].filter(Boolean).join(": ");
  if (job.status === "evaluating") return doing;
  if (job.spec.sweep) return "Running trials. No time estimate";
  const left = job.progress.seconds_remaining;
  if (left == null) return doing || "Starting. No time estimate until two steps are measured";
  return `${formatDuration(left)} left, training ends about ${formatClockTime(job.estimated_finish ?? Date.now() / 1000 + left)}`;
}

/** A job's workers and their resources: `2 × 1 GPU`. */
function workerResources({ num_workers: workers, gpus_per_worker: gpus, cpus_per_worker: cpus }) {
  const number = typeof workers === "object" ? `${workers.min} to ${workers.max}` : workers;
  return `${number} × ${gpus ? `${gpus} GPU` : `${cpus} CPU`}`;
}

const JobList = ({ jobs }) => html`<ul class="items">
  ${jobs.map((job) => html`<li key=${job.id}>
    <a href="#/jobs/${job.id}">${job.name}</a><${Status} status=${job.status} />
    <span class="sub">${describeProgress(job)} · ${workerResources(job.spec.resources)}</span>
    ${job.progress.total_steps && html`<span class="sub"><${ProgressBar} job=${job} /></span>`}
  </li>`)}
</ul>`;

/** Use of the cluster by all tenants, and use and quota of this tenant. */
function ClusterUsage({ quota }) {
  const { cluster } = quota;
  const split = (kind) => `${formatNumber(quota.held_by_jobs[kind])} by jobs, ${formatNumber(quota.held_by_deployments[kind])} by deployments`;
  return html`<section class="panel">
    <header><h2>Cluster usage</h2><span class="end quiet">all tenants</span></header>
    ${cluster
      ? html`${cluster.total_gpus > 0 ? html`<${Meter} name="GPUs in use" value=${cluster.gpus} max=${cluster.total_gpus} />` : html`<p class="quiet small">No GPUs in this cluster.</p>`}
        <${Meter} name="CPUs in use" value=${cluster.cpus} max=${cluster.total_cpus} />`
      : html`<p class="quiet small">GPUs and CPUs are <span class="unknown">unknown</span>: Ray is unavailable or does not report its nodes.</p>`}
    <h3 class="part">Usage of tenant ${quota.tenant}</h3>
    <${Meter} name="GPUs" value=${quota.gpus} max=${quota.max_gpus} note=${split("gpus")} />
    <${Meter} name="CPUs" value=${quota.cpus} max=${quota.max_cpus} note=${split("cpus")} />
    <${Meter} name="Running jobs" value=${quota.running_jobs} max=${quota.max_running_jobs} />
    <${Meter} name="Replicas" value=${quota.replicas} max=${quota.max_replicas} />
    <p class="quiet small">${quota.max_gpus == null && quota.max_cpus == null ? "This tenant has no quota. " : ""}Usage counts the max number of workers of each job and of replicas of each deployment.</p>
  </section>`;
}

const DeploymentItem = ({ deployment, models }) => html`<li>
  <a href="#/deployments/${deployment.id}">${getDeploymentName(deployment, models)}</a><${ServingStatus} deployment=${deployment} />
  <span class="sub">Replicas: ${describeReplicas(deployment)}</span>
  <span class="sub figures">
    <${CurrentLoad} deployment=${deployment} />
    ${isServing(deployment) && html`<a href="#/playground?a=${deployment.id}">Open in playground</a>`}
  </span>
</li>`;

const FailedJobs = ({ jobs }) => html`<ul class="items">
  ${jobs.map((job) => html`<li key=${job.id}>
    <a href="#/jobs/${job.id}">${job.name}</a><span class="quiet small">${formatAge(job.finished_at ?? job.created_at)}</span>
    <span class="sub"><code>${job.error?.code ?? "unknown"}</code> ${job.error?.message ?? "No reason reported."}</span>
  </li>`)}
</ul>`;

const Tile = ({ name, value, href, bad }) => html`<a class="tile ${bad ? "bad" : ""}" href=${href}><strong>${value ?? "–"}</strong><span>${name}</span></a>`;

const Panel = ({ title, link, to, children }) => html`<section class="panel"><header><h2>${title}</h2><a class="end" href=${to}>${link}</a></header>${children}</section>`;

export function Overview() {
  const [jobs, problem] = usePolling(async () => ({ busy: await getByStatus(BUSY), waiting: await getByStatus(WAITING) }), [], EVERY_MS);
  const [failed] = usePolling(() => get(`/jobs?status=failed&limit=${MAX_FAILED}`), [], EVERY_MS);
  const [deployments] = usePolling(() => fetchAll("/deployments"), [], EVERY_MS);
  const [models] = usePolling(() => fetchAll("/models"), [deployments?.map(({ model }) => model).join()], null);
  const [quota] = usePolling(() => get("/quota"), [], EVERY_MS);
  const work = jobs && [...jobs.busy, ...jobs.waiting];
  return html`<${PageHeader} title="Overview"><a class="button" href="#/submit">New job</a><//>
    <${Problem} problem=${problem} />
    <div class="tiles">
      <${Tile} name="Running jobs" value=${jobs?.busy.length} href="#/jobs?status=running" />
      <${Tile} name="Queued and paused jobs" value=${jobs?.waiting.length} href="#/jobs?status=queued" />
      <${Tile} name="Running deployments" value=${deployments?.filter((item) => isServing(item) && item.unknown_since == null).length} href="#/deployments" />
      <${Tile} name="Recent failures" value=${failed && `${failed.data.length}${failed.has_more ? "+" : ""}`} bad=${failed?.data.length > 0} href="#/jobs?status=failed" />
    </div>
    <div class="halves">
      <div class="stack">
        <${Panel} title="Running and queued jobs" link="All jobs" to="#/jobs">
          ${!work ? html`<${Loading} what="jobs" />` : work.length ? html`<${JobList} jobs=${work} />` : html`<${EmptyState} title="No running or queued jobs"><a href="#/submit">Start one from a recipe</a><//>`}
        <//>
        <${Panel} title="Recent failures" link="All failed jobs" to="#/jobs?status=failed">
          ${!failed ? html`<${Loading} what="failures" />` : failed.data.length ? html`<${FailedJobs} jobs=${failed.data} />` : html`<${EmptyState} title="No failed jobs">Failed jobs appear here with the reason.<//>`}
        <//>
      </div>
      <div class="stack">
        <${Panel} title="Deployments" link="All deployments" to="#/deployments">
          ${!deployments ? html`<${Loading} what="deployments" />` : deployments.length ? html`<ul class="items">${deployments.map((item) => html`<${DeploymentItem} key=${item.id} deployment=${item} models=${models} />`)}</ul>` : html`<${EmptyState} title="No deployments"><a href="#/models">Deploy a model</a><//>`}
        <//>
        ${quota ? html`<${ClusterUsage} quota=${quota} />` : html`<${Loading} what="cluster usage" />`}
      </div>
    </div>`;
}
