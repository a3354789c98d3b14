// The events of /debug/live, by fetch, because an EventSource can send no key.  While the page is hidden there is no stream.

const KEY = "pellucid.key";
const SILENT_MS = 8000; // a tick is half a second, and asks workers that may take a second
const AGAIN_MS = [300, 600, 1200, 2400, 5000];
const EVENT_CHARS_MAX = 64 * 1024 * 1024;

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
  headers: () => (key.get() ? { authorization: `Bearer ${key.get()}` } : {}),
};

export class Stream {
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState; // (one of opening, live, lost, key, paused; words)
    this.wanted = false;
    this.tries = 0;
    this.control = null;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.turn());
  }

  start() {
    this.wanted = true;
    this.turn();
  }

  stop() {
    this.wanted = false;
    this.turn();
  }

  turn() {
    const open = this.wanted && document.visibilityState === "visible";
    if (open && this.control === null) this.open();
    if (!open) {
      this.close();
      this.onState("paused", "paused");
    }
  }

  close() {
    clearTimeout(this.timer);
    this.control?.abort();
    this.control = null;
  }

  async open() {
    clearTimeout(this.timer);
    const control = (this.control = new AbortController());
    this.onState("opening", this.tries ? "connecting again" : "connecting");
    let words = "the connection is gone";
    try {
      const answer = await fetch("/debug/live", { headers: key.headers(), signal: control.signal, cache: "no-store" });
      if (answer.ok) {
        await this.read(answer.body.getReader(), control);
        if (this.control === control && this.tries++ === 0) return this.open(); // a stream ends after a while, without a trouble
      } else {
        words = await this.refused(answer);
      }
      if (words === null) return;
    } catch (error) {
      if (error instanceof SyntaxError) throw error; // ours
    }
    if (this.control !== control) return; // somebody has closed it, or opened another
    this.close();
    this.onState("lost", words);
    this.timer = setTimeout(() => this.turn(), AGAIN_MS[Math.min(this.tries++, AGAIN_MS.length - 1)] * (0.75 + Math.random() / 2));
  }

  // Why there is no stream; null where a person has to do something first.
  async refused(answer) {
    const words = (await answer.json().catch(() => null))?.error?.message ?? `HTTP ${answer.status}`;
    if (answer.status !== 401) return words;
    this.wanted = false;
    this.close();
    this.onState("key", key.get() ? "This key is not good." : "");
    return null;
  }

  async read(reader, control) {
    const decoder = new TextDecoder();
    let parts = [];
    let chars = 0;
    for (;;) {
      const guard = setTimeout(() => control.abort(), SILENT_MS);
      const { done, value } = await reader.read().finally(() => clearTimeout(guard));
      if (done) return;
      let rest = decoder.decode(value, { stream: true });
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
        parts.push(rest.slice(0, end));
        rest = rest.slice(end + 2);
        this.event(parts.join(""));
        parts = [];
        chars = 0;
      }
      parts.push(rest);
      chars += rest.length;
      if (chars > EVENT_CHARS_MAX) throw new RangeError("an event without an end");
    }
  }

  event(text) {
    if (!text.startsWith("data: ")) return;
    this.tries = 0;
    this.onState("live", "live");
    this.onEvent(JSON.parse(text.slice(6)));
  }
}
