// The engine's state, from one object per second: figures, the cache as a bar, and the last two minutes as lines.

import { $, count, isNumber, rate, share } from "./dom.js";

const WINDOW = 120; // seconds
const FIRST_WINDOW = 30; // seconds that the charts show at first; they grow to WINDOW
const GAP = 5; // seconds without an object: the line is interrupted
const HEIGHT = 30;
const SVG = "http://www.w3.org/2000/svg";

/** The paths of one chart: `fields` from the largest to the smallest, each drawn over the one before. */
class Spark {
  constructor(id, fields) {
    this.svg = $(id);
    this.fields = fields.map((field) => {
      const area = document.createElementNS(SVG, "path");
      const line = document.createElementNS(SVG, "path");
      area.setAttribute("class", `area ${field}`);
      line.setAttribute("class", `line ${field}`);
      this.svg.append(area, line);
      return { field, area, line };
    });
  }

  draw(samples, top, label) {
    const now = samples.at(-1).time;
    const span = Math.max(now - samples[0].time, FIRST_WINDOW);
    const x = ({ time }) => (WINDOW * (1 - (now - time) / span)).toFixed(1);
    for (const { field, area, line } of this.fields) {
      const y = (sample) => (HEIGHT - 1 - (HEIGHT - 2) * Math.min(sample[field] / top, 1)).toFixed(1);
      const runs = [];
      samples.forEach((sample, i) => {
        if (i === 0 || sample.time - samples[i - 1].time > GAP) runs.push([]);
        runs.at(-1).push(sample);
      });
      const lines = runs.map((run) => "M" + run.map((sample) => `${x(sample)} ${y(sample)}`).join("L"));
      line.setAttribute("d", lines.join(""));
      area.setAttribute("d", runs.map((run, i) => `${lines[i]}V${HEIGHT}H${x(run[0])}Z`).join(""));
    }
    this.svg.setAttribute("aria-label", label);
  }
}

function age(seconds) {
  if (!isNumber(seconds)) return "";
  const [days, hours, minutes] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60].map(Math.floor);
  if (days) return `up ${days} d ${hours} h`;
  if (hours) return `up ${hours} h ${minutes} min`;
  return minutes ? `up ${minutes} min` : `up ${Math.floor(seconds)} s`;
}

export class LiveView {
  #samples = []; // {time in seconds, generated, prompt, held, used}: held and used as shares of the cache
  #places = new Map([...document.querySelectorAll("[data-live]")].map((place) => [place.dataset.live, place]));
  #generated = new Spark("spark-generated", ["generated"]);
  #prompt = new Spark("spark-prompt", ["prompt"]);
  #cache = new Spark("spark-cache", ["used", "held"]);

  /** Takes one object of /state. What it lacks is shown as a dash. */
  show(state) {
    const cache = state.cache ?? {};
    const { capacity_tokens: capacity = 0, held_tokens: held = 0, reusable_tokens: reusable = 0 } = cache;
    this.#sample(state, capacity ? held / capacity : 0, capacity ? (held + reusable) / capacity : 0);
    const texts = {
      generated: rate(state.generated_tokens_per_s),
      prompt: rate(state.prompt_tokens_per_s),
      format: cache.format ?? state.kv_cache_dtype ?? "",
      held: count(cache.held_tokens),
      reusable: count(cache.reusable_tokens),
      free: count(capacity - held - reusable),
      running: count(state.running),
      waiting: count(state.waiting),
      hits: share(state.prefix_hit_rate),
      preemptions: count(state.preemptions),
      saturated: count(state.saturated_values),
      nan: count(state.nan_values),
    };
    for (const [name, text] of Object.entries(texts)) this.#write(this.#places.get(name), text);
    this.#showBar(capacity, held, reusable);
    this.#showCacheNote(texts.format, capacity, cache.equivalent_16bit_tokens);
    this.#showWarning(texts.format, state);
    const busy = `${count(state.running)} running`;
    this.#write($("engine-brief"), `${busy} · ${texts.generated} tok/s · cache ${share(capacity ? held / capacity : 0)}`);
    this.#write($("uptime"), ["lines: up to two minutes", age(state.uptime_s)].filter(Boolean).join(" · "));
  }

  /** Marks the figures as old (no connection), or as current. */
  stale(is) {
    $("live").classList.toggle("stale", is);
  }

  #write(place, text) {
    if (place.textContent !== text) place.textContent = text;
  }

  #sample(state, held, used) {
    const time = performance.now() / 1000;
    const [generated, prompt] = [state.generated_tokens_per_s ?? 0, state.prompt_tokens_per_s ?? 0];
    this.#samples.push({ time, generated, prompt, held, used });
    while (this.#samples[0].time < time - WINDOW) this.#samples.shift();
    for (const [spark, field, name] of [
      [this.#generated, "generated", "Generated"],
      [this.#prompt, "prompt", "Prompt"],
    ]) {
      const peak = Math.max(...this.#samples.map((sample) => sample[field]));
      const label = `${name} tokens per second in the last two minutes: now ${rate(state[`${field}_tokens_per_s`])}, most ${rate(peak)}`;
      spark.draw(this.#samples, peak || 1, label);
    }
    this.#cache.draw(this.#samples, 1, `Cache use in the last two minutes: now ${share(held)} held`);
  }

  #showBar(capacity, held, reusable) {
    const [first, second] = $("cache-bar").children;
    first.style.width = `${capacity ? (100 * held) / capacity : 0}%`;
    second.style.width = `${capacity ? (100 * reusable) / capacity : 0}%`;
    const text = `${count(held)} tokens held, ${count(reusable)} reusable, ${count(capacity)} in all`;
    $("cache-bar").setAttribute("aria-label", text);
  }

  #showCacheNote(format, capacity, equivalent) {
    const room = `Room for ${count(capacity)} tokens`;
    const more = isNumber(equivalent) && equivalent > 0 && equivalent !== capacity;
    const other = more ? `; at 16 bits it would be ${count(equivalent)} (${(capacity / equivalent).toFixed(1)}×)` : "";
    this.#write($("cache-note"), capacity ? `${room}${other}.` : "");
  }

  #showWarning(format, { saturated_values: saturated, nan_values: nan }) {
    const notes = [];
    if (saturated > 0) {
      const [values, verb] = saturated === 1 ? ["value", "was"] : ["values", "were"];
      notes.push(
        `${count(saturated)} ${values} beyond the range of ${format || "the cache"} ${verb} clipped. ` +
          "Calibrated KV scales or scales per token avoid this.",
      );
    }
    if (nan > 0) notes.push(`${count(nan)} NaN stored in the cache: answers that read them end with an error.`);
    $("saturation").hidden = !notes.length;
    this.#write($("saturation"), notes.join(" "));
  }
}
