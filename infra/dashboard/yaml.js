// YAML that keeps comments when a value is changed; `make vendor` bundles it.

export { parseDocument, stringify } from "yaml";
