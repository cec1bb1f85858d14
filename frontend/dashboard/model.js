/** The page of a model version: batches, latency, costs, queue, workers, and what else it has. */

import { html } from "./vendor/htm-preact.js";
import { ModelActions } from "./actions.js";
import { Area, Costs, Latency } from "./charts.js";
import { findModel } from "./connection.js";
import { bytes, clock, duration, modelLink, ms, number, plural, requestLink, short, words } from "./format.js";
import { Errors, Fact, Percentiles, Problems, stateOf, workersText } from "./overview.js";
import { BatchStrip, Lane } from "./strip.js";
import { TryIt } from "./try.js";

const LANE_MS = 600_000;
const HISTORY_STEP = 5000; // milliseconds between the values of `history`

export function Section({ title, note, wide, children }) {
  return html`<section class=${`panel ${wide ? "wide" : ""}`}>
    <h2>${title}${note && html` <small>${note}</small>`}</h2>${children}</section>`;
}

const Facts = ({ model }) => html`<dl class="facts">
  <${Fact} name="Requests" value=${short(model.requestsPerSecond)} note="/s" />
  <${Fact} name="Latency of the last minute"><${Percentiles} latency=${model.latencyMs} goal=${model.goalMs} /><//>
  <${Fact} name="Queue" value=${number(model.queued)} note=${`of ${number(model.queueBound)}`}
    share=${model.queued / model.queueBound} />
  <${Fact} name="Open" value=${number(model.open)} />
  <${Fact} name="Batch size" value=${number(model.batchSize)} />
  <${Fact} name="Workers"><span>${workersText(model.workers)}</span><//>
  <${Fact} name="Errors of the last minute"><${Errors} errors=${model.errors} /><//></dl>`;

function CostSection({ batching, goal }) {
  const { costs, size, why, exploring, windowMs, optimalNumberOfRequests: optimal, failures } = batching;
  return html`<${Section} title="Cost by batch size">
    <p class="why">Batch size <b>${size}</b>${batching.isAutomatic ? " (automatic)" : ""}${why ? ": " : "."}
      ${why}</p>
    ${costs?.points.length ? html`<${Costs} points=${costs.points} size=${size} goal=${goal} />
      <p class="quiet">A batch costs ${ms(costs.perBatchMs)} and ${ms(costs.perRequestMs)} for each request,
        by ${number(costs.batches)} batches.</p>`
    : html`<p class="quiet">No costs are learnt yet.</p>`}
    <p class="quiet">${[
      `Longest wait for a batch: ${ms(windowMs)}`,
      exploring && `exploring size ${exploring}`,
      optimal != null && `optimal number of requests in flight: ${optimal}`,
      failures?.share > 0 && `failed requests: ${number(failures.share * 100, 1)} %`,
    ].filter(Boolean).join("; ")}.</p></${Section}>`;
}

function Worker({ worker, process, from, to }) {
  const gone = worker.pid == null || worker.pid < 0;
  return html`<li class="worker">
    <div class="bar"><b>${worker.id}</b><span class=${`tag w-${worker.state}`}>${worker.state}</span>
      <small>${[
        !gone && `pid ${worker.pid}`, worker.gpuId != null && `GPU ${worker.gpuId}`,
        process && `CPU ${number(process.cpuPercent)} %`,
        process && bytes(process.memoryBytes), worker.startedAt && `started ${clock(worker.startedAt)}`,
      ].filter(Boolean).join(" · ")}</small>
      <small class=${process?.processStatus === "stopped" ? "error" : ""}>${process?.processStatus}</small></div>
    <${Lane} events=${worker.events} from=${from} to=${to} />
    ${worker.lastError && html`<pre class=${worker.state === "ready" ? "" : "error"}>${
      clock(worker.lastErrorAt)} ${worker.lastError}</pre>`}
    ${worker.events.length > 0 && html`<details><summary>${plural(worker.events.length, "change")} of state
      </summary><ol class="events">${worker.events.map((each, i) => html`<li key=${i}>
        <time>${clock(each.at)}</time> ${each.state}
        ${each.error && html`<span class="error"> ${each.error}</span>`}</li>`)}</ol></details>`}</li>`;
}

function Workers({ workers, processes, at }) {
  const first = Math.min(at - 60_000, ...workers.flatMap((each) => each.events.map((event) => event.at)));
  const from = Math.max(first, at - LANE_MS);
  return html`<${Section} title="Workers" note=${`the last ${duration(at - from)}`} wide>
    ${workers.length ? html`<ul class="workers">${workers.map((worker) => html`<${Worker}
      key=${worker.id} worker=${worker} process=${processes[worker.id]} from=${from} to=${at} />`)}</ul>`
    : html`<p class="quiet">There is no worker.</p>`}
    <ul class="legend">${["starting", "loading", "ready", "failed", "stopped"].map((state) => html`
      <li key=${state}><i class=${`key w-${state}`}></i>${state}</li>`)}</ul></${Section}>`;
}

const GOOD = ["answered", "succeeded"];

