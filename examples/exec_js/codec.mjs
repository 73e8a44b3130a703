// A codec of sparse_delta v2 as a program: plain JavaScript for Node, no packages.
//
//   refdelta conformance --engine 'exec:node codec.mjs'        from this directory
//
//   node codec.mjs encode BASE TARGET OUT      node codec.mjs apply DELTA BASE OUT      node codec.mjs capabilities
//
// States are safetensors files, a delta is a directory. Exit 0: done; 3: refused, with the reason on standard error.
// Elements are bytes here, never numbers, so that every bit of every dtype stays what it is.

import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const WIDTH = {
  F64: 8, F32: 4, F16: 2, BF16: 2, F8_E4M3: 1, F8_E4M3FNUZ: 1, F8_E5M2: 1, F8_E5M2FNUZ: 1, F8_E8M0: 1,
  I64: 8, I32: 4, I16: 2, I8: 1, U64: 8, U32: 4, U16: 2, U8: 1, BOOL: 1, C64: 8,
};
const CAPABILITIES = "float64 float8 non_floating nan_values i64_positions canonical reasons";
const PACKED = ["delta.indices_flat", "delta.values_flat", "delta.layer_lengths"];
const OTHER = "non_floating_values";
const isFloating = (code) => /^(F|BF)/.test(code);

class Refused extends Error {}

function need(holds, reason, text) {
  if (!holds) throw new Refused(`[${reason}] ${text}`);
}

// -- JSON: integers are BigInt, objects are Map, doubled keys and numbers beyond doubles are refused ------------------

function parseJson(text) {
  let at = 0;
  const fail = (what) => { throw new SyntaxError(`${what} at ${at}`); };
  const space = () => { while (" \t\n\r".includes(text[at] ?? "x")) at += 1; };
  const match = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found) at = pattern.lastIndex;
    return found?.[0];
  };
  const expect = (character) => { space(); if (text[at] !== character) fail(`expected ${character}`); at += 1; };
  const list = (close, item) => {
    at += 1;
    space();
    if (text[at] === close) { at += 1; return; }
    for (;;) {
      item();
      space();
      if (text[at] === close) { at += 1; return; }
      expect(",");
    }
  };
  const string = () => {
    space();
    const found = match(/"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y) ?? fail("expected a text");
    return JSON.parse(found);
  };
  const object = () => {
    const found = new Map();
    list("}", () => {
      const key = string();
      if (found.has(key)) fail(`the key ${key} is there twice`);
      expect(":");
      found.set(key, value());
    });
    return found;
  };
  const array = () => { const found = []; list("]", () => found.push(value())); return found; };
  const number = () => {
    const found = match(/-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?/y) ?? fail("expected a value");
    if (/^-?[0-9]+$/.test(found)) return BigInt(found);
    if (!Number.isFinite(Number(found))) fail(`${found} is no finite number`);
    return Number(found);
  };
  const value = () => {
    space();
    if (text[at] === "{") return object();
    if (text[at] === "[") return array();
    if (text[at] === '"') return string();
    const word = match(/true|false|null/y);
    return word === undefined ? number() : { true: true, false: false, null: null }[word];
  };
  const found = value();
  space();
  if (at !== text.length) fail("text after the end");
  return found;
}

function readJson(bytes, reason) {
  try {
    return parseJson(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes));
  } catch (error) {
    throw new Refused(`[${reason}] ${error.message}`);
  }
}

const isCount = (value) => typeof value === "bigint" && value >= 0n && value < 2n ** 63n;
const isText = (value) => typeof value === "string" && value.isWellFormed();
const numel = (shape) => shape.reduce((product, size) => product * size, 1n);
const same = (a, b) => a.length === b.length && a.every((value, at) => value === b[at]);

// -- safetensors -------------------------------------------------------------------------------------------------------

