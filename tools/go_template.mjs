// Renders one Go template by Go's own engine, built for WebAssembly. Input on stdin: {"template": text, "data": value}.
// Usage: node tools/go_template.mjs ENGINE   (the folder of @evertdespiegeleer/go-template; `make chart-engine`)
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const { parse } = await import(pathToFileURL(`${process.argv[2]}/dist/main.js`).href);
const { template, data } = JSON.parse(readFileSync(0, 'utf8'));
process.stdout.write(await parse(template, data));
process.exit(0);
