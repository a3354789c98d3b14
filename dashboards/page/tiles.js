// How those were served who have asked within the last minute, and how much of the engines is in use.

import { $, classed, keyed, make, say } from "./dom.js";
import { count, plural, round, share, time } from "./words.js";

function promised(name, objective) {
  const bound = round(time(objective.objective_s * 1e9));
  const kept = objective.within;
  return {
    name,
    big: time(objective.p50_ns),
    small: "median",
    line: `p99 ${time(objective.p99_ns)}, of ${count(objective.count)}`,
    verdict: kept === null ? "" : `${kept >= 0.99 ? "\u2713" : "\u26a0"} ${share(kept)} within ${bound}`,
    tone: kept === null ? "" : kept >= 0.99 ? "good" : "bad",
  };
}

function tilesOf(model) {
  const { served, sights } = model.event;
  const sequences = model.sequences();
  const waits = sequences.filter((one) => one.state.startsWith("queue") || one.state === "preempted").length;
  const book = model.book();
  const used = book.total ? 1 - (book.free + book.cached_idle) / book.total : null;
  const failed = served.failed;
  return [
    promised("First token", served.time_to_first_token),
    promised("Between tokens", served.time_per_output_token),
    {
      name: "Failures of ours", big: count(failed), small: `of ${plural(served.requests, "request")}`,
      line: "in the last minute", verdict: served.requests ? (failed ? "\u26a0 see below" : "\u2713 none") : "", tone: failed ? "bad" : "good",
    },
    {
      name: "In the engines", big: sights.length ? count(sequences.length - waits) : "\u2013", small: "running",
      line: sights.length ? `${count(waits)} waiting` : "nothing is known yet", verdict: "", tone: "",
    },
    { name: "Output", ...pace(model), verdict: "", tone: "" },
    {
      name: "KV in use", big: share(used), small: "",
      line: book.total ? `${share(book.filled / book.total)} of all slots hold data` : "nothing is known yet", verdict: "", tone: "",
    },
  ];
}

// Tokens of the steps that ended within the last seconds.
function pace(model) {
  const window_s = 5;
  const since_ns = model.event.now_ns - window_s * 1e9;
  const tokens = model.steps.filter((one) => one.ended_ns > since_ns).reduce((sum, one) => sum + one.emitted_tokens, 0);
  const rate = tokens / window_s;
  return { big: rate >= 100 || rate === 0 ? count(rate) : rate.toFixed(1), small: "tokens/s", line: `over ${window_s} s` };
}

export function drawTiles(model) {
  keyed(
    $("tiles"), tilesOf(model), (one) => one.name,
    (one) => {
      const big = make("p", { class: "big" }, make("span"), " ", make("small"));
      return make("div", { class: "tile" }, make("h2", {}, one.name), big, make("p"), make("p", { class: "verdict" }));
    },
    (tile, one) => {
      const [, big, line, verdict] = tile.children;
      say(big.firstElementChild, one.big);
      say(big.lastElementChild, one.small);
      say(line, one.line);
      say(verdict, one.verdict);
      classed(verdict, `verdict ${one.tone}`);
    },
  );
}
