// The live page: events in, one drawing for each frame at most.

import { $, say, show } from "./dom.js";
import { Detail } from "./detail.js";
import { KvPanel } from "./kv.js";
import { Model } from "./model.js";
import { drawQueue, drawRanks } from "./queue.js";
import { RequestsPanel } from "./requests.js";
import { StepsPanel } from "./steps.js";
import { Stream, key } from "./stream.js";
import { drawTiles } from "./tiles.js";

export const model = new Model();
export const detail = new Detail(model);
const open = (id, opener) => detail.open(id, opener);
export const kv = new KvPanel(open);
const steps = new StepsPanel();
const requests = new RequestsPanel(open);
let frame = 0;

function draw() {
  frame = 0;
  const { event } = model;
  say($("model"), event.model);
  const troubles = event.engines.filter((one) => one.trouble !== null).map((one) => `Engine ${one.replica}: ${one.trouble}.`);
  say($("trouble"), troubles.join(" "));
  show($("trouble"), troubles.length > 0);
  drawTiles(model);
  kv.draw(model);
  steps.draw(model);
  drawQueue(model);
  drawRanks(model);
  requests.draw(model);
  detail.update();
  document.documentElement.dataset.event = event.number;
}

function heard(event) {
  model.hear(event);
  if (!frame) frame = requestAnimationFrame(draw);
}

function stateIs(state, words) {
  $("state").dataset.state = state;
  say($("state-words"), state === "lost" ? `not connected: ${words}` : state === "key" ? "an API key is needed" : words);
  show($("key-form"), state === "key");
  show($("forget"), key.get() !== "" && state !== "key");
  if (state === "key") {
    say($("key-words"), words);
    key.forget();
    $("key").focus();
  }
}

const stream = new Stream(heard, stateIs);

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  stream.start();
});
$("forget").addEventListener("click", () => {
  key.forget();
  location.reload(); // what was seen with it is gone, too
});
$("pause").addEventListener("click", () => {
  const paused = stream.wanted;
  $("pause").setAttribute("aria-pressed", paused);
  say($("pause"), paused ? "Go on" : "Pause");
  if (paused) stream.stop();
  else stream.start();
});

stream.start();
