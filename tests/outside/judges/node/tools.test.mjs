import assert from "node:assert/strict";
import { test } from "node:test";
import { zodFunction } from "openai/helpers/zod";
import { Weather, asked, client } from "./programs.mjs";

const tools = [zodFunction({ name: "get_weather", parameters: Weather })];
const choices = { required: "required", named: { type: "function", function: { name: "get_weather" } } };

function check(completion) {
  const calls = completion.choices[0].message.tool_calls;
  assert.equal(calls.length, 1);
  assert.equal(calls[0].function.name, "get_weather");
  assert.ok(Weather.parse(calls[0].function.parsed_arguments));
}

for (const [name, choice] of Object.entries(choices)) {
  const request = { ...asked, tools, tool_choice: choice, parallel_tool_calls: false };

  test(`a call of a tool, ${name}, whole`, async () => {
    check(await client.chat.completions.parse(request));
  });

  test(`a call of a tool, ${name}, streamed`, async () => {
    let deltas = 0;
    const stream = client.chat.completions.stream(request);
    stream.on("tool_calls.function.arguments.delta", () => (deltas += 1));
    check(await stream.finalChatCompletion());
    assert.ok(deltas > 1);
  });
}
