// Form of the most used fields, in sync with the spec's text.

import { html, useState } from "../vendor/htm-preact.js";
import { describeFile } from "../upload.js";
import { getAt } from "./document.js";
import { findFieldSchema } from "./schema.js";

const L = ["swiftkv", "num_key_value_layers"];
const SOURCE = ["data", "sources", 0, "name_or_path"];
const REDUCTION = ["swiftkv", "prefill_reduction"];

/** [legend, [field]]; setting a field removes the field `clears`. */
const GROUPS = [
  ["Job", [{ path: ["name"], label: "Name" }]],
  ["Model and data", [
    { path: ["model", "name_or_path"], label: "Teacher", list: "models" },
    { path: SOURCE, label: "Data", list: "sources" },
  ]],
  ["SwiftKV", [
    { path: L, label: "l, layers that prompts run", kind: "int", clears: REDUCTION },
    { path: REDUCTION, label: "or share of layers skipped", kind: "number", clears: L },
    { path: ["swiftkv", "key_value_group_size"], label: "g, skipped layers per KV cache layer", kind: "int" },
    { path: ["swiftkv", "early_exit"], label: "Early-exit head", kind: "check" },
  ]],
  ["Training", [
    { path: ["training", "max_steps"], label: "Steps", kind: "int" },
    { path: ["training", "batch_size"], label: "Batch size", kind: "int" },
    { path: ["optimizer", "learning_rate"], label: "Learning rate", kind: "number" },
    { path: ["data", "max_length"], label: "Tokens per row", kind: "int" },
  ]],
  ["Resources", [
    { path: ["resources", "num_workers"], label: "Workers", kind: "int" },
    { path: ["resources", "gpus_per_worker"], label: "GPUs per worker", kind: "number" },
    { path: ["resources", "cpus_per_worker"], label: "CPUs per worker", kind: "number" },
    { path: ["resources", "accelerator_type"], label: "GPU type" },
  ]],
];

export const makeFieldId = (path) => `spec-${path.join("-")}`;

/** Input as a value of the spec: empty removes the field; validation reports text that is not a number. */
function parseInput(kind, text) {
  if (kind === "check") return text;
  if (text.trim() === "") return undefined;
  return kind && Number.isFinite(Number(text)) ? Number(text) : text;
}

function Field({ field, spec, schema, faults, onChange, disabled }) {
  const { path, label, kind, list, clears } = field;
  const value = getAt(spec, path);
  const [draft, setDraft] = useState(null); // keeps "0." while the user types 0.5
  const known = schema && findFieldSchema(schema, path);
  const name = path.join(".");
  const mine = faults.filter((fault) => fault.field === name || fault.field?.startsWith(`${name}.`));
  const id = makeFieldId(path);
  const updateField = (event) => {
    if (kind !== "check") setDraft(event.target.value);
    const next = parseInput(kind, kind === "check" ? event.target.checked : event.target.value);
    onChange([...(clears && next !== undefined ? [[clears, undefined]] : []), [path, next]]);
  };
  const error = mine.length > 0 && html`<span class="field-error" id="${id}-error">${mine.map(({ message }) => message).join("; ")}</span>`;
  const common = { id, disabled, title: known?.description, "aria-invalid": mine.length ? "true" : null, "aria-describedby": mine.length ? `${id}-error` : null };
  if (kind === "check") {
    return html`<label class="check"><input ...${common} type="checkbox" checked=${value === true} onChange=${updateField} />${label}${error}</label>`;
  }
  const elaborate = value !== null && typeof value === "object";
  const standard = known?.default == null || typeof known.default === "object" ? "" : String(known.default);
  return html`<label>${label}
    <input ...${common} disabled=${disabled || elaborate} list=${list} inputmode=${kind ? "decimal" : null} placeholder=${elaborate ? "see the editor" : standard} value=${elaborate ? "" : draft !== null && parseInput(kind, draft) === value ? draft : (value ?? "")} onInput=${updateField} onBlur=${() => setDraft(null)} autocomplete="off" />
    ${error}
  </label>`;
}

/** `files`: uploaded files; `upload`: the upload field. */
export function Form({ spec, schema, faults, onChange, models, sources, files, upload }) {
  const paired = (fields) => (fields.length > 2 ? "pair" : "");
  const more = (getAt(spec, ["data", "sources"])?.length ?? 1) - 1;
  const named = files.find(({ id }) => id === getAt(spec, SOURCE));
  return html`<form class="form panel" onSubmit=${(event) => event.preventDefault()} aria-label="Most used fields">
    ${GROUPS.map(([legend, fields]) => html`<fieldset><legend>${legend}</legend><div class=${paired(fields)} style=${paired(fields) ? "" : "display: grid; gap: 0.6rem"}>
      ${fields.map((field) => html`<${Field} key=${field.label} field=${field} spec=${spec} schema=${schema} faults=${faults} onChange=${onChange} disabled=${spec === null} />`)}
    </div>${legend.includes("data") ? html`${named && html`<span class="quiet small">${describeFile(named)}</span>`}${more > 0 && html`<span class="quiet small">${more} more sources in the editor</span>`}${upload}` : ""}</fieldset>`)}
    <datalist id="models">${models.map((name) => html`<option value=${name}></option>`)}</datalist>
    <datalist id="sources">${sources.map((name) => html`<option value=${name}></option>`)}${files.map((file) => html`<option value=${file.id}>${describeFile(file)}</option>`)}</datalist>
  </form>`;
}
