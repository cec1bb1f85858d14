/** Actions: batching, workers, the default version, registration, levels of loggers; the logs. */

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { call, modelPath } from "./connection.js";

const LEVELS = ["debug", "info", "warn", "error", "fatal", "off"];
const POLICIES = ["fixed", "greedy", "adaptive", "fixed_or_single"];

/** A form whose fields become parameters; the server's answer is shown below the button. */
function Action({ title, fields = [], button, run, note, isAllowed = () => true, isDanger }) {
  const [values, setValues] = useState({});
  const [result, setResult] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setResult(null);
    try {
      const answer = await run(values);
      setResult({ text: [answer.status, ...(answer.warnings || [])].join(" ") });
    } catch (error) {
      setResult({ text: error.message, isError: true });
    }
    setBusy(false);
  };
  const change = (name) => (event) => setValues({ ...values, [name]: event.target.value });
  return html`<form class=${`panel action ${isDanger ? "danger" : ""}`} onSubmit=${submit}>
    <h2>${title}</h2>${note && html`<p class="quiet">${note}</p>`}
    ${fields.map(({ name, label, placeholder, options, type = "text", ...more }) => html`<label key=${name}>
      <span>${label}</span>${options
        ? html`<select value=${values[name] ?? ""} onChange=${change(name)}><option value="">unchanged</option>
          ${options.map((option) => html`<option key=${option} value=${option}>${option}</option>`)}</select>`
        : html`<input type=${type} value=${values[name] ?? ""} placeholder=${placeholder} autocomplete="off"
          spellcheck=${false} onInput=${change(name)} ...${more} />`}</label>`)}
    <div class="bar"><button class=${isDanger ? "danger" : "primary"}
      disabled=${isBusy || !isAllowed(values)}>${isBusy ? "Working…" : button}</button></div>
    <p class=${result?.isError ? "error" : "result"} role="status">${result?.text}</p></form>`;
}

const whole = { type: "number", min: 0, step: 1 };
const hasValue = (values) => Object.values(values).some((value) => value !== "");

export function ModelActions({ model, batching }) {
  const { modelName: name, modelVersion: version, workers } = model;
  const path = modelPath(name, version);
  const size = batching?.isAutomatic ? "auto" : String(model.batchSize);
  const described = (value) => (value == null ? "" : `now ${value}`);
  return html`<div class="panels">
    <${Action} title="Batching" button="Apply" isAllowed=${hasValue} run=${(values) => call("PUT", path, values)}
      note="Takes effect at once. Empty fields stay as they are. A restart of the server forgets it."
      fields=${[
        { name: "batch_size", label: "Batch size (a number, or auto)", placeholder: described(size) },
        { name: "max_batch_delay", label: "Longest wait for a batch, ms", ...whole,
          placeholder: described(batching?.windowMs) },
        { name: "batch_policy", label: "Policy", options: POLICIES },
        { name: "max_latency_ms", label: "Latency goal, ms (0: none)", ...whole,
          placeholder: described(model.goalMs) },
        { name: "job_queue_size", label: "Queue capacity", ...whole, min: 1,
          placeholder: described(model.queueBound) },
      ]} />
    <${Action} title="Workers" button="Scale" isAllowed=${(values) => values.min_worker > ""}
      run=${(values) => call("PUT", path, values)} note="Without a maximum, it is the minimum. 0 ends all workers."
      fields=${[
        { name: "min_worker", label: "Minimum", ...whole, placeholder: described(workers.min), required: true },
        { name: "max_worker", label: "Maximum", ...whole, placeholder: described(workers.max) },
      ]} />
    ${!model.isDefault && html`<${Action} title="Default version" button="Make it the default"
      note="Requests that name no version get the default version."
      run=${() => call("PUT", `${path}/set-default`)} />`}
    <${Action} title="Unregister" button="Unregister" isDanger isAllowed=${(values) => values.typed === name}
      note="Ends the workers of this version and removes it from the server."
      run=${() => call("DELETE", path)}
      fields=${[{ name: "typed", label: html`Type the model's name, <b>${name}</b>, to confirm` }]} /></div>`;
}

function Loggers() {
  const [{ loggers, error }, setAnswer] = useState({});
  const read = () => call("GET", "loggers").then(setAnswer, (failure) => setAnswer({ error: failure.message }));
  useEffect(() => void read(), []);
  const change = (name, level) => call("PUT", `loggers/${encodeURIComponent(name)}`, { level })
    .then(read, (failure) => setAnswer({ loggers, error: failure.message }));
  return html`<section class="panel"><h2>Logger levels</h2>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label="Loggers"><table><thead><tr><th>Logger</th><th>Level</th></tr></thead>
      <tbody>${loggers?.map(({ name, level }) => html`<tr key=${name}><th scope="row">${name}</th>
        <td><select aria-label=${`Level of ${name}`} value=${level}
            onChange=${(event) => change(name, event.target.value)}>
          ${[...new Set([level, ...LEVELS, ...(name === "root" ? [] : ["inherit"])])].map((each) => html`
            <option key=${each} value=${each} selected=${each === level}>${each}</option>`)}</select></td>
      </tr>`)}</tbody></table></div></section>`;
}

function Log() {
  const [{ files = [], file, lines = [], error }, setAnswer] = useState({});
  const read = (name) => call("GET", "dashboard/log", { file: name })
    .then(setAnswer, (failure) => setAnswer({ files, file, error: failure.message }));
  const showEnd = (element) => element && (element.scrollTop = element.scrollHeight);
  useEffect(() => void read(), []);
  return html`<section class="panel wide"><h2>Log</h2>
    <div class="bar"><select aria-label="Log file" value=${file} onChange=${(event) => read(event.target.value)}>
        ${files.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select>
      <button onClick=${() => read(file)}>Read again</button><span class="quiet">The newest line is last.</span></div>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <pre tabindex="0" role="region" aria-label="Lines of the log" ref=${showEnd}>${lines.join("\n")}</pre></section>`;
}

export function ServerPage() {
  return html`<h1 tabindex="-1">Server</h1><div class="panels">
    <${Action} title="Register a model" button="Register" isAllowed=${(values) => values.url}
      run=${(values) => call("POST", "models", values)} fields=${[
        { name: "url", label: "Archive: a file of the model store, or an allowed URL", required: true,
          placeholder: "digits.mar" },
        { name: "model_name", label: "Name (else the archive's)" },
        { name: "initial_workers", label: "Workers", ...whole, placeholder: "as configured" },
        { name: "batch_size", label: "Batch size (a number, or auto)", placeholder: "as configured" },
        { name: "max_batch_delay", label: "Longest wait for a batch, ms", ...whole, placeholder: "as configured" },
      ]} />
    <${Loggers} /><${Log} /></div>`;
}
