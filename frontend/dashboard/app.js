/** The shell of the dashboard: address, header, state of the connection, and the key. */

import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { ServerPage } from "./actions.js";
import { retryNow, unlock, useLive, watch } from "./connection.js";
import { duration, readAddress } from "./format.js";
import { ModelPage } from "./model.js";
import { Overview } from "./overview.js";
import { Requests } from "./requests.js";

const PAGES = [["", "Overview"], ["requests", "Requests"], ["server", "Server"]];
const STATES = { retrying: "disconnected, retrying", locked: "key needed" }; // else the state's name

const focusTitle = () => document.querySelector("h1")?.focus();
const skip = (event) => (event.preventDefault(), focusTitle());

function useAddress() {
  const [address, setAddress] = useState(readAddress);
  useEffect(() => {
    const read = () => {
      setAddress(readAddress());
      setTimeout(focusTitle);
      scrollTo(0, 0);
    };
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, []);
  return address;
}

function Connection({ state, reason, receivedAt }) {
  const age = receivedAt && Date.now() - receivedAt;
  return html`<div class=${`connection ${state}`} role="status" title=${reason}>
    <i class="dot"></i><span>${STATES[state] || state}</span>
    ${state === "retrying" && html`<small>${age > 0 && `data is ${duration(age)} old`}</small>
      <button onClick=${retryNow}>Retry now</button>`}</div>`;
}

function Lock({ reason }) {
  const [text, setText] = useState("");
  const submit = (event) => {
    event.preventDefault();
    if (text.trim()) unlock(text.trim());
    setText("");
  };
  return html`<form class="lock panel" onSubmit=${submit}>
    <h1 tabindex="-1">Enter the management key</h1>
    <p>This server answers requests about its models only with its <b>management key</b>. The key is in
      the file <code>key_file.json</code> in the server's working directory: there,${" "}
      <code>key</code> of <code>management</code>.</p>
    ${reason && html`<p class="error" role="alert">${reason}</p>`}
    <label for="key">Management key</label>
    <div class="bar"><input id="key" type="password" autocomplete="off" spellcheck=${false} value=${text}
        onInput=${(event) => setText(event.target.value)} /><button class="primary">Connect</button></div>
    <p class="quiet">The key stays in the memory of this page. A reload of the page forgets it.</p>
  </form>`;
}

function Page({ segments, query, data }) {
  const [page, ...rest] = segments;
  if (data.state === "locked") return html`<${Lock} reason=${data.reason} />`;
  if (page === "requests") return html`<${Requests} id=${rest[0]} query=${query} data=${data} />`;
  if (page === "server") return html`<${ServerPage} />`;
  if (!data.overview) {
    return html`<h1 tabindex="-1">Connecting</h1><p class="quiet">${data.reason || "Waiting for data."}</p>`;
  }
  if (page === "models" && rest.length > 1) {
    const [name, version, tab = ""] = rest;
    return html`<${ModelPage} key=${`${name}/${version}`} name=${name} version=${version} tab=${tab}
      data=${data} />`;
  }
  return html`<${Overview} overview=${data.overview} />`;
}

function App() {
  const { segments, query } = useAddress();
  const data = useLive();
  const [page = "", name, version] = segments;
  const isModel = page === "models" && version !== undefined;
  useEffect(() => watch(isModel ? name : null, version), [isModel, name, version]);
  document.title = [...segments.slice(0, 3).reverse(), "marserve"].join(" · ");
  const isCurrent = (path) => (path === "" ? !page || page === "models" : page === path);
  return html`
    <header><a class="skip" href="#" onClick=${skip}>Skip to the content</a><a class="brand" href="#/">marserve</a>
      <nav aria-label="Pages">${PAGES.map(([path, title]) => html`<a key=${path} href=${`#/${path}`}
        aria-current=${isCurrent(path) ? "page" : null}>${title}</a>`)}</nav>
      <${Connection} ...${data} /></header>
    <main class=${data.state === "retrying" ? "stale" : ""}>
      <${Page} segments=${segments} query=${query} data=${data} /></main>`;
}

render(html`<${App} />`, document.getElementById("app"));
