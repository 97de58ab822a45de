// A new job, from a recipe or from another job: a form next to an editor, kept in sync, and the plan as it is typed.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/htm-preact.js";
import { all, get, newKey, post, send } from "../api.js";
import { Loading, Problem, useFresh } from "../parts.js";
import { change, parts, rangeOf, read, write } from "../spec/document.js";
import { Editor } from "../spec/editor.js";
import { Form } from "../spec/form.js";
import { PlanPanel } from "../spec/plan.js";
import { check, loadSchema, withoutDefaults } from "../spec/schema.js";
import { Upload } from "../upload.js";

const FIRST = "builtin-python-5m";
const QUIET_MS = 400;
const NONE = { plan: null, problem: null, busy: true };

/** The change of a spec that has it train on an uploaded file in place of its first source. */
const trainsOn = ({ id, format }) => [["data", "sources", 0], { name_or_path: id, ...(format === "prompts" && { complete: {} }) }];

/** The plan of `value`, asked for once typing rests; an answer that has been overtaken is dropped. */
function usePlan(value, json) {
  const [state, setState] = useState(NONE);
  useEffect(() => {
    if (value === null) return;
    const asking = new AbortController();
    setState((old) => ({ ...old, busy: true }));
    const timer = setTimeout(async () => {
      try {
        const answer = await send("POST", "/jobs/validate", value, { signal: asking.signal });
        const plan = await answer.json();
        setState({ plan, problem: null, busy: false });
      } catch (problem) {
        if (problem.name !== "AbortError") setState((old) => ({ plan: old.plan, problem, busy: false }));
      }
    }, QUIET_MS);
    return () => {
      clearTimeout(timer);
      asking.abort();
    };
  }, [json]);
  return state;
}

/** What is wrong, once a field: the control plane's words before the schema's. [{field, message}] */
function faultsOf({ problem: unreadable, value }, schema, refusal) {
  if (unreadable) return [{ field: null, message: `The text cannot be read: ${unreadable.message}`, from: unreadable.from }];
  const told = (refusal?.errors ?? []).filter((error) => error.field).map(({ field, message }) => ({ field: parts(field).join("."), message }));
  const fields = new Set(told.map(({ field }) => field));
  const local = schema ? check(schema, value).map(({ path, message }) => ({ field: path.join("."), message })) : [];
  const faults = [...told, ...local.filter(({ field }) => !fields.has(field) && !told.length)];
  return refusal && !faults.length ? [{ field: null, message: refusal instanceof TypeError ? "The control plane does not answer." : refusal.message }] : faults;
}

function Origin({ recipes, jobs, query, chosen }) {
  const go = (event) => {
    const [kind, id] = event.target.value.split(":");
    const file = kind === "recipe" && query.get("file");
    location.hash = `#/submit?${kind}=${id}${file ? `&file=${file}` : ""}`;
  };
  const value = query.get("job") ? `job:${query.get("job")}` : `recipe:${chosen?.id ?? FIRST}`;
  const listed = jobs?.some(({ id }) => id === query.get("job"));
  return html`<label>Begin from
    <select value=${value} onChange=${go}>
      <optgroup label="Recipes">${recipes.map(({ id }) => html`<option value="recipe:${id}" selected=${value === `recipe:${id}`}>${id}</option>`)}</optgroup>
      <optgroup label="A job, cloned">
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
  const spec = useMemo(() => read(text), [text]);
  const json = JSON.stringify(spec.value);
  const state = usePlan(spec.value, json);
  const faults = useMemo(() => faultsOf(spec, schema, state.problem), [spec, schema, state.problem]);
  const marks = useMemo(() => faults.map(({ field, message, from }) => ({ ...(field ? rangeOf(spec.doc, parts(field)) : { from: from ?? 0, to: from ?? 0 }), message })), [faults]);
  const latest = useRef(null);
  latest.current = spec.value;
  // One key for one text: a second click, or a try after a broken connection, submits nothing twice.
  const key = useMemo(newKey, [json]);
  async function submit() {
    if (latest.current === null || busy) return;
    setBusy(true);
    try {
      const job = await post("/jobs", latest.current, { "Idempotency-Key": key });
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
  const [files, , reloadFiles] = useFresh(() => all("/v1/files"), [], null);
  const take = (file) => {
    setRefusal(null);
    setText((now) => change(now, [trainsOn(file)])); // what was typed meanwhile stays
    return reloadFiles();
  };
  const upload = html`<${Upload} id="spec-upload" label="or upload rows" hint="JSON Lines, chosen or dropped here; they replace the first source." disabled=${spec.value === null} onDone=${take} />`;
  const teachers = [...new Set(recipes.map((recipe) => recipe.spec.model.name_or_path))];
  const sources = [...new Set(recipes.flatMap((recipe) => recipe.spec.data.sources.map((source) => source.name_or_path)))];
  const go = (field) => setShown({ ...rangeOf(spec.doc, parts(field)) });
  return html`<div class="spec">
    <${Form} spec=${spec.value} schema=${schema} faults=${faults} onChange=${(changes) => edit(change(text, changes))} models=${teachers} sources=${sources} files=${files ?? []} upload=${upload} />
    <section aria-label="Editor">
      <${Editor} label="Spec, YAML or JSON" text=${text} onInput=${edit} onSubmit=${submit} schema=${schema} marks=${marks} shown=${shown} />
      <p class="quiet small">Ctrl Space completes, Ctrl Enter submits, Tab leaves the editor.</p>
    </section>
    <${PlanPanel} state=${state} spec=${spec.value} faults=${faults} onShow=${go}>
      <${Problem} problem=${refusal} />
      <p><button onClick=${submit} disabled=${busy || spec.value === null}>Submit job</button></p>
    <//>
  </div>`;
}

const load = async (query) => {
  const [schema, recipes] = await Promise.all([loadSchema(), all("/recipes")]);
  const clone = query.get("job");
  if (clone) {
    const { spec, name } = await get(`/jobs/${clone}`);
    const [copy, from] = [withoutDefaults(schema, spec), query.get("from")];
    if (from) copy.training = { ...copy.training, from };
    const words = `A copy of ${name}${from ? ` that continues from ${from}` : ""}; fields at their defaults are left out.`;
    return { schema, recipes, start: write(copy), words };
  }
  const recipe = recipes.find(({ id }) => id === (query.get("recipe") ?? FIRST)) ?? recipes[0];
  const file = query.get("file") && (await get(`/v1/files/${query.get("file")}`));
  const start = file ? change(recipe.text, [trainsOn(file)]) : recipe.text;
  return { schema, recipes, start, words: recipe.description, recipe };
};

export function Submit({ query }) {
  const [found, problem] = useFresh(() => load(query), [], null);
  const [page] = useFresh(() => get("/jobs?limit=20"), [], null);
  return html`<div class="head"><h1>New job</h1>
      ${found && html`<span class="end"><${Origin} recipes=${found.recipes} jobs=${page?.data} query=${query} chosen=${found.recipe} /></span>`}
    </div>
    <${Problem} problem=${problem} />
    ${found ? html`<p class="lead small">${found.words}</p><br /><${Spec} start=${found.start} schema=${found.schema} recipes=${found.recipes} />` : !problem && html`<${Loading} what="recipes" />`}`;
}
