// How numbers are written, what states and parts are called, and which sign each has.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value).replaceAll(",", "\u2009");

export function time(ns) {
  if (ns === null || ns === undefined) return "\u2013";
  if (ns < 1e3) return `${ns} ns`;
  for (const [unit, size] of [["µs", 1e3], ["ms", 1e6], ["s", 1e9]]) {
    const value = ns / size;
    if (value < 999.5 || unit === "s") return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`;
  }
  return "";
}

// Without zeros that say nothing: of values that are round.
export const round = (text) => text.replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");

export function share(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  if (value > 0 && value < 0.0005) return "<0.1 %";
  if (value < 1 && value > 0.9995) return ">99.9 %";
  return `${(100 * value).toFixed(value === 0 || value === 1 ? 0 : 1)} %`;
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

export const STATES = {
  parse: "read the request", auth: "check the key", limit: "check limits", tokenize: "tokenize", route: "choose an engine",
  dispatch: "hand to the engine", queue_batch_full: "wait: batch full", queue_kv_full: "wait: KV full",
  queue_token_budget: "wait: step's tokens spent", queue_fairness: "wait: others' turn",
  prefill: "prefill", decode: "decode", stalled: "stalled: others were served",
  preempted: "preempted: KV taken away", recompute: "recompute", lost: "lost with its engine",
  resume: "wait for another engine", upstream: "an upstream has it", deliver: "deliver", detokenize: "detokenize", send: "send",
  send_blocked: "the client does not read", finalize: "finalize",
};
export const PARTS = {
  publish: "publish", idle: "idle", plan: "plan", draft: "draft", batch: "arrays", compute: "compute",
  interconnect_wait: "wait for ranks", interconnect_transfer: "transfer", bubble: "pipeline bubble", sample: "sample", commit: "commit",
};

const plain = (name) => name.replaceAll("_", " ");
export const stateWords = (state) => STATES[state] ?? plain(state);
export const partWords = (part) => PARTS[part] ?? plain(part);

// The sign of a state: a class of style.css, by kind, so that a state that is new here has one too.
export function stateKind(state) {
  if (state.startsWith("queue")) return "wait";
  if (state === "prefill" || state === "decode") return state;
  if (state === "stalled") return "stall";
  if (["preempted", "recompute", "lost", "resume"].includes(state)) return "again";
  if (state === "upstream") return "far";
  if (state === "send_blocked") return "blocked";
  if (["deliver", "detokenize", "send", "finalize"].includes(state)) return "send";
  return "gate";
}

export const KINDS = [
  ["gate", "gateway"], ["wait", "queue"], ["prefill", "prefill"], ["decode", "decode"], ["stall", "stalled"],
  ["again", "preempted, again"], ["send", "send"], ["blocked", "client is slow"], ["far", "elsewhere"],
];

const PART_KINDS = {
  compute: "decode", sample: "prefill", plan: "wait", draft: "far", interconnect_wait: "again", bubble: "again",
  interconnect_transfer: "stall", idle: "idle",
};
export const partKind = (part) => PART_KINDS[part] ?? "gate";

// Seven colours and 26 letters have no common factor: 182 sequences in a row look different.
const OWNERS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"];
export const ownerColour = (number) => OWNERS[number % OWNERS.length];
export const ownerInk = (number) => (number % OWNERS.length === 0 ? "#fff" : "#000");
export const ownerLetter = (number) => String.fromCharCode(65 + (number % 26));

// What stands for those that are not for these eyes, and those that are not over: no request, so nothing to open.
export const SOMEBODY = "other requests";

// The engine's name of a sequence is that of its request, "#", and which choice of it.
export const requestOf = (name) => (name === null ? null : name.split("#")[0]);

export function shortId(id) {
  return id.length > 22 ? `${id.slice(0, 12)}\u2026${id.slice(-6)}` : id;
}

export const OUTCOMES = {
  client_gone: "client left", rate_limited: "rate limited", no_healthy_engine: "no engine", engine_lost: "engine lost",
  upstream_failed: "upstream failed", keys_unavailable: "keys unavailable", limits_unavailable: "limits unavailable",
};
export const FINE = ["stop", "length", "ok"];
