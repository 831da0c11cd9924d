// The form of the page, its table and its code. The numbers are those of formula.js.
"use strict";

const OTHER_CARD = "another size", PASTED = "as pasted";
const FIELDS = ["preset", "card", "gigabytes", "batch", "seq", "training", "rank", "optimizer"];
const MOST_BATCH = 1024, STEP = 64, GIB = 2 ** 30;
// shown as, its name in the table of colours, and its bytes
const PARTS = [
  ["weights", "weights", (found) => found.weights_bytes],
  ["gradients", "gradients", (found) => found.gradients_bytes],
  ["optimizer states", "optimizer states", (found) => found.optimizer_bytes],
  ["kept for backward", "kept for backward", (found) => Math.min(found.kept_bytes, found.step_peak_bytes)],
  ["on top of that, at the peak", "transient", (found) => Math.max(found.step_peak_bytes - found.kept_bytes, 0)],
  ["context of CUDA", "device context (allowance)", (found) => found.context_bytes],
];
const $ = (id) => document.getElementById(id);

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, content] of Object.entries(attributes)) element.setAttribute(name, content);
  return element;
}

function fill(select, names) {
  select.replaceChildren(...names.map((name) => make("option", name, { value: name })));
}

const readable = (bytes) => `${(bytes / GIB).toFixed(2)} GiB`;

function trainingOf(mode, rank) {
  return {
    bf16: { dtype: "bf16" },
    fp32: { dtype: "fp32" },
    autocast: { dtype: "fp32", autocast: "bf16" },
    lora: { dtype: "bf16", lora: rank },
    qlora: { dtype: "bf16", lora: rank, quantization: "nf4" },
    int8: { dtype: "bf16", lora: rank, quantization: "int8" },
  }[mode];
}

function roomOf() {
  return $("card").value === OTHER_CARD ? Number($("gigabytes").value) * 1e9 : DATA.cards[$("card").value];
}

function read() {
  for (const id of ["batch", "seq", "rank", "gigabytes"]) {
    if (!$(id).checkValidity()) throw new Error(`${$(id).parentElement.firstChild.textContent.trim()}: ${$(id).validationMessage}`);
  }
  let config;
  try { config = JSON.parse($("config").value); } catch (error) { throw new Error(`This is no JSON: ${error.message}`); }
  if (config === null || typeof config !== "object" || Array.isArray(config)) throw new Error("A config is a JSON object.");
  const mode = $("training").value, rank = Number($("rank").value);
  const asked = question(DATA, config, trainingOf(mode, rank));
  return { asked, mode, rank, batch: Number($("batch").value), seq: Number($("seq").value), room: roomOf() };
}

function rowOf(state, strategy) {
  const { asked, batch, seq, room } = state, optimizer = $("optimizer").value;
  const needed = (b, s) => answer(asked, strategy, b, s, optimizer).device_bytes;
  const limit = mostTokens(asked);
  const length = (steps) => Math.min(steps * STEP, limit);
  const most = Math.ceil(limit / STEP);
  const steps = largest((n) => needed(batch, length(n)), room, most, tilesFrom(batch * STEP));
  const found = answer(asked, strategy, batch, seq, optimizer);
  const fits = found.device_bytes > room ? "no" : found.device_bytes > room * (1 - DATA.headroom) ? "tight" : "yes";
  const [, , , time, gradients] = DATA.strategies[strategy];
  return { strategy, found, fits, time, gradients, batch: largest((b) => needed(b, seq), room, MOST_BATCH, tilesFrom(seq)), longest: length(steps) };
}

// exact rows before lossy ones, then those that are not tight, then those that take less time; as strategies.py
function recommended(rows) {
  const order = (row) => [row.gradients !== "exact", row.fits === "tight", Object.keys(DATA.times).indexOf(row.time)].map(Number);
  const before = (a, b) => order(a).map((value, i) => value - order(b)[i]).find((difference) => difference !== 0) ?? 0;
  return rows.filter((row) => row.fits !== "no").sort(before)[0];
}

function bar(found, scale, room) {
  const parts = PARTS.map(([name, , size]) => `${name} ${readable(size(found))}`);
  const element = make("div", "", { class: "bar", role: "img", "aria-label": parts.join(", ") });
  for (const [name, colour, size] of PARTS) {
    const part = make("span", "", { title: `${name}: ${readable(size(found))}` });
    part.style.width = `${(100 * size(found)) / scale}%`;
    part.style.background = DATA.colours[colour];
    element.append(part);
  }
  const card = make("i", "", { class: "card", title: `the card: ${readable(room)}` });
  card.style.left = `${(100 * room) / scale}%`;
  element.append(card);
  return element;
}

function show(state) {
  const rows = Object.keys(state.asked.data.cases[state.asked.key]).map((strategy) => rowOf(state, strategy));
  const scale = Math.max(state.room, ...rows.map((row) => row.found.device_bytes));
  const start = recommended(rows);
  $("rows").replaceChildren(...rows.map((row) => {
    const line = make("tr", "", row === start ? { class: "start" } : {}), cell = make("td", "");
    cell.append(bar(row.found, scale, state.room));
    line.append(
      make("th", row.strategy, { scope: "row" }), make("td", readable(row.found.device_bytes), { class: "number" }), cell,
      make("td", row.fits, { class: row.fits }),
      make("td", row.batch >= MOST_BATCH ? `${MOST_BATCH}+` : row.batch, { class: "number" }),
      make("td", row.longest, { class: "number" }),
      make("td", row.time, { title: DATA.times[row.time] }), make("td", row.gradients, { class: row.gradients === "exact" ? "" : "tight" }),
    );
    return line;
  }));
  const name = $("preset").value === PASTED ? state.asked.name : $("preset").value;
  $("title").textContent = `${name}, batch ${state.batch} × ${state.seq} on ${$("card").value === OTHER_CARD ? `${$("gigabytes").value} GB` : $("card").value}`;
  return { fitting: rows.filter((row) => row.fits !== "no").map((row) => row.strategy), start: start?.strategy };
}

