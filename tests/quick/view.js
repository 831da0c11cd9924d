// Runs the scripts of a page on a few stand-ins for a document, pastes a config, and prints what the page shows.
"use strict";
const html = require("fs").readFileSync(process.argv[2], "utf8");
const elements = {};

function element(tag) {
  return {
    tag, children: [], style: {}, listeners: {}, value: "", own: "", hidden: false,
    get textContent() { return this.own + this.children.map((child) => child.textContent ?? child).join(""); },
    set textContent(text) { this.own = String(text); this.children = []; },
    setAttribute(name, value) { if (name === "value") this.value = value; },
    append(...more) { this.children.push(...more); },
    replaceChildren(...all) { this.children = all; if (tag === "select" && all.length) this.value = all[0].value; },
    addEventListener(name, call) { this.listeners[name] = call; },
    checkValidity() { return true; },
  };
}

for (const [text, tag, id] of html.matchAll(/<(\w+) id="(\w+)"[^>]*>/g)) {
  elements[id] = element(tag);
  elements[id].value = (text.match(/ value="(\w+)"/) || ["", ""])[1];
}
globalThis.window = { addEventListener() {} };
globalThis.location = { hash: "" };
globalThis.history = { replaceState() {} };
globalThis.document = { getElementById: (id) => elements[id], createElement: element };
const scripts = [...html.matchAll(/<script>([\s\S]*?)<\/script>/g)].map((found) => found[1]);
new Function(scripts.join("\n"))();

const shown = () => ({
  title: elements.title.textContent, problem: elements.problem.textContent, hidden: elements.answer.hidden,
  rows: elements.rows.children.map((row) => row.children.map((cell) => cell.textContent)), code: elements.code.textContent,
  start: elements.start.textContent, choices: elements.strategy.children.map((option) => option.value),
});
const answers = [shown()];
elements.training.value = "bf16";
for (const pasted of process.argv.slice(3)) {
  elements.config.value = pasted;
  elements.config.listeners.input();
  answers.push(shown());
}
console.log(JSON.stringify(answers));
