// A validator of JSON Schema that evaluates no code, which the pages' policy forbids; `make vendor` bundles it.

export { Validator } from "@cfworker/json-schema";
