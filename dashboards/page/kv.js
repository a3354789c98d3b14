// The KV map: every block of every engine, coloured by who holds it, filled as far as it is; and the same in numbers.

import { $, classed, keyed, make, row, say, show, swatch } from "./dom.js";
import { colour, cursor, fitted, onTheme } from "./canvas.js";
import { count, ownerColour, ownerInk, ownerLetter, plural, requestOf, share, shortId, stateWords } from "./words.js";

const [FREE, CACHED, FENCED, HELD] = [0, 1, 2, 3]; // as the engine counts places
const CELL_MAX = 18;
const CELL_MIN = 5;
const OWNERS_SHOWN = 12;
const SIGNS = [
  ["filled", "filled, in its owner's colour"], ["tail", "tail: held, not filled"], ["lookahead", "lookahead: held ahead"],
  ["cached", "cached, held by nobody"], ["fenced", "fenced: a step may still write it"], ["free", "free"],
];
const PLACES = [
  ["filled", "filled", "filled"], ["tail", "tail", "tail"], ["lookahead", "lookahead", "lookahead"],
  ["cached_idle", "cached, idle", "cached"], ["fenced", "fenced", "fenced"], ["free", "free", "free"],
];

class BlockMap {
  constructor(replica, open) {
    this.caption = make("figcaption");
    this.canvas = make("canvas", { class: "map", tabindex: "0", role: "img", "aria-describedby": "kv-book" });
    this.element = make("figure", {}, this.caption, this.canvas);
    this.replica = replica;
    this.cells = this.columns = 0;
    this.cell = CELL_MIN;
    this.chosen = -1;
    cursor(this.canvas, {
      size: () => this.cells,
      across: () => this.columns,
      at: (x, y) => {
        const column = Math.floor(x / this.cell);
        const place = Math.floor(y / this.cell) * this.columns + column;
        return column < this.columns && place < this.cells ? place : -1;
      },
      moved: (place) => this.choose(place),
      choose: (place) => {
        const owner = this.sequence(this.owner[place * this.per]);
        if (owner?.request_id) open(requestOf(owner.request_id));
      },
    });
  }

  take(sight) {
    const blocks = sight.runs.reduce((sum, run) => sum + run[0], 0);
    if (this.place?.length !== blocks) {
      this.place = new Uint8Array(blocks);
      this.filled = new Uint32Array(blocks);
      this.owner = new Int32Array(blocks);
      this.holders = new Uint32Array(blocks);
    }
    let begin = 0;
    for (const [length, place, filled, owner, holders] of sight.runs) {
      this.place.fill(place, begin, begin + length);
      this.filled.fill(filled, begin, begin + length);
      this.owner.fill(owner, begin, begin + length);
      this.holders.fill(holders, begin, begin + length);
      begin += length;
    }
    this.sight = sight;
    this.byNumber = new Map(sight.sequences.map((one) => [one.number, one]));
  }

  sequence(number) {
    return this.byNumber.get(number);
  }

  choose(place) {
    this.chosen = place;
    say($("kv-reading"), place < 0 ? "" : this.words(place));
    this.draw();
  }

  words(place) {
    const block = place * this.per;
    const [where, filled, owner] = [this.place[block], this.filled[block], this.owner[block]];
    const slots = this.sight.block_slots;
    const name = `Block ${count(block)}: `;
    if (where === FREE) return `${name}free`;
    if (where === CACHED) return `${name}cached; nobody holds it, a prompt with this prefix would find it`;
    if (where === FENCED) return `${name}given up, until the step that may still write it is done`;
    const by = this.sequence(owner);
    const whose = by ? `${ownerLetter(owner)}, ${by.request_id ? requestOf(by.request_id) : "a request of another tenant"}` : "nobody known";
    const others = this.holders[block] > 1 ? `, shared by ${plural(this.holders[block], "sequence")}` : "";
    return `${name}held by ${whose}; ${filled} of ${slots} slots filled${filled ? "" : ", lookahead"}${others}`;
  }

