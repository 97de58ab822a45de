// Shared by the tests of OpenAI's client for Node: the deployment, and the form of an answer.
import OpenAI from "openai";
import { z } from "zod";

export const client = new OpenAI({ apiKey: "none", baseURL: process.env.SWIFTKV_JUDGED_URL, maxRetries: 0 });
export const Weather = z.object({
  city: z.enum(["Rome", "Oslo"]),
  days: z.number().int().min(1).max(14),
  celsius: z.boolean(),
});
export const asked = {
  model: process.env.SWIFTKV_JUDGED_MODEL,
  messages: [{ role: "user", content: "Is it warm in Rome?" }],
  seed: 1,
  max_tokens: 400,
};
