// The landing page: what runs and waits, what holds the cluster, what serves, and what failed lately.

import { html } from "../vendor/htm-preact.js";
import { all, get } from "../api.js";
import { Empty, Known, Loading, Meter, Problem, Status, ago, answering, clockTime, duration, figure, served, useFresh } from "../parts.js";
import { figures, silence, useSamples } from "../rates.js";
import { Progress, phaseProgress } from "./jobs.js";

const EVERY_MS = 5000;
const BUSY = ["running", "evaluating", "starting", "pausing", "cancelling"];
const WAITING = ["queued", "paused"];
const MOST_FAILED = 5;

const ofStatuses = async (statuses) => (await Promise.all(statuses.map((status) => all(`/jobs?status=${status}`)))).flat();

/** What a queued job waits for, since when, and its place, in words. */
function waits({ status_reason: reason, queue_place: place, waiting_since: since }) {
  const said = reason?.message ?? "its turn";
  const what = said.startsWith("waits") ? said : `waits: ${said}`;
  return [what, since && `since ${clockTime(since)}`, place && `place ${place} in the queue`].filter(Boolean).join(" · ");
}

/** What a job does whose end has no pace, by its phase. */
const PHASES = {
  write: "the teacher writes answers",
  prepare: "prepares its data",
  calibrate: "calibrates its start",
  train: "begins to train; ETA unknown until two steps were measured",
  evaluate: "trained; its quality is being measured",
  publish: "trained and measured; its model is being stored",
};

/** When a job will be done, in words; where nothing says, why not. */
export function eta(job) {
  if (job.status === "paused") return "paused: it goes on when it is resumed";
  if (job.status === "queued") return waits(job);
  const doing = [PHASES[job.status === "evaluating" ? (job.phase === "publish" ? "publish" : "evaluate") : job.phase], phaseProgress(job)].filter(Boolean).join(": ");
  if (job.status === "evaluating") return doing;
  if (job.spec.sweep) return "trains and measures its trials; their end cannot be estimated";
  const left = job.progress.seconds_remaining;
  if (left == null) return doing || "starts; ETA unknown until two steps were measured";
  return `${duration(left)} left, trained about ${clockTime(job.estimated_finish ?? Date.now() / 1000 + left)}`;
}

/** Workers of a job and what they hold, in words. */
function needs({ num_workers: workers, gpus_per_worker: gpus, cpus_per_worker: cpus }) {
  const number = typeof workers === "object" ? `${workers.min} to ${workers.max}` : workers;
  return `${number} × ${gpus ? `${gpus} GPU` : `${cpus} CPU`}`;
}

const Work = ({ jobs }) => html`<ul class="items">
  ${jobs.map((job) => html`<li key=${job.id}>
    <a href="#/jobs/${job.id}">${job.name}</a><${Status} status=${job.status} />
    <span class="sub">${eta(job)} · ${needs(job.spec.resources)}</span>
    ${job.progress.total_steps && html`<span class="sub"><${Progress} job=${job} /></span>`}
  </li>`)}
</ul>`;

/** What all tenants hold of the cluster, where Ray tells it, and what this one's quota leaves of it. */
function Cluster({ quota }) {
  const { cluster } = quota;
  const split = (kind) => `${figure(quota.held_by_jobs[kind])} by jobs, ${figure(quota.held_by_deployments[kind])} by deployments`;
  return html`<section class="panel">
    <header><h2>Cluster in use</h2><span class="end quiet">all tenants</span></header>
    ${cluster
      ? html`${cluster.total_gpus > 0 ? html`<${Meter} name="GPUs in use" value=${cluster.gpus} most=${cluster.total_gpus} />` : html`<p class="quiet small">It has no GPU.</p>`}
        <${Meter} name="CPUs in use" value=${cluster.cpus} most=${cluster.total_cpus} />`
      : html`<p class="quiet small">Its GPUs and CPUs are <span class="unknown">unknown</span>: Ray does not answer, or does not report its nodes.</p>`}
    <h3 class="part">Held by tenant ${quota.tenant}</h3>
    <${Meter} name="GPUs" value=${quota.gpus} most=${quota.max_gpus} words=${split("gpus")} />
    <${Meter} name="CPUs" value=${quota.cpus} most=${quota.max_cpus} words=${split("cpus")} />
    <${Meter} name="Jobs running" value=${quota.running_jobs} most=${quota.max_running_jobs} />
    <${Meter} name="Replicas" value=${quota.replicas} most=${quota.max_replicas} />
    <p class="quiet small">${quota.max_gpus == null && quota.max_cpus == null ? "No quota limits this tenant. " : ""}Jobs and deployments count with the most that they may grow to.</p>
  </section>`;
}

