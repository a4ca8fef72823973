// Write charts.min.js, and LICENSES.txt with the licence of every package that it may hold.
import { buildSync } from "esbuild";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";

buildSync({
  entryPoints: ["entry.js"],
  outfile: "charts.min.js",
  bundle: true,
  charset: "utf8",
  legalComments: "none",
  minify: true,
  target: "es2020",
});
const packages = {}; // by the text of their licence
for (const name of readdirSync("node_modules").filter((name) => !/^(\.|@|esbuild)/.test(name)).sort()) {
  const folder = `node_modules/${name}`;
  const { version, license } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
  const file = readdirSync(folder).find((file) => /^licen[cs]e/i.test(file));
  const text = file ? readFileSync(`${folder}/${file}`, "utf8").trim() : license;
  (packages[text] ??= []).push(`${name} ${version}`);
}
const notices = Object.entries(packages).map(([text, names]) => `${names.join(", ")}\n\n${text}\n`);
writeFileSync("LICENSES.txt", notices.join(`\n${"-".repeat(80)}\n\n`));
