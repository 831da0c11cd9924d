// The formula of quick/formula.py and quick/question.py. A test runs both on the same inputs.
"use strict";

const LEAST_CHUNK = 2 ** 24, MOST_CHUNK = 2 ** 28, ALIGNMENT = 16, LORA_RANK = 8, LEAST_TILE = 256;
const LEAST_ROWS = 8192;
const KEPT_BYTES = 2 ** 28, KEPT_GRADIENTS = 2, LOGIT_BYTES = { fp32: 4, bf16: 2, autocast: 2 };
const WITHOUT_LOGITS = ["stock", "checkpointing", "offload"];
// embeddings of these classes have no padding token
const WITHOUT_PADDING = ["GPT2LMHeadModel"];
const QUANTIZED = { nf4: "qlora", int8: "int8" };
// products of experts need widths that are multiples of this
const EXPERTS = 8;
const HALF = ["bf16", "bfloat16", "fp16", "float16", "half"];

function chunk(total, others, budget) {
  const bounded = Math.min(Math.max(budget, LEAST_CHUNK), MOST_CHUNK);
  return Math.min(Math.max(Math.floor(Math.floor(bounded / others) / ALIGNMENT), 1) * ALIGNMENT, total);
}

function withChunks(sizes) {
  const tokens = sizes.batch * sizes.seq, vocab = sizes.vocab;
  return {
    ...sizes,
    labels: sizes.seq - 1,
    tile: Math.min(sizes.tile, tokens),
    columns: chunk(vocab, tokens, tokens * sizes.hidden),
    rows: chunk(tokens, vocab, tokens * sizes.hidden),
    few_rows: chunk(tokens, vocab, 0),
  };
}

function keptLogits(sizes) {
  const tokens = sizes.batch * sizes.seq, bytes = tokens * sizes.vocab * sizes.logits_itemsize;
  return tokens <= KEPT_GRADIENTS * sizes.hidden && bytes <= KEPT_BYTES ? bytes : 0;
}

// the rows of a tile of a checkpointed layer; nothing if it has too few rows for tiles
function tileOf(sizes) {
  const tokens = sizes.batch * sizes.seq, count = Math.floor(tokens / LEAST_ROWS);
  return count > 1 ? { tile: Math.ceil(tokens / count) } : null;
}

function termValues(terms, sizes) {
  return terms.map((term) => Object.entries(term).reduce((value, [name, power]) => value * sizes[name] ** power, 1));
}

function total(polynomial, values) {
  let sum = 0;
  for (let at = 0; at < polynomial.length; at += 2) sum += values[polynomial[at]] * polynomial[at + 1];
  return sum;
}

// torch's AdamW that is not fused: the same states, more in its step
const FOREACH = "adamw_foreach";

function evaluate(data, found, optimizer, sizes) {
  const tiled = found.length > 2 ? tileOf(sizes) : null;
  const values = termValues(data.terms, withChunks({ ...sizes, ...tiled }));
  const state = data.states[found[0]], step = data.steps[found[tiled ? 2 : 1]];
  const bytes = (number) => Math.round(total(data.sums[number], values));
  const kept = Object.fromEntries(Object.entries(step.kept).map(([role, number]) => [role, bytes(number)]));
  const logits = keptLogits(sizes);
  if (logits) kept.loss_head = (kept.loss_head || 0) + logits;
  const answer = {
    weights_bytes: bytes(state.weights),
    gradients_bytes: bytes(state.gradients),
    optimizer_bytes: bytes(state[optimizer === FOREACH ? "adamw" : optimizer]),
    kept_by_role: kept,
    kept_bytes: Object.values(kept).reduce((sum, size) => sum + size, 0),
    step_peak_bytes: Math.max(...step.moments.map(bytes)) + logits,
    optimizer_step_bytes: optimizer === FOREACH ? bytes(state.gradients) : optimizer === "adafactor" ? sizes.adafactor : 0,
    context_bytes: data.context_bytes,
  };
  answer.device_bytes = answer.weights_bytes + answer.gradients_bytes + answer.optimizer_bytes
    + Math.max(answer.step_peak_bytes, answer.optimizer_step_bytes) + answer.context_bytes;
  return answer;
}

