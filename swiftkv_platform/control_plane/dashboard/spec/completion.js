// Completion of fields and values at the cursor of a spec, by its schema.

import { listFields, listValues } from "./schema.js";

const KEY = /^(\s*(?:- +)*)([A-Za-z_][\w.]*)?$/;
const VALUE = /(?:^|[{,]|- )\s*([A-Za-z_]\w*):\s+([\w.-]*)$/;
const IN_BRACES = /[{,]\s*(\w*)$/;

const getIndent = (line) => line.search(/\S|$/);

/** Path of line `number`: keys of the enclosing mappings, outermost first; `-` for a list item. */
export function findPath(lines, number, column) {
  const path = [];
  let limit = column;
  for (let at = number; at >= 0 && limit > 0; at--) {
    const line = lines[at];
    if (at !== number && (!line.trim() || line.trim().startsWith("#"))) continue;
    let depth = getIndent(line);
    if (at === number) {
      if (/^\s*- /.test(line) && depth < limit) {
        path.unshift("-");
        limit = depth + 1; // a list may have the same indentation as its key
      }
      continue;
    }
    if (depth >= limit) continue;
    const item = /^(\s*)- +(.*)$/.exec(line);
    const inner = item ? line.length - item[2].length : depth;
    const key = /^([A-Za-z_]\w*):/.exec(line.slice(inner));
    if (item && inner < limit && key) path.unshift(key[1]);
    if (item) path.unshift("-");
    else if (key) path.unshift(key[1]);
    limit = item ? depth + 1 : depth;
  }
  return path;
}

/** Keys of the unclosed braces in `before`, outermost first. */
function findBracePath(before) {
  const open = [];
  for (let at = 0; at < before.length; at++) {
    if ("{[".includes(before[at])) {
      const key = /([A-Za-z_]\w*):\s*$/.exec(before.slice(0, at));
      open.push(before[at] === "[" ? [...(key ? [key[1]] : []), "-"] : key ? [key[1]] : []);
    }
    if ("}]".includes(before[at])) open.pop();
  }
  return open.flat();
}

function makeCompletion(field) {
  const standard = field.default === undefined || field.default === null || typeof field.default === "object" ? "" : ` = ${field.default}`;
  return { label: field.name, type: "property", detail: `${field.type}${standard}`, info: field.description || undefined, apply: `${field.name}: ` };
}

/** CodeMirror's source of completions for `schema`. */
export const makeCompletionSource = (schema) => (context) => {
  const line = context.state.doc.lineAt(context.pos);
  const before = line.text.slice(0, context.pos - line.from);
  const lines = context.state.doc.toString().split("\n");
  const inside = findBracePath(before);
  const around = findPath(lines, line.number - 1, getIndent(line.text));
  const value = VALUE.exec(before);
  if (value) {
    const from = context.pos - value[2].length;
    const options = listValues(schema, [...around, ...inside, value[1]]).map((label) => ({ label, type: "constant" }));
    return options.length ? { from, options, validFor: /^[\w.-]*$/ } : null;
  }
  const key = inside.length ? IN_BRACES.exec(before) : KEY.exec(before);
  if (!key) return null;
  const word = (inside.length ? key[1] : key[2]) ?? "";
  if (!word && !context.explicit) return null;
  const path = inside.length ? [...around, ...inside] : findPath([...lines.slice(0, line.number - 1), `${key[1]}x`], line.number - 1, key[1].length);
  const options = listFields(schema, path).map((field) => makeCompletion(field));
  return options.length ? { from: context.pos - word.length, options, validFor: /^\w*$/ } : null;
};
