// Chat or completion with one or two deployments side by side, streamed.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { fetchAll, streamEvents } from "../api.js";
import { EmptyState, FactList, PageHeader, LoadingOrProblem, Problem, isServing, formatCount, describeDeepTail, getDeploymentName, formatNumber, usePolling } from "../parts.js";

const FRESH = { turns: [], live: null, problem: null, busy: false };
const TOOLS = `[{"type": "function", "function": {
  "name": "get_weather",
  "description": "Weather of a city",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
}}]`;

/** Client-side figures of a stream: time to first token, and tokens per second after it. */
function computeTimings(began, first, tokens) {
  const now = performance.now();
  const seconds = first === null ? 0 : (now - first) / 1000;
  return { ttft: first === null ? null : first - began, rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null, tokens };
}

/** Parse an event of /generate or a chat completion: {piece, calls, tokens, usage, timings}. */
function parseEvent(event) {
  const choice = event.choices?.[0];
  const calls = choice?.delta?.tool_calls ?? [];
  const text = choice?.text ?? choice?.delta?.content ?? "";
  const exited = choice?.num_exited_tokens ?? 0;
  const drafted = choice?.num_accepted_tokens ?? 0;
  const tokens = choice?.token_ids?.length ?? (text || calls.length ? 1 : 0);
  return { piece: text ? { text, exited, drafted, tokens } : null, calls, tokens, usage: event.usage, timings: event.timings };
}

/** Merge streamed parts of tool calls. */
function mergeCalls(calls, parts) {
  const all = [...calls];
  for (const { index = 0, id, function: { name, arguments: written } = {} } of parts) {
    const old = all[index] ?? { id: "", name: "", arguments: "" };
    all[index] = { id: id ?? old.id, name: name ?? old.name, arguments: old.arguments + (written ?? "") };
  }
  return all;
}

/** A turn as a chat message of the API. */
function toApiMessage({ role, content, calls, call }) {
  if (role === "tool") return { role, content, tool_call_id: call };
  if (!calls?.length) return { role, content };
  return { role, content: content || null, tool_calls: calls.map(({ id, name, arguments: written }) => ({ id, type: "function", function: { name, arguments: written } })) };
}

const classifyPiece = ({ exited, drafted }) => (exited ? "exited" : drafted ? "drafted" : null);
const describePiece = ({ exited, drafted, tokens }) => (exited ? "exited early" : `${drafted} of ${tokens} tokens drafted, all verified`);

const ResponseText = ({ pieces }) => pieces.map((piece) => (classifyPiece(piece) ? html`<span class=${classifyPiece(piece)} title=${describePiece(piece)}>${piece.text}</span>` : piece.text));

function Message({ turn, busy }) {
  const who = { user: "You", assistant: "Model", tool: "Tool" }[turn.role] ?? turn.role;
  return html`<div class="turn ${turn.role}">
    <span class="who">${who}</span>${turn.pieces ? html`<${ResponseText} pieces=${turn.pieces} />` : turn.content}
    ${turn.calls?.map((call) => html`<div><b>calls ${call.name}</b>(${call.arguments})</div>`)}
    ${turn.role === "assistant" && !turn.content && !turn.calls?.length && (busy ? html`<span class="quiet">…</span>` : html`<span class="quiet">(empty response)</span>`)}
  </div>`;
}

/** Form for the results of the model's tool calls. */
function ToolResultsForm({ calls, onDone }) {
  const submit = (event) => {
    event.preventDefault();
    const fields = new FormData(event.target);
    onDone(calls.map((call, i) => ({ role: "tool", call: call.id, content: fields.get(`result-${i}`) })));
  };
  return html`<form onSubmit=${submit} aria-label="Tool results">
    ${calls.map((call, i) => html`<label class="wide">Result of ${call.name} <textarea name="result-${i}" rows="2" required></textarea></label>`)}
    <p><button class="plain">Send ${calls.length > 1 ? "results" : "result"}</button></p>
  </form>`;
}