// the smallest number of sequences of so many tokens, or of so many tokens at a time, that has tiles
const tilesFrom = (tokens) => Math.ceil(2 * LEAST_ROWS / tokens);

// bytes grow with the number, and may fall once, at the number `falls`
function largest(needed, room, most, falls) {
  if (falls && falls <= most && needed(falls) <= room) {
    return falls + largest((more) => needed(falls + more), room, most - falls);
  }
  let low = 0, high = most + 1;
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (needed(middle) <= room) low = middle; else high = middle;
  }
  return low;
}

// the other fields that a rule compares with: its key, the field's name and its value
const BESIDE = { at_most: "at most", below: "below", divides: "a divisor of" };
function besideOf(rule, values) {
  return Object.keys(BESIDE).flatMap((key) => {
    const name = (rule[key] || []).find((name) => Number.isInteger(values[name]) && values[name] > 0);
    return name ? [[key, name, values[name]]] : [];
  });
}

// what a value should be by a rule of config_rules.json, if it is not
function broken(rule, x, values) {
  if (rule.names) return Array.isArray(x) && x.every((name) => typeof name === "string") ? null : "a list of names";
  if (rule.options) return isObject(x) ? null : "an object with options";
  if (rule.one_of) {
    const plain = typeof x === "string" ? x.replace("torch.", "") : x;
    return rule.one_of.includes(plain) ? null : `one of ${rule.one_of.join(", ")}`;
  }
  const beside = besideOf(rule, values), { least, most } = rule;
  if (!beside.length && Object.keys(BESIDE).some((key) => key in rule)) return null;
  if (typeof x === "boolean" && !rule.whole) return null;
  const divides = (other) => x > 0 && other % x === 0;
  const tests = { at_most: (other) => x <= other, below: (other) => x < other, divides };
  const number = typeof x === "number" && (!rule.whole || Number.isInteger(x)) && x >= (least ?? x) && x <= (most ?? x);
  if (number && beside.every(([key, , other]) => tests[key](other))) return null;
  const kind = rule.whole ? "a whole number" : "a number";
  const range = most === undefined ? `of ${least} or more` : `from ${least} to ${most}`;
  const bounds = least === undefined ? [] : [`${kind} ${range}`];
  bounds.push(...beside.map(([key, name, other]) => `${BESIDE[key]} ${name} (${other})`));
  return [bounds.join(" and ") || kind, ...(rule.also || [])].join(" or ");
}

const isObject = (x) => typeof x === "object" && x !== null && !Array.isArray(x);

function checkConfig(rules, values, about = "config", where = "") {
  for (const [field, found] of Object.entries(values).filter(([, found]) => found !== null)) {
    for (const rule of rules[about]) {
      if (!new RegExp(`^(?:${rule.fields})$`).test(field) || values[rule.unless] === false) continue;
      const single = rule.names || rule.options || rule.one_of || rule.single;
      for (const x of Array.isArray(found) && !single ? found : [found]) {
        if ((!single && typeof x === "object" && x !== null) || (rule.also || []).includes(x)) continue;
        const should = broken(rule, x, values);
        if (!should) continue;
        const said = `${where}${field} is ${JSON.stringify(found)} in this config`;
        throw new Error(`${said}, and should be ${should}: correct it there`);
      }
    }
    if (isObject(found)) checkConfig(rules, found, Object.hasOwn(rules, field) ? field : about, `${where}${field}.`);
  }
}

function classOf(classes, config) {
  const stated = config.architectures || [];
  const named = stated.find((name) => Object.hasOwn(classes, name));
  if (named) return named;
  const same = Object.keys(classes).filter((name) => classes[name].model_type === config.model_type);
  if (same.length && !stated.length) return same.find((name) => classes[name].task !== "classification") || same[0];
  const what = stated.join(", ") || config.model_type || "a config without architectures and model_type";
  throw new Error(`There is no formula for ${what}; known: ${Object.keys(classes).join(", ")}. `
    + "`hf-actcompress estimate` takes any model.");
}

// what is written in Python as None, and left out in a config, is the same here
const value = (values, field) => (values[field] === undefined ? null : values[field]);

