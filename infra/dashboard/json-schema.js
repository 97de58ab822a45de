// A JSON Schema validator that evaluates no code, which the pages' content policy forbids; `make vendor` bundles it.

export { Validator } from "@cfworker/json-schema";
