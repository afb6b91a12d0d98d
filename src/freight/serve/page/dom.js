// Elements, numbers and the clipboard. Text goes into the page as text nodes only: there is no innerHTML anywhere.

export const $ = (id) => document.getElementById(id);

/** An element with properties and children; a string child becomes a text node. */
export function el(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** 12,345; a dash for what is not known. */
export const count = (value) => (isNumber(value) ? whole.format(value) : "–");

/** 48.3 below a hundred, 1,893 above. */
export const rate = (value) => (isNumber(value) ? (value < 100 && value > 0 ? tenths : whole).format(value) : "–");

/** A fraction as per cent. */
export const share = (value) => (isNumber(value) ? `${whole.format(100 * value)} %` : "–");

/** Milliseconds as a person reads them. */
export const duration = (ms) => (ms < 1000 ? `${whole.format(ms)} ms` : `${tenths.format(ms / 1000)} s`);

/** Copies, also where the page came by plain HTTP and the browser has no clipboard for it. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { value: text, className: "sr" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that copies what `text` returns when it is pressed. */
export function copyButton(text) {
  const button = el("button", { type: "button", className: "copy", textContent: "Copy" });
  button.addEventListener("click", async () => {
    let done = "Copied";
    try {
      await copy(text());
    } catch {
      done = "Not allowed";
    }
    button.textContent = done;
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}
