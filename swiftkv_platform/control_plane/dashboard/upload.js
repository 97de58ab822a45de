// Upload of a file of rows: file field, drop target, progress and errors.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { upload } from "./api.js";
import { formatCount, formatPercent } from "./parts.js";

const PATH = "/v1/files";
const BROKEN = "Upload failed: the file has changed since you chose it, or the control plane is unavailable.";

/** Description of an uploaded file: `chats.jsonl: 3 rows, messages`. */
export const describeFile = ({ filename, rows, format }) => `${filename}: ${formatCount(rows)} ${rows === 1 ? "row" : "rows"}, ${format}`;

const describeError = (problem) => (problem instanceof TypeError ? BROKEN : problem.message);

/** Upload field. Calls `onDone` with the uploaded file; shows the API's error message at the field. */
export function Upload({ id, label, hint, disabled, onDone }) {
  const [sent, setSent] = useState(null); // uploaded share, 0 to 1; null: no upload
  const [problem, setProblem] = useState(null);
  const [kept, setKept] = useState(null);
  const [isOver, setOver] = useState(false);
  const way = useRef(null);
  useEffect(() => () => way.current?.abort(), []);
  async function uploadFile(files) {
    if (!files.length || sent !== null || disabled) return;
    setKept(null);
    setProblem(files.length > 1 ? `Drop one file at a time, not ${files.length}.` : null);
    if (files.length > 1) return;
    way.current = new AbortController();
    setSent(0);
    try {
      const { signal } = way.current;
      const file = await upload(PATH, { purpose: "fine-tune", file: files[0] }, { signal, onProgress: setSent });
      setKept(file);
      await onDone(file);
    } catch (error) {
      if (error.name !== "AbortError") setProblem(describeError(error));
    }
    setSent(null);
  }
  const pick = ({ target }) => {
    uploadFile([...target.files]);
    target.value = ""; // allows choosing the same file again
  };
  const hover = (is) => (event) => {
    event.preventDefault();
    setOver(is);
  };
  const drop = (event) => {
    hover(false)(event);
    uploadFile([...event.dataTransfer.files]);
  };
  const described = [`${id}-hint`, problem && `${id}-error`].filter(Boolean).join(" ");
  return html`<div class="drop ${isOver ? "over" : ""}" onDragOver=${hover(true)} onDragLeave=${hover(false)} onDrop=${drop}>
    <label>${label}
      <input id=${id} type="file" accept=".jsonl,.ndjson,.json" disabled=${disabled || sent !== null} onChange=${pick} aria-invalid=${problem ? "true" : null} aria-describedby=${described} />
    </label>
    <span class="quiet small" id="${id}-hint">${hint}</span>
    ${sent !== null && html`<div class="row"><progress max="1" value=${sent} aria-label="Upload progress"></progress>
      <span class="small">${sent < 1 ? formatPercent(Math.floor(100 * sent) / 100) : "Validating rows…"}</span>
      <button type="button" class="plain small" onClick=${() => way.current.abort()}>Stop</button></div>`}
    <span class="sr" role="status">${kept && `Uploaded ${describeFile(kept)}`}</span>
    ${problem && html`<span class="field-error" id="${id}-error" role="alert">${problem}</span>`}
  </div>`;
}
