/** Text for values, and links. Foreign strings become text nodes only, never markup. */

export const number = (value, digits = 0) =>
  value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });

/** A rate or another number with at most three significant digits. */
export const short = (value) =>
  value == null ? "–" : number(value, value >= 100 ? 0 : value >= 10 ? 1 : 2);

export function ms(value) {
  if (value == null) return "–";
  return value >= 10_000 ? `${short(value / 1000)} s` : `${short(value)} ms`;
}

export function bytes(value) {
  if (value == null) return "–";
  const step = value < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${short(value / 1000 ** step)} ${["B", "kB", "MB", "GB", "TB"][step]}`;
}

export const clock = (at) => new Date(at).toLocaleTimeString("en-GB");

export function duration(milliseconds) {
  const seconds = Math.max(0, Math.round(milliseconds / 1000));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} d`;
}

export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
export const words = (name) => String(name).replaceAll("_", " ");
export const sum = (values) => values.reduce((total, value) => total + value, 0);

const link = (...segments) => `#/${segments.map(encodeURIComponent).join("/")}`;
export const modelLink = (name, version, ...page) => link("models", name, version, ...page);
export const requestLink = (id) => link("requests", id);

/** What a function returns for a text, or `otherwise` if it throws. */
function attempt(read, text, otherwise) {
  try {
    return read(text);
  } catch {
    return otherwise;
  }
}

export const parse = (text) => attempt(JSON.parse, text, undefined);

/** The page and its arguments in the address, for example ["models", "digits", "1.0"]. */
export function readAddress() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const segments = path.split("/").filter(Boolean).map((text) => attempt(decodeURIComponent, text, text));
  return { segments, query: new URLSearchParams(query) };
}
