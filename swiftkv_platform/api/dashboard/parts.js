// What pages are built from: text, tables, charts, and hooks that keep data fresh. Knows no route of the API.

import { html, useCallback, useEffect, useRef, useState } from "./vendor/htm-preact.js";

const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

export const count = (value) => (value == null ? "" : new Intl.NumberFormat("en").format(value));
export const figure = (value) => (value == null ? "" : number.format(value));
export const percent = (value) => (value == null ? "" : `${number.format(100 * value)}%`);
export const when = (seconds) => (seconds == null ? "" : new Date(1000 * seconds).toLocaleString());

/** Whether a deployment takes requests, be it with the model before. */
export const answering = (deployment) => ["running", "swapping", "refused"].includes(deployment.status);

/** Which model a deployment serves, in words. */
export const served = ({ model, engine }) => (engine.swiftkv === false ? `the teacher of ${model}` : model);

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value > 0 ? Math.min(Math.floor(Math.log2(value) / 10), units.length - 1) : 0;
  return `${figure(value / 1024 ** power)} ${units[power]}`;
}

export function duration(seconds) {
  if (seconds == null) return "";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${figure(seconds / 3600)} h`;
}

/** `load()` now and every `everyMs` while the page is shown: [value, problem, reload]. */
export function useFresh(load, inputs, everyMs) {
  const [state, setState] = useState({ value: null, problem: null });
  const latest = useRef(0);
  const reload = useCallback(async () => {
    const turn = ++latest.current;
    try {
      const value = await load();
      if (turn === latest.current) setState({ value, problem: null });
    } catch (problem) {
      if (turn === latest.current) setState((old) => ({ value: old.value, problem }));
    }
  }, inputs);
  useEffect(() => {
    reload();
    const timer = everyMs ? setInterval(() => document.hidden || reload(), everyMs) : null;
    return () => {
      latest.current += 1;
      clearInterval(timer);
    };
  }, [reload, everyMs]);
  return [state.value, state.problem, reload];
}

export function Problem({ problem }) {
  if (!problem) return null;
  const detail = problem instanceof TypeError ? "The control plane does not answer." : problem.message;
  const fields = (problem.errors ?? []).filter((error) => error.field);
  return html`<div class="problem" role="alert">
    ${fields.length ? null : detail}
    ${fields.map((error) => html`<p><code>${error.field}</code>: ${error.message}</p>`)}
  </div>`;
}

export const Status = ({ status }) => html`<span class="status ${status}">${status}</span>`;

export function Table({ caption, columns, rows, empty }) {
  if (!rows.length) return html`<p class="quiet">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <thead>
        <tr>${columns.map((column) => html`<th scope="col" class=${column.number ? "number" : ""}>${column.name}</th>`)}</tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) => html`<tr>
            ${columns.map((column) => html`<td class=${column.number ? "number" : column.whole ? "whole" : ""}>${column.cell(row)}</td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

export function Facts({ of }) {
  const shown = Object.entries(of).filter(([, value]) => value != null && value !== "");
  return html`<dl>${shown.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;
}

const WHOLE_STEPS = Array.from({ length: 30 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));
const INKS = ["#2b7fd4", "#d9730d", "#2f9e63", "#b5479d", "#8a7400"];

/** Lines over steps, or another whole `unit`: `series` is {name: [values]}. The last values are said in words. */
export function Chart({ title, x, series, unit = "step" }) {
  const place = useRef(null);
  const plot = useRef(null);
  const names = Object.keys(series);
  const data = [x, ...names.map((name) => series[name])];
  useEffect(() => {
    const ink = getComputedStyle(document.body).getPropertyValue("color");
    const axis = { stroke: ink, grid: { stroke: "#8884", width: 1 }, ticks: { stroke: "#8884" } };
    const options = {
      width: place.current.clientWidth,
      height: 200,
      scales: { x: { time: false } },
      axes: [{ ...axis, incrs: WHOLE_STEPS }, { ...axis, size: 70, values: (_, values) => values.map((value) => figure(value)) }],
      series: [{ label: unit }, ...names.map((label, i) => ({ label, stroke: INKS[i % INKS.length], width: 2, spanGaps: true }))],
    };
    plot.current = new uPlot(options, data, place.current);
    const observer = new ResizeObserver(() =>
      plot.current.setSize({ width: place.current.clientWidth, height: 200 }),
    );
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, [names.join()]);
  useEffect(() => {
    plot.current.setData(data);
    plot.current.setLegend({ idx: x.length - 1 }); // the last values, until the pointer asks for others
  }, [x.length, x[x.length - 1]]);
  const last = names.map((name) => `${name} ${figure(series[name].findLast((value) => value != null))}`);
  return html`<section class="panel">
    <h3>${title}</h3>
    <div ref=${place} role="img" aria-label="${title} by ${unit}; last: ${last.join(", ")}"></div>
  </section>`;
}