function Run({ run }) {
  const share = (value) => (value / (run.tookMs || 1)) * 1000;
  const end = (node) => node.endedMs ?? run.tookMs;
  const draw = (node, i) => html`<rect class="s-waitingMs" x=${share(node.queuedMs)} y=${i * 8 + 1} height="6"
      width=${share((node.startedMs ?? end(node)) - node.queuedMs)} />
    ${node.startedMs != null && html`<rect height="6" x=${share(node.startedMs)} y=${i * 8 + 1}
      width=${Math.max(3, share(end(node) - node.startedMs))}
      class=${GOOD.includes(node.outcome) ? "s-handlerMs" : "w-failed"} />`}`;
  return html`<li class="run"><a href=${requestLink(run.id)}>${clock(run.startedAt)}</a>
    <b>${ms(run.tookMs)}</b> <span class=${GOOD.includes(run.outcome) ? "" : "error"}>${words(run.outcome)}</span>
    <svg viewBox=${`0 0 1000 ${run.nodes.length * 8 || 8}`} preserveAspectRatio="none" aria-hidden="true">
      ${run.nodes.map(draw)}</svg>
    <small>${run.nodes.map((node) => `${node.node} ${ms(end(node) - node.queuedMs)}`).join(" · ")}</small></li>`;
}

function More({ detail: { sequences, scaling, workflow }, runs }) {
  return html`
    ${sequences && html`<${Section} title="Sequences"><dl class="facts">${Object.entries(sequences)
      .map(([name, value]) => html`<${Fact} key=${name} name=${name} value=${number(value)} />`)}</dl></${Section}>`}
    ${scaling?.length > 0 && html`<${Section} title="Scaling decisions"><ol class="events">
      ${[...scaling].reverse().slice(0, 20).map((each, i) => html`<li key=${i}><time>${clock(each.at)}</time>
        <b>${plural(each.workers, "worker")}</b> ${each.why}</li>`)}</ol></${Section}>`}
    ${runs.length > 0 && html`<${Section} title="Workflow runs" note=${workflow} wide>
      <ul class="runs">${runs.slice(-12).reverse().map((run) => html`<${Run} key=${run.id}
        run=${run} />`)}</ul>
      <ul class="legend"><li><i class="key s-waitingMs"></i>waiting</li>
        <li><i class="key s-handlerMs"></i>running</li></ul></${Section}>`}`;
}

function Live({ model, detail, batches, runs, moments, at }) {
  const history = model.history.map((rate, i, all) => [at - (all.length - 1 - i) * HISTORY_STEP, rate]);
  return html`<div class="panels">
    <${Section} title="Batches" wide note="width: time in the worker, height: requests, colour: why it left">
      <${BatchStrip} batches=${batches} /></${Section}>
    <${Section} title="Latency" note="mean of the oldest requests of batches"><${Latency} batches=${batches} /></${Section}>
    ${detail.batching && html`<${CostSection} batching=${detail.batching} goal=${model.goalMs} />`}
    <${Section} title="Requests per second"><${Area} points=${history}
      label=${`Requests per second, now ${short(model.requestsPerSecond)}`} /></${Section}>
    <${Section} title="Queue and refusals" note="since this page was opened">
      <${Area} points=${moments} bound=${model.queueBound} unit=${number}
        label=${`Requests that wait, now ${model.queued} of ${model.queueBound}`} />
      <p>Refused and failed in the last minute: <${Errors} errors=${model.errors} /></p></${Section}>
    <${Workers} workers=${detail.workers} processes=${detail.processes} at=${at} />
    <${More} detail=${detail} runs=${runs} /></div>`;
}

const TABS = [["", "Live"], ["try", "Try it"], ["actions", "Actions"]];

export function ModelPage({ name, version, tab, data: { overview, model: detail, missing, batches, runs, moments } }) {
  const model = findModel(overview, name, version);
  if (!model) {
    return html`<h1 tabindex="-1">${name} <span class="version">${version}</span></h1>
      <p class="panel">${missing || "This version of the model is not registered."}
        <a href="#/"> Back to the overview</a></p>`;
  }
  const others = overview.models.filter((each) => each.modelName === name && each.modelVersion !== version);
  const problems = overview.problems.filter((each) => each.modelName === name
    && (each.modelVersion ?? version) === version);
  const state = stateOf(model);
  return html`
    <div class="bar title"><h1 tabindex="-1"><i class=${`dot ${state}`}></i>${name}
        <span class="version"> ${version}</span></h1>
      ${model.isDefault && html`<span class="tag">default</span>`}<span class="state">${state}</span>
      ${others.length > 0 && html`<span class="quiet">other versions: ${others.map((each) => html`
        <a key=${each.modelVersion} href=${modelLink(name, each.modelVersion)}>${each.modelVersion}</a> `)}</span>`}
      <a class="end" href=${`#/requests?model=${encodeURIComponent(name)}`}>Slow requests</a></div>
    <${Problems} problems=${problems} />
    <${Facts} model=${model} />
    <nav class="tabs" aria-label="Parts of the page">${TABS.map(([path, title]) => html`<a key=${path}
      href=${modelLink(name, version, ...(path ? [path] : []))}
      aria-current=${tab === path ? "page" : null}>${title}</a>`)}</nav>
    ${tab === "try" ? html`<${TryIt} name=${name} version=${version}
      address=${overview.server.inferenceAddress} />`
    : tab === "actions" ? html`<${ModelActions} model=${model} batching=${detail?.batching} />`
    : detail ? html`<${Live} model=${model} detail=${detail} batches=${batches} runs=${runs}
        moments=${moments} at=${overview.at} />`
    : html`<p class="quiet">${missing || "Waiting for data."}</p>`}`;
}