function checkStructure(name, data, values) {
  for (const [field, expected] of Object.entries({ model_type: data.model_type, ...data.structure })) {
    if (field in values && JSON.stringify(values[field]) !== JSON.stringify(expected)) {
      throw new Error(`The formula of ${name} is for ${field}=${expected}, and this config has ${values[field]}; `
        + "`hf-actcompress estimate` takes any model.");
    }
  }
  const alike = (kind, at) => (kind === "full_attention") === ((at + 1) % data.period === 0);
  if (data.period > 1 && !(values.layer_types || []).every(alike)) {
    throw new Error(`The formula of ${name} is for one layer of full attention in each ${data.period}, the last.`);
  }
  if (values.quantization_config) {
    throw new Error("The formula does not read a quantization_config; choose QLoRA instead.");
  }
}

function flavourOf(data, values) {
  for (const [flavour, options] of Object.entries(data.flavours)) {
    if (Object.entries(options).every(([field, wanted]) => value(values, field) === wanted)) return flavour;
  }
  throw new Error(`There is no formula for such a config; known: ${JSON.stringify(data.flavours)}`);
}

// rows of the table of positions that belong to no token: in RoBERTa those up to the padding token's
function reservedOf(name, { reserved }, values, { vocab, positions }) {
  const padding = "pad_token_id" in values ? values.pad_token_id : reserved - 1;
  if (WITHOUT_PADDING.includes(name) || (padding === null && !reserved)) return reserved;
  const rows = reserved ? Math.min(vocab, positions) : vocab;
  if (!Number.isInteger(padding)) {
    throw new Error(`${name} cannot be made from this config: pad_token_id is ${padding}; state the padding token there`);
  }
  if (padding < -rows || padding >= rows) {
    throw new Error(`${name} cannot be made from this config: Padding_idx must be within num_embeddings`);
  }
  return reserved ? (padding + positions) % positions + 1 : 0;
}

function checkHeads(name, data, values, sizes) {
  const { hidden, head, ffn } = sizes, heads = sizes.groups * sizes.kv_heads;
  if (data.head !== null && data.head !== head) {
    throw new Error(`The formula of ${name} is for heads of ${data.head} features, not ${head}`);
  }
  if (hidden % heads) {
    throw new Error(`The formula of ${name} is for a width that ${heads} heads divide, not for ${hidden}`);
  }
  if (!data.learned_positions && head % 2) {
    throw new Error(`Rotary positions turn pairs of features, and ${name} has heads of ${head} here`);
  }
  if ("experts" in sizes && (hidden % EXPERTS || ffn % EXPERTS)) {
    throw new Error(`Products of experts need widths that are multiples of ${EXPERTS}, not ${hidden} and ${ffn}`);
  }
  if (data.period > 1 && value(values, "sliding_window") === null) {
    throw new Error(`${name} needs a sliding_window, and this config has none`);
  }
}

function sizesOf({ fields, defaults }, values) {
  // only some classes compute the width of an MLP that is left out
  const computed = value(defaults, fields.ffn) !== null ? ["head", "kv_heads"] : ["ffn", "head", "kv_heads"];
  // what a class computes where it is left out is not always computed where it is null
  const stated = fields.head in values && defaults[fields.head] !== null;
  const optional = computed.filter((size) => size !== "head" || !stated);
  const found = Object.fromEntries(Object.entries(fields).map(([size, field]) => [size, value(values, field)]));
  for (const size of Object.keys(fields)) {
    const leftOut = (found[size] ?? null) === null && optional.includes(size);
    if (leftOut) continue;
    if (!Number.isInteger(found[size]) || found[size] < 1) {
      throw new Error(`The formula needs ${fields[size]} above 0, and this config has ${found[size]}`);
    }
  }
  const { heads, ...rest } = found;
  const kvHeads = found.kv_heads || heads;
  if (kvHeads === 1 && heads > 1) {
    throw new Error("The formula is for several heads of keys, not for one; `hf-actcompress estimate` takes any model.");
  }
  return {
    ...rest,
    ffn: found.ffn || 4 * found.hidden,
    head: found.head || Math.floor(found.hidden / heads),
    kv_heads: kvHeads,
    groups: heads / kvHeads,
  };
}

