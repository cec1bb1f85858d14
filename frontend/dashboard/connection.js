/** The connection to the server: the key, requests, and the stream of events. */

import { parse } from "./format.js";
import { useEffect, useState } from "./vendor/htm-preact.js";

const ROOT = new URL("..", import.meta.url);
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 8000;
const SILENCE = 6000; // milliseconds without an event; the server sends one each second
const MAX_BATCHES = 512;
const MAX_MOMENTS = 300;

/**
 * What the page shows. `state` is connecting, live, retrying, locked (a key is needed) or paused
 * (the page is hidden). `batches` and `moments` (queue lengths) are those of the watched model.
 */
export const live = {
  state: "connecting", reason: "", receivedAt: 0, overview: null, model: null, missing: "",
  batches: [], moments: [],
};

let key = null; // never stored
let watched = null; // [name, version]
let wanted = null; // the same, also while the server does not have it
let stream = null; // the AbortController of the current stream
let wake = () => {};
const listeners = new Set();

function change(members) {
  Object.assign(live, members);
  listeners.forEach((listener) => listener());
}

/** Render a component again after each change of `live`. */
export function useLive() {
  const [, count] = useState(0);
  useEffect(() => {
    const listener = () => count((n) => n + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return live;
}

/** An answer that is not a success; `message` is the server's. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message || `The server answered with status ${status}.`);
    this.status = status;
  }
}

/** Send a request with the key; `options` are those of fetch. Raises Refusal. */
export async function send(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(new URL(path, ROOT), { cache: "no-store", ...options, headers });
  if (response.ok) return response;
  const text = await response.text();
  const error = parse(text) ?? { message: text };
  const isHandlers = path.startsWith("dashboard/predictions"); // whose 401 is not about the key
  if ((response.status === 401 && !isHandlers) || error.type === "InvalidKeyException") {
    const reason = key ? `The server does not accept this key: ${error.message}` : "";
    key = null;
    stream?.abort();
    if (live.state !== "locked") change({ state: "locked", reason });
  }
  throw new Refusal(response.status, error.message);
}

/** The JSON answer to a request; parameters that are null or "" are left out. */
export async function call(method, path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value != null && value !== "");
  const query = new URLSearchParams(given).toString();
  return (await send(query ? `${path}?${query}` : path, { method })).json();
}

export const modelPath = (name, version) =>
  `models/${encodeURIComponent(name)}${version ? `/${encodeURIComponent(version)}` : ""}`;

export const hasKey = () => key !== null;

/** Use a key, and connect. */
export function unlock(text) {
  key = text;
  change({ state: "connecting" });
  follow();
}

/** Follow a model version as well, or none. */
export function watch(name, version) {
  const model = name ? [name, version] : null;
  if (stream && String(model) === String(watched)) return;
  watched = wanted = model;
  change({ model: null, missing: "", batches: [], moments: [] });
  if (live.state !== "locked") follow();
}

export const retryNow = () => wake();

/** Read events until another stream replaces this one; connect again after failures. */
async function follow() {
  stream?.abort();
  const mine = (stream = new AbortController());
  const isOver = () => mine !== stream || live.state === "locked";
  let pause = FIRST_PAUSE;
  change({ state: live.state === "live" ? "live" : "connecting" });
  while (mine === stream) {
    let reason = "The server closed the connection.";
    try {
      await readEvents(mine, () => (pause = FIRST_PAUSE));
    } catch (error) {
      reason = error.message;
      if (error.status === 404 && watched && !isOver()) {
        watched = null; // until it is there: `receive`
        change({ missing: reason });
        continue;
      }
    }
    if (isOver()) return;
    change({ state: "retrying", reason });
    await new Promise((resolve) => (wake = resolve, setTimeout(resolve, pause)));
    pause = Math.min(2 * pause, LONGEST_PAUSE);
  }
}

async function readEvents(mine, succeeded) {
  const request = new AbortController();
  const stop = () => request.abort(new Error("The server has sent nothing for some seconds."));
  mine.signal.addEventListener("abort", () => request.abort(), { once: true });
  let timer = setTimeout(stop, SILENCE);
  try {
    const query = watched ? `?${new URLSearchParams({ model: watched[0], version: watched[1] })}` : "";
    const response = await send(`dashboard/events${query}`, { signal: request.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    let isFirst = true;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(stop, SILENCE);
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const data of events.map((event) => JSON.parse(event.split("\ndata: ")[1]))) {
        if (mine !== stream) return;
        succeeded();
        receive(data, isFirst);
        isFirst &&= "models" in data; // until the first event of the model
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

function receive(data, isFirst) {
  if (data.models) {
    const shown = watched && findModel(data, ...watched);
    const moments = shown ? [...live.moments, [data.at, shown.queued]].slice(-MAX_MOMENTS) : [];
    change({ state: "live", reason: "", receivedAt: Date.now(), overview: data, moments });
    if (!watched && wanted && findModel(data, ...wanted)) watch(...wanted); // it is registered again
  } else {
    const batches = [...(isFirst ? [] : live.batches), ...data.batches].slice(-MAX_BATCHES);
    change({ model: data, batches });
  }
}

export const findModel = (overview, name, version) =>
  overview?.models.find((each) => each.modelName === name && each.modelVersion === version);

document.addEventListener("visibilitychange", () => {
  if (live.state === "locked") return;
  if (!document.hidden) return follow();
  stream?.abort();
  stream = null;
  change({ state: "paused" });
});
