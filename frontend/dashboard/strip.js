/** The batch strip, and lanes of workers over time. */

import { html, useState } from "./vendor/htm-preact.js";
import { useWidth } from "./charts.js";
import { clock, duration, ms, words } from "./format.js";

const HEIGHT = 96;
const LEAST = 3; // pixels of a bar with its gap
const WIDEST = 24; // pixels of a bar of median time

const describe = (batch) => [
  `${clock(batch.closedAt)}: ${batch.size} requests`,
  batch.ranAs > batch.size && `ran as ${batch.ranAs}`,
  batch.paddingShare > 0 && `${Math.round(batch.paddingShare * 100)} % padding`,
  `left as ${words(batch.reason)}`, `took ${ms(batch.tookMs)}`,
  batch.predictedMs && `predicted ${ms(batch.predictedMs)}`,
  `the oldest waited ${ms(batch.oldestWaitedMs)}`, batch.workerId && `worker ${batch.workerId}`,
  batch.succeeded ? "" : "failed",
].filter(Boolean).join(", ");

/** The last batches that fit, each with its place and width: a constant and its share of time. */
function layOut(batches, width) {
  const shown = batches.slice(-Math.min(400, Math.floor(width / (2 * LEAST))));
  const times = shown.map((batch) => batch.tookMs);
  const total = times.reduce((all, time) => all + time, 0) || 1;
  const median = [...times].sort((a, b) => a - b)[Math.floor(times.length / 2)] || 1;
  const scale = Math.min((width - shown.length * LEAST) / total, WIDEST / median);
  let x = width - shown.length * LEAST - total * scale;
  return shown.map((batch) => {
    const bar = { batch, x, width: LEAST - 1 + batch.tookMs * scale };
    x += bar.width + 1;
    return bar;
  });
}

export function BatchStrip({ batches }) {
  const [ref, width] = useWidth();
  const [chosen, choose] = useState(null); // a batch
  const bars = layOut(batches, width);
  const shown = bars.map((bar) => bar.batch);
  const largest = Math.max(...shown.map((batch) => batch.ranAs), 1);
  const y = (rows) => HEIGHT * (1 - rows / largest);
  const place = shown.indexOf(chosen);
  const onKeyDown = (event) => {
    const last = shown.length - 1;
    const from = place < 0 ? last + 1 : place;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(shown[Math.max(0, Math.min(last, to))]);
  };
  const counts = new Map();
  shown.forEach(({ reason }) => counts.set(reason, (counts.get(reason) || 0) + 1));
  const said = chosen ? describe(chosen)
    : `${shown.length} batches. Point at one, or use the arrow keys, for its details.`;
  const draw = ({ batch, x, width }, i) => {
    const filled = batch.size * (1 - (batch.paddingShare || 0));
    return html`<g key=${i} class=${`r-${batch.reason}`} onPointerEnter=${() => choose(batch)}>
      <rect class="hit" x=${x} width=${width + 1} height=${HEIGHT} />
      <rect class="filled" x=${x} width=${width} y=${y(filled)} height=${HEIGHT - y(filled)} />
      ${batch.ranAs > filled && html`<rect fill="url(#hatched)" x=${x} width=${width}
        y=${y(batch.ranAs)} height=${y(filled) - y(batch.ranAs)} />`}
      ${!batch.succeeded && html`<rect class="failed" x=${x} width=${width} y=${HEIGHT + 2} height="4" />`}
      ${batch === chosen && html`<rect class="chosen" x=${x - 1} width=${width + 2} height=${HEIGHT} />`}
    </g>`;
  };
  return html`
    <div class="strip" ref=${ref} tabindex="0" role="slider" aria-label="Batches, the newest last"
        aria-valuemin="0" aria-valuemax=${Math.max(0, shown.length - 1)} aria-valuetext=${said}
        aria-valuenow=${place < 0 ? Math.max(0, shown.length - 1) : place} onKeyDown=${onKeyDown}
        onPointerLeave=${() => choose(null)}>
      <svg width=${width} height=${HEIGHT + 8} aria-hidden="true">
        <defs><pattern id="hatched" width="5" height="5" patternUnits="userSpaceOnUse"
          patternTransform="rotate(45)"><rect class="hatch" width="2" height="5" /></pattern></defs>
        ${bars.map(draw)}
      </svg>
    </div>
    <p class="said">${said}</p>
    <ul class="legend">${[...counts].map(([reason, count]) => html`<li key=${reason}>
      <i class=${`key r-${reason}`}></i>${words(reason)} <b>${count}</b></li>`)}
      <li><i class="key hatched"></i>padding</li><li><i class="key failed"></i>failed</li></ul>
    <details><summary>Last 30 batches as a table</summary><div class="scroll" tabindex="0"
        role="region" aria-label="Batches"><table>
      <thead><tr><th>Closed</th><th>Size</th><th>Ran as</th><th>Reason</th><th>Waited</th><th>Held</th>
        <th>Handler</th><th>Took</th><th>Predicted</th><th>Worker</th><th>Result</th></tr></thead>
      <tbody>${shown.slice(-30).reverse().map((batch, i) => html`<tr key=${i}>
        <td>${clock(batch.closedAt)}</td><td>${batch.size}</td><td>${batch.ranAs}</td>
        <td>${words(batch.reason)}</td><td>${ms(batch.oldestWaitedMs)}</td><td>${ms(batch.heldMs)}</td>
        <td>${ms(batch.handlerMs)}</td><td>${ms(batch.tookMs)}</td><td>${ms(batch.predictedMs)}</td>
        <td>${batch.workerId}</td><td>${batch.succeeded ? "answered" : "failed"}</td></tr>`)}</tbody>
    </table></div></details>`;
}

/** The states of a worker in the last minutes; deaths are higher than the rest. */
export function Lane({ events, from, to }) {
  const place = (at) => Math.max(0, Math.min(1000, ((at - from) / (to - from)) * 1000));
  const widthOf = (at, i) => place(events[i + 1]?.at ?? to) - place(at);
  const said = events.map(({ at, state }) => `${state} at ${clock(at)}`).join(", ");
  return html`<svg class="lane" viewBox="0 0 1000 16" preserveAspectRatio="none" role="img"
      aria-label=${`States since ${duration(to - from)}: ${said || "none recorded"}`}>
    <rect class="back" width="1000" height="16" />
    ${events.map(({ at, state }, i) => html`<rect key=${i} class=${`w-${state}`} x=${place(at)}
      width=${Math.max(widthOf(at, i), state === "failed" ? 4 : 0)}
      y=${state === "failed" ? 0 : 3} height=${state === "failed" ? 16 : 10} />`)}
  </svg>`;
}
