// A file of rows on its way to the control plane: picked or dropped, with its progress and what is wrong with it.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { upload } from "./api.js";
import { count, percent } from "./parts.js";

const PATH = "/v1/files";
const BROKEN = "The file could not be sent: it has changed since it was chosen, or the control plane does not answer.";

/** What is in an uploaded file, in words. */
export const contents = ({ filename, rows, format }) => `${filename}: ${count(rows)} ${rows === 1 ? "row" : "rows"}, ${format}`;

const words = (problem) => (problem instanceof TypeError ? BROKEN : problem.message);

/** `onDone` is given the file as the API has it; a refusal is shown at the field, in the API's words. */
export function Upload({ id, label, hint, disabled, onDone }) {
  const [sent, setSent] = useState(null); // the share of a file that is on its way
  const [problem, setProblem] = useState(null);
  const [kept, setKept] = useState(null);
  const [isOver, setOver] = useState(false);
  const way = useRef(null);
  useEffect(() => () => way.current?.abort(), []);
  async function take(files) {
    if (!files.length || sent !== null || disabled) return;
    setKept(null);
    setProblem(files.length > 1 ? `${files.length} files were dropped; drop one at a time.` : null);
    if (files.length > 1) return;
    way.current = new AbortController();
    setSent(0);
    try {
      const { signal } = way.current;
      const file = await upload(PATH, { purpose: "fine-tune", file: files[0] }, { signal, onProgress: setSent });
      setKept(file);
      await onDone(file);
    } catch (error) {
      if (error.name !== "AbortError") setProblem(words(error));
    }
    setSent(null);
  }
  const pick = ({ target }) => {
    take([...target.files]);
    target.value = ""; // the same file, mended, can be picked again
  };
  const hover = (is) => (event) => {
    event.preventDefault();
    setOver(is);
  };
  const drop = (event) => {
    hover(false)(event);
    take([...event.dataTransfer.files]);
  };
  const described = [`${id}-hint`, problem && `${id}-error`].filter(Boolean).join(" ");
  return html`<div class="drop ${isOver ? "over" : ""}" onDragOver=${hover(true)} onDragLeave=${hover(false)} onDrop=${drop}>
    <label>${label}
      <input id=${id} type="file" accept=".jsonl,.ndjson,.json" disabled=${disabled || sent !== null} onChange=${pick} aria-invalid=${problem ? "true" : null} aria-describedby=${described} />
    </label>
    <span class="quiet small" id="${id}-hint">${hint}</span>
    ${sent !== null && html`<div class="row"><progress max="1" value=${sent} aria-label="Part of the file sent"></progress>
      <span class="small">${sent < 1 ? percent(Math.floor(100 * sent) / 100) : "Checking each row…"}</span>
      <button type="button" class="plain small" onClick=${() => way.current.abort()}>Stop</button></div>`}
    <span class="sr" role="status">${kept && `Uploaded ${contents(kept)}`}</span>
    ${problem && html`<span class="field-error" id="${id}-error" role="alert">${problem}</span>`}
  </div>`;
}
