// What Python makes for the browser, written by tests/pure/test_views_scripts.py.

import { readFileSync } from "node:fs";

export const given = JSON.parse(readFileSync(process.env.PICTURES, "utf8"));
export const near = (a, b, most = 1e-9) => Math.abs(a - b) <= most;
