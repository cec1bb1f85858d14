/** Charts in SVG: sparkline, area over time, stacked latency, cost by size. */

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { clock, ms, number, short, sum } from "./format.js";

/** The width of an element in pixels, and its ref. */
export function useWidth() {
  const ref = useRef();
  const [width, setWidth] = useState(600);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(entry.contentRect.width));
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return [ref, Math.max(width, 120)];
}

/** Round values for an axis from 0 to at least `max`. */
export function ticks(max, wanted = 3) {
  const rough = (max || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough);
  return Array.from({ length: Math.ceil((max || 1) / step) + 1 }, (_, i) => i * step);
}

export function Sparkline({ values, label }) {
  if (values.length < 2) return html`<div class="spark empty">no requests yet</div>`;
  const max = Math.max(...values, 1);
  const at = (value, i) => `${(i / (values.length - 1)) * 100},${29 - (value / max) * 27}`;
  const line = values.map(at).join(" ");
  return html`<svg class="spark" viewBox="0 0 100 30" preserveAspectRatio="none" role="img"
      aria-label=${label}>
    <polygon class="area" points=${`0,30 ${line} 100,30`} /><polyline class="line" points=${line} />
  </svg>`;
}

const LEFT = 46;
const BOTTOM = 18;

/** Axes with labels around marks; `marks(x, y)` draws into a plane of `right` by `top`. */
function Plane({ height = 150, top, unit = number, x, labels, label, marks }) {
  const [ref, width] = useWidth();
  const levels = ticks(top);
  const highest = levels.at(-1);
  const y = (value) => (height - BOTTOM) * (1 - value / highest) + 4;
  const toX = (value) => LEFT + x(value) * (width - LEFT - 8);
  return html`<div class="plane" ref=${ref}>
    <svg width=${width} height=${height + 4} role="img" aria-label=${label}>
      ${levels.map((level) => html`<g key=${level}>
        <line class="grid" x1=${LEFT} x2=${width} y1=${y(level)} y2=${y(level)} />
        <text x=${LEFT - 6} y=${y(level) + 4} text-anchor="end">${unit(level)}</text></g>`)}
      ${labels.map(({ value, text, anchor = "middle" }) => html`<text key=${text} x=${toX(value)}
        y=${height + 2} text-anchor=${anchor}>${text}</text>`)}
      ${marks(toX, y, width)}
    </svg>
  </div>`;
}

const ends = (from, to) => [
  { value: from, text: clock(from), anchor: "start" }, { value: to, text: clock(to), anchor: "end" },
];

/** One value over time; `points` are [moment, value], `bound` is drawn as a line. */
export function Area({ points, bound, label, unit = short }) {
  if (points.length < 2) return html`<p class="quiet">Collecting data…</p>`;
  const from = points[0][0];
  const to = points.at(-1)[0];
  const highest = Math.max(...points.map((point) => point[1]), 4);
  const isNear = bound && bound < 10 * highest; // else the line of values would be flat
  const max = isNear ? Math.max(highest, bound) : highest;
  const marks = (x, y, width) => {
    const line = points.map(([at, value]) => `${x(at)},${y(value)}`).join(" ");
    return html`
      <polygon class="area" points=${`${x(from)},${y(0)} ${line} ${x(to)},${y(0)}`} />
      <polyline class="line" points=${line} />
      ${isNear && html`<line class="bound" x1=${LEFT} x2=${width} y1=${y(bound)} y2=${y(bound)} />`}`;
  };
  return html`<${Plane} height=${110} top=${max} unit=${unit} label=${label}
    x=${(at) => (at - from) / (to - from || 1)} labels=${ends(from, to)} marks=${marks} />`;
}

export const SHARES = [
  ["receivingMs", "receiving"], ["waitingMs", "waiting"], ["batchingMs", "batching"],
  ["handOverMs", "hand-over"], ["handlerMs", "handler"], ["answeringMs", "answering"],
];
const STACK = SHARES.slice(1, 5);

