// The newest requests, each with where its time went; all bars have one scale.

import { $, classed, keyed, make, row, say, show, swatch } from "./dom.js";
import { FINE, KINDS, OUTCOMES, count, plural, shortId, stateKind, stateWords, time } from "./words.js";

const SHOWN = 40;

export class RequestsPanel {
  constructor(open) {
    this.open = open;
    keyed($("requests-legend"), KINDS, ([kind]) => kind, ([kind, words]) => make("li", {}, swatch(kind), words), () => {});
  }

  draw(model) {
    const newest = [...model.requests.values()].slice(0, SHOWN);
    const longest = Math.max(1, ...newest.map((one) => one.e2e_ns));
    keyed(
      $("requests-table").tBodies[0], newest, (one) => one.request_id,
      (one) => this.make(one),
      (line, one) => this.update(line, one, model, longest),
    );
    const live = [...model.requests.values()].filter((one) => one.outcome === null).length;
    const words = [`${count(live)} in flight`, `the newest ${count(newest.length)}`, `a full bar is ${time(longest)}`];
    if (model.event.workers_silent) words.push(`${plural(model.event.workers_silent.length, "gateway worker")} did not answer`);
    say($("requests-sub"), newest.length ? words.join(" · ") : "");
    show($("requests-nobody"), !newest.length);
    show($("requests-table"), newest.length > 0);
  }

  make(one) {
    const line = row(7);
    const button = make("button", { type: "button", class: "id", title: one.request_id, "aria-haspopup": "dialog" }, shortId(one.request_id));
    line.dataset.request = one.request_id;
    line.cells[0].append(button);
    line.cells[5].className = "w";
    line.cells[5].append(make("div", { class: "bars", role: "img" }));
    line.addEventListener("click", () => {
      if (!getSelection()?.toString()) this.open(one.request_id, button);
    });
    return line;
  }

  update(line, one, model, longest) {
    const live = one.outcome === null;
    const [, tenant, outcome, tokens, first, bars, whole] = line.cells;
    say(tenant, one.tenant || "–");
    say(outcome, live ? stateWords(one.state) : OUTCOMES[one.outcome] ?? one.outcome.replaceAll("_", " "));
    classed(outcome, live ? "running" : FINE.includes(one.outcome) ? "" : "bad");
    say(tokens, one.prompt_tokens || one.output_tokens ? `${count(one.prompt_tokens)} → ${count(one.output_tokens)}` : "–");
    say(first, one.first_token_ns ? time(one.first_token_ns) : "–");
    say(whole, time(one.e2e_ns));
    const states = model.inOrder(one.states);
    const box = bars.firstElementChild;
    keyed(
      box, states, ([state]) => state,
      ([state]) => make("i", { class: `c-${stateKind(state)}` }),
      (part, [state, ns]) => {
        const width = `${((100 * ns) / longest).toFixed(3)}%`;
        if (part.style.width !== width) part.style.width = width;
        part.title = `${stateWords(state)}: ${time(ns)}`;
      },
    );
    const main = [...states].sort((a, b) => b[1] - a[1]).slice(0, 3);
    box.setAttribute("aria-label", `${time(one.e2e_ns)}: ${main.map(([state, ns]) => `${stateWords(state)} ${time(ns)}`).join(", ")}`);
  }
}
