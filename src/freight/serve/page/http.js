// Requests to the server that this page came from, with its key, and server-sent events.

const KEY = "freight-key";

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
};

/** An error answer of the server. `status` is the HTTP status; 200 for an error inside a stream. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Returns the server's error message, in OpenAI's shape or TGI's; "" if there is none. */
export function reason(body) {
  const found = body?.error?.message ?? body?.error ?? body?.message ?? body?.detail;
  return typeof found === "string" ? found : "";
}

/** fetch with the key. Raises ServerError for a status that is not 2xx, TypeError without a connection. */
export async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key.get()) headers.set("Authorization", `Bearer ${key.get()}`);
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ServerError(reason(body) || `The server answered with status ${response.status}.`, response.status);
}

/** The data of each event. Comments such as ": keep-alive" and other fields are skipped; half an event is dropped. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // an aborted stream has nothing left to cancel
  }
}
