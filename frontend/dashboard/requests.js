/** The slowest and the failed requests, and the time line of each. */

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { SHARES } from "./charts.js";
import { call } from "./connection.js";
import { bytes, clock, modelLink, ms, plural, requestLink, words } from "./format.js";

const EVERY = 3000; // milliseconds between two readings of the list
const SINCE = [["60", "1 min"], ["300", "5 min"], ["", "10 min"]];
const OUTCOMES = { cancelled: "the client left" };

function Shares({ line, whole = line.tookMs, offset = 0 }) {
  const at = (value) => (value / (whole || 1)) * 1000;
  let x = at(offset);
  const parts = SHARES.filter(([part]) => line.shares?.[part] > 0);
  const said = parts.map(([part, name]) => `${name} ${ms(line.shares[part])}`).join(", ");
  return html`<svg class="shares" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img"
      aria-label=${said || "no parts recorded"}>
    <rect class="back" width="1000" height="10" />${parts.map(([part, name]) => {
      const width = at(line.shares[part]);
      x += width;
      return html`<rect key=${part} class=${`s-${part}`} x=${x - width} width=${Math.max(1, width)} height="10">
        <title>${`${name} ${ms(line.shares[part])}`}</title></rect>`;
    })}</svg>`;
}

const Outcome = ({ line }) => html`<span class=${line.outcome === "answered" ? "" : "error"}>
  ${line.status} ${OUTCOMES[line.outcome] || line.outcome}</span>`;

/** The model, with a link if it has a version; a workflow has none. */
const Model = ({ line: { modelName: name, modelVersion: version } }) => (version
  ? html`<a href=${modelLink(name, version)}>${name}</a> <span class="version">${version}</span>` : name);

function BatchOf({ line: { batch, requestBytes, nested } }) {
  if (!batch) return nested.length > 0 ? null : html`<p class="quiet">The request reached no worker.</p>`;
  const largest = Math.max(...batch.requestBytes, 1);
  return html`<p class="label">The batch</p>
    <p>${plural(batch.size, "request")}${batch.ranAs > batch.size && `, ran as ${batch.ranAs}`}; left as
      <b> ${words(batch.reason)}</b> at ${clock(batch.closedAt)}; took <b>${ms(batch.tookMs)}</b>
      ${batch.predictedMs && ` (predicted ${ms(batch.predictedMs)})`} in worker ${batch.workerId}.</p>
    <ul class="sizes" aria-label="Sizes of the requests of the batch">${batch.requestBytes.map((size, i) => html`
      <li key=${i} class=${size === requestBytes ? "own" : ""}><svg viewBox="0 0 100 6"
        preserveAspectRatio="none" aria-hidden="true"><rect width=${(size / largest) * 100} height="6" /></svg>
        ${bytes(size)}${size === requestBytes && " (this size)"}</li>`)}</ul>`;
}

const saysMore = (line) => line.error && !line.explanation.includes(line.error);

/** One request: its sentence, its parts, and its events with the time between them. */
export function TimeLine({ line, root = line }) {
  const offset = Math.max(0, line.arrivedAt - root.arrivedAt);
  const isNested = line !== root;
  const events = line.events || [];
  return html`<div class=${isNested ? "timeline nested" : "timeline"}>
    <p class="explanation">${line.explanation}</p>
    ${isNested && html`<p><${Model} line=${line} /> <b>${ms(line.tookMs)}</b> <${Outcome} line=${line} /></p>`}
    <${Shares} line=${line} whole=${root.tookMs} offset=${isNested ? offset : 0} />
    ${!isNested && html`<ul class="legend">${SHARES.filter(([part]) => line.shares?.[part] > 0)
      .map(([part, name]) => html`<li key=${part}><i class=${`key s-${part}`}></i>${name}
        <b> ${ms(line.shares[part])}</b></li>`)}</ul>`}
    ${saysMore(line) && html`<pre class="error">${line.error}</pre>`}
    <div class="columns"><div><p class="label">Events</p><ol class="events">${events.map((event, i) => html`<li key=${i}>
        <time>${ms(event.atMs)}</time> ${event.name}
        ${i > 0 && html`<small>+${ms(event.atMs - events[i - 1].atMs)}</small>`}</li>`)}</ol></div>
      <div><${BatchOf} line=${line} /></div></div>
    ${line.nested.map((inner) => html`<${TimeLine} key=${inner.id || inner.arrivedAt} line=${inner} root=${root} />`)}
    ${!isNested && html`<dl class="ids"><dt>Request</dt><dd><a href=${requestLink(line.id)}>${line.id}</a></dd>
      ${line.traceId && html`<dt>Trace</dt><dd>${line.traceId}</dd>`}
      <dt>Size</dt><dd>${bytes(line.requestBytes)}</dd>
      ${line.attempts > 1 && html`<dt>Attempts</dt><dd>${line.attempts}</dd>`}</dl>`}</div>`;
}

