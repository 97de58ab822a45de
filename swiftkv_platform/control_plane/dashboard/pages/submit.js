// A new job, from a recipe or a clone: a form and an editor in sync, and the plan of the current spec.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/htm-preact.js";
import { fetchAll, get, makeIdempotencyKey, post, send } from "../api.js";
import { PageHeader, Loading, Problem, showToast, usePolling } from "../parts.js";
import { setFields, splitPath, findRange, parseSpec, formatSpec } from "../spec/document.js";
import { Editor } from "../spec/editor.js";
import { Form } from "../spec/form.js";
import { PlanPanel } from "../spec/plan.js";
import { validateSpec, loadSchema, withoutDefaults } from "../spec/schema.js";
import { Upload } from "../upload.js";

const FIRST = "builtin-python-5m";
const QUIET_MS = 400;
const NONE = { plan: null, problem: null, busy: true };

/** Change of a spec that replaces its first source by an uploaded file. */
const makeSourceChange = ({ id, format }) => [["data", "sources", 0], { name_or_path: id, ...(format === "prompts" && { complete: {} }) }];

/** The plan of the spec `value`, requested when typing pauses; outdated responses are dropped. */
function usePlan(value, json) {
  const [state, setState] = useState(NONE);
  useEffect(() => {
    if (value === null) return;
    const request = new AbortController();
    setState((old) => ({ ...old, busy: true }));
    const timer = setTimeout(async () => {
      try {
        const response = await send("POST", "/jobs/validate", value, { signal: request.signal });
        const plan = await response.json();
        setState({ plan, problem: null, busy: false });
      } catch (problem) {
        if (problem.name !== "AbortError") setState((old) => ({ plan: old.plan, problem, busy: false }));
      }
    }, QUIET_MS);
    return () => {
      clearTimeout(timer);
      request.abort();
    };
  }, [json]);
  return state;
}

/** Whether a validation failed for a reason other than the spec. */
const isTemporary = (problem) => problem instanceof TypeError || problem?.status === 429 || problem?.status >= 500;

/** Errors of the spec, one per field; those of the control plane replace those of the schema. [{field, message}] */
function findErrors({ problem: unreadable, value }, schema, refusal) {
  if (unreadable) return [{ field: null, message: `The spec cannot be parsed: ${unreadable.message}`, from: unreadable.from }];
  const reported = (refusal?.errors ?? []).filter((error) => error.field).map(({ field, message }) => ({ field: splitPath(field).join("."), message }));
  const fields = new Set(reported.map(({ field }) => field));
  const local = schema ? validateSpec(schema, value).map(({ path, message }) => ({ field: path.join("."), message })) : [];
  const faults = [...reported, ...local.filter(({ field }) => !fields.has(field) && !reported.length)];
  return refusal && !faults.length ? [{ field: null, message: refusal instanceof TypeError ? "The control plane is unavailable." : refusal.message }] : faults;
}

function StartFrom({ recipes, jobs, query, chosen }) {
  const go = (event) => {
    const [kind, id] = event.target.value.split(":");
    const file = kind === "recipe" && query.get("file");
    location.hash = `#/submit?${kind}=${id}${file ? `&file=${file}` : ""}`;
  };
  const value = query.get("job") ? `job:${query.get("job")}` : `recipe:${chosen?.id ?? FIRST}`;
  const listed = jobs?.some(({ id }) => id === query.get("job"));
  return html`<label>Start from
    <select value=${value} onChange=${go}>
      <optgroup label="Recipes">${recipes.map(({ id }) => html`<option value="recipe:${id}" selected=${value === `recipe:${id}`}>${id}</option>`)}</optgroup>
      <optgroup label="Clone a job">
        ${query.get("job") && !listed && html`<option value=${value} selected>${query.get("job")}</option>`}
        ${(jobs ?? []).map(({ id, name }) => html`<option value="job:${id}" selected=${value === `job:${id}`}>${name} (${id.slice(-6)})</option>`)}
      </optgroup>
    </select>
  </label>`;
}

