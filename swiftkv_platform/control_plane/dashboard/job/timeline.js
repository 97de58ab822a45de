// A timeline of a job's phases and checkpoints. Knows status events, no route.

import { html } from "../vendor/htm-preact.js";
import { ENDED, Loading, formatDuration, formatTime } from "../parts.js";

/**
 * The phases of a job from its events: [{status, attempt, from, to, live, saved}], oldest first. A checkpoint belongs to
 * the phase of its event, since its time is from a worker's clock.
 */
export function listPhases(events, now) {
  const phases = [];
  for (const event of events) {
    if (event.type === "checkpoint") phases.at(-1)?.saved.push(event);
    if (event.type !== "status" || !event.data.status) continue;
    if (phases.length) Object.assign(phases.at(-1), { to: event.created_at, live: false });
    const { status, attempt } = event.data;
    phases.push({ status, attempt, from: event.created_at, to: Math.max(now, event.created_at), live: true, saved: [] });
  }
  return phases.filter(({ status }) => !ENDED.has(status));
}

/** `ended`: end time of the job, if it has ended. */
export function Timeline({ events, ended }) {
  const phases = listPhases(events, ended ?? Date.now() / 1000);
  if (!events.length) return html`<${Loading} what="phases" />`; // every job has events, which arrive after it
  if (!phases.length) return html`<p class="quiet">No phase has started yet.</p>`;
  const begin = phases[0].from;
  const whole = Math.max(phases.at(-1).to - begin, 1);
  const place = (time) => `${Math.min(Math.max((100 * (time - begin)) / whole, 0), 100).toFixed(2)}%`;
  const checkpoints = events.filter((event) => event.type === "checkpoint");
  const several = new Set(phases.map(({ attempt }) => attempt)).size > 1;
  return html`<ol class="timeline">
    ${phases.map((phase) => {
      const { saved, from, to } = phase;
      const width = Math.max((100 * (phase.to - phase.from)) / whole, 0).toFixed(2);
      return html`<li title="${formatTime(phase.from)} to ${phase.live ? "now" : formatTime(phase.to)}">
        <span>${phase.status}${several ? html` <span class="quiet">attempt ${phase.attempt}</span>` : ""}</span>
        <span class="track" aria-hidden="true">
          <span class="bar ${phase.status} ${phase.live ? "live" : ""}" style="left: ${place(phase.from)}; width: ${width}%"></span>
          ${saved.map((event) => html`<span class="tick" style="left: ${place(Math.min(Math.max(event.created_at, from), to))}"></span>`)}
        </span>
        <span class="time">${formatDuration(phase.to - phase.from)}${saved.length > 0 ? html`<span class="sr">, ${saved.length} checkpoints</span>` : ""}</span>
      </li>`;
    })}
  </ol>
  <p class="quiet small">${formatTime(begin)} to ${ended ? formatTime(ended) : "now"}, ${formatDuration(whole)} in total${checkpoints.length > 0 ? `; ◇ marks ${checkpoints.length} checkpoints` : ""}.</p>`;
}
