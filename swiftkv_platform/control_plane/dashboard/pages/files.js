// Uploaded training files.

import { html } from "../vendor/htm-preact.js";
import { fetchAll, get, remove } from "../api.js";
import { EmptyState, PageHeader, CopyableId, SearchableTable, formatBytes, formatCount, showToast, useAction, usePolling, formatTime } from "../parts.js";
import { Upload } from "../upload.js";

const EVERY_MS = 10000;
const MAX_JOBS = 500;
const USERS_SHOWN = 3;

/** The newest jobs that train on each file, by the file's id. */
async function loadJobsByFile() {
  const found = new Map();
  for (const job of (await get(`/jobs?limit=${MAX_JOBS}`)).data) {
    for (const name of new Set(job.spec.data.sources.map((source) => source.name_or_path))) found.set(name, [...(found.get(name) ?? []), job]);
  }
  return found;
}

function JobLinks({ jobs }) {
  const more = jobs.length - USERS_SHOWN;
  return html`<span>${jobs.slice(0, USERS_SHOWN).map((job, i) => html`${i > 0 && ", "}<a href="#/jobs/${job.id}">${job.name}</a>`)}${more > 0 && ` and ${formatCount(more)} more`}</span>`;
}

const getSearchText = (file) => [file.filename, file.id, file.format].join(" ");

export function Files() {
  const [act, busy, refusal] = useAction();
  const [files, problem, reload] = usePolling(() => fetchAll("/v1/files"), [], EVERY_MS);
  const [usedBy] = usePolling(loadJobsByFile, [], null);
  const [quota] = usePolling(() => get("/quota"), [files?.length], null);
  const erase = (file) => () => {
    if (!confirm(`Delete ${file.filename} (${file.id})? This cannot be undone.`)) return;
    act(async () => {
      await remove(`/v1/files/${file.id}`);
      showToast(`Deleted ${file.filename}.`);
      await reload();
    });
  };
  const columns = [
    { name: "File", sort: (file) => file.filename, cell: (file) => html`<span><a href="/v1/files/${file.id}/content" download=${file.filename}>${file.filename}</a><br /><${CopyableId} text=${file.id} quiet /></span>` },
    { name: "Rows", number: true, sort: (file) => file.rows, cell: (file) => formatCount(file.rows) },
    { name: "Format", sort: (file) => file.format, cell: (file) => file.format },
    { name: "Purpose", sort: (file) => file.purpose, cell: (file) => file.purpose },
    { name: "Size", number: true, sort: (file) => file.bytes, cell: (file) => formatBytes(file.bytes) },
    { name: "Used by", sort: (file) => usedBy?.get(file.id)?.length ?? 0, cell: (file) => (usedBy?.has(file.id) ? html`<${JobLinks} jobs=${usedBy.get(file.id)} />` : "") },
    { name: "Uploaded", sort: (file) => file.created_at, cell: (file) => html`<span>${formatTime(file.created_at)}${file.expires_at && html`<br /><span class="quiet small">until ${formatTime(file.expires_at)}</span>`}</span>` },
    {
      name: "",
      cell: (file) => html`<span class="row">
        <a href="#/submit?file=${file.id}" aria-label="Train on ${file.filename}">Train</a>
        <button class="danger" disabled=${busy} onClick=${erase(file)} aria-label="Delete ${file.filename}">Delete</button>
      </span>`,
    },
  ];
  const empty = html`<div class="panel"><${EmptyState} title="No files yet">Upload conversations, prompts with completions, or texts: one JSON object per line.<//></div>`;
  const stored = quota && `${formatBytes(quota.stored_bytes)}${quota.max_stored_bytes == null ? "" : ` of ${formatBytes(quota.max_stored_bytes)}`} stored`;
  return html`<${PageHeader} title="Files" />
    <${Upload} id="upload" label="Upload rows" hint="Choose or drop a JSON Lines file. Every row is validated; a file with an invalid row is not stored." onDone=${reload} />
    <${SearchableTable} what="files" columns=${columns} rows=${files} problem=${problem ?? refusal} empty=${empty} find=${getSearchText}><span class="end">${stored}</span><//>`;
}
