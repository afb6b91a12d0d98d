// The page at /: it connects to the server it came from, follows the engine, and holds the conversation.

import { Exchange } from "./answer.js";
import { $, count } from "./dom.js";
import { ServerError, ask, events, key, reason } from "./http.js";
import { LiveView } from "./live.js";

const SILENCE = 10_000; // ms without an object of /state/stream: the connection counts as lost
const COMPLETION_TOKENS = 256; // without a limit, the API's own is 16

const live = new LiveView();
const exchanges = [];
let served = null; // {model, chat}: what answers, once it is known
let current = null; // {exchange, abort}: the answer that is being given
let keyWait = null; // {promise, resolve}: what waits for a key

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const mode = () => $("mode").querySelector(":checked").value;

// ---- the connection ------------------------------------------------------------------------------------------------

function showStatus(state, text, banner = "") {
  $("status").dataset.state = state;
  $("status-text").textContent = text;
  $("banner").hidden = !banner;
  $("banner").textContent = banner;
  live.stale(state !== "ready");
  $("send").disabled = state !== "ready" || current !== null;
}

async function connect() {
  for (let failures = 0; ; ) {
    try {
      const health = await fetch("health", { cache: "no-store" });
      if (health.ok) {
        await identify();
        failures = 0;
        await follow();
      } else {
        const said = reason(await health.json().catch(() => null));
        showStatus("loading", "Loading", said || "The server is up, the model is not ready yet. This page waits for it.");
        failures = 0;
      }
    } catch (error) {
      if (error.status === 401) {
        await needKey();
        continue;
      }
      const banner = error instanceof ServerError ? error.message : "No connection to the server. Trying again.";
      showStatus("lost", "No connection", banner);
      failures += 1;
    }
    await sleep(Math.min(1000 * 2 ** Math.max(failures - 1, 0), 5000));
  }
}

/** Asks for the served model: its name, and whether it has a chat template. */
async function identify() {
  const models = await (await ask("v1/models")).json();
  const info = await ask("info").then((response) => response.json(), orMissing({}));
  served = { model: models.data[0].id, chat: Boolean(info.chat) };
  document.title = `${served.model} · Freight`;
  $("model").hidden = false;
  for (const place of [$("model"), $("welcome-model")]) place.textContent = served.model;
  const context = models.data[0].max_model_len ?? info.max_total_tokens;
  $("welcome-facts").textContent = context ? `${count(context)} tokens of context` : "";
  const [chat, completion] = $("mode").querySelectorAll("input");
  chat.disabled = !served.chat;
  chat.parentElement.title = served.chat ? "" : "This model has no chat template.";
  if (!served.chat) completion.checked = true;
  for (const input of $("parameters").elements) {
    const value = info.defaults?.[input.name];
    if (input.type === "number" && value !== undefined && value !== null) input.placeholder = value;
  }
  showMode();
  showStatus("ready", "Ready");
}

/** Returns a handler of a promise's failure: `value` if the server does not have the path (404). */
function orMissing(value) {
  return (error) => {
    if (error.status === 404) return value;
    throw error;
  };
}

/** Shows each object of the stream; returns or throws when it ends. */
async function follow() {
  const abort = new AbortController();
  const lost = () => abort.abort(new TypeError("silent"));
  let watch = setTimeout(lost, SILENCE);
  try {
    const response = await ask("state/stream", { signal: abort.signal }).catch(orMissing(null));
    if (!response) return await poll();
    for await (const data of events(response)) {
      clearTimeout(watch);
      watch = setTimeout(lost, SILENCE);
      live.show(JSON.parse(data));
    }
  } finally {
    clearTimeout(watch);
  }
}

/** Polls for the same objects, for a server or proxy without the stream. */
async function poll() {
  for (;;) {
    const state = await ask("state", { signal: AbortSignal.timeout(SILENCE) }).catch(orMissing(null));
    if (state) live.show(await state.json());
    await sleep(state ? 1000 : SILENCE);
  }
}

function needKey() {
  $("key-text").textContent = key.get() ? "The server did not accept this key." : "This server asks for a key.";
  $("key-form").hidden = false;
  showStatus("key", "Key needed");
  $("key").focus();
  keyWait ??= Promise.withResolvers();
  return keyWait.promise;
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value);
  $("key").value = "";
  $("key-form").hidden = true;
  keyWait?.resolve();
  keyWait = null;
  $("prompt").focus();
});

// ---- the conversation ----------------------------------------------------------------------------------------------

function showMode() {
  const chat = mode() === "chat";
  $("prompt").placeholder = chat ? "Write a message" : "Write the beginning of a text; the model continues it";
  $("prompt-label").textContent = chat ? "Message" : "Text to continue";
  for (const field of document.querySelectorAll(".for-chat")) field.hidden = !chat;
  $("parameters").elements.max_tokens.placeholder = chat ? "default" : COMPLETION_TOKENS;
}

