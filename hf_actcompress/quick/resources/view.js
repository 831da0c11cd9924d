// The form of the page, its table and its code. The numbers are those of formula.js.
"use strict";

const MOST_BATCH = 1024, STEP = 64, GIB = 2 ** 30;
const PARTS = [
  ["weights", "#4477aa", (found) => found.weights_bytes],
  ["gradients", "#66ccee", (found) => found.gradients_bytes],
  ["optimizer states", "#228833", (found) => found.optimizer_bytes],
  ["kept for backward", "#ccbb44", (found) => Math.min(found.kept_bytes, found.step_peak_bytes)],
  ["at the peak, beside that", "#ee6677", (found) => Math.max(found.step_peak_bytes - found.kept_bytes, 0)],
  ["context of CUDA", "#aa3377", (found) => found.context_bytes],
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

function read() {
  for (const id of ["batch", "seq", "rank"]) {
    if (!$(id).checkValidity()) throw new Error(`${$(id).parentElement.firstChild.textContent.trim()}: ${$(id).validationMessage}`);
  }
  let config;
  try { config = JSON.parse($("config").value); } catch (error) { throw new Error(`This is no JSON: ${error.message}`); }
  if (config === null || typeof config !== "object" || Array.isArray(config)) throw new Error("A config is a JSON object.");
  const mode = $("training").value, rank = Number($("rank").value);
  const asked = question(DATA, config, trainingOf(mode, rank));
  return { asked, mode, rank, batch: Number($("batch").value), seq: Number($("seq").value), room: DATA.cards[$("card").value] };
}

function rowOf(state, strategy) {
  const { asked, batch, seq, room } = state, optimizer = $("optimizer").value;
  const needed = (b, s) => answer(asked, strategy, b, s, optimizer).device_bytes;
  const limit = mostTokens(asked);
  const length = (steps) => Math.min(steps * STEP, limit);
  const steps = largest((n) => needed(batch, length(n)), room, Math.ceil(limit / STEP));
  const found = answer(asked, strategy, batch, seq, optimizer);
  const fits = found.device_bytes > room ? "no" : found.device_bytes > room * (1 - DATA.headroom) ? "tight" : "yes";
  return { strategy, found, fits, batch: largest((b) => needed(b, seq), room, MOST_BATCH), longest: length(steps) };
}

function bar(found, scale) {
  const parts = PARTS.map(([name, , size]) => `${name} ${readable(size(found))}`);
  const element = make("div", "", { class: "bar", role: "img", "aria-label": parts.join(", ") });
  for (const [name, colour, size] of PARTS) {
    const part = make("span", "", { title: `${name}: ${readable(size(found))}` });
    part.style.width = `${(100 * size(found)) / scale}%`;
    part.style.background = colour;
    element.append(part);
  }
  return element;
}

function show(state) {
  const rows = Object.keys(state.asked.data.cases[state.asked.key]).map((strategy) => rowOf(state, strategy));
  const scale = Math.max(...rows.map((row) => row.found.device_bytes));
  $("rows").replaceChildren(...rows.map((row) => {
    const line = document.createElement("tr"), cell = make("td", "");
    cell.append(bar(row.found, scale));
    line.append(
      make("th", row.strategy, { scope: "row" }), make("td", readable(row.found.device_bytes), { class: "number" }), cell,
      make("td", row.fits, { class: row.fits }),
      make("td", row.batch >= MOST_BATCH ? `${MOST_BATCH}+` : row.batch, { class: "number" }),
      make("td", row.longest, { class: "number" }),
    );
    return line;
  }));
  $("title").textContent = `${state.asked.name}, batch ${state.batch} × ${state.seq} on ${$("card").value}`;
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

function update() {
  let problem = "";
  try {
    const state = read();
    const chosen = $("strategy").value;
    show(state);
    fill($("strategy"), Object.keys(state.asked.data.cases[state.asked.key]));
    $("strategy").value = chosen || "exact";
    $("code").textContent = codeOf(state);
  } catch (error) {
    problem = error.message;
  }
  $("problem").textContent = problem;
  $("answer").hidden = problem !== "";
}

function choosePreset() {
  const config = DATA.presets[$("preset").value];
  if (config) $("config").value = JSON.stringify(config, null, 1);
  update();
}

function start() {
  fill($("preset"), [...Object.keys(DATA.presets), "as pasted"]);
  fill($("card"), Object.keys(DATA.cards));
  $("card").value = "rtx4090";
  fill($("optimizer"), Object.values(DATA.classes)[0].optimizers);
  $("headroom").textContent = `${Math.round(100 * DATA.headroom)}%`;
  $("legend").replaceChildren(...PARTS.map(([name, colour]) => {
    const item = document.createElement("li"), mark = document.createElement("span");
    mark.style.background = colour;
    item.append(mark, name);
    return item;
  }));
  $("preset").addEventListener("change", choosePreset);
  $("config").addEventListener("input", () => { $("preset").value = "as pasted"; update(); });
  $("form").addEventListener("change", update);
  $("form").addEventListener("submit", (event) => event.preventDefault());
  $("strategy").addEventListener("change", update);
  $("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText($("code").textContent);
      $("copied").textContent = "copied";
    } catch {
      $("copied").textContent = "select the text to copy it";
    }
  });
  choosePreset();
}

start();