function Spec({ start, schema, recipes }) {
  const [text, setText] = useState(start);
  const [refusal, setRefusal] = useState(null);
  const [busy, setBusy] = useState(false);
  const [shown, setShown] = useState(null);
  const spec = useMemo(() => parseSpec(text), [text]);
  const json = JSON.stringify(spec.value);
  const state = usePlan(spec.value, json);
  const faults = useMemo(() => findErrors(spec, schema, state.problem), [spec, schema, state.problem]);
  const marks = useMemo(() => faults.map(({ field, message, from }) => ({ ...(field ? findRange(spec.doc, splitPath(field)) : { from: from ?? 0, to: from ?? 0 }), message })), [faults]);
  const latest = useRef(null);
  latest.current = spec.value;
  const blocked = useRef(false); // the editor keeps its first `submit`
  blocked.current = findErrors(spec, schema, isTemporary(state.problem) ? null : state.problem).length > 0;
  // One key per spec, so that a second click or a retry submits nothing twice.
  const key = useMemo(makeIdempotencyKey, [json]);
  async function submit() {
    if (blocked.current || busy) return;
    setBusy(true);
    try {
      const job = await post("/jobs", latest.current, { "Idempotency-Key": key });
      showToast(`Submitted ${job.name}.`);
      location.hash = `#/jobs/${job.id}`;
    } catch (error) {
      setRefusal(error);
      setBusy(false);
    }
  }
  const edit = (next) => {
    setRefusal(null);
    setText(next);
  };
  const [files, , reloadFiles] = usePolling(() => fetchAll("/v1/files"), [], null);
  const replaceFirstSource = (file) => {
    setRefusal(null);
    setText((now) => setFields(now, [makeSourceChange(file)])); // keeps concurrent edits
    return reloadFiles();
  };
  const upload = html`<${Upload} id="spec-upload" label="or upload rows" hint="Choose or drop a JSON Lines file. It replaces the first data source." disabled=${spec.value === null} onDone=${replaceFirstSource} />`;
  const teachers = [...new Set(recipes.map((recipe) => recipe.spec.model.name_or_path))];
  const [deployments] = usePolling(() => fetchAll("/deployments"), [], null);
  const captured = (deployments ?? []).filter(({ capture }) => capture).map(({ id }) => `traffic:${id}`);
  const sources = [...new Set(recipes.flatMap((recipe) => recipe.spec.data.sources.map((source) => source.name_or_path))), ...captured];
  const go = (field) => setShown({ ...findRange(spec.doc, splitPath(field)) });
  return html`<div class="spec">
    <${Form} spec=${spec.value} schema=${schema} faults=${faults} onChange=${(changes) => edit(setFields(text, changes))} models=${teachers} sources=${sources} files=${files ?? []} upload=${upload} />
    <section aria-label="Editor">
      <${Editor} label="Spec, YAML or JSON" text=${text} onInput=${edit} onSubmit=${submit} schema=${schema} marks=${marks} shown=${shown} />
      <p class="quiet small">Ctrl+Space: complete. Ctrl+Enter: submit. Tab: leave the editor.</p>
    </section>
    <${PlanPanel} state=${state} spec=${spec.value} faults=${faults} onShow=${go}>
      <${Problem} problem=${refusal} />
      <p><button onClick=${submit} disabled=${busy || blocked.current}>Submit job</button></p>
    <//>
  </div>`;
}

const loadStart = async (query) => {
  const [schema, recipes] = await Promise.all([loadSchema(), fetchAll("/recipes")]);
  const clone = query.get("job");
  if (clone) {
    const { spec, name } = await get(`/jobs/${clone}`);
    const [copy, from] = [withoutDefaults(schema, spec), query.get("from")];
    if (from) copy.training = { ...copy.training, from };
    const words = `Copy of ${name}${from ? `, continuing from ${from}` : ""}. Fields with default values are left out.`;
    return { schema, recipes, start: formatSpec(copy), words };
  }
  const recipe = recipes.find(({ id }) => id === (query.get("recipe") ?? FIRST)) ?? recipes[0];
  const file = query.get("file") && (await get(`/v1/files/${query.get("file")}`));
  const start = file ? setFields(recipe.text, [makeSourceChange(file)]) : recipe.text;
  return { schema, recipes, start, words: recipe.description, recipe };
};

export function Submit({ query }) {
  const [found, problem] = usePolling(() => loadStart(query), [], null);
  const [page] = usePolling(() => get("/jobs?limit=20"), [], null);
  return html`<${PageHeader} title="New job">${found && html`<${StartFrom} recipes=${found.recipes} jobs=${page?.data} query=${query} chosen=${found.recipe} />`}<//>
    <${Problem} problem=${problem} />
    ${found ? html`<p class="lead small">${found.words}</p><br /><${Spec} start=${found.start} schema=${found.schema} recipes=${found.recipes} />` : !problem && html`<${Loading} what="recipes" />`}`;
}
