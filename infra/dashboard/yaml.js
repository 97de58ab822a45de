// A YAML library that keeps comments when a value changes; `make vendor` bundles it.

export { parseDocument, stringify } from "yaml";
