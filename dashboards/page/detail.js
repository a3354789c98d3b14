// One request: its waterfall with the exact ledger, and in words why it took as long as it did.

import { $, keyed, make, row, say, show, swatch } from "./dom.js";
import { key } from "./stream.js";
import { FINE, OUTCOMES, SOMEBODY, count, requestOf, share, shortId, stateKind, stateWords, time } from "./words.js";

const AGAIN_MS = 3000; // of one in flight
const OTHERS_SHOWN = 8;
const DRAWN = ["detail-facts", "detail-ledger"]; // once it is known

const sentence = (words, end = ".") => words.charAt(0).toUpperCase() + words.slice(1) + (words.endsWith(end) ? "" : end);

export class Detail {
  constructor(model) {
    this.model = model;
    this.id = null;
    this.opener = null;
    this.dialog = $("detail");
    this.sum = $("detail-ledger").tFoot.appendChild(make("tr", {}, make("th", { scope: "row" }, "sum of the states"), ...[0, 1, 2].map(() => make("td"))));
    this.whole = $("detail-ledger").tFoot.appendChild(make("tr", {}, make("th", { scope: "row" }, "end to end"), ...[0, 1, 2].map(() => make("td"))));
    $("detail-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
    this.dialog.addEventListener("close", () => {
      this.id = null;
      clearTimeout(this.timer);
      this.opener?.focus();
    });
  }

  async open(id, opener = document.activeElement) {
    this.id = id;
    this.opener = opener;
    say($("detail-title"), id);
    this.why(null, "");
    if (!this.dialog.open) this.dialog.showModal();
    this.dialog.scrollTop = 0;
    this.shown = null;
    say($("detail-sub"), "…");
    $("detail-sub").className = "sub";
    for (const part of DRAWN) show($(part), false);
    await this.look(id);
  }

  // With each event, while it is open: of one in flight, and at its end.
  update() {
    const one = this.id === null ? null : this.model.requests.get(this.id);
    if (!one) return;
    if (this.shown?.outcome === null && one.outcome !== null) this.ask(one.request_id);
    if (one !== this.shown) this.draw(one);
  }

  // At one that the page has heard of, else at what the gateway says of it.
  async look(id) {
    const known = this.model.requests.get(id);
    if (known) this.draw(known);
    else {
      const answer = await fetch(`/debug/requests/${encodeURIComponent(id)}`, { headers: key.headers() }).catch(() => null);
      const one = answer?.ok ? await answer.json() : null;
      if (this.id !== id) return;
      if (answer?.status === 404) return this.forgotten();
      if (one) this.draw(one);
    }
    await this.ask(id);
  }

  // What was seen of it stays, but nothing more will be heard.
  forgotten() {
    this.shown = null;
    say($("detail-sub"), "not remembered any more");
    $("detail-sub").className = "sub";
    this.why(null, "It is not remembered any more: only the newest requests are.");
  }

  draw(one) {
    this.shown = one;
    for (const part of DRAWN) show($(part), true);
    const live = one.outcome === null;
    const outcome = live ? `in flight: ${stateWords(one.state)}` : OUTCOMES[one.outcome] ?? one.outcome.replaceAll("_", " ");
    say($("detail-sub"), [outcome, one.model, one.tenant && `tenant ${one.tenant}`, one.route].filter(Boolean).join(" · "));
    $("detail-sub").className = live || FINE.includes(one.outcome) ? "sub" : "sub bad";
    this.facts(one);
    const states = this.model.inOrder(one.states);
    const sum = states.reduce((before, [, ns]) => before + ns, 0);
    const starts = new Map();
    states.reduce((before, [state, ns]) => (starts.set(state, before), before + ns), 0);
    keyed(
      $("detail-ledger").tBodies[0], states, ([state]) => state,
      ([state]) => {
        const line = row(4);
        line.dataset.state = state;
        line.cells[0].append(swatch(stateKind(state)), stateWords(state));
        line.cells[1].className = "w";
        line.cells[1].append(make("span", { class: "track", "aria-hidden": "true" }, make("i", { class: `c-${stateKind(state)}` })));
        return line;
      },
      (line, [state, ns]) => {
        const bar = line.querySelector("i");
        bar.style.left = `${sum ? Math.min(99.5, (100 * starts.get(state)) / sum) : 0}%`;
        bar.style.width = `${sum ? (100 * ns) / sum : 0}%`;
        say(line.cells[2], count(ns));
        line.cells[2].dataset.ns = ns;
        say(line.cells[3], share(sum ? ns / sum : null));
      },
    );
    say(this.sum.cells[2], count(sum));
    this.sum.cells[2].dataset.ns = sum;
    say(this.whole.cells[2], count(one.e2e_ns));
    this.whole.cells[2].dataset.ns = one.e2e_ns;
    say(this.whole.cells[3], sum === one.e2e_ns ? "✓ equal" : "⚠ not equal");
  }

  facts(one) {
    const facts = [
      ["end to end", time(one.e2e_ns)],
      ["first token", one.first_token_ns ? time(one.first_token_ns) : "–"],
      ["longest gap", one.gap_max_ns ? time(one.gap_max_ns) : "–"],
      ["tokens", `${count(one.prompt_tokens ?? 0)} → ${count(one.output_tokens ?? 0)}`],
      ["from the cache", count(one.cached_tokens ?? 0)],
      ["engine steps", one.steps === undefined ? "–" : count(one.steps)],
      ["preemptions", one.preemptions === undefined ? "–" : count(one.preemptions)],
      ["KV held", one.kv_block_ns === undefined ? "–" : `${(one.kv_block_ns / 1e9).toFixed(2)} block·s`],
    ];
    keyed(
      $("detail-facts"), facts, ([name]) => name,
      ([name]) => make("div", {}, make("dt", {}, name), make("dd")),
      (box, [, value]) => say(box.lastElementChild, value),
    );
  }

  // ---- why

  async ask(id) {
    clearTimeout(this.timer);
    say($("why-summary"), $("why-summary").textContent || "…");
    const answer = await fetch(`/debug/why/${encodeURIComponent(id)}`, { headers: key.headers() }).catch(() => null);
    if (this.id !== id) return;
    if (answer?.status === 404 && !this.model.requests.has(id)) return this.forgotten();
    if (answer?.ok) this.why(await answer.json(), "");
    else this.why(null, "Nothing is known of it: it may be too old, or nobody has recorded its steps.");
    if (!this.shown || this.shown.outcome === null) this.timer = setTimeout(() => this.id === id && this.look(id), AGAIN_MS);
  }

  others(several) {
    const each = several.slice(0, OTHERS_SHOWN).flatMap((one) => {
      if (one.request_id === SOMEBODY) return [`${SOMEBODY} ${time(one.ns)}  `];
      const id = requestOf(one.request_id);
      const button = make("button", { type: "button", class: "id", title: id }, shortId(id));
      button.addEventListener("click", () => this.open(id, this.opener));
      return [button, ` ${time(one.ns)}  `];
    });
    return each.length ? ["Served in the same steps: ", ...each] : [];
  }

  why(found, instead) {
    say($("why-summary"), found ? found.summary : instead);
    const causes = (found?.causes ?? []).map((one) => {
      const facts = [time(one.ns), share(one.share)];
      if (one.baseline_ns !== null && one.baseline_ns !== undefined) facts.push(`usually ${time(one.baseline_ns)}`);
      if (one.estimate) facts.push("an estimate");
      const lines = [sentence(one.words), ...(one.change ? [`To change: ${one.change}.`] : [])];
      const title = make("strong", {}, sentence(one.title ?? one.cause.replaceAll("_", " "), ""));
      return make("li", {}, title, ` ${facts.join(" · ")}`, ...lines.map((line) => make("span", { class: "line" }, line)));
    });
    $("why-causes").replaceChildren(...causes);
    $("why-others").replaceChildren(...this.others(found?.others ?? []));
    const not = (found?.not ?? []).map((one) => one.words);
    say($("why-not"), not.length ? `Looked at and ruled out: ${not.join("; ")}.` : "");
    for (const part of ["why-causes", "why-others", "why-not"]) show($(part), $(part).textContent !== "");
  }
}
