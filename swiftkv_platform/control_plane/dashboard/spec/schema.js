// The JSON schema of a job spec from the API's OpenAPI document: validation, and the fields and values at a path.

import { Validator } from "../vendor/json-schema.js";
import { get } from "../api.js";

const DRAFT = "2020-12";
const SECONDARY = new Set(["properties", "items", "$ref", "anyOf", "allOf", "oneOf", "additionalProperties", "discriminator"]);

/** The schema of the body of POST /jobs. */
export async function loadSchema() {
  const api = await get("/openapi.json");
  const text = JSON.stringify({
    ...api.paths["/jobs"].post.requestBody.content["application/json"].schema,
    $defs: api.components.schemas,
  });
  return JSON.parse(text.replaceAll("#/components/schemas/", "#/$defs/"));
}

/** The alternatives of a schema, with references resolved. */
function listAlternatives(root, schema) {
  if (schema === true || schema == null) return [];
  if (schema.$ref) return listAlternatives(root, root.$defs[schema.$ref.split("/").at(-1)]);
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  return several ? several.flatMap((each) => listAlternatives(root, each)) : [schema];
}

function getChildSchemas(root, schema, key) {
  return listAlternatives(root, schema).flatMap((each) => {
    if (typeof key === "number" || key === "-") return each.items ? [each.items] : [];
    const found = each.properties?.[key] ?? each.additionalProperties;
    return found && found !== true ? [found] : [];
  });
}

/** The schemas of the value at `path`; empty for an unknown path. */
export const findSchemas = (root, path) => path.reduce((found, key) => found.flatMap((each) => getChildSchemas(root, each, key)), [root]);

/** The field's own schema at `path`, with its description and default. */
export const findFieldSchema = (root, path) => findSchemas(root, path)[0];

/** Fields of the object at `path`: [{name, description, type, default}]. */
export function listFields(root, path) {
  const maps = findSchemas(root, path).flatMap((each) => listAlternatives(root, each));
  return maps.flatMap((map) => Object.entries(map.properties ?? {}).map(([name, schema]) => ({ name, ...describeField(root, schema) })));
}

/** Enumerated values of the field at `path`. */
export function listValues(root, path) {
  const kinds = findSchemas(root, path).flatMap((each) => listAlternatives(root, each));
  const values = kinds.flatMap((each) => (each.type === "boolean" ? [true, false] : each.type === "null" ? [null] : (each.enum ?? (each.const === undefined ? [] : [each.const]))));
  return [...new Set(values)].map(String);
}

function describeField(root, schema) {
  const kinds = listAlternatives(root, schema);
  const type = [...new Set(kinds.map((each) => each.type ?? (each.enum ? "choice" : "")))].filter(Boolean).join(" or ");
  const isMap = kinds.some((each) => each.properties);
  return { description: schema.description ?? kinds[0]?.description ?? "", type, default: schema.default, isMap };
}

/** Validate `value`: [{path, message}], the innermost path of each error. */
export function validateSpec(root, value) {
  const { errors } = new Validator(root, DRAFT, false).validate(value);
  const leaves = errors.filter(({ keyword }) => !SECONDARY.has(keyword));
  const found = new Map();
  for (const { instanceLocation, keyword, keywordLocation, error } of leaves) {
    if (!found.has(instanceLocation) || keyword === "false") found.set(instanceLocation, { keyword, keywordLocation, error });
  }
  const places = [...found.keys()];
  return places
    .filter((place) => !places.some((other) => other.startsWith(`${place}/`)))
    .map((place) => {
      const path = place.split("/").slice(1).map((part) => decodeURIComponent(part).replaceAll("~1", "/").replaceAll("~0", "~"));
      const { keyword, error } = found.get(place);
      return { path, message: keyword === "false" ? describeUnknownField(root, path) : error };
    });
}

function describeUnknownField(root, path) {
  const names = listFields(root, path.slice(0, -1)).map(({ name }) => name);
  return names.length ? `unknown field; known fields: ${names.join(", ")}` : "unknown field";
}

/** Whether two JSON values are equal, with missing fields equal to null. */
function isSame(one, other) {
  if (one === null || other === null || typeof one !== "object" || typeof other !== "object") return one === other;
  const names = new Set([...Object.keys(one), ...Object.keys(other)]);
  return Array.isArray(one) === Array.isArray(other) && [...names].every((name) => isSame(one[name] ?? null, other[name] ?? null));
}

/** `value` without the fields that have their default. */
export function withoutDefaults(root, value, path = []) {
  if (Array.isArray(value)) return value.map((each, i) => withoutDefaults(root, each, [...path, i]));
  if (value === null || typeof value !== "object") return value;
  const kept = Object.entries(value).flatMap(([name, each]) => {
    const field = findFieldSchema(root, [...path, name]);
    if (field && "default" in field && isSame(field.default, each)) return [];
    const inner = withoutDefaults(root, each, [...path, name]);
    const isEmpty = inner !== null && typeof inner === "object" && !Array.isArray(inner) && !Object.keys(inner).length;
    return isEmpty || inner === null ? [] : [[name, inner]];
  });
  return Object.fromEntries(kept);
}