/** Where the tokens of a prompt were computed. `tail`: which tokens run all layers. */
function PromptTokens({ usage, tail }) {
  const { prompt_tokens: all, prefill_layers_skipped_tokens: skipped } = usage;
  const cached = usage.cached_tokens ?? usage.prompt_tokens_details?.cached_tokens;
  return html`<${FactList} of=${{
    "prompt tokens": formatCount(all),
    "from the prefix cache": formatCount(cached),
    "skipped layers": formatCount(skipped),
    "ran all layers": skipped == null ? null : formatCount(all - (cached ?? 0) - skipped),
    "deep tail": tail,
  }} />`;
}

function ResponseMetrics({ live, tail }) {
  const { usage, timings } = live;
  const ttft = timings?.ttft_ms ?? live.ttft;
  const tokens = usage?.completion_tokens ?? live.tokens;
  const rate = timings?.tpot_ms ? 1000 / timings.tpot_ms : live.rate;
  const exited = usage?.early_exit_tokens ?? usage?.completion_tokens_details?.early_exit_tokens ?? live.exited;
  const figures = [
    ["time to first token", ttft == null ? "–" : `${formatNumber(ttft)} ms`],
    ["tokens/s", rate == null ? "–" : formatNumber(rate)],
    ["tokens", formatCount(tokens)],
    ["exited tokens", formatCount(exited)],
    ["drafted tokens", formatCount(live.drafted)],
  ];
  return html`<div class="live">${figures.map(([name, value]) => html`<div><strong>${value}</strong><span>${name}</span></div>`)}</div>
    ${usage && html`<${PromptTokens} usage=${usage} tail=${tail} />`}`;
}

function Conversation({ title, talk, tail, onResults }) {
  const { turns, live, problem, busy } = talk;
  const last = turns.at(-1);
  const place = useRef(null);
  useEffect(() => place.current && (place.current.scrollTop = place.current.scrollHeight), [turns]);
  return html`<section class="panel talk" aria-label=${title}>
    <header><h2>${title}</h2></header>
    ${live ? html`<${ResponseMetrics} live=${live} tail=${tail} />` : ""}
    <div class="turns" ref=${place} tabindex="0" role="log" aria-label="Response of ${title}" aria-busy=${busy}>
      ${turns.map((turn, i) => html`<${Message} key=${i} turn=${turn} busy=${busy && i === turns.length - 1} />`)}
    </div>
    <${Problem} problem=${problem} />
    ${!busy && last?.calls?.length > 0 && html`<${ToolResultsForm} calls=${last.calls} onDone=${onResults} />`}
  </section>`;
}

/** Path and body of a request. Exits and drafts are marked by /generate; tools need chat completions. */
function buildRequest(id, turns, fields, exits) {
  const exit = exits ? { early_exit: fields.exit === "threshold" ? { mode: fields.exit, threshold: fields.threshold } : { mode: fields.exit } } : {};
  const common = { max_tokens: fields.maxTokens, temperature: fields.temperature, stream: true, ...exit };
  const system = fields.system ? [{ role: "system", content: fields.system }] : [];
  const messages = [...system, ...turns.map(toApiMessage)];
  if (fields.tools) {
    const body = { ...common, model: fields.models[id], messages, tools: fields.tools, stream_options: { include_usage: true } };
    return [`/deployments/${id}/chat/completions`, body];
  }
  const asked = fields.kind === "chat" ? { messages } : { prompt: turns.at(-1).content };
  return [`/deployments/${id}/generate`, { ...asked, ...common, stream_interval_s: 0 }];
}

/** Spec of the student that a deployment serves, if known. */
const findSpec = (models, item) => (item?.engine.swiftkv === false ? null : models?.find(({ id }) => id === item?.model)?.lineage.spec);

/** Whether a deployment's model has an early-exit head, as far as known. */
const hasExitHead = (models, item) => item.engine.swiftkv !== false && findSpec(models, item)?.swiftkv?.early_exit !== false;

