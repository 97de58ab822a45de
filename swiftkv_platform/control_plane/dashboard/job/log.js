// A job's log, searched as it is typed.

import { html, useState } from "../vendor/htm-preact.js";
import { send } from "../api.js";
import { Problem, SearchField, formatCount, usePolling } from "../parts.js";

const LINES = 2000;

/** A line with all matches of `word` highlighted. */
function highlight(line, word) {
  if (!word) return line;
  const pieces = [];
  const low = line.toLowerCase();
  let from = 0;
  for (let at = low.indexOf(word); at >= 0; at = low.indexOf(word, from)) {
    pieces.push(line.slice(from, at), html`<mark>${line.slice(at, at + word.length)}</mark>`);
    from = at + word.length;
  }
  return [...pieces, line.slice(from)];
}

export function Log({ job, live }) {
  const [search, setSearch] = useState("");
  const [errors, setErrors] = useState(false);
  const load = async () => (await send("GET", `/jobs/${job.id}/logs?tail_lines=${LINES}`)).text();
  const [text, problem] = usePolling(load, [job.id], live ? 3000 : null);
  const lines = (text ?? "").split("\n").filter(Boolean);
  const word = search.toLowerCase();
  const found = lines.filter((line) => (!word || line.toLowerCase().includes(word)) && (!errors || /error|warn|traceback|exception|fail/i.test(line)));
  return html`<${Problem} problem=${problem} />
    <div class="toolbar">
      <${SearchField} value=${search} onInput=${setSearch} label="Search the log" />
      <label class="check"><input type="checkbox" checked=${errors} onChange=${(event) => setErrors(event.target.checked)} /> errors and warnings only</label>
      <span class="end" role="status">${formatCount(found.length)} of ${formatCount(lines.length)} lines</span>
    </div>
    <pre tabindex="0" role="region" aria-label="Log">${found.length ? found.map((line) => html`${highlight(line, word)}${"\n"}`) : lines.length ? "No matching lines." : "No output yet."}</pre>
    <p class="quiet small">Last ${formatCount(LINES)} lines. <a href="/jobs/${job.id}/logs">Open the full log</a>.</p>`;
}
