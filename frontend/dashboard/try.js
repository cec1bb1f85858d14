/** Try it: an input for a model, its answer rendered, and the same request as commands. */

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { hasKey, send } from "./connection.js";
import { bytes, ms, number, parse, requestLink, short } from "./format.js";

const MAX_TEXT = 200_000; // characters of an answer that are shown
const MAX_ROWS = 100;

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isClasses = (value) => isObject(value) && Object.keys(value).length > 0
  && Object.values(value).every((each) => typeof each === "number");
const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function Classes({ classes }) {
  const found = Object.entries(classes).sort((a, b) => b[1] - a[1]).slice(0, MAX_ROWS);
  const largest = Math.max(...found.map(([, value]) => Math.abs(value)), 1e-9);
  return html`<table class="classes"><tbody>${found.map(([label, value]) => html`<tr key=${label}>
    <th scope="row">${label}</th><td class="grow"><svg viewBox="0 0 100 10" preserveAspectRatio="none"
      aria-hidden="true"><rect width=${(Math.abs(value) / largest) * 100} height="10" /></svg></td>
    <td>${value >= 0 && value <= 1 ? `${number(value * 100, 1)} %` : short(value)}</td></tr>`)}</tbody></table>`;
}

function Rows({ rows }) {
  const names = isObject(rows[0]) ? [...new Set(rows.flatMap(Object.keys))] : null;
  const cells = (row) => (names ? names.map((name) => row[name]) : row);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>
    ${names && html`<thead><tr>${names.map((name) => html`<th key=${name}>${name}</th>`)}</tr></thead>`}
    <tbody>${rows.slice(0, MAX_ROWS).map((row, i) => html`<tr key=${i}>${cells(row).map((cell, j) => html`
      <td key=${j}>${cell === undefined ? "" : asText(cell)}</td>`)}</tr>`)}</tbody></table></div>
    ${rows.length > MAX_ROWS && html`<p class="quiet">${MAX_ROWS} of ${rows.length} rows are shown.</p>`}`;
}

function Value({ value }) {
  if (isClasses(value)) return html`<${Classes} classes=${value} />`;
  if (Array.isArray(value) && value.length) {
    if (value.every(isClasses) && value.length <= 8) {
      return value.map((each, i) => html`<${Classes} key=${i} classes=${each} />`);
    }
    if (value.every(isObject) || value.every(Array.isArray)) return html`<${Rows} rows=${value} />`;
  }
  return html`<pre tabindex="0">${JSON.stringify(value, null, 2).slice(0, MAX_TEXT)}</pre>`;
}

function Answer({ answer: { id, status, type, text, value, image, took, size, error, isDone } }) {
  return html`<section class="panel wide" aria-live="polite"><h2>Answer
      <small>${[status, type, took != null && ms(took), size > 0 && bytes(size), !isDone && "arriving…"]
        .filter(Boolean).join(" · ")}</small>
      ${isDone && id && html` <small><a href=${requestLink(id)}>Time line</a></small>`}</h2>
    ${error && html`<p class="error">${error}</p>`}
    ${image ? html`<img src=${image} alt="The answer of the model" />`
    : value !== undefined ? html`<${Value} value=${value} />`
    : text && html`<pre tabindex="0">${text.slice(0, MAX_TEXT)}</pre>`}</section>`;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function commands({ url, file, text, type }) {
  const name = file?.name || "";
  const body = file ? `@${quoted(name)}` : quoted(text);
  const headers = { "Content-Type": type, ...(hasKey() && { Authorization: "Bearer INFERENCE_KEY" }) };
  const options = Object.entries(headers).map(([field, value]) => ` \\\n  -H ${quoted(`${field}: ${value}`)}`);
  const data = file ? `open(${JSON.stringify(name)}, "rb")` : `${JSON.stringify(text)}.encode()`;
  return [
    ["curl", `curl ${quoted(url)}${options.join("")} \\\n  --data-binary ${body}`],
    ["Python", `import requests\n\nanswer = requests.post(\n    ${JSON.stringify(url)},\n    data=${data},\n`
      + `    headers=${JSON.stringify(headers)},\n)\nprint(answer.status_code, answer.text)`],
  ];
}

function Command({ title, text }) {
  const [isCopied, setCopied] = useState(false);
  const copy = () => navigator.clipboard?.writeText(text).then(() => setCopied(true), () => {});
  return html`<div class="bar"><h3>${title}</h3><button onClick=${copy}>${isCopied ? "Copied" : "Copy"}</button></div>
    <pre tabindex="0" aria-label=${`As ${title}`}>${text}</pre>`;
}

/** Read an answer, and show text as it arrives. */
async function read(response, started, show) {
  const type = (response.headers.get("content-type") || "").split(";")[0];
  const answer = { status: response.status, type, id: response.headers.get("x-request-id"), isDone: false };
  if (type.startsWith("image/")) {
    const blob = await response.blob();
    return show({ ...answer, image: URL.createObjectURL(blob), size: blob.size, isDone: true });
  }
  let text = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    const took = performance.now() - started;
    if (done) {
      return show({ ...answer, value: parse(text), text, took, size: text.length, isDone: true });
    }
    text += value;
    show({ ...answer, text, took, size: text.length });
  }
}

export function TryIt({ name, version, address }) {
  const [text, setText] = useState("");
  const [file, setFile] = useState(null);
  const [answer, setAnswer] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const request = useRef();
  useEffect(() => () => request.current?.abort(), []);
  useEffect(() => () => answer?.image && URL.revokeObjectURL(answer.image), [answer?.image]);
  const type = file ? file.type || "application/octet-stream"
    : parse(text) === undefined ? "text/plain" : "application/json";
  const path = `predictions/${encodeURIComponent(name)}/${encodeURIComponent(version)}`;
  const submit = async (event) => {
    event.preventDefault();
    request.current = new AbortController();
    setBusy(true);
    setAnswer(null);
    const started = performance.now();
    try {
      const options = { method: "POST", body: file || text, headers: { "Content-Type": type } };
      const response = await send(`dashboard/${path}`, { ...options, signal: request.current.signal });
      await read(response, started, setAnswer);
    } catch (error) {
      const shown = { status: error.status, error: error.message, isDone: true };
      if (error.name !== "AbortError") setAnswer({ ...shown, took: performance.now() - started });
    }
    setBusy(false);
  };
  const inference = new URL(/^https?:/.test(address) ? address : location.origin);
  inference.hostname = location.hostname; // the configured one may be 0.0.0.0
  const url = new URL(path, inference).href;
  return html`<div class="panels">
    <form class="panel" onSubmit=${submit}><h2>Input</h2>
      <label for="input">JSON or text</label>
      <textarea id="input" rows="8" spellcheck=${false} disabled=${file} value=${text}
        onInput=${(event) => setText(event.target.value)}></textarea>
      <div class="bar"><label>or a file <input type="file"
          onChange=${(event) => setFile(event.target.files[0] || null)} /></label></div>
      <div class="bar"><button class="primary" disabled=${isBusy}>Send</button>
        ${isBusy && html`<button type="button" onClick=${() => request.current.abort()}>Cancel</button>`}
        <small>as ${type}</small></div></form>
    <section class="panel"><h2>As a command <small>to the inference listener</small></h2>
      ${commands({ url, file, text, type }).map(([title, command]) => html`<${Command} key=${title}
        title=${title} text=${command} />`)}</section>
    ${answer && html`<${Answer} answer=${answer} />`}</div>`;
}