function readSafetensors(raw) {
  need(raw.length >= 8, "bad_header", "no header");
  const length = raw.readBigUInt64LE(0);
  need(length <= 100_000_000n && 8n + length <= raw.length, "bad_header", `a header of ${length} bytes`);
  const start = 8 + Number(length);
  need(raw[8] === 0x7b, "bad_header", "the header does not start with {");
  const header = readJson(raw.subarray(8, start), "bad_header");
  const metadata = header.get("__metadata__") ?? new Map();
  need(metadata instanceof Map && [...metadata.values()].every(isText), "bad_header", "__metadata__");
  header.delete("__metadata__");
  const tensors = [...header].map(([key, spec]) => readEntry(key, spec));
  tensors.sort((a, b) => (a.begin < b.begin ? -1 : a.begin > b.begin ? 1 : a.end < b.end ? -1 : 1));
  let offset = 0n;
  for (const tensor of tensors) {
    const size = numel(tensor.shape) * BigInt(WIDTH[tensor.code]);
    need(tensor.begin === offset && tensor.end - tensor.begin === size, "bad_header", `${tensor.key}: offsets`);
    offset = tensor.end;
    need(BigInt(start) + offset <= raw.length, "bad_header", `${tensor.key}: beyond the file`);
    tensor.data = raw.subarray(start + Number(tensor.begin), start + Number(tensor.end));
  }
  need(BigInt(start) + offset === BigInt(raw.length), "bad_header", "bytes after the last tensor");
  return { tensors: new Map(tensors.map((tensor) => [tensor.key, tensor])), metadata };
}

function readEntry(key, spec) {
  need(spec instanceof Map, "bad_header", `${key}: no description`);
  need(spec.size === 3, "bad_header", `${key}: ${[...spec.keys()]}`);
  const [code, shape, offsets] = ["dtype", "shape", "data_offsets"].map((name) => spec.get(name));
  need(typeof code === "string", "bad_header", `${key}: no dtype`);
  need(Object.hasOwn(WIDTH, code), "unsupported_dtype", `${key}: ${code}`);
  need(Array.isArray(shape) && shape.every(isCount), "bad_header", `${key}: shape`);
  need(Array.isArray(offsets) && offsets.length === 2 && offsets.every(isCount), "bad_header", `${key}: offsets`);
  return { key, code, shape, begin: offsets[0], end: offsets[1] };
}

function packSafetensors(entries, metadata) {
  const header = metadata === undefined ? [] : [`"__metadata__":${JSON.stringify(metadata)}`];
  let offset = 0;
  for (const { key, code, shape, data } of entries) {
    const place = `"shape":[${shape.join(",")}],"data_offsets":[${offset},${offset + data.length}]`;
    header.push(`${JSON.stringify(key)}:{"dtype":"${code}",${place}}`);
    offset += data.length;
  }
  const text = Buffer.from(`{${header.join(",")}}`);
  const padded = Buffer.concat([text, Buffer.alloc((8 - (text.length % 8)) % 8, " ")]);
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(padded.length));
  return Buffer.concat([length, padded, ...entries.map((entry) => entry.data)]);
}

// -- writing -----------------------------------------------------------------------------------------------------------

function byCodePoints(a, b) {
  return Buffer.compare(Buffer.from(a), Buffer.from(b));
}

function encode(basePath, targetPath, out) {
  const [base, target] = [basePath, targetPath].map((path) => readSafetensors(readFileSync(path)).tensors);
  const missing = [...base.keys(), ...target.keys()].find((name) => !(base.has(name) && target.has(name)));
  need(missing === undefined, "unknown_tensor", `${missing} is in one of the states only`);
  const patches = [...base.keys()].sort(byCodePoints).map((name) => difference(base.get(name), target.get(name)));
  const changed = patches.filter((patch) => patch.count > 0);
  const total = [...target.values()].reduce((sum, tensor) => sum + numel(tensor.shape), 0n);
  const entries = changed.flatMap((patch, number) => [
    { key: `${number}.indices`, code: patch.wide ? "I64" : "I32", shape: [patch.count], data: patch.positions },
    { key: `${number}.values`, code: patch.code, shape: [patch.count], data: patch.values },
  ]);
  const names = changed.map((patch) => patch.name);
  mkdirSync(out, { recursive: true });
  writeFileSync(join(out, "delta.safetensors"), packSafetensors(entries, { layer_names: JSON.stringify(names) }));
  writeFileSync(join(out, "metadata.json"), metadataOf(changed, names, total));
}

function difference(old, now) {
  need(old.code === now.code, "dtype_mismatch", `${old.key}: ${old.code} against ${now.code}`);
  need(same(old.shape, now.shape), "shape_mismatch", `${old.key}: [${old.shape}] against [${now.shape}]`);
  const width = WIDTH[old.code];
  const at = [];
  for (let byte = 0, element = 0; byte < old.data.length; byte += width, element += 1) {
    if (old.data.compare(now.data, byte, byte + width, byte, byte + width) !== 0) at.push(element);
  }
  const wide = numel(old.shape) > 2n ** 31n;
  const positions = Buffer.alloc(at.length * (wide ? 8 : 4));
  const values = Buffer.alloc(at.length * width);
  at.forEach((element, place) => {
    if (wide) positions.writeBigInt64LE(BigInt(element), place * 8);
    else positions.writeInt32LE(element, place * 4);
    now.data.copy(values, place * width, element * width, (element + 1) * width);
  });
  return { name: old.key, code: old.code, shape: old.shape, count: at.length, wide, positions, values };
}

