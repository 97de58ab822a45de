// Write the licenses of the bundled packages, found among the installed ones, to vendor/LICENSES-bundles.txt.

import { readFileSync, readdirSync, writeFileSync } from "node:fs";

const PACKAGES = JSON.parse(readFileSync("package-lock.json", "utf8")).packages;
const OUT = "../../swiftkv_platform/control_plane/dashboard/vendor/LICENSES-bundles.txt";

const texts = new Map();
for (const [path, { dev, version }] of Object.entries(PACKAGES)) {
  if (!path || dev) continue;
  const file = readdirSync(path).find((name) => /^licen[cs]e/i.test(name));
  const { license, author, repository } = JSON.parse(readFileSync(`${path}/package.json`, "utf8"));
  if (!file && license !== "MIT") throw new Error(`${path} has no license file`);
  const text = file
    ? readFileSync(`${path}/${file}`, "utf8").trim()
    : `${license} by ${author?.name ?? author}, as its package.json says; it has no license file (${repository.url})`;
  texts.set(text, [...(texts.get(text) ?? []), `${path.replace("node_modules/", "")} ${version}`]);
}
writeFileSync(OUT, [...texts].map(([text, names]) => `${names.join(", ")} (npm)\n\n${text}\n`).join("\n\n"));
