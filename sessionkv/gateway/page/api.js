// Requests to the gateway that served this page, and to nobody else.

const BASE = "/sessionkv/v1/";
const KEY = "sessionkv.key";
// Without credentials the browser does not ask for a password of its own.
const FETCH = { cache: "no-store", credentials: "omit" };

/** What the gateway refused or could not do. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the gateway answered with status ${status}`);
    this.status = status;
    this.code = error?.code ?? "error";
  }
}

let askForKey = async () => null;
let asking = null;

/** Who asks the user for a key; resolves to it, or to null. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** The answer to a question: `ask("session", {session: name})`. */
export async function ask(path, query = {}, signal = undefined) {
  return (await send(address(path, query), { signal })).json();
}

/** The answer to a change: `tell("fork", {session, name})`. */
export async function tell(path, body) {
  return (await send(BASE + path, posted(body))).json();
}

/** Events of a stream, as `{name, value}`; a change where there is a body. */
export async function* events(path, { query = {}, body = undefined, signal = undefined }) {
  const options = body === undefined ? { signal } : { ...posted(body), signal };
  const response = await send(address(path, query), options);
  for await (const { name, value } of parsed(response.body)) {
    if (name === "error") throw new ApiError(response.status, value.error);
    yield { name, value };
  }
}

function address(path, query) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  return given.length ? `${BASE}${path}?${new URLSearchParams(given)}` : BASE + path;
}

function posted(body) {
  return {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
}

async function send(url, options) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers };
    if (key !== null) headers.Authorization = `Bearer ${key}`;
    const response = await fetch(url, { ...options, ...FETCH, headers });
    if (response.ok) return response;
    const error = await problem(response);
    if (response.status !== 401 || !(await newKey(key, error.message))) throw error;
  }
}

/** Have the user give a key, once for all requests that lack one; false when they would not. */
async function newKey(refused, why) {
  if (sessionStorage.getItem(KEY) !== refused) return true; // another request has asked meanwhile
  asking ??= askForKey(why).finally(() => {
    asking = null;
  });
  const key = await asking;
  if (key === null) return false;
  sessionStorage.setItem(KEY, key);
  return true;
}

async function problem(response) {
  try {
    return new ApiError(response.status, (await response.json()).error);
  } catch {
    return new ApiError(response.status, null);
  }
}

/** Server-sent events of a body. */
async function* parsed(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const whole = text.split("\n\n");
      text = whole.pop();
      for (const event of whole) {
        const made = one(event);
        if (made !== null) yield made;
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // it has ended, or the caller wants no more
  }
}

function one(event) {
  let name = "message";
  let data = "";
  for (const line of event.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  return data ? { name, value: JSON.parse(data) } : null;
}