function metadataOf(patches, names, total) {
  const changed = patches.reduce((sum, patch) => sum + patch.count, 0);
  const fields = [
    '"format":"sparse_delta"',
    '"format_version":2',
    `"layer_names":${JSON.stringify(names)}`,
    `"layer_shapes":[${patches.map((patch) => `[${patch.shape.join(",")}]`).join(",")}]`,
    `"changed_elements":${changed}`,
    `"total_elements":${total}`,
    `"density_pct":${density(changed, total)}`,
  ];
  if (patches.some((patch) => !isFloating(patch.code))) fields.push(`"requires":["${OTHER}"]`);
  return `{${fields.join(",")}}`;
}

// Per cent to three decimals; a tie goes to the even digit, as in Python's round.
function density(changed, total) {
  if (total === 0n) return 0;
  const exact = ((100 * Number(changed)) / Number(total)).toFixed(60);
  const [whole, decimals] = exact.split(".");
  let thousandths = BigInt(whole + decimals.slice(0, 3));
  const rest = BigInt(decimals.slice(3));
  const half = 5n * 10n ** 56n;
  if (rest > half || (rest === half && thousandths % 2n === 1n)) thousandths += 1n;
  return Number(thousandths) / 1000;
}

// -- reading: strict, and whole before anything is written ---------------------------------------------------------------

function readDelta(directory) {
  const paths = ["metadata.json", "delta.safetensors"].map((name) => join(directory, name));
  for (const path of paths) need(existsSync(path), "not_a_delta", `${path} is not there`);
  let raw;
  try {
    raw = paths.map((path) => readFileSync(path));
  } catch (error) {
    throw new Refused(`[unreadable] ${error.message}`);
  }
  need(raw[0].length <= 100_000_000, "bad_metadata", `metadata.json of ${raw[0].length} bytes`);
  const metadata = readMetadata(raw[0], () => checkNotLegacy([...readSafetensors(raw[1]).tensors.keys()]));
  const { tensors, metadata: header } = readSafetensors(raw[1]);
  checkNotLegacy([...tensors.keys()]);
  const names = metadata.get("layer_names");
  if (header.has("layer_names")) checkNames(header.get("layer_names"), names);
  const keys = names.flatMap((_, number) => [`${number}.indices`, `${number}.values`]);
  need(tensors.size === keys.length && keys.every((key) => tensors.has(key)), "keys_mismatch", [...tensors.keys()]);
  const patches = names.map((name, number) => readPatch(name, metadata.get("layer_shapes")[number], tensors, number));
  checkCounts(metadata, patches);
  const bare = patches.find((patch) => !isFloating(patch.code));
  const declared = (metadata.get("requires") ?? []).includes(OTHER);
  need(!bare || declared, "unsupported_dtype", `${bare?.name}: ${bare?.code} without ${OTHER}`);
  return patches;
}

// Payloads before version 2 were keyed by the tensors' names, or packed over all of them.
function checkNotLegacy(keys) {
  const named = keys.length > 0 && keys.every((key) => /^[^0-9].*\.(indices|values)$/s.test(key));
  need(!named, "legacy_layout", `keyed by name: ${keys[0]}`);
  const packed = keys.filter((key) => PACKED.includes(key));
  need(packed.length === 0, "legacy_layout", `packed: ${packed}`);
}

function checkNames(text, names) {
  let found;
  try {
    found = parseJson(text);
  } catch (error) {
    throw new Refused(`[bad_header] layer_names of the header: ${error.message}`);
  }
  need(Array.isArray(found) && same(found, names), "keys_mismatch", "the header names other layers");
}

