import assert from "node:assert/strict";
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

const modules = fileURLToPath(new URL("../../distkit/views/js", import.meta.url));

for (const name of readdirSync(modules).filter((file) => file.endsWith(".js"))) {
  test(`${name} can be imported by itself`, () => import(pathToFileURL(join(modules, name))));
}

for (const name of readdirSync(process.env.SCRIPTS)) {
  test(`the script ${name} renders a view`, async () => {
    const { default: widget } = await import(pathToFileURL(join(process.env.SCRIPTS, name)));
    assert.equal(typeof widget.render, "function");
  });
}