/** Returns the sampling parameters that were entered; the server decides the empty ones. */
function parameters() {
  const given = {};
  for (const input of $("parameters").elements) {
    if (input.type === "number" && input.value !== "") given[input.name] = input.valueAsNumber;
  }
  return given;
}

function request(exchange) {
  const stream = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const common = { model: served.model, ...parameters(), ...stream };
  if (exchange.mode === "completion") {
    return ["v1/completions", { prompt: exchange.prompt, max_tokens: COMPLETION_TOKENS, ...common }];
  }
  const messages = [];
  const system = $("parameters").elements.system.value.trim();
  if (system) messages.push({ role: "system", content: system });
  for (const earlier of exchanges) {
    if (earlier === exchange) break;
    // An exchange without an answer is left out: many templates refuse two user messages in a row.
    if (earlier.mode !== "chat" || !earlier.text) continue;
    messages.push({ role: "user", content: earlier.prompt }, { role: "assistant", content: earlier.text });
  }
  messages.push({ role: "user", content: exchange.prompt });
  return ["v1/chat/completions", { messages, ...common }];
}

/** Reads one answer to its end; returns why it ended. */
async function read(response, exchange) {
  let finish = null;
  for await (const data of events(response)) {
    if (data === "[DONE]") return finish ?? "stop";
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(reason(chunk) || "The server gave no reason.", 200);
    if (chunk.usage) exchange.setUsage(chunk.usage);
    const [choice] = chunk.choices ?? [];
    if (!choice) continue;
    finish = choice.finish_reason ?? finish;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? { content: choice.text };
    if (reasoning) exchange.addReasoning(reasoning);
    if (content) exchange.addText(content);
    for (const call of calls ?? []) exchange.addToolCall(call);
  }
  throw new TypeError("the stream ended early");
}

async function answer(exchange) {
  const abort = new AbortController();
  current = { exchange, abort };
  showBusy(true);
  exchange.begin();
  scroll(true);
  try {
    const [path, body] = request(exchange);
    const headers = { "Content-Type": "application/json" };
    const response = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal: abort.signal });
    exchange.finish(await read(response, exchange));
    announce(exchange.tokens === undefined ? "Answer complete" : `Answer complete, ${count(exchange.tokens)} tokens`);
  } catch (error) {
    if (abort.signal.aborted) {
      exchange.finish("stopped");
      announce("Stopped");
    } else if (error.status === 401) {
      takeBack(exchange);
      needKey().then(() => showStatus("ready", "Ready"));
    } else if (error instanceof ServerError) exchange.fail(error.message);
    else if (error instanceof TypeError) exchange.fail("The connection ended before the answer did.");
    else exchange.fail("The server sent something that this page cannot read.");
  } finally {
    current = null;
    showBusy(false);
  }
}

function send() {
  const prompt = $("prompt").value;
  if (!prompt.trim() || $("send").disabled || current) return;
  if (!$("parameters").checkValidity()) {
    $("settings").open = true;
    $("parameters").reportValidity();
    return;
  }
  const exchange = new Exchange(mode(), prompt, { draw: scroll, again: () => !current && served && answer(exchange) });
  exchanges.push(exchange);
  $("welcome").hidden = true;
  $("log").append(exchange.element);
  $("prompt").value = "";
  answer(exchange);
}

/** Puts a message that was not sent back into the input. */
function takeBack(exchange) {
  exchanges.splice(exchanges.indexOf(exchange), 1);
  exchange.element.remove();
  $("prompt").value ||= exchange.prompt;
  $("welcome").hidden = exchanges.length > 0;
}

function showBusy(busy) {
  $("stop").hidden = !busy;
  $("send").hidden = busy;
  $("send").disabled = busy || $("status").dataset.state !== "ready";
  $("clear").hidden = busy || !exchanges.length;
  document.body.classList.toggle("busy", busy);
}

function announce(text) {
  $("announcer").textContent = text;
}

// the conversation follows its end until the user scrolls up
let following = true;
const log = $("log");
log.addEventListener("scroll", () => (following = log.scrollHeight - log.scrollTop - log.clientHeight < 48));

function scroll(force) {
  if (force === true) following = true;
  if (following) log.scrollTop = log.scrollHeight;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) stop();
});

function stop() {
  current?.abort.abort();
  $("prompt").focus();
}

$("stop").addEventListener("click", stop);
$("mode").addEventListener("change", showMode);
$("parameters").addEventListener("submit", (event) => event.preventDefault());
$("parameters").addEventListener("input", () => {
  const given = Object.entries(parameters()).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  $("settings-brief").textContent = given.join(" · ");
});

$("clear").addEventListener("click", () => {
  exchanges.length = 0;
  for (const element of log.querySelectorAll(".exchange")) element.remove();
  $("welcome").hidden = false;
  $("clear").hidden = true;
  $("prompt").focus();
});

if (matchMedia("(max-width: 56rem)").matches) $("engine").open = $("settings").open = false;
showMode();
showStatus("connecting", "Connecting");
connect();