function Served({ deployment, models }) {
  const [samples, problem] = useSamples(deployment.id, EVERY_MS);
  const now = samples.length > 1 ? figures(samples) : {};
  const why = silence(deployment, samples, problem);
  return html`<li>
    <a href="#/deployments/${deployment.id}">${deployment.route_prefix}</a><${Status} status=${deployment.status} />
    <span class="sub">${served(deployment, models)} · ${deployment.replicas} of ${deployment.max_replicas} replicas</span>
    <span class="sub figures">
      <span><${Known} value=${now["generated tokens/s"]} why=${why} /> tokens/s</span>
      <span>TTFT <${Known} value=${now["time to first token, ms"]} unit="ms" why=${why} /></span>
      ${answering(deployment) && html`<a href="#/playground?a=${deployment.id}">Try it</a>`}
    </span>
  </li>`;
}

const Failures = ({ jobs }) => html`<ul class="items">
  ${jobs.map((job) => html`<li key=${job.id}>
    <a href="#/jobs/${job.id}">${job.name}</a><span class="quiet small">${ago(job.finished_at ?? job.created_at)}</span>
    <span class="sub"><code>${job.error?.code ?? "unknown"}</code> ${job.error?.message ?? "no reason was given"}</span>
  </li>`)}
</ul>`;

const Tile = ({ name, value, href, bad }) => html`<a class="tile ${bad ? "bad" : ""}" href=${href}><strong>${value ?? "–"}</strong><span>${name}</span></a>`;

const Panel = ({ title, link, to, children }) => html`<section class="panel"><header><h2>${title}</h2><a class="end" href=${to}>${link}</a></header>${children}</section>`;

export function Overview() {
  const [jobs, problem] = useFresh(async () => ({ busy: await ofStatuses(BUSY), waiting: await ofStatuses(WAITING) }), [], EVERY_MS);
  const [failed] = useFresh(() => get(`/jobs?status=failed&limit=${MOST_FAILED}`), [], EVERY_MS);
  const [deployments] = useFresh(() => all("/deployments"), [], EVERY_MS);
  const [models] = useFresh(() => all("/models"), [deployments?.map(({ model }) => model).join()], null);
  const [quota] = useFresh(() => get("/quota"), [], EVERY_MS);
  const work = jobs && [...jobs.busy, ...jobs.waiting];
  return html`<div class="head"><h1>Overview</h1><span class="end"><a class="button" href="#/submit">New job</a></span></div>
    <${Problem} problem=${problem} />
    <div class="tiles">
      <${Tile} name="jobs running" value=${jobs?.busy.length} href="#/jobs?status=running" />
      <${Tile} name="jobs waiting" value=${jobs?.waiting.length} href="#/jobs?status=queued" />
      <${Tile} name="deployments answering" value=${deployments?.filter(answering).length} href="#/deployments" />
      <${Tile} name="failed lately" value=${failed && `${failed.data.length}${failed.has_more ? "+" : ""}`} bad=${failed?.data.length > 0} href="#/jobs?status=failed" />
    </div>
    <div class="halves">
      <div class="stack">
        <${Panel} title="Running and waiting" link="All jobs" to="#/jobs">
          ${!work ? html`<${Loading} what="jobs" />` : work.length ? html`<${Work} jobs=${work} />` : html`<${Empty} title="No job runs or waits"><a href="#/submit">Start one from a recipe</a><//>`}
        <//>
        <${Panel} title="Failed lately" link="All that failed" to="#/jobs?status=failed">
          ${!failed ? html`<${Loading} what="failures" />` : failed.data.length ? html`<${Failures} jobs=${failed.data} />` : html`<${Empty} title="Nothing failed">When a job fails, its reason appears here.<//>`}
        <//>
      </div>
      <div class="stack">
        <${Panel} title="Deployments" link="All deployments" to="#/deployments">
          ${!deployments ? html`<${Loading} what="deployments" />` : deployments.length ? html`<ul class="items">${deployments.map((item) => html`<${Served} key=${item.id} deployment=${item} models=${models} />`)}</ul>` : html`<${Empty} title="Nothing is served"><a href="#/models">Deploy a model</a><//>`}
        <//>
        ${quota ? html`<${Cluster} quota=${quota} />` : html`<${Loading} what="the cluster's use" />`}
      </div>
    </div>`;
}
