// Who runs and who waits, by tenant and reason; and what ranks waited for each other.

import { $, keyed, make, row, say, show, swatch } from "./dom.js";
import { count, plural, share, stateKind, stateWords, time } from "./words.js";

const BEFORE = ["parse", "auth", "limit", "tokenize", "route", "dispatch", "resume", "lost", "upstream"];
const ROWS_MAX = 60;

// Sequences as the engines have them; requests that no engine has yet, as the gateway does.
function groupsOf(model) {
  const groups = new Map();
  const add = (tenant, state, longest_ns) => {
    const name = `${tenant}\n${state}`;
    const group = groups.get(name) ?? { name, tenant, state, sequences: 0, longest_ns: 0 };
    group.sequences += 1;
    group.longest_ns = Math.max(group.longest_ns, longest_ns);
    groups.set(name, group);
  };
  for (const one of model.sequences()) add(one.tenant ?? null, one.state, one.state_ns);
  for (const one of model.requests.values()) {
    if (one.outcome === null && BEFORE.includes(one.state)) add(one.tenant, one.state, one.states[one.state] ?? 0);
  }
  const place = (group) => model.vocabulary.states.indexOf(group.state);
  return [...groups.values()].sort((a, b) => String(a.tenant).localeCompare(String(b.tenant)) || place(a) - place(b));
}

const tenantWords = (tenant) => (tenant === null ? "other tenants" : tenant || "–");

export function drawQueue(model) {
  const groups = groupsOf(model);
  keyed(
    $("queue-table").tBodies[0], groups.slice(0, ROWS_MAX), (group) => group.name,
    (group) => {
      const line = row(4);
      line.cells[0].append(tenantWords(group.tenant));
      line.cells[1].className = "left";
      line.cells[1].append(swatch(stateKind(group.state)), stateWords(group.state));
      return line;
    },
    (line, group) => {
      say(line.cells[2], count(group.sequences));
      say(line.cells[3], time(group.longest_ns));
    },
  );
  const all = model.sequences();
  const waiting = all.filter((one) => one.state.startsWith("queue") || one.state === "preempted").length;
  say($("queue-sub"), `${count(all.length - waiting)} running · ${count(waiting)} waiting`);
  show($("queue-nobody"), !groups.length);
  show($("queue-table"), groups.length > 0);
}

// By engine and rank, over the steps that are shown.
function ranksOf(model) {
  const found = new Map();
  for (const step of model.steps) {
    const { kind, rank_wait_ns: waits, straggler } = step.interconnect;
    const each = waits.length ? waits : [0];
    each.forEach((wait_ns, rank) => {
      const name = `${step.replica} ${rank}`;
      const one = found.get(name) ?? { name, replica: step.replica, rank, kind, wait_ns: 0, step_ns: 0, late: 0, steps: 0 };
      one.kind = kind;
      one.wait_ns += wait_ns;
      one.step_ns += step.step_ns - (step.parts.idle ?? 0);
      one.late += straggler === rank;
      one.steps += 1;
      found.set(name, one);
    });
  }
  return [...found.values()].sort((a, b) => a.replica - b.replica || a.rank - b.rank);
}

export function drawRanks(model) {
  const ranks = ranksOf(model);
  keyed(
    $("ranks-table").tBodies[0], ranks, (one) => one.name,
    (one) => {
      const line = row(5);
      line.cells[0].append(String(one.replica));
      line.cells[1].append(String(one.rank));
      line.cells[3].append(make("span", { class: "meter", "aria-hidden": "true" }, make("i")), " ", make("span"));
      return line;
    },
    (line, one) => {
      const part = one.step_ns ? one.wait_ns / one.step_ns : 0;
      say(line.cells[2], time(Math.round(one.wait_ns / one.steps)));
      line.cells[3].querySelector("i").style.width = `${Math.min(100, 100 * part).toFixed(1)}%`;
      say(line.cells[3].lastElementChild, share(part));
      say(line.cells[4], one.kind === "none" ? "–" : share(one.late / one.steps));
    },
  );
  const kinds = [...new Set(ranks.map((one) => one.kind))];
  const alone = kinds.every((kind) => kind === "none");
  const engines = model.event.engines.filter((one) => one.trouble === null).length;
  const words = [`${plural(engines, "engine")} of ${count(model.event.engines.length)} up`];
  if (ranks.length) words.push(alone ? "one rank each: nobody to wait for" : `over ${kinds.filter((kind) => kind !== "none").join(", ")}; waiting is for a rank that is late`);
  say($("ranks-sub"), words.join(" · "));
  show($("ranks-nobody"), !ranks.length);
  show($("ranks-table"), ranks.length > 0);
}
