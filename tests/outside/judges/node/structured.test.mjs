import assert from "node:assert/strict";
import { test } from "node:test";
import { zodResponseFormat } from "openai/helpers/zod";
import { Weather, asked, client } from "./programs.mjs";

const request = { ...asked, response_format: zodResponseFormat(Weather, "weather") };

test("a structured answer, whole", async () => {
  const whole = await client.chat.completions.parse(request);
  assert.ok(Weather.parse(whole.choices[0].message.parsed));
});

test("a structured answer, streamed", async () => {
  let deltas = 0;
  const stream = client.chat.completions.stream(request).on("content.delta", () => (deltas += 1));
  const final = await stream.finalChatCompletion();
  assert.ok(deltas > 1);
  assert.ok(Weather.parse(final.choices[0].message.parsed));
});