// of the largest weight: fp32 squares and updates, and copies if it is narrower; those of adapters do not count
function adafactorStep(sizes, mode) {
  const largest = Math.max(sizes.vocab, "experts" in sizes ? 2 * sizes.experts * sizes.ffn : sizes.ffn);
  return ({ fp32: 8, autocast: 8, bf16: 16 }[mode] || 0) * largest * sizes.hidden;
}

function modeOf(dtype, autocast, lora, quantization) {
  const name = String(dtype || "float32").replace("torch.", "");
  const half = HALF.includes(name);
  if (quantization && (!Object.hasOwn(QUANTIZED, quantization) || !lora || !half)) {
    throw new Error("The formula for quantised weights is that of LoRA over nf4 or int8 with bf16 or fp16.");
  }
  if (half && !autocast) return quantization ? QUANTIZED[quantization] : lora ? "lora" : "bf16";
  if (!lora && (autocast || ["fp32", "float32", "float"].includes(name))) return autocast ? "autocast" : "fp32";
  throw new Error(`There is no formula for weights in ${name}${lora ? " with LoRA" : ""}: `
    + "use bf16 or fp16 weights, or fp32 ones without LoRA.");
}

function question({ classes, rules }, config, training) {
  checkConfig(rules, config);
  const name = classOf(classes, config), data = classes[name];
  const values = { ...data.defaults, ...config };
  checkConfig(rules, values);
  checkStructure(name, data, values);
  const flavour = flavourOf(data, values);
  const sizes = sizesOf(data, values);
  const reserved = reservedOf(name, data, values, sizes);
  checkHeads(name, data, values, sizes);
  const { dtype, autocast, lora, quantization } = training;
  sizes.rank = Number.isInteger(lora) && lora > 0 ? lora : LORA_RANK;
  // also of quantised weights: a linear layer knows its inputs' width
  sizes.tile = Math.max(LEAST_TILE, Math.floor(sizes[data.tile] / 2));
  const mode = modeOf(dtype || values.dtype || values.torch_dtype, autocast, Boolean(lora), quantization);
  sizes.adafactor = adafactorStep(sizes, mode);
  const key = `${flavour}/${sizes.groups > 1 ? "grouped" : "single"}/${mode}`;
  if (!(key in data.cases)) {
    throw new Error(`There is no formula for ${name}, ${key}; known: ${Object.keys(data.cases).join(", ")}`);
  }
  const window = (values.use_sliding_window ?? true) ? value(values, "sliding_window") : null;
  return { name, data, key, sizes, window, reserved };
}

// the cases of sequences that are longer than what attention reaches
const windowed = (asked) => `${asked.key}/windowed`;

function mostTokens(asked) {
  const most = asked.sizes.positions - asked.reserved;
  return !asked.window || windowed(asked) in asked.data.cases ? most : Math.min(most, asked.window - 1);
}

function checkLength(asked, seqLen) {
  const positions = asked.sizes.positions - asked.reserved;
  if (asked.data.learned_positions && seqLen > positions) {
    const [most, wanted] = [positions, seqLen].map((tokens) => tokens.toLocaleString("en"));
    throw new Error(`${asked.name} has learned positions for ${most} tokens, and ${wanted} were asked for; shorten `
      + "the sequences");
  }
  if (asked.window && seqLen >= asked.window && !(windowed(asked) in asked.data.cases)) {
    throw new Error(`Its attention reaches ${asked.window} tokens back, and the formula holds below that many; `
      + "`hf-actcompress estimate` counts the masks that longer sequences need.");
  }
}

// bytes of a logit that the head may keep to backward; 0 if it keeps none
function logitBytes(asked, strategy) {
  const none = WITHOUT_LOGITS.includes(strategy) || asked.data.task === "classification";
  return none ? 0 : LOGIT_BYTES[asked.key.split("/").at(-1)] || 0;
}

function answer(asked, strategy, batchSize, seqLen, optimizer = "adamw") {
  checkLength(asked, seqLen);
  const sizes = { ...asked.sizes, batch: batchSize, seq: seqLen, logits_itemsize: logitBytes(asked, strategy) };
  const key = asked.window && seqLen >= asked.window ? windowed(asked) : asked.key;
  return evaluate(asked.data, asked.data.cases[key][strategy], optimizer, sizes);
}

if (typeof module !== "undefined") module.exports = { question, answer, largest, mostTokens, tilesFrom };