function Fields({ offersExit, kind, setKind, exit, setExit, tools, setTools, options, both }) {
  return html`<div class="row bottom">
      <label>Deployment <select name="a" required>${options}</select></label>
      <label>Compare with <select name="b"><option value="">none</option>${both}</select></label>
      <label>Kind <select name="kind" value=${kind} onChange=${(event) => setKind(event.target.value)}><option value="chat">chat</option><option value="text">completion</option></select></label>
    </div>
    <div class="row bottom">
      <label>Max tokens <input name="max_tokens" type="number" min="1" value="128" /></label>
      <label>Temperature <input name="temperature" type="number" min="0" step="0.1" value="0" /></label>
      ${offersExit && html`<label>Early exit
        <select name="exit" value=${exit} onChange=${(event) => setExit(event.target.value)}>${["off", "threshold", "lossless"].map((mode) => html`<option value=${mode}>${mode}</option>`)}</select>
      </label>`}
      ${offersExit && exit === "threshold" && html`<label>Exit threshold <input name="threshold" type="number" min="0.01" max="1" step="any" value="0.95" /></label>`}
      ${kind === "chat" && html`<label class="check"><input type="checkbox" checked=${tools} onChange=${(event) => setTools(event.target.checked)} /> tools</label>`}
    </div>
    ${kind === "chat" && html`<details><summary>System message</summary><label class="wide">System message <textarea name="system" rows="2"></textarea></label></details>`}
    ${kind === "chat" && tools && html`<label class="wide">Tools (JSON, as in OpenAI's API) <textarea name="tools" rows="6" spellcheck="false">${TOOLS}</textarea></label>`}`;
}

/** The form's values; throws if the tools are not valid JSON. */
function readForm(form, kind, tools) {
  const fields = new FormData(form);
  const asked = { kind, exit: fields.get("exit") ?? "off", threshold: Number(fields.get("threshold")), system: fields.get("system"), maxTokens: Number(fields.get("max_tokens")), temperature: Number(fields.get("temperature")), tools: null };
  if (kind === "chat" && tools) {
    try {
      asked.tools = JSON.parse(fields.get("tools"));
    } catch (error) {
      throw new Error(`The tools are not valid JSON: ${error.message}`);
    }
  }
  return { ...asked, ids: [...new Set([fields.get("a"), fields.get("b")].filter(Boolean))], prompt: fields.get("prompt") };
}

export function Playground({ query }) {
  const [deployments, problem] = usePolling(() => fetchAll("/deployments"), [], 5000);
  const [known] = usePolling(() => fetchAll("/models"), [], 10000);
  const [talks, setTalks] = useState({});
  const [refusal, setRefusal] = useState(null);
  const [kind, setKind] = useState("chat");
  const [exit, setExit] = useState("off");
  const [tools, setTools] = useState(false);
  const running = useRef(null);
  const form = useRef(null);
  const ready = (deployments ?? []).filter(isServing);
  const busy = Object.values(talks).some((talk) => talk.busy);

  const updateConversation = (id, change) => setTalks((old) => ({ ...old, [id]: { ...FRESH, ...old[id], ...change(old[id] ?? FRESH) } }));
  const exits = (id, fields) => fields.exit !== "off" && ready.some((item) => item.id === id && hasExitHead(known, item));

  /** Stream one deployment's response to `turns`. */
  async function ask(id, turns, fields, signal) {
    const began = performance.now();
    const answer = { role: "assistant", content: "", pieces: [], calls: [] };
    const sums = { exited: 0, drafted: 0, tokens: 0, usage: null, timings: null };
    let first = null;
    updateConversation(id, () => ({ turns: [...turns, answer], live: computeTimings(began, null, 0), problem: null, busy: true }));
    try {
      for await (const event of streamEvents(...buildRequest(id, turns, fields, exits(id, fields)), signal)) {
        const { piece, calls, tokens, usage, timings } = parseEvent(event);
        if (tokens && first === null) first = performance.now();
        if (piece) answer.pieces = [...answer.pieces, piece];
        answer.content += piece?.text ?? "";
        answer.calls = mergeCalls(answer.calls, calls);
        sums.tokens += tokens;
        sums.exited += piece?.exited ?? 0;
        sums.drafted += piece?.drafted ?? 0;
        sums.usage = usage ?? sums.usage;
        sums.timings = timings ?? sums.timings;
        updateConversation(id, () => ({ turns: [...turns, { ...answer }], live: { ...sums, ...computeTimings(began, first, sums.tokens) } }));
      }
    } catch (error) {
      if (error.name !== "AbortError") updateConversation(id, (old) => ({ problem: error, turns: answer.content || answer.calls.length ? old.turns : turns }));
    }
    updateConversation(id, () => ({ busy: false }));
  }

  function begin(fields, ids, turnsOf) {
    running.current = new AbortController();
    const models = Object.fromEntries(ready.map((item) => [item.id, item.model]));
    return Promise.all(ids.map((id) => ask(id, turnsOf(id), { ...fields, models }, running.current.signal)));
  }

  function submit(event) {
    event?.preventDefault();
    if (busy || !form.current.reportValidity()) return;
    try {
      const fields = readForm(form.current, kind, tools);
      const asked = { role: "user", content: fields.prompt };
      const before = (id) => (kind === "chat" ? (talks[id]?.turns ?? []) : []);
      setRefusal(null);
      setTalks((old) => Object.fromEntries(fields.ids.map((id) => [id, old[id] ?? FRESH])));
      begin(fields, fields.ids, (id) => [...before(id), asked]);
      if (kind === "chat") form.current.elements.prompt.value = "";
    } catch (error) {
      setRefusal(error);
    }
  }
  const answered = (id) => (results) => begin(readForm(form.current, kind, tools), [id], () => [...talks[id].turns, ...results]);
  const keys = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && submit(event);
  const option = (item, chosen) => html`<option value=${item.id} selected=${chosen}>${getDeploymentName(item, known)}</option>`;
  const find = (id) => ready.find((item) => item.id === id);
  const name = (id) => (find(id) ? getDeploymentName(find(id), known) : id);
  if (!deployments) return html`<${PageHeader} title="Playground" /><${LoadingOrProblem} what="deployments" problem=${problem} />`;
  const idle = !ready.length && !Object.keys(talks).length;
  return html`<${PageHeader} title="Playground"><span class="legend"><span><span class="exited">exited early</span></span><span><span class="drafted">drafted and verified</span></span></span><//>
    <${Problem} problem=${problem ?? refusal} />
    ${!ready.length && html`<div class="panel"><${EmptyState} title="No running deployment"><a href="#/models">Choose a model to deploy</a>.<//></div><br />`}
    <form class="panel asked" ref=${form} hidden=${idle} onSubmit=${submit}>
      <${Fields} offersExit=${ready.some((item) => hasExitHead(known, item))} kind=${kind} setKind=${setKind} exit=${exit} setExit=${setExit} tools=${tools} setTools=${setTools}
        options=${ready.map((item) => option(item, item.id === query.get("a")))} both=${ready.map((item) => option(item, item.id === query.get("b")))} />
      <label class="wide">Prompt <textarea name="prompt" rows=${kind === "chat" ? 3 : 6} required onKeyDown=${keys} placeholder="Ctrl+Enter to send"></textarea></label>
      <div class="row">
        <button disabled=${busy || !ready.length}>Generate</button>
        ${busy && html`<button type="button" class="plain" onClick=${() => running.current.abort()}>Stop</button>`}
        ${!busy && Object.keys(talks).length > 0 && html`<button type="button" class="plain" onClick=${() => setTalks({})}>New conversation</button>`}
        ${tools && kind === "chat" && html`<span class="quiet small">With tools, early exits are counted but not marked in the text.</span>`}
      </div>
    </form>
    <br />
    <div class="talks">${Object.entries(talks).map(([id, talk]) => html`<${Conversation} key=${id} title=${name(id)} talk=${talk} tail=${describeDeepTail(findSpec(known, find(id)))} onResults=${answered(id)} />`)}</div>`;
}
