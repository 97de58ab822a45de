// One prompt, one or two deployments answering it side by side, token by token.

import { html, useRef, useState } from "../vendor/htm-preact.js";
import { all, stream } from "../api.js";
import { Facts, Problem, answering, figure, served, useFresh } from "../parts.js";

const EMPTY = { pieces: [], usage: null, timings: null, problem: null };

function Answer({ title, answer }) {
  const { pieces, usage, timings, problem } = answer;
  return html`<section class="panel">
    <h2>${title}</h2>
    <div class="answer" aria-live="polite" aria-label="Answer of ${title}">
      ${pieces.map((piece) => (piece.exited ? html`<span class="exited" title="exited early">${piece.text}</span>` : piece.text))}
    </div>
    <${Problem} problem=${problem} />
    ${usage && html`<${Facts} of=${{
      "prompt tokens": usage.prompt_tokens,
      "of them skipped layers": usage.prefill_layers_skipped_tokens,
      "answer tokens": usage.completion_tokens,
      "exited early": usage.early_exit_tokens,
      "time to first token": timings.ttft_ms == null ? null : `${figure(timings.ttft_ms)} ms`,
      "time per token": timings.tpot_ms == null ? null : `${figure(timings.tpot_ms)} ms`,
    }} />`}
  </section>`;
}

export function Playground({ query }) {
  const [deployments, problem] = useFresh(() => all("/deployments"), [], 5000);
  const [answers, setAnswers] = useState({});
  const [busy, setBusy] = useState(false);
  const running = useRef(null);
  const ready = (deployments ?? []).filter(answering);

  async function ask(id, body, signal) {
    const put = (change) => setAnswers((old) => ({ ...old, [id]: { ...EMPTY, ...old[id], ...change(old[id] ?? EMPTY) } }));
    put(() => EMPTY);
    try {
      for await (const event of stream(`/deployments/${id}/generate`, body, signal)) {
        const [choice] = event.choices;
        const piece = { text: choice.text, exited: choice.num_exited_tokens > 0 };
        put((old) => ({ pieces: [...old.pieces, piece], usage: event.usage ?? null, timings: event.timings ?? null }));
      }
    } catch (error) {
      if (error.name !== "AbortError") put(() => ({ problem: error }));
    }
  }
  async function submit(event) {
    event.preventDefault();
    const fields = new FormData(event.target);
    const ids = [...new Set([fields.get("a"), fields.get("b")].filter(Boolean))];
    const text = fields.get("prompt");
    const asked = fields.get("chat") ? { messages: [{ role: "user", content: text }] } : { prompt: text };
    const body = { ...asked, max_tokens: Number(fields.get("max_tokens")), temperature: Number(fields.get("temperature")), stream: true, stream_interval_s: 0 };
    const mode = fields.get("exit");
    const exit = { early_exit: mode === "threshold" ? { mode, threshold: Number(fields.get("threshold")) } : { mode } };
    running.current = new AbortController();
    setAnswers({});
    setBusy(true);
    await Promise.all(ids.map((id) => ask(id, exits(id, mode) ? { ...body, ...exit } : body, running.current.signal)));
    setBusy(false);
  }
  const exits = (id, mode) => mode !== "off" && ready.find((item) => item.id === id)?.engine.swiftkv !== false; // a teacher has no exit head
  const options = ready.map((item) => html`<option value=${item.id} selected=${item.id === query.get("a")}>${item.route_prefix} (${served(item)})</option>`);
  const name = (id) => {
    const asked = ready.find((item) => item.id === id);
    return asked ? `${asked.route_prefix} (${asked.engine.swiftkv === false ? "teacher" : "student"})` : id;
  };
  return html`<h1>Playground</h1>
    <${Problem} problem=${problem} />
    ${deployments && !ready.length && html`<p class="quiet">Nothing is served that could answer.</p>`}
    <form onSubmit=${submit}>
      <label class="wide">Prompt <textarea name="prompt" rows="6" required>def fibonacci(n):\n    </textarea></label>
      <p class="row">
        <label>Deployment <select name="a" required>${options}</select></label>
        <label>beside it <select name="b"><option value="">none</option>${ready.map((item) => html`<option value=${item.id}>${item.route_prefix} (${served(item)})</option>`)}</select></label>
        <label><input name="chat" type="checkbox" /> as a chat</label>
        <label>Most tokens <input name="max_tokens" type="number" min="1" value="64" /></label>
        <label>Temperature <input name="temperature" type="number" min="0" step="0.1" value="0" /></label>
        <label>Early exit
          <select name="exit">${["off", "threshold", "lossless"].map((mode) => html`<option value=${mode}>${mode}</option>`)}</select>
        </label>
        <label>Exit threshold <input name="threshold" type="number" min="0.01" max="1" step="any" value="0.95" /></label>
        <button disabled=${busy || !ready.length}>Generate</button>
        ${busy && html`<button type="button" class="plain" onClick=${() => running.current.abort()}>Stop</button>`}
      </p>
    </form>
    <div class="grid">${Object.entries(answers).map(([id, answer]) => html`<${Answer} key=${id} title=${name(id)} answer=${answer} />`)}</div>`;
}