/** The parts of a batch's latency; its oldest request counts. */
function latencyOf(batch) {
  const handlerMs = batch.handlerMs ?? batch.tookMs;
  return {
    waitingMs: Math.max(0, batch.oldestWaitedMs - batch.heldMs),
    batchingMs: batch.heldMs,
    handOverMs: Math.max(0, batch.tookMs - handlerMs),
    handlerMs,
  };
}

const meanOf = (batches, part) => sum(batches.map((each) => latencyOf(each)[part])) / batches.length;

export function Latency({ batches }) {
  if (!batches.length) return html`<p class="quiet">No batch has run yet.</p>`;
  const to = batches.at(-1).closedAt;
  const recent = batches.filter((each) => each.closedAt > to - 300_000);
  const from = Math.min(recent[0].closedAt, to - 1000);
  const count = Math.min(60, Math.max(8, recent.length));
  const columns = Array.from({ length: count }, () => []);
  const place = (at) => Math.min(count - 1, Math.floor(((at - from) / (to - from)) * count));
  recent.forEach((each) => columns[Math.max(0, place(each.closedAt))].push(each));
  const stacks = columns.map((column) =>
    column.length ? STACK.map(([part]) => meanOf(column, part)) : null);
  const max = Math.max(...stacks.map((stack) => (stack ? sum(stack) : 0)));
  const means = STACK.map(([part, name]) => [part, name, meanOf(recent, part)]);
  const marks = (x, y) => stacks.map((stack, i) => {
    let below = 0;
    return stack?.map((value, part) => html`<rect class=${`s-${STACK[part][0]}`} key=${`${i}-${part}`}
      x=${x(i / count)} width=${Math.max(1, x((i + 1) / count) - x(i / count) - 1)}
      y=${y((below += value))} height=${Math.max(0, y(below - value) - y(below))} />`);
  });
  const said = means.map(([, name, mean]) => `${name} ${ms(mean)}`).join(", ");
  return html`<${Plane} top=${max} unit=${ms} x=${(value) => value} marks=${marks}
      label=${`Mean latency of the last ${recent.length} batches: ${said}`}
      labels=${ends(from, to).map((end, i) => ({ ...end, value: i }))} />
    <ul class="legend">${means.map(([part, name, mean]) => html`<li key=${part}>
      <i class=${`key s-${part}`}></i>${name} <b>${ms(mean)}</b></li>`)}</ul>`;
}

/** Learnt cost by batch size: the mean, the bound of 97 %, the chosen size, and the goal. */
export function Costs({ points, size, goal }) {
  const largest = Math.max(...points.map((point) => point.size), size) * 1.05;
  const top = Math.max(...points.map((point) => point.boundMs), goal || 0);
  const marks = (x, y) => html`
    <line class="chosen" x1=${x(size)} x2=${x(size)} y1=${y(top)} y2=${y(0)} />
    ${goal && html`<line class="bound" x1=${x(0)} x2=${x(largest)} y1=${y(goal)} y2=${y(goal)} />`}
    <polyline class="upper" points=${points.map((p) => `${x(p.size)},${y(p.boundMs)}`).join(" ")} />
    <polyline class="line" points=${points.map((p) => `${x(p.size)},${y(p.meanMs)}`).join(" ")} />
    ${points.map((p) => html`<circle key=${p.size} class="point" cx=${x(p.size)} cy=${y(p.meanMs)}
      r=${2.5 + Math.min(4, Math.log10(1 + p.batches))}><title>${`${p.size} requests: ${ms(p.meanMs)}`}</title></circle>`)}`;
  const labels = points.filter((p, i) => i % Math.ceil(points.length / 8) === 0)
    .map((p) => ({ value: p.size, text: number(p.size, 1) }));
  const said = points.map((p) => `${number(p.size, 1)} requests ${ms(p.meanMs)}`).join(", ");
  return html`<${Plane} top=${top} unit=${ms} x=${(value) => value / largest} labels=${labels}
      marks=${marks} label=${`Cost of a batch by size: ${said}; the chosen size is ${size}`} />
    <ul class="legend"><li><i class="key dot"></i>mean</li><li><i class="key dash"></i>97 % bound</li>
      <li><i class="key tall"></i>chosen size <b>${size}</b></li>
      ${goal && html`<li><i class="key limit"></i>goal <b>${ms(goal)}</b></li>`}</ul>`;
}
