/** The overview: what is wrong now, the host, and a card for each model version. */

import { html, useState } from "./vendor/htm-preact.js";
import { Sparkline } from "./charts.js";
import { findModel } from "./connection.js";
import { bytes, duration, modelLink, ms, number, plural, short, sum, words } from "./format.js";

const MIB = 1_048_576;
const ROWS_FROM = 13; // models, from which rows are easier to compare than cards

/** One word for the state of a model: ready, degraded, down or empty. */
export function stateOf({ workers: { ready, min, restarting, givenUp, crashLoop } }) {
  if (!ready) return min || restarting || givenUp ? "down" : "empty";
  return ready < min || restarting || givenUp || crashLoop ? "degraded" : "ready";
}

export function Problems({ problems, none, models = [] }) {
  if (!problems.length) return none && html`<p class="fine"><i class="dot ready"></i>${none}</p>`;
  const isError = (each) => each.severity === "error";
  const sorted = [...problems].sort((a, b) => isError(b) - isError(a));
  return html`<ul class="problems">${sorted.map((each, i) => html`
    <li key=${i} class=${each.severity}>
      <b>${each.severity}</b><span>${each.text}</span>
      ${findModel({ models }, each.modelName, each.modelVersion) && html`<a href=${modelLink(each.modelName, each.modelVersion)}
        aria-label=${`Look at ${each.modelName} ${each.modelVersion}`}>Look</a>`}</li>`)}</ul>`;
}

export function Meter({ share, label }) {
  const level = share >= 0.9 ? "bad" : share >= 0.7 ? "warn" : "";
  return html`<svg class=${`meter ${level}`} viewBox="0 0 100 4" preserveAspectRatio="none" role="img"
    aria-label=${label}><rect class="back" width="100" height="4" />
    <rect class="fill" width=${Math.min(100, share * 100)} height="4" /></svg>`;
}

/** A named value with a note; `share` of its maximum is drawn as a bar. */
export const Fact = ({ name, value, note, share, children }) => html`<div class=${children ? "broad" : ""}>
  <dt>${name}</dt><dd>${value}${note && html`<small>${note}</small>`}${children}
    ${share !== undefined && html`<${Meter} share=${share} label=${name} />`}</dd></div>`;

const Host = ({ overview: { host, server, models, at } }) => html`<dl class="facts">
  <${Fact} name="Requests" value=${short(sum(models.map((model) => model.requestsPerSecond)))} note="/s" />
  ${host.cpuPercent == null ? html`<${Fact} name="CPU" value="unknown" />`
    : html`<${Fact} name="CPU" value=${`${number(host.cpuPercent)} %`} note=${host.cpus && `of ${plural(host.cpus, "core")}`}
      share=${host.cpuPercent / 100} />`}
  ${host.memoryTotalBytes == null ? html`<${Fact} name="Memory" value="unknown" />`
    : html`<${Fact} name="Memory" value=${bytes(host.memoryUsedBytes)} note=${`of ${bytes(host.memoryTotalBytes)}`}
      share=${host.memoryUsedBytes / host.memoryTotalBytes} />`}
  ${host.gpus.map((gpu) => html`<${Fact} key=${gpu.id} name=${`GPU ${gpu.id}`}
    value=${`${number(gpu.utilizationPercent)} %`} share=${gpu.memoryUsedMiB / gpu.memoryTotalMiB}
    note=${`memory ${bytes(gpu.memoryUsedMiB * MIB)} of ${bytes(gpu.memoryTotalMiB * MIB)}`} />`)}
  <${Fact} name="Server" value=${server.hostname}
    note=${`${server.version}, up ${duration(at - server.startedAt)}`} /></dl>`;

export function Errors({ errors }) {
  const found = Object.entries(errors).sort((a, b) => b[1] - a[1]);
  if (!found.length) return html`<span class="quiet">no errors</span>`;
  return html`<span class="errors">${found.map(([kind, count]) => html`<span key=${kind}>
    ${words(kind)} <b>${number(count)}</b></span>`)}</span>`;
}

export function Percentiles({ latency, goal }) {
  const isLate = goal && latency && latency.p99 > goal;
  return html`<span class="latency"><span>p50 <b>${ms(latency?.p50)}</b></span>
    <span>p95 <b>${ms(latency?.p95)}</b></span>
    <span class=${isLate ? "late" : ""}>p99 <b>${ms(latency?.p99)}</b></span>
    ${goal && html`<span class="quiet">goal ${ms(goal)}</span>`}</span>`;
}

