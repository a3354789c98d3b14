// What has been heard so far: bounded, like everything that stays open for long.

const STEPS_MAX = 480;
const REQUESTS_MAX = 100;

export class Model {
  constructor() {
    this.vocabulary = { states: [], parts: [] };
    this.event = null;
    this.steps = []; // oldest first
    this.requests = new Map();
  }

  hear(event) {
    if (event.vocabulary) this.vocabulary = event.vocabulary;
    this.event = event;
    const steps = [...event.steps].reverse();
    this.steps = (event.whole ? steps : this.steps.concat(steps)).slice(-STEPS_MAX);
    this.remember(event);
  }

  // Those in flight come with each event; those that have ended once.
  remember(event) {
    const kept = event.whole ? [] : [...this.requests.values()].filter((one) => one.outcome !== null);
    const all = new Map(kept.map((one) => [one.request_id, one]));
    for (const one of event.requests) all.set(one.request_id, one);
    const newest = [...all.values()].sort((a, b) => b.accepted_ns - a.accepted_ns).slice(0, REQUESTS_MAX);
    this.requests = new Map(newest.map((one) => [one.request_id, one]));
  }

  // The KV book of all engines that have shown what is in their blocks.
  book() {
    const sum = {};
    for (const sight of this.event.sights) {
      for (const [place, slots] of Object.entries(sight.slots)) sum[place] = (sum[place] ?? 0) + slots;
    }
    return sum;
  }

  sequences() {
    return this.event.sights.flatMap((sight) => sight.sequences.map((one) => ({ ...one, replica: sight.replica })));
  }

  // States in the order of a life; what the vocabulary does not know comes last.
  inOrder(states) {
    const place = (state) => (this.vocabulary.states.indexOf(state) + 1 || Infinity);
    return Object.entries(states).sort(([a], [b]) => place(a) - place(b) || 0);
  }
}
