// Building blocks of pages: formats, tables, charts, and hooks that poll data. Knows no route of the API.

import { html, useCallback, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { onThemeChange } from "./theme.js";

const NUMBER_FORMAT = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const SHORT_FORMAT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, roundingPriority: "morePrecision", maximumFractionDigits: 0 });

export const formatCount = (value) => (value == null ? "" : new Intl.NumberFormat("en").format(value));
export const formatNumber = (value) => (value == null ? "" : NUMBER_FORMAT.format(value));
export const formatPercent = (value) => (value == null ? "" : `${NUMBER_FORMAT.format(100 * value)}%`);
export const formatTime = (seconds) => (seconds == null ? "" : new Date(1000 * seconds).toLocaleString());
export const formatClockTime = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
export const formatAge = (seconds) => `${formatDuration(Math.max(Date.now() / 1000 - seconds, 0), 1)} ago`;

/** Final statuses of jobs. */
export const ENDED = new Set(["succeeded", "failed", "cancelled"]);

/** Whether a deployment accepts requests, possibly still with its previous model. */
export const isServing = (deployment) => ["running", "swapping", "refused"].includes(deployment.status);

/** The model that a deployment serves, by name if it is among `models`. */
export function getModelName({ model, engine }, models) {
  const name = models?.find(({ id }) => id === model)?.name ?? model;
  return engine.swiftkv === false ? `teacher of ${name}` : name;
}

/** Name of a deployment: its model and its route. */
export const getDeploymentName = (deployment, models) => `${getModelName(deployment, models)} at ${deployment.route_prefix}`;

/** `1 running (min 1, max 2)`; the last known number while the cluster reports none. */
export const describeReplicas = (item) => `${item.unknown_since == null ? "" : "last known: "}${item.replicas} running (min ${item.min_replicas}, max ${item.max_replicas})`;

/** Which tokens of a prompt run all layers of a spec's student. */
export function describeDeepTail(spec) {
  if (!spec?.swiftkv) return null;
  const tokens = spec.swiftkv.deep_tail ?? 1;
  return tokens === 1 ? "The last prompt token runs all layers." : `The last ${formatCount(tokens)} prompt tokens run all layers.`;
}

export function formatBytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value > 0 ? Math.min(Math.floor(Math.log2(value) / 10), units.length - 1) : 0;
  return `${SHORT_FORMAT.format(value / 1024 ** power)} ${units[power]}`;
}

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

/** `4 min 10 s`: the `maxUnits` largest units, as the command line prints them. */
export function formatDuration(seconds, maxUnits = 2) {
  if (seconds == null) return "";
  const whole = Math.round(seconds);
  const first = UNITS.findIndex(([size]) => whole >= size);
  if (first < 0) return "0 s";
  const parts = UNITS.slice(first, first + maxUnits).map(([size, unit], i) => [Math.floor((i ? whole % UNITS[first + i - 1][0] : whole) / size), unit]);
  return parts.filter(([number]) => number).map((part) => part.join(" ")).join(" ");
}

/** Call `load()` now and every `everyMs` while the page is visible, until a 404: [value, problem, reload]. */
export function usePolling(load, inputs, everyMs) {
  const [state, setState] = useState({ value: null, problem: null });
  const latest = useRef(0);
  const reload = useCallback(async () => {
    const request = ++latest.current;
    try {
      const value = await load();
      if (request === latest.current) setState({ value, problem: null });
    } catch (problem) {
      if (request === latest.current) setState((old) => ({ value: old.value, problem }));
    }
  }, inputs);
  const isMissing = state.problem?.status === 404;
  useEffect(() => {
    reload();
    return () => {
      latest.current += 1;
    };
  }, [reload]);
  useEffect(() => {
    const timer = everyMs && !isMissing ? setInterval(() => document.hidden || reload(), everyMs) : null;
    return () => clearInterval(timer);
  }, [reload, everyMs, isMissing]);
  return [state.value, state.problem, reload];
}

/** Hook that runs actions that may fail: [act, busy, problem]; `problem` is the error of the last `act(work)`. */
export function useAction() {
  const [state, setState] = useState({ busy: false, problem: null });
  const act = async (work) => {
    setState({ busy: true, problem: null });
    try {
      await work();
      setState({ busy: false, problem: null });
    } catch (problem) {
      setState({ busy: false, problem });
    }
  };
  return [act, state.busy, state.problem];
}

