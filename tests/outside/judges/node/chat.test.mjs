import assert from "node:assert/strict";
import { test } from "node:test";
import { asked, client } from "./programs.mjs";

const short = { ...asked, max_tokens: 8, temperature: 0 };

test("a streamed chat joins to the whole", async () => {
  const whole = await client.chat.completions.create(short);
  const stream = await client.chat.completions.create({ ...short, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.ok(text.length > 0);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.total_tokens, whole.usage.total_tokens);
});

test("a streamed completion joins to the whole", async () => {
  const request = { model: asked.model, prompt: "hello", max_tokens: 8, temperature: 0 };
  const whole = await client.completions.create(request);
  let text = "";
  for await (const chunk of await client.completions.create({ ...request, stream: true })) {
    text += chunk.choices[0]?.text ?? "";
  }
  assert.equal(text, whole.choices[0].text);
});

test("models are listed", async () => {
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  assert.deepEqual(models, [asked.model]);
});
