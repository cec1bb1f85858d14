/** The connection to the server: the key, requests, and the stream of events. */

import { parse } from "./format.js";
import { useEffect, useState } from "./vendor/htm-preact.js";

const ROOT = new URL("..", import.meta.url);
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 8000;
const SILENCE = 6000; // milliseconds without an event; the server sends one each second
const MAX_BATCHES = 512;
const MAX_RUNS = 20;
const MAX_MOMENTS = 300;

/**
 * What the page shows. `state` is connecting, live, retrying, locked (a key is needed) or paused
 * (the page is hidden). `batches`, `runs` and `moments` (queue lengths) are those of the watched model.
 */
export const live = {
  state: "connecting", reason: "", receivedAt: 0, overview: null, model: null, missing: "",
  batches: [], runs: [], moments: [],
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
  change({ model: null, missing: "", batches: [], runs: [], moments: [] });
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
    const seen = new Set(); // kinds of events
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(stop, SILENCE);
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const [kind, data] of events.map((event) => event.split("\ndata: "))) {
        if (mine !== stream) return;
        succeeded();
        receive(kind, JSON.parse(data), !seen.has(kind));
        seen.add(kind);
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

/** Use an event: the first of its kind has all, the others have what has changed. */
function receive(kind, data, isFirst) {
  if (kind === "event: overview") {
    const overview = isFirst ? data : { ...live.overview, ...data, models: mergedModels(data) };
    const shown = watched && findModel(overview, ...watched);
    const moments = shown ? [...live.moments, [data.at, shown.queued]].slice(-MAX_MOMENTS) : [];
    change({ state: "live", reason: "", receivedAt: Date.now(), overview, moments });
    if (!watched && wanted && findModel(overview, ...wanted)) watch(...wanted); // it is registered again
  } else {
    const { batches = [], runs = [], ...members } = data;
    const before = isFirst ? { batches: [], runs: [] } : live;
    change({
      model: isFirst ? members : { ...live.model, ...members },
      batches: [...before.batches, ...batches].slice(-MAX_BATCHES),
      runs: [...before.runs, ...runs].slice(-MAX_RUNS),
    });
  }
}

function mergedModels({ models, gone }) {
  const found = new Map(live.overview.models.map((each) => [modelKey(each), each]));
  models.forEach((each) => found.set(modelKey(each), each));
  gone.forEach((each) => found.delete(JSON.stringify(each)));
  return [...found.values()];
}

const modelKey = ({ modelName, modelVersion }) => JSON.stringify([modelName, modelVersion]);

export const findModel = (overview, name, version) =>
  overview?.models.find((each) => each.modelName === name && each.modelVersion === version);

document.addEventListener("visibilitychange", () => {
  if (live.state === "locked") return;
  if (!document.hidden) return follow();
  stream?.abort();
  stream = null;
  change({ state: "paused" });
});