export function Problem({ problem }) {
  if (!problem) return null;
  const detail = problem instanceof TypeError ? "The control plane is unavailable." : problem.message;
  const fields = (problem.errors ?? []).filter((error) => error.field);
  return html`<div class="problem" role="alert">
    ${fields.length ? null : detail}
    ${fields.map((error) => html`<p><code>${error.field}</code>: ${error.message}</p>`)}
  </div>`;
}

export const Status = ({ status }) => html`<span class="status ${status}">${status}</span>`;

/** A deployment's status, or since when the cluster has not reported it. */
export const ServingStatus = ({ deployment: { status, unknown_since: since } }) =>
  since == null ? html`<${Status} status=${status} />` : html`<span class="status undecided" title="Last known status: ${status}">unknown since ${formatClockTime(since)}</span>`;

const TOAST = "swiftkv-toast";
const TOAST_MS = 6000;

/** Confirm an action at the edge of the page, for seconds. */
export const showToast = (message) => dispatchEvent(new CustomEvent(TOAST, { detail: message }));

export function Toasts() {
  const [shown, setShown] = useState([]);
  useEffect(() => {
    const add = (event) => {
      setShown((old) => [...old, event]);
      setTimeout(() => setShown((old) => old.filter((other) => other !== event)), TOAST_MS);
    };
    addEventListener(TOAST, add);
    return () => removeEventListener(TOAST, add);
  }, []);
  return html`<div class="toasts" aria-live="polite">${shown.map((event) => html`<p key=${event.timeStamp}>${event.detail}</p>`)}</div>`;
}

/** Copy `text`. Browsers have a clipboard only with HTTPS or on this machine; elsewhere, copies a selection. */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = Object.assign(document.createElement("textarea"), { value: text, className: "sr" });
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  if (!isCopied) throw new Error("the browser refused");
}

export function CopyButton({ text, name = text }) {
  const copy = () => copyText(text).then(() => showToast(`Copied ${name}.`), (error) => showToast(`Not copied: ${error.message}. Select the text instead.`));
  return html`<button type="button" class="copy" aria-label="Copy ${name}" title="Copy" onClick=${copy}>
    <svg viewBox="0 0 16 16" aria-hidden="true"><rect x="5.5" y="5.5" width="8" height="8" rx="1.5" /><path d="M10.5 5.5v-3h-8v8h3" /></svg></button>`;
}

/** An id, path or address with a button that copies it. */
export const CopyableId = ({ text, quiet }) => html`<span class="id"><code class=${quiet ? "quiet" : ""}>${text}</code><${CopyButton} text=${text} /></span>`;

/** Code with a button that copies it. */
export const Snippet = ({ name, code }) => html`<h3>${name}<${CopyButton} text=${code} name=${name} /></h3><pre tabindex="0" role="region" aria-label=${name}>${code}</pre>`;

/** Title of a page. `parent`: [address, title] of the page above; `children` are at the end of the line. */
export function PageHeader({ title, parent, status, children }) {
  useEffect(() => {
    document.title = `${title} · SwiftKV`;
  }, [title]);
  return html`${parent && html`<nav class="crumbs" aria-label="Breadcrumb"><a href="#/${parent[0]}">${parent[1]}</a> / <span aria-current="page">${title}</span></nav>`}
    <div class="head"><h1>${title}</h1>${status}${children && html`<span class="end">${children}</span>`}</div>`;
}

/** Links to the tabs {id: title} of the page at `address`. */
export const Tabs = ({ address, tabs, chosen }) => html`<nav class="tabs" aria-label="Tabs">
  ${Object.entries(tabs).map(([id, title]) => html`<a href="#/${address}?tab=${id}" aria-current=${id === chosen ? "page" : null}>${title}</a>`)}
</nav>`;

/**
 * Page of one object: `page` gets `value`, `problem` and `onChange`. `what`: kind of object; `parent`: [address, title]
 * of the list of these objects.
 */
export function ObjectPage({ what, id, parent, load, everyMs, page, ...rest }) {
  const [value, problem, reload] = usePolling(load, [id], everyMs);
  if (problem?.status === 404) {
    return html`<${PageHeader} title="No such ${what}" parent=${parent} />
      <div class="panel"><${EmptyState} title="There is no ${what} ${id}">It may have been deleted. <a href="#/${parent[0]}">Show all ${parent[1].toLowerCase()}</a>.<//></div>`;
  }
  if (value) return html`<${page} value=${value} problem=${problem} onChange=${reload} ...${rest} />`;
  return html`<${PageHeader} title=${id} parent=${parent} /><${LoadingOrProblem} what="the ${what}" problem=${problem} />`;
}

