// YAML that keeps comments when a value is changed; `make vendor` bundles it.

export { isMap, isScalar, parseDocument } from "yaml";
