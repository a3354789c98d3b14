// What the tests ask of a page that is open.

const seen = (selector) => [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility());
const number = (text) => Number(text.replace(/\D/g, ""));
const later = () => new Promise(requestAnimationFrame);

const colour = (text) => {
  const found = text.match(/[\d.]+/g).map(Number);
  return found.length < 4 ? [...found, 1] : found;
};

const luminance = (of) => {
  const [r, g, b] = of.slice(0, 3).map((one) => (one / 255 <= 0.03928 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};

const behind = (one) => {
  for (; one; one = one.parentElement) {
    const found = colour(getComputedStyle(one).backgroundColor);
    if (found[3] === 1) return found;
  }
  return [255, 255, 255, 1];
};

window.probe = {
  // The KV book: as it is written, as the map's blocks come to, and as the event has it; all of one moment.
  async books() {
    const { model, kv } = await import("/page/page.js");
    await later();
    await later();
    const sum = { total: 0, free: 0, cached_idle: 0, filled: 0, tail: 0, lookahead: 0, fenced: 0 };
    for (const map of kv.maps.values()) {
      const size = map.sight.block_slots;
      map.place.forEach((place, block) => {
        const filled = map.filled[block];
        sum.total += size;
        if (place < 3) sum[["free", "cached_idle", "fenced"][place]] += size;
        else if (filled) [sum.filled, sum.tail] = [sum.filled + filled, sum.tail + size - filled];
        else sum.lookahead += size;
      });
    }
    return { written: this.written(), map: sum, event: model.book() };
  },

  written() {
    const rows = [...document.querySelectorAll("#kv-book tr[data-place]")];
    return Object.fromEntries(rows.map((row) => [row.dataset.place, number(row.cells[1].textContent)]));
  },

  owners: () => document.querySelectorAll("#kv-owners tbody tr").length,

  // The ledger of the request that is open.
  ledger() {
    const rows = [...document.querySelectorAll("#detail-ledger tbody tr")];
    const foot = [...document.querySelectorAll("#detail-ledger tfoot td[data-ns]")];
    return {
      id: document.getElementById("detail-title").textContent,
      states: Object.fromEntries(rows.map((row) => [row.dataset.state, Number(row.cells[2].dataset.ns)])),
      written: rows.map((row) => number(row.cells[2].textContent)),
      foot: foot.map((cell) => Number(cell.dataset.ns)),
      verdict: document.querySelector("#detail-ledger tfoot tr:last-child td:last-child").textContent,
      why: document.getElementById("why-summary").textContent,
    };
  },

  // Text that is hard to read on what is behind it: less than WCAG 2 asks of AA.
  faint() {
    const found = [];
    for (const one of seen("body *")) {
      if (![...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim())) continue;
      const [a, b] = [luminance(colour(getComputedStyle(one).color)), luminance(behind(one))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < 4.5) found.push(`${one.tagName}.${one.className} ${one.textContent.slice(0, 20)} ${ratio.toFixed(2)}`);
    }
    return found;
  },

  // What can be used or looked at and has no name for who does not see it.
  nameless() {
    const named = (one) =>
      (one.tagName === "BUTTON" && one.textContent.trim()) || one.ariaLabel || one.getAttribute("aria-labelledby") ||
      one.labels?.length || one.caption?.textContent;
    return seen("button, input, canvas, section, table, dialog").filter((one) => !named(one)).map((one) => one.outerHTML.slice(0, 80));
  },

  // How many colours a picture is drawn in.
  colours(selector) {
    const one = document.querySelector(selector);
    const data = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
    return new Set(new Uint32Array(data.buffer)).size;
  },

  focus() {
    const one = document.activeElement;
    return { name: one.id || one.className || one.tagName, outline: getComputedStyle(one).outlineStyle };
  },

  async bounded() {
    const { model } = await import("/page/page.js");
    return model.requests.size <= 100 && model.steps.length <= 480;
  },
};