/** Empty state; `children` say what to do next. */
export const EmptyState = ({ title, children }) => html`<div class="empty"><strong>${title}</strong><p>${children}</p></div>`;

export const Loading = ({ what }) => html`<div class="skeleton"><span class="sr">Loading ${what}…</span></div>`;

/** In place of something that is not loaded: why, or that it is loading. */
export const LoadingOrProblem = ({ what, problem }) => (problem ? html`<${Problem} problem=${problem} />` : html`<${Loading} what=${what} />`);

/** A value as a bar from 0 to `max`; without `max` the number alone. */
export function Meter({ name, value, max, format = formatNumber, note }) {
  return html`<div class="meter">
    <div><span>${name}</span><span><b>${format(value)}</b>${max == null ? "" : ` of ${format(max)}`}</span></div>
    ${max > 0 && html`<progress class="wide ${value > max ? "over" : ""}" max=${max} value=${Math.min(value, max)} aria-label=${name}></progress>`}
    ${note && html`<div class="quiet">${note}</div>`}
  </div>`;
}

const compareValues = (a, b) => (a == null) - (b == null) || (typeof a === "string" ? a.localeCompare(b) : a - b);

/**
 * A table. Columns with `sort` (row => number or text) are sortable; `search` filters rows by `find` (row => text). On a
 * phone, each row becomes a card.
 */