function readMetadata(raw, checkOlder) {
  const found = readJson(raw, "bad_metadata");
  need(found instanceof Map, "bad_metadata", "the metadata is no object");
  const [names, shapes] = ["layer_names", "layer_shapes"].map((key) => found.get(key));
  need(found.get("format") === "sparse_delta", "unsupported_format", `format ${found.get("format")}`);
  if (found.get("format_version") !== 2n) checkOlder();
  need(found.get("format_version") === 2n, "unsupported_version", `format_version ${found.get("format_version")}`);
  need(Array.isArray(names), "bad_metadata", "layer_names");
  need(names.every((name) => isText(name) && name), "bad_name", "layer_names");
  need(new Set(names).size === names.length, "duplicate_name", "a layer is there twice");
  need(Array.isArray(shapes) && shapes.length === names.length, "bad_metadata", "layer_shapes");
  need(shapes.every((shape) => Array.isArray(shape) && shape.every(isCount)), "bad_shape", "layer_shapes");
  need(shapes.every((shape) => isCount(numel(shape))), "bad_shape", "a shape of 2^63 elements or more");
  const requires = found.get("requires") ?? [];
  need(Array.isArray(requires) && requires.every(isText), "bad_metadata", "requires");
  need(requires.every((name) => name === OTHER), "unsupported_extension", `requires ${requires}`);
  for (const key of ["base_model", "model_id", "kind", "created_at"]) {
    need(typeof (found.get(key) ?? "") === "string", "bad_metadata", key);
  }
  need(["bigint", "number"].includes(typeof (found.get("timestamp") ?? 0)), "bad_metadata", "timestamp");
  for (const key of ["changed_elements", "total_elements"]) {
    need(typeof found.get(key) === "bigint", "bad_metadata", key);
    need(isCount(found.get(key)), "count_mismatch", key);
  }
  need(["bigint", "number"].includes(typeof found.get("density_pct")), "bad_metadata", "density_pct");
  return found;
}

function readPatch(name, shape, tensors, number) {
  const [indices, values] = ["indices", "values"].map((part) => tensors.get(`${number}.${part}`));
  need(["I32", "I64"].includes(indices.code), "bad_indices", `${name}: positions of ${indices.code}`);
  need(indices.shape.length === 1, "bad_indices", `${name}: positions of shape [${indices.shape}]`);
  need(values.shape.length === 1, "bad_values", `${name}: values of shape [${values.shape}]`);
  need(indices.shape[0] === values.shape[0], "length_mismatch", `${name}: [${indices.shape}], [${values.shape}]`);
  const wide = indices.code === "I64";
  const positions = Array.from({ length: Number(indices.shape[0]) }, (_, at) =>
    wide ? indices.data.readBigInt64LE(at * 8) : BigInt(indices.data.readInt32LE(at * 4)),
  );
  const size = numel(shape);
  for (const at of positions) need(at >= 0n && at < size, "index_range", `${name}: position ${at} of ${size}`);
  positions.slice(1).forEach((at, before) => need(at > positions[before], "index_order", `${name}: ${at}`));
  return { name, shape, code: values.code, positions, data: values.data };
}

function checkCounts(metadata, patches) {
  const changed = patches.reduce((sum, patch) => sum + BigInt(patch.positions.length), 0n);
  const total = metadata.get("total_elements");
  need(metadata.get("changed_elements") === changed, "count_mismatch", `${changed} changed elements`);
  const least = patches.reduce((sum, patch) => sum + numel(patch.shape), 0n);
  need(total >= least, "count_mismatch", `${total} elements in all, ${least} in the layers`);
  const found = Number(metadata.get("density_pct"));
  const said = Math.abs(found) <= 100 ? Math.round(1000 * found) : NaN;
  need(found === said / 1000, "count_mismatch", `density_pct ${found}`);
  const off = BigInt(said) * (total || 1n) - 100000n * changed; // half way between two of them either will do
  need(2n * (off < 0n ? -off : off) <= total, "count_mismatch", `density_pct ${found}`);
}

function apply(delta, basePath, out) {
  const patches = readDelta(delta);
  const { tensors } = readSafetensors(readFileSync(basePath));
  for (const { name, shape, code } of patches) {
    const tensor = tensors.get(name);
    need(tensor !== undefined, "unknown_tensor", name);
    need(same(tensor.shape, shape), "shape_mismatch", `${name}: [${shape}] against [${tensor.shape}]`);
    need(tensor.code === code, "dtype_mismatch", `${name}: ${code} against ${tensor.code}`);
  }
  for (const { name, code, positions, data } of patches) {
    const width = WIDTH[code];
    const after = tensors.get(name).data;
    positions.forEach((at, place) => data.copy(after, Number(at) * width, place * width, (place + 1) * width));
  }
  writeFileSync(out, packSafetensors([...tensors.values()]));
}

// -- the command ---------------------------------------------------------------------------------------------------------

const COMMANDS = { encode, apply, capabilities: () => console.log(CAPABILITIES) };

const [verb, ...paths] = process.argv.slice(2);
try {
  need(Object.hasOwn(COMMANDS, verb ?? ""), "unsupported_extension", `no command ${verb}`);
  COMMANDS[verb](...paths);
} catch (error) {
  if (!(error instanceof Refused)) throw error;
  console.error(error.message);
  process.exitCode = 3;
}
