// The step timeline: one column a step, its parts stacked, newest at the right; and the same in numbers.

import { $, keyed, make, say, show, swatch } from "./dom.js";
import { colour, cursor, fitted, hatch, onTheme } from "./canvas.js";
import { count, partKind, partWords, plural, round, share, time } from "./words.js";

const COLUMN = 6;
const LEFT = 52;
const BOTTOM = 16;
const COLOURS = { decode: "blue", prefill: "sky", wait: "orange", far: "pink", again: "red", stall: "yellow", gate: "grey" };
const HATCHED = ["wait", "again", "stall"];

const work = (step) => step.step_ns - (step.parts.idle ?? 0);

export class StepsPanel {
  constructor() {
    this.canvas = $("steps-chart");
    this.shown = [];
    this.chosen = -1;
    this.total = $("steps-table").tFoot.appendChild(make("tr", {}, make("th", { scope: "row" }, "a step"), make("td"), make("td")));
    cursor(this.canvas, {
      size: () => this.shown.length,
      across: () => 10,
      at: (x) => {
        const place = Math.floor((x - LEFT) / COLUMN);
        return place >= 0 && place < this.shown.length ? place : -1;
      },
      moved: (place) => {
        this.chosen = place;
        say($("steps-reading"), place < 0 ? "" : this.words(this.shown[place]));
        this.picture();
      },
      choose: () => {},
    });
    onTheme(() => this.picture());
    new ResizeObserver(() => this.model && this.draw(this.model)).observe(this.canvas);
  }

  draw(model) {
    this.model = model;
    const room = Math.max(1, Math.floor((this.canvas.clientWidth - LEFT) / COLUMN));
    this.shown = model.steps.slice(-room);
    if (this.chosen >= this.shown.length) this.chosen = -1;
    this.picture();
    this.numbers(model);
  }

  words(step) {
    const parts = Object.entries(step.parts).filter(([part, ns]) => ns && part !== "idle").sort((a, b) => b[1] - a[1]);
    const where = this.several() ? ` of engine ${step.replica}` : "";
    const idle = step.parts.idle ? `, after ${time(step.parts.idle)} idle` : "";
    const list = parts.slice(0, 4).map(([part, ns]) => `${partWords(part)} ${time(ns)}`).join(", ");
    return `Step ${count(step.step_id)}${where}: ${time(work(step))}${idle}; ${plural(step.sequences, "sequence")}, ${plural(step.tokens, "row")}; ${list}`;
  }

  several() {
    return this.model.event.engines.length > 1;
  }

  picture() {
    const { pen, width, height } = fitted(this.canvas);
    const floor = height - BOTTOM;
    const sorted = this.shown.map(work).sort((a, b) => a - b);
    const top = nice((sorted[Math.floor(sorted.length * 0.98)] ?? 1e6) * 1.08);
    this.axis(pen, width, floor, top);
    this.shown.forEach((step, place) => this.column(pen, step, LEFT + place * COLUMN, floor, top));
    if (this.chosen >= 0) {
      pen.strokeStyle = colour("ink");
      pen.lineWidth = 1;
      pen.strokeRect(LEFT + this.chosen * COLUMN - 1.5, 0.5, COLUMN + 1, floor);
    }
  }

  axis(pen, width, floor, top) {
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const part of [0, 0.5, 1]) {
      const y = Math.round(floor - part * (floor - 8)) + 0.5;
      pen.strokeStyle = colour("rule");
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(LEFT, y);
      pen.lineTo(width, y);
      pen.stroke();
      pen.fillStyle = colour("muted");
      pen.fillText(part ? round(time(top * part)) : "0", LEFT - 6, y);
    }
    pen.textAlign = "left";
    pen.textBaseline = "alphabetic";
    pen.fillText(this.shown.length ? "older" : "no step yet", LEFT, floor + 13);
    pen.textAlign = "right";
    if (this.shown.length) pen.fillText("now", LEFT + this.shown.length * COLUMN, floor + 13);
  }

  column(pen, step, x, floor, top) {
    const scale = (floor - 8) / top;
    let y = floor;
    for (const part of this.model.vocabulary.parts) {
      const ns = step.parts[part] ?? 0;
      if (!ns || part === "idle") continue;
      const tall = Math.min(ns * scale, y);
      const kind = partKind(part);
      pen.fillStyle = colour(COLOURS[kind]);
      pen.fillRect(x, y - tall, COLUMN - 1, tall);
      if (HATCHED.includes(kind) && tall > 2) {
        pen.fillStyle = hatch("panel", { step: kind === "again" ? 3 : 5 });
        pen.fillRect(x, y - tall, COLUMN - 1, tall);
      }
      y -= tall;
    }
    if (work(step) > top) { // higher than the picture: its end is not shown, and that is
      pen.fillStyle = colour("ink");
      pen.beginPath();
      pen.moveTo(x, 6);
      pen.lineTo(x + COLUMN - 1, 6);
      pen.lineTo(x + (COLUMN - 1) / 2, 0);
      pen.fill();
    }
    if ((step.parts.idle ?? 0) > work(step)) { // it had nothing to do before
      pen.fillStyle = colour("muted");
      pen.fillRect(x, floor + 1, COLUMN - 1, 2);
    }
  }

  numbers(model) {
    const steps = this.shown;
    const sums = new Map();
    for (const step of steps) {
      for (const [part, ns] of Object.entries(step.parts)) sums.set(part, (sums.get(part) ?? 0) + ns);
    }
    const whole = steps.reduce((sum, step) => sum + step.step_ns, 0);
    const parts = model.vocabulary.parts.filter((part) => sums.get(part));
    keyed(
      $("steps-table").tBodies[0], parts, (part) => part,
      (part) => make("tr", {}, make("td", {}, swatch(partKind(part)), partWords(part)), make("td"), make("td")),
      (line, part) => {
        say(line.cells[1], time(Math.round(sums.get(part) / steps.length)));
        say(line.cells[2], share(sums.get(part) / whole));
      },
    );
    say(this.total.cells[1], steps.length ? time(Math.round(whole / steps.length)) : "–");
    show($("steps-table").tBodies[0], steps.length > 0);
    const newest = steps.at(-1);
    const words = [`the last ${plural(steps.length, "step")}`];
    if (newest) words.push(`newest: ${plural(newest.sequences, "sequence")}, ${time(work(newest))}`);
    const preemptions = steps.reduce((sum, step) => sum + step.preemptions, 0);
    if (preemptions) words.push(`${plural(preemptions, "preemption")}`);
    say($("steps-sub"), steps.length ? words.join(" · ") : "none yet");
    const mean = steps.length ? time(Math.round(steps.reduce((sum, step) => sum + work(step), 0) / steps.length)) : "";
    this.canvas.setAttribute("aria-label", `Step timeline: ${words.join(", ")}${mean && `, ${mean} on average`}. Arrow keys move over it.`);
  }
}

// The next value that is easily read.
function nice(value) {
  const size = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  return [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((one) => one * size).find((one) => one >= value) ?? 10 * size;
}