export const workersText = ({ ready, min, max, restarting, givenUp, crashLoop }) => [
  `${ready} ready of ${min === max ? max : `${min}–${max}`}`,
  restarting && `${restarting} restarting`, givenUp && `${givenUp} given up`,
  crashLoop && `${crashLoop} failures in 5 minutes`,
].filter(Boolean).join(", ");

function Card({ model }) {
  const state = stateOf(model);
  return html`<article class=${`card ${state}`}>
    <h3><i class=${`dot ${state}`}></i><a href=${modelLink(model.modelName, model.modelVersion)}>
      ${model.modelName}</a> <span class="version">${model.modelVersion}</span>
      ${model.isDefault && html`<span class="tag">default</span>`}
      <span class="state">${state === "ready" ? "" : state}</span></h3>
    <span class="rate"><b>${short(model.requestsPerSecond)}</b> req/s</span>
    <${Sparkline} values=${model.history}
      label=${`Requests per second in the last minutes, now ${short(model.requestsPerSecond)}`} />
    <${Percentiles} latency=${model.latencyMs} goal=${model.goalMs} />
    <span class="workers">${workersText(model.workers)}</span>
    <span class="queue"><${Meter} share=${model.queued / model.queueBound} label="Queue" />
      <span>queue <b>${number(model.queued)}</b> / ${number(model.queueBound)}</span></span>
    <${Errors} errors=${model.errors} /></article>`;
}

const ORDERS = {
  problems: (model) => ["down", "degraded", "ready", "empty"].indexOf(model.state) * 2 - !!model.errorCount,
  name: () => 0,
  "requests/s": (model) => -model.requestsPerSecond,
  p99: (model) => -(model.latencyMs?.p99 || 0),
  errors: (model) => -model.errorCount,
};

export function Overview({ overview }) {
  const [filter, setFilter] = useState("");
  const [order, setOrder] = useState("problems");
  const [layout, setLayout] = useState("");
  const wanted = filter.toLowerCase().split(" ").filter(Boolean);
  const models = overview.models.map((model) => ({
    ...model, state: stateOf(model), errorCount: sum(Object.values(model.errors)),
  }));
  const shown = models.filter((model) => {
    const text = `${model.modelName} ${model.modelVersion} ${model.state}`.toLowerCase();
    return wanted.every((word) => text.includes(word));
  }).sort((a, b) => ORDERS[order](a) - ORDERS[order](b) || a.modelName.localeCompare(b.modelName)
    || a.modelVersion.localeCompare(b.modelVersion, "en", { numeric: true }));
  const asRows = layout ? layout === "rows" : models.length >= ROWS_FROM;
  const option = (name) => html`<option key=${name} value=${name}>${name}</option>`;
  return html`
    <h1 tabindex="-1">Overview</h1>
    <section aria-labelledby="wrong"><h2 id="wrong">What is wrong now</h2>
      <${Problems} problems=${overview.problems} models=${overview.models}
        none="Nothing is wrong now." /></section>
    <section aria-label="Host"><${Host} overview=${overview} /></section>
    <section aria-labelledby="models">
      <div class="bar"><h2 id="models">Models <small>${shown.length === models.length ? models.length
          : `${shown.length} of ${models.length}`}</small></h2>
        <input type="search" placeholder="Filter: name, version, state" aria-label="Filter models"
          value=${filter} onInput=${(event) => setFilter(event.target.value)} />
        <label>Sort <select value=${order} onChange=${(event) => setOrder(event.target.value)}>
          ${Object.keys(ORDERS).map(option)}</select></label>
        <button aria-pressed=${asRows} onClick=${() => setLayout(asRows ? "cards" : "rows")}>Rows</button>
      </div>
      ${!models.length && html`<p class="quiet">No model is registered.
        <a href="#/server">Register one</a>.</p>`}
      <div class=${asRows ? "models rows" : "models cards"}>
        ${shown.map((model) => html`<${Card} key=${`${model.modelName}/${model.modelVersion}`}
          model=${model} />`)}</div>
    </section>`;
}
