// A spec as YAML (or JSON) text: parse it, and change fields while keeping comments and layout.

import { parseDocument, stringify } from "../vendor/yaml.js";

/** Parse a spec: {doc, value, problem}; `problem` is {message, from} if it is invalid. */
export function parseSpec(text) {
  const doc = parseDocument(text, { prettyErrors: false });
  if (doc.errors.length) {
    const [{ message, pos }] = doc.errors;
    return { doc, value: null, problem: { message, from: pos[0] } };
  }
  const value = doc.toJS();
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    return { doc, value: null, problem: { message: "a spec is a mapping, such as name: my-job", from: 0 } };
  }
  return { doc, value, problem: null };
}

export const formatSpec = (value) => stringify(value, { lineWidth: 0 });

/** Split a dotted path of an API error into keys. */
export const splitPath = (field) => field.replace(/\[(\d+)\]/g, ".$1").split(".").map((part) => (/^\d+$/.test(part) ? Number(part) : part));

export const getAt = (value, path) => path.reduce((found, key) => (found === null || typeof found !== "object" ? undefined : found[key]), value);

/** Set values in `text`: [[path, value]]; undefined removes a field. */
export function setFields(text, changes) {
  const { doc, problem } = parseSpec(text);
  if (problem) return text;
  for (const [path, value] of changes) {
    if (value === undefined) {
      if (doc.hasIn(path)) doc.deleteIn(path);
      continue;
    }
    for (let depth = 1; depth < path.length; depth++) {
      const above = doc.getIn(path.slice(0, depth));
      const missing = above === null || typeof above !== "object";
      if (missing) doc.setIn(path.slice(0, depth), doc.createNode(typeof path[depth] === "number" ? [] : {}));
    }
    doc.setIn(path, typeof value === "object" ? doc.createNode(value) : value);
  }
  return doc.toString({ lineWidth: 0 });
}

/** Text range of the key at `path`, or of its nearest existing parent. */
export function findRange(doc, path) {
  for (let depth = path.length; depth > 0; depth--) {
    const key = findKey(doc, path.slice(0, depth));
    if (key?.range) return { from: key.range[0], to: key.range[1] };
  }
  return { from: 0, to: 0 };
}

function findKey(doc, path) {
  const above = path.length > 1 ? doc.getIn(path.slice(0, -1), true) : doc.contents;
  const name = path.at(-1);
  if (typeof name === "number") return above?.items?.[name];
  return above?.items?.find((pair) => String(pair.key?.value ?? pair.key) === name)?.key;
}
