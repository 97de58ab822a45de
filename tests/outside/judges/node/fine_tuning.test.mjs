import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout } from "node:timers/promises";
import OpenAI, { toFile } from "openai";

const platform = process.env.SWIFTKV_JUDGED_PLATFORM;
const asked = JSON.parse(process.env.SWIFTKV_JUDGED_JOB);
const client = new OpenAI({ apiKey: "none", baseURL: `${platform}/v1` });

async function json(path, options) {
  const answer = await fetch(`${platform}${path}`, options);
  assert.ok(answer.ok, `${path}: ${answer.status}`);
  return answer.json();
}

async function collected(pages) {
  const items = [];
  for await (const item of pages) items.push(item);
  return items;
}

test("a job from an uploaded file to a chat with the model", async () => {
  const rows = await toFile(Buffer.from(asked.rows), "chats.jsonl");
  const file = await client.files.create({ file: rows, purpose: "fine-tune" });
  assert.equal(file.bytes, asked.rows.length);
  assert.equal(await (await client.files.content(file.id)).text(), asked.rows);
  const request = { model: asked.teacher, training_file: file.id, suffix: "adder", swiftkv: asked.swiftkv };
  let job = await client.fineTuning.jobs.create(request);
  while (!["succeeded", "failed", "cancelled"].includes(job.status)) {
    await setTimeout(500);
    job = await client.fineTuning.jobs.retrieve(job.id);
  }
  const events = await collected(client.fineTuning.jobs.listEvents(job.id, { limit: 2 }));
  assert.equal(job.status, "succeeded", events.map((event) => event.message).join("\n"));
  assert.ok(events.some((event) => event.type === "metrics"));
  const checkpoints = await collected(client.fineTuning.jobs.checkpoints.list(job.id));
  assert.deepEqual(checkpoints.map((each) => each.step_number), [2, 1]);
  assert.ok((await client.files.delete(file.id)).deleted);

  const headers = { "Content-Type": "application/json" };
  const body = JSON.stringify({ model: job.fine_tuned_model, route_prefix: "/tuned-by-node" });
  let deployment = await json("/deployments", { method: "POST", headers, body });
  while (deployment.status !== "running") {
    assert.notEqual(deployment.status, "failed", deployment.message);
    await setTimeout(500);
    deployment = await json(`/deployments/${deployment.id}`);
  }
  const served = new OpenAI({ apiKey: "none", baseURL: `${deployment.url}/v1` });
  const [model] = await collected(served.models.list());
  const answer = await served.chat.completions.create({ model: model.id, messages: asked.question, max_tokens: 16 });
  assert.ok(answer.choices[0].message.content.length > 0);
  await fetch(`${platform}/deployments/${deployment.id}`, { method: "DELETE" });
});