// only names that stand in a table here reach the text, never what was pasted
function codeOf({ asked, mode, rank, batch }) {
  const [preset, checkpointing, codec] = DATA.strategies[$("strategy").value];
  const auto = { causal: "AutoModelForCausalLM", mlm: "AutoModelForMaskedLM", classification: "AutoModelForSequenceClassification" }[asked.data.task];
  const lora = ["lora", "qlora", "int8"].includes(mode), dtype = ["autocast", "fp32"].includes(mode) ? "float32" : "bfloat16";
  const names = preset === null ? [] : codec === null ? ["patch_model"] : ["CompressionConfig", "patch_model"];
  const config = codec === null ? `"${preset}"` : `CompressionConfig.from_preset("${preset}", checkpoint_input="${codec}")`;
  const quantized = mode === "qlora"
    ? ', quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",\n'
      + "    bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)"
    : mode === "int8" ? ", quantization_config=BitsAndBytesConfig(load_in_8bit=True)" : "";
  const optim = {
    adamw: "adamw_torch_fused", adamw_32bit: "paged_adamw_32bit", adamw_8bit: "adamw_bnb_8bit", adafactor: "adafactor", sgd: "sgd",
  }[$("optimizer").value];
  const lines = [
    mode === "qlora" ? "import torch" : null,
    lora ? "from peft import LoraConfig, get_peft_model" : null,
    `from transformers import ${auto}, ${quantized ? "BitsAndBytesConfig, " : ""}Trainer, TrainingArguments`,
    names.length ? `from hf_actcompress import ${names.join(", ")}` : null,
    "",
    `model = ${auto}.from_pretrained("YOUR MODEL", dtype="${dtype}"${quantized})`,
    lora ? `model = get_peft_model(model, LoraConfig(r=${rank}, target_modules="all-linear"))` : null,
    names.length ? `patch_model(model, ${config})` : null,
    "arguments = TrainingArguments(",
    `    "out", per_device_train_batch_size=${batch}${optim ? `, optim="${optim}"` : ""},`,
    `    bf16=${mode === "autocast" ? "True" : "False"}, gradient_checkpointing=${checkpointing ? "True" : "False"},`,
    ")",
    optim ? null : "# torch.optim.SGD(..., momentum=0.9) goes to the Trainer as `optimizers`",
    "Trainer(model=model, args=arguments, train_dataset=YOUR_DATA).train()",
  ];
  return lines.filter((line) => line !== null).join("\n");
}

// the strategy that the user has chosen; until then the recommended one is shown
let chosen = "";

// what is entered, in the address: an address opened again shows the same
function remember() {
  const state = new URLSearchParams(FIELDS.map((id) => [id, $(id).value]));
  if ($("preset").value === PASTED) state.set("config", $("config").value);
  if (chosen) state.set("strategy", chosen);
  $("link").href = `#${state}`;
  try { history.replaceState(null, "", `#${state}`); } catch { /* a browser may refuse so many changes in a row */ }
}

// fills the form from the address; a field keeps its content where the address has none that fits
function recall() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const id of FIELDS.filter((id) => state.has(id))) {
    const before = $(id).value;
    $(id).value = state.get(id);
    if (!$(id).value) $(id).value = before;
  }
  if (state.has("config")) $("config").value = state.get("config");
  chosen = state.get("strategy") || "";
}

function update() {
  let problem = "";
  $("size").hidden = $("card").value !== OTHER_CARD;
  try {
    const state = read();
    const { fitting, start } = show(state);
    fill($("strategy"), fitting);
    if (!fitting.includes(chosen)) chosen = "";
    $("strategy").value = chosen || start;
    $("start").textContent = start ? `Start with ${start}.` : "Nothing here fits: a smaller batch, LoRA or QLoRA needs less.";
    $("code").textContent = start ? codeOf(state) : "";
  } catch (error) {
    problem = error.message;
  }
  $("problem").textContent = problem;
  $("answer").hidden = problem !== "";
  remember();
}

function choosePreset() {
  const config = DATA.presets[$("preset").value];
  if (config) $("config").value = JSON.stringify(config, null, 1);
  update();
}

function start() {
  fill($("preset"), [...Object.keys(DATA.presets), PASTED]);
  fill($("card"), [...Object.keys(DATA.cards), OTHER_CARD]);
  $("card").value = "rtx3060";
  $("preset").value = "Llama-3.1-8B";
  $("training").value = "qlora";
  fill($("optimizer"), Object.values(DATA.classes)[0].optimizers);
  $("headroom").textContent = `${Math.round(100 * DATA.headroom)}%`;
  $("legend").replaceChildren(...PARTS.map(([name, colour]) => {
    const item = document.createElement("li"), mark = document.createElement("span");
    mark.style.background = DATA.colours[colour];
    item.append(mark, name);
    return item;
  }));
  $("preset").addEventListener("change", choosePreset);
  $("config").addEventListener("input", () => { $("preset").value = PASTED; update(); });
  for (const event of ["input", "change"]) $("form").addEventListener(event, update);
  $("form").addEventListener("submit", (event) => event.preventDefault());
  $("strategy").addEventListener("change", () => { chosen = $("strategy").value; update(); });
  $("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText($("code").textContent);
      $("copied").textContent = "copied";
    } catch {
      $("copied").textContent = "select the text to copy it";
    }
  });
  window.addEventListener("hashchange", () => { recall(); choosePreset(); });
  recall();
  choosePreset();
}

start();
