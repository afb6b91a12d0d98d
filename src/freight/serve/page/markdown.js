// A small part of Markdown, drawn while it arrives: paragraphs, headings, lists, code blocks, inline code, bold.
//
// Everything else stays plain text; no part of a model's text is ever parsed as HTML. A complete block is never touched
// again, so an update costs as much as the last paragraph, however long the answer. The result does not depend on how
// the text was cut into pieces.

import { copyButton, el } from "./dom.js";

const FENCE = /^\s*(`{3,})\s*([^`]*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|(\d{1,9})[.)])\s+(.*)$/;
const RULE = /^ {0,3}(-{3,}|\*{3,}|_{3,})\s*$/;
// The beginning of a line whose kind depends on the next characters.
const UNDECIDED = /^\s*([-*+_#]*\s*|\d{0,9}[.)]?\s*|`{1,2}|`{3,}[^`]*)$/;

/** Nodes of one line or paragraph. Linear in its length: the partner of a marker is searched for once. */
export function inline(text) {
  const nodes = [];
  const unpaired = new Set();
  let plain = 0;
  let at = 0;
  while (at < text.length) {
    const mark = text[at] === "`" ? /`+/y : text.startsWith("**", at) ? /\*\*/y : null;
    if (!mark) {
      const next = /[`*]/g;
      next.lastIndex = at + 1;
      at = next.exec(text)?.index ?? text.length;
      continue;
    }
    mark.lastIndex = at;
    const marker = mark.exec(text)[0];
    const start = at + marker.length;
    const end = unpaired.has(marker) ? -1 : text.indexOf(marker, start + 1);
    if (end < 0) {
      unpaired.add(marker);
      at = start;
      continue;
    }
    if (plain < at) nodes.push(text.slice(plain, at));
    nodes.push(el(marker === "**" ? "strong" : "code", { textContent: text.slice(start, end) }));
    at = plain = end + marker.length;
  }
  if (plain < text.length) nodes.push(text.slice(plain));
  return nodes;
}

export class Markdown {
  #root;
  #line = ""; // the current line so far
  #begun = null; // the handler of the rest of the current line, once its kind is known
  #leaf = null; // the element that the next line of text may continue
  #source = ""; // its text
  #lists = []; // the open lists, outermost first: {indent, list}
  #code = null; // the open code block: {text, fence}

  constructor(root) {
    this.#root = root;
  }

  append(text) {
    const lines = (this.#line + text).split("\n");
    this.#line = lines.pop();
    for (const line of lines) this.#draw(line, true);
    if (this.#line && (this.#begun || !UNDECIDED.test(this.#line))) this.#draw(this.#line, false);
  }

  /** Ends the text. */
  end() {
    if (this.#line) this.#draw(this.#line, true);
    this.#line = "";
  }

  #draw(line, complete) {
    this.#begun ??= this.#code ? this.#inCode(line) : this.#block(line);
    this.#begun(line, complete);
    if (complete) this.#begun = null;
  }

  #inCode(line) {
    const { text, fence } = this.#code;
    const close = FENCE.exec(line);
    if (close && !close[2] && close[1].length >= fence) {
      this.#code = null;
      return () => {};
    }
    if (this.#code.lines++) text.appendData("\n"); // before each line but the first: no empty line at the end
    let shown = 0;
    return (now) => {
      text.appendData(now.slice(shown));
      shown = now.length;
    };
  }

  #block(line) {
    let found;
    if (!line.trim()) {
      this.#leaf = null;
      return () => {};
    }
    if ((found = FENCE.exec(line))) return this.#openCode(found);
    if (RULE.test(line)) {
      this.#close();
      this.#root.append(el("hr"));
      return () => {};
    }
    if ((found = HEADING.exec(line))) {
      this.#close();
      this.#open(el(`h${Math.min(found[1].length + 2, 6)}`), this.#root);
      return this.#text(line.length - found[2].length, true);
    }
    if ((found = ITEM.exec(line))) {
      const item = el("li");
      this.#open(item, this.#list(found[1].length, found[3]));
      return this.#text(line.length - found[4].length);
    }
    const indented = /^\s{2,}/.test(line) && this.#lists.length;
    if (!this.#leaf) {
      if (!indented) this.#close();
      this.#open(el("p"), indented ? this.#lists.at(-1).list.lastChild : this.#root);
    }
    return this.#text(line.length - line.trimStart().length);
  }

  #openCode([, fence, language]) {
    const text = document.createTextNode("");
    this.#close();
    const bar = el("div", { className: "code-bar" }, language.trim(), copyButton(() => text.data));
    const code = el("pre", { tabIndex: 0 }, el("code", {}, text));
    this.#root.append(el("div", { className: "code" }, bar, code));
    this.#code = { text, fence: fence.length, lines: 0 };
    return () => {};
  }

  #list(indent, number) {
    while (this.#lists.length && this.#lists.at(-1).indent > indent) this.#lists.pop();
    const tag = number === undefined ? "UL" : "OL";
    const last = this.#lists.at(-1);
    if (last && indent < last.indent + 2 && last.list.tagName === tag) return last.list;
    if (last && indent < last.indent + 2) this.#lists.pop(); // a list of the other kind takes its place
    const list = el(tag.toLowerCase());
    if (number !== undefined) list.start = Number(number);
    const outer = this.#lists.at(-1)?.list.lastChild ?? this.#root;
    outer.append(list);
    this.#lists.push({ indent, list });
    return list;
  }

  #open(leaf, parent) {
    const place = leaf.tagName === "LI" ? el("span") : leaf; // an item may hold a list after its text
    if (place !== leaf) leaf.append(place);
    parent.append(leaf);
    this.#leaf = place;
    this.#source = "";
  }

  #close() {
    this.#leaf = null;
    this.#lists = [];
  }

  /** Writes lines from their character `from` on into the leaf; `alone`: the next line does not continue it. */
  #text(from, alone = false) {
    const leaf = this.#leaf;
    const before = this.#source && `${this.#source}\n`;
    let drawn = null;
    return (line, complete) => {
      const text = before + line.slice(from);
      const added = drawn !== null && text.slice(drawn.length);
      // plain text after plain text is appended: selections survive, and nothing is parsed again
      if (drawn !== null && !/[`*]/.test(text)) leaf.lastChild ? leaf.lastChild.appendData(added) : leaf.append(added);
      else leaf.replaceChildren(...inline(text));
      drawn = this.#source = text;
      if (complete && alone) this.#leaf = null;
    };
  }
}
