// Client of the control plane's HTTP API: JSON requests, errors, pages and event streams.

export class ApiError extends Error {
  constructor(problem) {
    super(problem.detail);
    this.code = problem.code;
    this.status = problem.status;
    this.errors = problem.errors ?? [];
  }
}

function parseError(text, { status, statusText }) {
  try {
    const { error, ...problem } = JSON.parse(text);
    if (!error) return new ApiError(problem);
    // Routes below /v1 return errors in OpenAI's form.
    const { message, code, param } = error;
    return new ApiError({ detail: message, code, status, errors: param ? [{ field: param, message }] : [] });
  } catch {
    return new ApiError({ detail: text || statusText, code: "http_error", status });
  }
}

const readError = async (response) => parseError(await response.text(), response);

/** Send a request with a JSON body. Throws `ApiError` for an error response, `TypeError` without a response. */
export async function send(method, path, body, { signal, headers = {} } = {}) {
  const options = { method, signal, headers: body === undefined ? headers : { "Content-Type": "application/json", ...headers } };
  if (body !== undefined) options.body = JSON.stringify(body);
  const response = await fetch(path, options);
  if (!response.ok) throw await readError(response);
  return response;
}

export const get = async (path) => (await send("GET", path)).json();
export const post = async (path, body, headers) => (await send("POST", path, body, { headers })).json();
export const patch = async (path, body, headers) => (await send("PATCH", path, body, { headers })).json();
export const remove = async (path) => (await send("DELETE", path)).json();

/**
 * POST a form. `onProgress`: called with the uploaded share, which `fetch` does not report. Throws as `send`, and
 * `AbortError`.
 */
export function upload(path, fields, { signal, onProgress }) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  const request = new XMLHttpRequest();
  signal.addEventListener("abort", () => request.abort());
  return new Promise((resolve, reject) => {
    request.upload.onprogress = ({ loaded, total }) => onProgress(loaded / total);
    request.onload = () => (request.status < 400 ? resolve(JSON.parse(request.responseText)) : reject(parseError(request.responseText, request)));
    request.onerror = () => reject(new TypeError("the connection was lost"));
    request.onabort = () => reject(new DOMException("", "AbortError"));
    request.open("POST", path);
    request.send(form);
  });
}

/** A fresh `Idempotency-Key`. */
export const makeIdempotencyKey = () => crypto.getRandomValues(new Uint32Array(4)).join("-");

/** All pages of a list. */
export async function fetchAll(path) {
  const rows = [];
  let after = null;
  do {
    const url = new URL(path, location.origin);
    url.searchParams.set("limit", "1000");
    if (after !== null) url.searchParams.set("after", after);
    const page = await get(url.pathname + url.search);
    rows.push(...page.data);
    after = page.has_more ? page.last_id : null;
  } while (after !== null);
  return rows;
}

/** Call `onEvent` with each past and future event of a job; returns a function that stops it. */
export function followEvents(jobId, onEvent) {
  const source = new EventSource(`/jobs/${jobId}/events`);
  for (const type of ["status", "message", "metrics", "checkpoint"]) {
    source.addEventListener(type, (message) => onEvent(JSON.parse(message.data)));
  }
  return () => source.close();
}

/** POST and yield the JSON of each server-sent event, until `[DONE]`. Throws `ApiError`. */
export async function* streamEvents(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await readError(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split(/\r?\n\r?\n/);
    buffer = blocks.pop();
    for (const block of blocks) {
      const lines = block.split(/\r?\n/);
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (lines.includes("event: error")) throw new ApiError(JSON.parse(data));
      if (data) yield JSON.parse(data);
    }
  }
}
