// Answers questions by the page's formula: node run.js formula.js < questions.json
"use strict";
const { question, answer, largest, mostTokens, tilesFrom } = require(process.argv[2]);
const { classes, rules, questions } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const answers = questions.map(({ config, training, strategy, batch, seq, optimizer, room }) => {
  try {
    const asked = question({ classes, rules }, config, training);
    const found = answer(asked, strategy, batch, seq, optimizer);
    const most = largest((b) => answer(asked, strategy, b, seq, optimizer).device_bytes, room, 1024, tilesFrom(seq));
    return { ...found, largest: most, longest: mostTokens(asked) };
  } catch (error) {
    return { error: error.message };
  }
});
console.log(JSON.stringify(answers));
