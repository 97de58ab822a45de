import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText, tool } from "ai";
import { z } from "zod";

const { SWIFTKV_JUDGED_MODEL: model, SWIFTKV_JUDGED_URL: baseURL } = process.env;
const blockSize = 16;
// Whitespace, which random weights would write a lot between the tokens of JSON. Not every provider passes a bias.
const bias = { 197: -50, 198: -50, 201: -50, 220: -50 };
const fetchBiased = (url, init) =>
  fetch(url, { ...init, body: JSON.stringify({ ...JSON.parse(init.body), logit_bias: bias }) });
const options = { apiKey: "none", baseURL, fetch: fetchBiased };
const openai = createOpenAI(options);
const compatible = createOpenAICompatible({ ...options, name: "swiftkv", includeUsage: true });
const unstored = { store: false, truncation: "auto", textVerbosity: "low" };
const passed = { cache_control: { type: "ephemeral" }, truncation: "auto", reasoningEffort: "low" };
const anthropic = { thinking: { type: "disabled" }, effort: "low", cacheControl: { type: "ephemeral" } };
const routes = {
  "responses, stored": { model: openai.responses(model) },
  responses: { model: openai.responses(model), providerOptions: { openai: unstored } },
  "chat completions": { model: openai.chat(model) },
  "an OpenAI-compatible provider": { model: compatible(model), providerOptions: { swiftkv: passed } },
  messages: { model: createAnthropic(options)(model), providerOptions: { anthropic } },
};
const image = { type: "image-data", mediaType: "image/png", data: "iVBORw0KGgo=" };
const tools = {
  ping: tool({ inputSchema: z.object({}), execute: () => ({ ok: true }) }),
  look: tool({
    inputSchema: z.object({ at: z.enum(["a", "b"]) }),
    execute: () => "seen",
    toModelOutput: () => ({ type: "content", value: [{ type: "text", text: "seen" }, image] }),
  }),
};

for (const [name, settings] of Object.entries(routes)) {
  test(`five turns over ${name}`, async () => {
    const messages = [];
    let before = 0;
    for (const called of [null, "ping", "look", null, null]) {
      messages.push({ role: "user", content: "What is there?" });
      const toolChoice = called ? { type: "tool", toolName: called } : "auto";
      const limits = { maxOutputTokens: called ? 200 : 9, temperature: 0, maxRetries: 0 };
      const result = streamText({ ...settings, ...limits, system: "Be brief.", messages, tools, toolChoice });
      for await (const part of result.fullStream) assert.ok(!part.type.includes("error"), part.error);
      assert.equal(await result.finishReason, called ? "tool-calls" : "length");
      assert.deepEqual((await result.toolResults).map((part) => part.toolName), called ? [called] : []);
      assert.equal((await result.text).length > 0, !called);
      const { inputTokens, cachedInputTokens } = await result.usage;
      assert.ok(cachedInputTokens >= before - blockSize);
      before = inputTokens;
      messages.push(...(await result.response).messages);
    }
  });
}