  draw(several) {
    this.several = several ?? this.several;
    const blocks = this.place.length;
    const wide = Math.max(1, this.canvas.clientWidth);
    const tall = wide < 480 ? 420 : this.several ? 220 : 430;
    let cell = Math.max(CELL_MIN, Math.min(CELL_MAX, Math.floor(Math.sqrt((wide * tall) / blocks))));
    while (cell > CELL_MIN && Math.ceil(blocks / Math.floor(wide / cell)) * cell > tall) cell -= 1;
    const columns = Math.max(1, Math.floor(wide / cell));
    this.per = Math.ceil(blocks / (columns * Math.floor(tall / cell))); // blocks of one cell, where there are too many
    this.cells = Math.ceil(blocks / this.per);
    [this.cell, this.columns] = [cell, columns];
    const { pen } = fitted(this.canvas, Math.ceil(this.cells / columns) * cell);
    for (let place = 0; place < this.cells; place += 1) {
      this.paint(pen, place, (place % columns) * cell, Math.floor(place / columns) * cell, cell - (cell > 4 ? 1 : 0));
    }
    this.letters(pen);
    if (this.chosen >= 0 && this.chosen < this.cells) {
      pen.strokeStyle = colour("ink");
      pen.lineWidth = 2;
      pen.strokeRect((this.chosen % columns) * cell - 0.5, Math.floor(this.chosen / columns) * cell - 0.5, cell, cell);
    }
  }

  paint(pen, place, x, y, size) {
    const block = place * this.per;
    const where = this.place[block];
    if (where === HELD) {
      const own = ownerColour(this.owner[block] < 0 ? 0 : this.owner[block]);
      const part = this.filled[block] / this.sight.block_slots;
      pen.globalAlpha = 0.28;
      pen.fillStyle = own;
      if (part > 0) pen.fillRect(x, y, size, size);
      pen.globalAlpha = 1;
      pen.fillRect(x, y + size * (1 - part), size, size * part);
      if (part === 0) this.outline(pen, own, x, y, size, [2, 1]);
      return;
    }
    if (where === FREE) {
      pen.fillStyle = colour("faint");
      pen.fillRect(x, y, size, size);
      return;
    }
    pen.strokeStyle = colour(where === CACHED ? "quiet" : "muted"); // one stroke: cached; two: fenced
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x + 0.5, y + size - 0.5);
    pen.lineTo(x + size - 0.5, y + 0.5);
    if (where === FENCED) {
      pen.moveTo(x + 0.5, y + 0.5);
      pen.lineTo(x + size - 0.5, y + size - 0.5);
    }
    pen.stroke();
    this.outline(pen, colour("rule"), x, y, size, []);
  }

  outline(pen, own, x, y, size, dash) {
    pen.strokeStyle = own;
    pen.lineWidth = 1;
    pen.setLineDash(dash);
    pen.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    pen.setLineDash([]);
  }

  // Each owner's letter, once, where it holds most in a row: the map can be read without its colours.
  letters(pen) {
    const longest = new Map();
    let begin = 0;
    for (const [length, place, , owner] of this.sight.runs) {
      if (place === HELD && length > (longest.get(owner)?.length ?? 0)) longest.set(owner, { begin, length });
      begin += length;
    }
    pen.font = "700 11px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (const [owner, run] of longest) {
      const place = Math.floor(run.begin / this.per);
      const x = Math.max(6, (place % this.columns) * this.cell + this.cell / 2);
      const y = Math.max(7, Math.floor(place / this.columns) * this.cell + this.cell / 2);
      pen.fillStyle = ownerColour(owner);
      pen.fillRect(x - 6, y - 7, 12, 13);
      pen.fillStyle = ownerInk(owner);
      pen.fillText(ownerLetter(owner), x, y);
    }
  }
}

export class KvPanel {
  constructor(open) {
    this.open = open;
    this.maps = new Map();
    keyed($("kv-legend"), SIGNS, ([kind]) => kind, ([kind, words]) => make("li", {}, swatch(kind), words), () => {});
    keyed(
      $("kv-book").tBodies[0], PLACES, ([place]) => place,
      ([place, words, kind]) => {
        const one = make("tr", { "data-place": place }, make("td", {}, swatch(kind), words), make("td"), make("td"));
        return one;
      },
      () => {},
    );
    this.total = $("kv-book").tFoot.appendChild(make("tr", { "data-place": "total" }, make("th", { scope: "row" }, "in all"), make("td"), make("td")));
    const redraw = () => this.maps.forEach((map) => map.sight && map.draw());
    onTheme(redraw);
    new ResizeObserver(redraw).observe($("kv-maps"));
  }

