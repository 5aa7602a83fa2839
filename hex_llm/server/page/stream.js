// Requests to the server: headers, streams of events, and every failure as an ApiError in words.

const RETRY_MS = 2000;

/** `status` is 0 where there was no reply at all. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Sends one request. A reply that is no success becomes an ApiError with the server's words. */
export async function call(path, { key, body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

async function reason(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return error.message ?? String(error);
  } catch {
    return text.slice(0, 300) || `${response.status} ${response.statusText}`;
  }
}

/**
 * The JSON events that answer `body`. While the model is not ready (503), tells why through `onWait` and asks
 * again, until it is ready or `signal` ends it.
 */
export async function* stream(path, { key, body, signal, onWait }) {
  for (;;) {
    try {
      yield* events(await call(path, { key, body, signal }));
      return;
    } catch (error) {
      if (error.status !== 503) throw error;
      onWait(error.message);
      await pause(RETRY_MS, signal);
    }
  }
}

async function* events(response) {
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.code ?? 500, event.error.message ?? String(event.error));
    yield event;
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let chunk;
    try {
      chunk = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The connection was lost before the answer ended.");
    }
    if (chunk.done) break;
    const found = (rest + chunk.value).split("\n");
    rest = found.pop();
    yield* found;
  }
  if (rest) yield rest;
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("stopped", "AbortError"));
    });
  });
}