/** All of a request of the list, which has a part of its nested requests. */
function Whole({ line }) {
  const { requests } = useRequests({ id: line.id }, true);
  return html`<${TimeLine} line=${requests?.[0] || line} />`;
}

function Row({ line, isOpen, toggle }) {
  return html`<li class=${isOpen ? "request open" : "request"}>
    <button class="row" aria-expanded=${isOpen} onClick=${toggle}>
      <b class="took">${ms(line.tookMs)}</b>
      <span class="who">${line.modelName} <span class="version">${line.modelVersion}</span></span>
      <${Outcome} line=${line} /><time>${clock(line.arrivedAt)}</time>
      <${Shares} line=${line} />
      <span class="explanation">${line.explanation}
        ${saysMore(line) && ` ${line.error}`}</span></button>
    ${isOpen && html`<${Whole} line=${line} />`}</li>`;
}

/** The requests for these parameters, read again every some seconds unless they are held. */
function useRequests(parameters, isHeld) {
  const [answer, setAnswer] = useState({});
  const held = useRef();
  held.current = isHeld;
  useEffect(() => {
    let isOver = false;
    const read = () => call("GET", "requests", parameters)
      .then(({ requests }) => ({ requests }), (error) => ({ error: error.message }))
      .then((found) => isOver || setAnswer((last) => (found.error ? { ...last, ...found } : found)));
    read();
    const timer = setInterval(() => document.hidden || held.current || read(), EVERY);
    return () => (clearInterval(timer), (isOver = true));
  }, [JSON.stringify(parameters)]);
  return answer;
}

function OneRequest({ id }) {
  const { requests, error } = useRequests({ id }, true);
  const line = requests?.[0];
  return html`<h1 tabindex="-1">Request</h1><p><a href="#/requests">All requests</a></p>
    ${line ? html`<section class="panel"><h2><${Model} line=${line} />
      ${" "}<b>${ms(line.tookMs)}</b> <${Outcome} line=${line} /> <small>${clock(line.arrivedAt)}</small></h2>
      <${TimeLine} line=${line} /></section>`
    : html`<p class="panel">${error || "Reading…"}</p>`}`;
}

function List({ query, data }) {
  const [opened, open] = useState(null);
  const [since, setSince] = useState("");
  const isFailed = query.has("failed");
  const model = query.get("model") || "";
  const kind = isFailed ? "failed" : "slowest";
  const isHeld = data.state !== "live" || opened !== null;
  const { requests, error } = useRequests({ [kind]: 50, model, since }, isHeld);
  const address = (failed, name) => `#/requests?${new URLSearchParams({
    ...(failed && { failed: "" }), ...(name && { model: name }) })}`;
  const names = [...new Set([...(data.overview?.models || []).map((each) => each.modelName), model])];
  return html`
    <div class="bar"><h1 tabindex="-1">Requests</h1>
      <nav class="tabs" aria-label="Kind of requests">${[[false, "Slowest"], [true, "Failed"]].map(([failed, text]) => html`
        <a key=${text} href=${address(failed, model)} aria-current=${failed === isFailed ? "page" : null}>${text}</a>`)}</nav>
      <label>Model <select value=${model}
          onChange=${(event) => (location.hash = address(isFailed, event.target.value))}>
        <option value="">all</option>${names.filter(Boolean).map((name) => html`
          <option key=${name} value=${name} selected=${name === model}>${name}</option>`)}</select></label>
      <label>Since <select value=${since} onChange=${(event) => setSince(event.target.value)}>
        ${SINCE.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select></label>
      ${opened && html`<small>The list stands still while a request is open.</small>`}</div>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${requests?.length === 0 && html`<p class="quiet">There are no ${isFailed ? "failed " : ""}requests.</p>`}
    <ul class="requests">${requests?.map((line) => html`<${Row} key=${line.id} line=${line}
      isOpen=${opened === line.id} toggle=${() => open(opened === line.id ? null : line.id)} />`)}</ul>`;
}

export const Requests = ({ id, query, data }) =>
  id ? html`<${OneRequest} key=${id} id=${id} />` : html`<${List} query=${query} data=${data} />`;
