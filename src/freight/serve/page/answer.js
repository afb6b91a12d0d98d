// One exchange: the user's prompt and the growing answer. Text is collected and drawn once per frame, or less often if
// drawing is slow, so that a paragraph of thousands of words does not block the user's input.

import { copyButton, count, duration, el, rate } from "./dom.js";
import { Markdown } from "./markdown.js";

const ENDS = { length: "token limit reached", stop: "complete", tool_calls: "tool call" };
const QUICK = 8; // ms: after a longer drawing, the next one waits four times as long as it took
const STATS_EVERY = 250; // ms: figures that change with every frame are unreadable

export class Exchange {
  text = ""; // the answer's content so far, which the next request repeats as history
  reasoning = "";
  failed = false;
  #pending = ""; // text that is not drawn yet; the same for reasoning below
  #pendingReasoning = "";
  #scheduled = false;
  #cost = 0; // ms that the last drawing took, layout included
  #calls = []; // of tools: {name, arguments, code}
  #usage = null;
  #sent = 0;
  #first = 0; // when the first token came, 0 before it
  #last = 0;
  #statsAt = 0;

  /** `draw` is called after each drawing; `again` when the user wants another answer. */
  constructor(mode, prompt, { draw, again }) {
    this.mode = mode;
    this.prompt = prompt;
    this.#drawn = draw;
    this.body = el("div", { className: "body" });
    this.stats = el("p", { className: "stats" });
    this.answer = el("article", { className: "answer", ariaLabel: "Answer" });
    const regenerate = el("button", { type: "button", className: "again", textContent: "Regenerate" });
    regenerate.addEventListener("click", again);
    this.actions = el("div", { className: "actions" }, copyButton(() => this.copied()), regenerate);
    this.element = el("div", { className: `exchange ${mode}` });
    if (mode === "chat") this.element.append(el("article", { className: "given", ariaLabel: "You", textContent: prompt }));
    this.element.append(this.answer);
  }

  #drawn;

  copied() {
    return this.mode === "chat" ? this.text : this.prompt + this.text;
  }

  /** Empties the exchange: its request is sent now. */
  begin() {
    this.text = this.reasoning = "";
    this.failed = false;
    this.#calls = [];
    this.#usage = null;
    this.#first = 0;
    this.#sent = performance.now();
    this.thoughts = null;
    this.body.replaceChildren();
    this.body.className = `body ${this.mode === "chat" ? "markdown" : "plain"}`;
    this.answer.replaceChildren(this.body, el("footer", {}, this.stats, this.actions));
    this.answer.ariaBusy = "true";
    this.stats.textContent = "waiting for the first token";
    if (this.mode === "chat") this.view = new Markdown(this.body);
    else {
      const continued = document.createTextNode("");
      this.body.append(el("span", { className: "given", textContent: this.prompt }), continued);
      this.view = { append: (text) => continued.appendData(text), end: () => {} };
    }
  }

  addText(text) {
    this.text += text;
    this.#pending += text;
    this.#arrived();
  }

  addReasoning(text) {
    this.reasoning += text;
    this.#pendingReasoning += text;
    this.#arrived();
  }

  /** Adds one entry of a delta's tool_calls. Its arguments may come in pieces. */
  addToolCall({ index = 0, function: called = {} }) {
    this.#calls[index] ??= this.#openCall();
    const call = this.#calls[index];
    call.name.textContent += called.name ?? "";
    call.arguments += called.arguments ?? "";
    this.#arrived();
  }

  setUsage(usage) {
    this.#usage = usage;
  }

  /** Ends the exchange: the answer is complete, or was stopped (`end` "stopped"). */
  finish(end) {
    this.#end();
    this.#showStats(ENDS[end] ?? end);
  }

  fail(message) {
    this.failed = true;
    this.#end();
    this.#showStats("failed");
    const note = el("p", { className: "failure" }, el("b", { textContent: "Error " }), message);
    note.setAttribute("role", "alert");
    this.body.after(note);
    this.#drawn();
  }

  get tokens() {
    return this.#usage?.completion_tokens;
  }

  #arrived() {
    this.#last = performance.now();
    this.#first ||= this.#last;
    if (this.#scheduled) return;
    this.#scheduled = true;
    const draw = () => this.#scheduled && this.#draw();
    setTimeout(() => requestAnimationFrame(draw), this.#cost > QUICK ? 4 * this.#cost : 0);
  }

  #draw() {
    const begin = performance.now();
    this.#scheduled = false; // a hidden tab has no frames: the end draws the rest
    if (this.#pendingReasoning) this.#drawReasoning();
    if (this.#pending) this.view.append(this.#pending);
    this.#pending = this.#pendingReasoning = "";
    for (const call of this.#calls) if (call) call.code.textContent = call.arguments;
    if (begin - this.#statsAt > STATS_EVERY) this.#showStats();
    this.#drawn();
    this.#cost = performance.now() - begin;
  }

  #drawReasoning() {
    if (!this.thoughts) {
      this.thoughts = { text: document.createTextNode(""), title: el("summary", { textContent: "Reasoning …" }) };
      const text = el("div", {}, this.thoughts.text);
      this.body.before(el("details", { className: "reasoning" }, this.thoughts.title, text));
    }
    this.thoughts.text.appendData(this.#pendingReasoning);
  }

  #openCall() {
    const name = el("b");
    const code = el("code");
    const title = el("figcaption", {}, "Tool call ", name);
    this.body.after(el("figure", { className: "tool" }, title, el("pre", { tabIndex: 0 }, code)));
    return { name, code, arguments: "" };
  }

  #end() {
    this.#draw();
    this.view.end();
    for (const call of this.#calls) if (call) call.code.textContent = pretty(call.arguments);
    if (this.thoughts) this.thoughts.title.textContent = "Reasoning";
    this.answer.ariaBusy = "false";
    this.#drawn();
  }

  #showStats(end) {
    this.#statsAt = performance.now();
    const { completion_tokens: tokens, prompt_tokens: prompt, prompt_tokens_details: details } = this.#usage ?? {};
    const cached = details?.cached_tokens;
    const seconds = (this.#last - this.#first) / 1000;
    const parts = [];
    if (tokens !== undefined) parts.push(`${count(tokens)} token${tokens === 1 ? "" : "s"}`);
    if (tokens > 1 && seconds > 0) parts.push(`${rate((tokens - 1) / seconds)} tok/s`);
    if (this.#first) parts.push(`first token ${duration(this.#first - this.#sent)}`);
    if (cached !== undefined) parts.push(`${count(cached)} of ${count(prompt)} prompt tokens cached`);
    if (end) parts.push(end);
    this.stats.replaceChildren(...parts.map((part) => el("span", { textContent: part })));
  }
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // a call that was cut stays as it came
  }
}