  draw(model) {
    const { sights } = model.event;
    for (const replica of this.maps.keys()) {
      if (!sights.some((sight) => sight.replica === replica)) this.maps.delete(replica);
    }
    keyed(
      $("kv-maps"), sights, (sight) => sight.replica,
      (sight) => {
        const map = new BlockMap(sight.replica, this.open);
        this.maps.set(sight.replica, map);
        return map.element;
      },
      (_, sight) => {
        const map = this.maps.get(sight.replica);
        map.take(sight);
        const blocks = map.place.length;
        say(map.caption, sights.length > 1 ? `Engine ${sight.replica}` : "");
        show(map.caption, sights.length > 1);
        const held = map.place.reduce((sum, place) => sum + (place === HELD), 0);
        map.canvas.setAttribute(
          "aria-label",
          `KV map of engine ${sight.replica}: ${plural(blocks, "block")}, ${count(held)} held. Arrow keys move over it, Enter opens the request.`,
        );
      },
    );
    for (const map of this.maps.values()) map.draw(sights.length > 1); // all are in the document now, and have a width
    this.numbers(model);
    this.owners(model);
  }

  numbers(model) {
    const { sights } = model.event;
    const book = model.book();
    const total = book.total ?? 0;
    for (const line of $("kv-book").tBodies[0].rows) {
      const slots = book[line.dataset.place] ?? 0;
      say(line.cells[1], sights.length ? count(slots) : "–");
      say(line.cells[2], share(total ? slots / total : null));
    }
    say(this.total.cells[1], sights.length ? count(total) : "–");
    const blocks = sights.reduce((sum, sight) => sum + sight.slots.total / sight.block_slots, 0);
    const used = book.filled + book.tail;
    const words = [`${plural(blocks, "block")} of ${sights[0]?.block_slots} tokens`];
    if (used) words.push(`${share(book.tail / used)} of what is begun is unfilled`);
    const per = Math.max(0, ...[...this.maps.values()].map((map) => map.per ?? 0));
    if (per > 1) words.push(`one square is ${per} blocks`);
    const old_s = Math.max(0, ...sights.map((sight) => sight.age_ns)) / 1e9;
    if (old_s > 3) words.push(`as it was ${old_s.toFixed(0)} s ago`);
    say($("kv-sub"), sights.length ? words.join(" · ") : "no engine has shown what it holds yet");
  }

  owners(model) {
    const holding = model.sequences().filter((one) => one.blocks).sort((a, b) => b.blocks - a.blocks || a.number - b.number);
    keyed(
      $("kv-owners").tBodies[0], holding.slice(0, OWNERS_SHOWN), (one) => `${one.replica} ${one.number}`,
      (one) => {
        const line = row(4);
        const sign = swatch("own");
        say(sign, ownerLetter(one.number));
        sign.style.backgroundColor = ownerColour(one.number);
        sign.style.color = ownerInk(one.number);
        sign.removeAttribute("aria-hidden");
        line.cells[0].append(sign);
        if (one.request_id) {
          const id = requestOf(one.request_id);
          const button = make("button", { type: "button", class: "id", title: id }, shortId(id));
          button.addEventListener("click", () => this.open(id));
          line.cells[0].append(button);
        } else {
          line.cells[0].append("another tenant's");
        }
        return line;
      },
      (line, one) => {
        const chosen = [...this.maps.values()].some(
          (map) => map.replica === one.replica && map.chosen >= 0 && map.owner[map.chosen * map.per] === one.number,
        );
        classed(line, chosen ? "chosen" : "");
        say(line.cells[1], stateWords(one.state).split(":")[0]);
        say(line.cells[2], count(one.computed_tokens));
        say(line.cells[3], count(one.blocks));
      },
    );
    show($("kv-nobody"), !holding.length);
    show($("kv-owners"), holding.length > 0);
    const more = holding.length - OWNERS_SHOWN;
    say($("kv-owners").caption, more > 0 ? `Who holds it: the first ${OWNERS_SHOWN}, and ${count(more)} more` : "Who holds it");
  }
}