export function Table({ caption, columns, rows, empty, search = "", find, first }) {
  const [order, setOrder] = useState(first ?? null);
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = find ? rows.filter((row) => words.every((word) => find(row).toLowerCase().includes(word))) : rows;
  const by = columns.find((column) => column.name === order?.name);
  if (by) shown = shown.toSorted((a, b) => (order.up ? 1 : -1) * compareValues(by.sort(a), by.sort(b)));
  if (!rows.length) return typeof empty === "string" ? html`<p class="quiet">${empty}</p>` : empty;
  if (!shown.length) return html`<${EmptyState} title="No matches">None of ${rows.length} rows contains “${search}”.<//>`;
  const toggleOrder = ({ name }) => setOrder((old) => ({ name, up: old?.name === name ? !old.up : true }));
  const sorted = ({ name }) => (order?.name === name ? (order.up ? "ascending" : "descending") : null);
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table class=${columns.length > 2 ? "stacks" : ""}>
      <thead>
        <tr>${columns.map((column) => html`<th scope="col" class=${column.number ? "number" : ""} aria-sort=${sorted(column)}>
          ${column.sort ? html`<button type="button" onClick=${() => toggleOrder(column)}>${column.name}</button>` : column.name || html`<span class="sr">Actions</span>`}
        </th>`)}</tr>
      </thead>
      <tbody>
        ${shown.map(
          (row) => html`<tr key=${row.id}>
            ${columns.map((column) => html`<td data-name=${column.name} class=${column.number ? "number" : column.whole ? "whole" : ""}>${column.cell(row)}</td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** A table with its search. `what`: its rows, such as jobs; `children` are next to the search. */
export function SearchableTable({ what, rows, problem, children, ...table }) {
  const [search, setSearch] = useState("");
  return html`<div class="toolbar"><${SearchField} value=${search} onInput=${setSearch} label="Search ${what}" />${children}</div>
    ${rows ? html`<${Problem} problem=${problem} /><${Table} caption=${what[0].toUpperCase() + what.slice(1)} rows=${rows} search=${search} ...${table} />` : html`<${LoadingOrProblem} what=${what} problem=${problem} />`}`;
}

export const SearchField = ({ value, onInput, label = "Search" }) => html`<label class="grow">${label}
  <input type="search" value=${value} onInput=${(event) => onInput(event.target.value)} data-search placeholder="Ctrl K" /></label>`;

export function FactList({ of }) {
  const shown = Object.entries(of).filter(([, value]) => value != null && value !== "" && value !== false);
  return html`<dl>${shown.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;
}

const WHOLE_STEPS = Array.from({ length: 30 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));
const INKS = ["#2b7fd4", "#d9730d", "#2f9e63", "#b5479d", "#8a7400"];

/** Show the last values in the legend while the pointer is outside of the chart. */
function showLastValues(plot) {
  if (plot.cursor.idx == null) plot.setLegend({ idx: plot.data[0].length - 1 }, false);
}

/** Draw a dashed line with its label at each of `marks` [{x, label}]. */
function drawMarks({ ctx, bbox: { left, top, width, height }, valToPos }, marks, ink) {
  ctx.save();
  Object.assign(ctx, { strokeStyle: ink, fillStyle: ink, lineWidth: devicePixelRatio, font: `${12 * devicePixelRatio}px system-ui, sans-serif`, textBaseline: "top" });
  ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  for (const [i, { x, label }] of marks.entries()) {
    const at = valToPos(x, "x", true);
    const isRight = at > left + width / 2;
    ctx.textAlign = isRight ? "right" : "left";
    ctx.fillText(label, at + (isRight ? -4 : 4) * devicePixelRatio, top + 14 * i * devicePixelRatio);
    ctx.beginPath();
    ctx.moveTo(at, top);
    ctx.lineTo(at, top + height);
    ctx.stroke();
  }
  ctx.restore();
}

/** Exponential moving average of `values`, unbiased at its start; `weight` of the past: 0 to 1. Nulls stay. */
export function smooth(values, weight) {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value == null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return sum / total;
  });
}

/**
 * Line chart over steps, or another integer `unit`; the charts of a unit share the pointer's position. `series` is
 * {name: [values]}; `marks` are labeled vertical lines [{x, label}]. The label for screen readers has the last values and
 * the marks.
 */
export function Chart({ title, x, series, unit = "step", marks = [], smoothing = 0 }) {
  const place = useRef(null);
  const plot = useRef(null);
  const marked = useRef(marks);
  marked.current = marks;
  const names = Object.keys(series);
  const data = [x, ...names.map((name) => smooth(series[name], smoothing))];
  useEffect(() => {
    const ink = () => getComputedStyle(document.body).getPropertyValue("color");
    const axis = { stroke: ink, grid: { stroke: "#8884", width: 1 }, ticks: { stroke: "#8884" } };
    const options = {
      width: place.current.clientWidth,
      height: 200,
      scales: { x: { time: false } },
      cursor: { sync: { key: unit, scales: ["x", null] } },
      axes: [{ ...axis, incrs: WHOLE_STEPS }, { ...axis, size: 70, values: (_, values) => values.map((value) => formatNumber(value)) }],
      hooks: { setLegend: [showLastValues], draw: [(drawn) => drawMarks(drawn, marked.current, ink())] },
      series: [{ label: unit }, ...names.map((label, i) => ({ label, stroke: INKS[i % INKS.length], width: 2, spanGaps: true }))],
    };
    plot.current = new uPlot(options, data, place.current);
    const observer = new ResizeObserver(() =>
      plot.current.setSize({ width: place.current.clientWidth, height: 200 }),
    );
    observer.observe(place.current);
    const stop = onThemeChange(() => plot.current.redraw());
    return () => {
      stop();
      observer.disconnect();
      plot.current.destroy();
    };
  }, [names.join()]);
  useEffect(() => {
    plot.current.setData(data);
  }, [x.length, x[x.length - 1], JSON.stringify(marks), smoothing]);
  const last = names.map((name) => `${name} ${formatNumber(series[name].findLast((value) => value != null))}`);
  return html`<section class="panel">
    <h3>${title}</h3>
    <div ref=${place} role="img" aria-label="${title} by ${unit}; last: ${[...last, ...marks.map(({ x: at, label }) => `${label} at ${unit} ${formatNumber(at)}`)].join(", ")}"></div>
  </section>`;
}

/** Charts with one control that smooths their lines. `charts`: properties of each `Chart`. */
export function Charts({ charts }) {
  const [smoothing, setSmoothing] = useState(0);
  return html`<div class="toolbar"><label>Smoothing<input type="range" min="0" max="0.99" step="0.01" value=${smoothing} onInput=${(event) => setSmoothing(Number(event.target.value))} /></label>
      <span class="quiet small">${smoothing ? `Moving average with weight ${smoothing}` : "off"}</span></div>
    <div class="halves">${charts.map((chart) => html`<${Chart} key=${chart.title} smoothing=${smoothing} ...${chart} />`)}</div>`;
}
