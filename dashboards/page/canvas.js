// What the two pictures share: sharp canvases, the colours of the style sheet, and patterns.

export function fitted(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(1, canvas.clientWidth);
  if (height && canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const tall = height || canvas.clientHeight;
  const wide = [Math.round(width * ratio), Math.round(tall * ratio)];
  if (canvas.width !== wide[0] || canvas.height !== wide[1]) [canvas.width, canvas.height] = wide;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, tall);
  return { pen, width, height: tall };
}

let colours = new Map();
const patterns = new Map();

export function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

export function onTheme(redraw) {
  const changed = () => {
    colours = new Map();
    patterns.clear();
    redraw();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

// Lines over nothing: they say what a thing is to those who do not see its colour.
export function hatch(name, { step = 5, both = false, width = 1 } = {}) {
  const key = `${name} ${step} ${both} ${width}`;
  if (!patterns.has(key)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = step;
    const pen = tile.getContext("2d");
    pen.strokeStyle = colour(name);
    pen.lineWidth = width;
    pen.beginPath();
    for (const at of [-step, 0, step]) {
      pen.moveTo(at - 1, step + 1);
      pen.lineTo(at + step + 1, -1);
      if (both) {
        pen.moveTo(at - 1, -1);
        pen.lineTo(at + step + 1, step + 1);
      }
    }
    pen.stroke();
    patterns.set(key, pen.createPattern(tile, "repeat"));
  }
  return patterns.get(key);
}

// Keys and pointer move a cursor over `size()` things; `choose` is Enter or a click.
export function cursor(canvas, { size, at, across, moved, choose }) {
  let place = -1;
  const go = (next) => {
    place = size() ? Math.max(0, Math.min(size() - 1, next)) : -1;
    moved(place);
  };
  canvas.addEventListener("pointermove", (event) => {
    const found = at(event.offsetX, event.offsetY);
    if (found !== place) {
      place = found;
      moved(place);
    }
  });
  canvas.addEventListener("pointerleave", () => {
    place = -1;
    moved(place);
  });
  canvas.addEventListener("click", (event) => {
    place = at(event.offsetX, event.offsetY);
    moved(place);
    if (place >= 0) choose(place);
  });
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across(), ArrowUp: -across(), Home: -Infinity, End: Infinity };
    if (event.key in steps) go(place < 0 && steps[event.key] < 0 ? size() - 1 : place + steps[event.key]);
    else if (event.key === "Enter" && place >= 0) choose(place);
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("blur", () => {
    place = -1;
    moved(place);
  });
}
