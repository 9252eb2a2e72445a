// Shows what /api/events sends. Texts of locks are set as text only, never as markup.

const $ = (id) => document.getElementById(id);

/** The latest state, when its reading began, and since when the stream is broken, if it is. */
let state = null;
let began = 0;
let lost = null;
let source = null;
const open = new Set();

/** Shows characters that are invisible or change the direction of text, as the command does. */
const safe = (text) =>
  String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

function time(ms) {
  if (ms == null) return "–";
  const s = Math.floor(ms / 1000);
  if (s < 1) return `${Math.max(0, Math.floor(ms))} ms`;
  if (s < 60) return `${s} s`;
  const two = (n) => String(n).padStart(2, "0");
  if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${two(Math.floor(s / 60) % 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
}

const number = (n) => n.toLocaleString("en");
const counted = (n, what) => `${number(n)} ${what}${n === 1 ? "" : "s"}`;

/** Sets the text of an element if it is another one, so that a selection remains. */
const fill = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

/** Makes the children of `parent` that have a key those of `items`, in order, and reuses them. */
function sync(parent, items, create, update, keyOf = (_, i) => i + 1) {
  const keys = items.map(keyOf);
  const wanted = new Set(keys);
  const present = new Map();
  for (const element of [...parent.children].filter((one) => one.key)) {
    if (wanted.has(element.key)) present.set(element.key, element);
    else element.remove();
  }
  let next = present.values().next().value ?? null;
  for (const [i, item] of items.entries()) {
    let element = present.get(keys[i]);
    if (!element) {
      element = create(item);
      element.key = keys[i];
    }
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
    update(element, item);
  }
}

/** A body of a table with a cell for each title; the first ones have a line of their own on a phone. */
function body(table, wide) {
  const element = make("tbody");
  const row = element.appendChild(make("tr"));
  [...table.querySelectorAll("th")].forEach((title, i) => {
    row.appendChild(make("td", i < wide ? "wide" : "time")).dataset.title = title.textContent;
  });
  return element;
}

const cells = (element) => element.firstChild.children;

const nameOf = (party) => safe(party.client ?? party.owner);

function holderText(lock) {
  if (lock.total_permits != null) return `${lock.holder_count} of ${lock.total_permits} permits`;
  const [first] = lock.holders;
  if (!first) return "free";
  const side = first.side ? ` (${first.side})` : "";
  const more = lock.holder_count > 1 ? ` and ${number(lock.holder_count - 1)} more` : "";
  return nameOf(first) + side + more;
}

function lease({ holders }) {
  const left = holders.map((one) => one.remaining_ms);
  return left.includes(null) ? "forever" : left.length ? time(Math.max(...left)) : "–";
}

function createLock(lock) {
  const element = body($("locks"), 2);
  const [name, holder, , queue] = cells(element);
  const button = name.appendChild(make("button", "name"));
  name.append(make("span", "kind"));
  holder.append(make("span"), make("span", "note"));
  queue.className = "queue";
  queue.append(make("span"), make("span", "pips"));
  const details = element.appendChild(make("tr", "details")).appendChild(make("td"));
  details.colSpan = 6;
  details.append(make("ul"));
  element.addEventListener("click", () => {
    if (String(getSelection())) return;
    if (!open.delete(lock.name)) open.add(lock.name);
    render();
  });
  button.setAttribute("aria-label", `Details of ${safe(lock.name)}`);
  return element;
}

function updateLock(element, lock) {
  const [name, holder, age, queue, wait, left] = cells(element);
  fill(name.firstChild, safe(lock.name));
  fill(name.lastChild, lock.kind + (lock.kind === "fenced" ? ` · token ${lock.token}` : ""));
  fill(holder.firstChild, holderText(lock));
  const first = lock.total_permits == null && lock.holders[0];
  holder.firstChild.className = first && !first.client ? "owner" : "";
  fill(holder.lastChild, first?.note ? `“${safe(first.note)}”` : "");
  fill(age, lock.age_ms == null ? "–" : (lock.age_at_least ? "≥ " : "") + time(lock.age_ms));
  fill(queue.firstChild, lock.waiter_count ? number(lock.waiter_count) : "–");
  fill(queue.lastChild, "●".repeat(Math.min(lock.waiter_count, 8)) + (lock.waiter_count > 8 ? "…" : ""));
  fill(wait, time(lock.wait_ms));
  wait.classList.toggle("warm", lock.wait_ms != null);
  fill(left, lease(lock));
  element.classList.toggle("free", !lock.holders.length);
  const isOpen = open.has(lock.name);
  name.firstChild.setAttribute("aria-expanded", isOpen);
  element.lastChild.hidden = !isOpen;
  if (isOpen) updateDetails(element.querySelector("ul"), lock);
}

function updateDetails(list, lock) {
  const line = (role) => (party) => {
    const parts = [`${role} ${nameOf(party)}`];
    if (party.side) parts.push(party.side);
    if (party.age_ms != null) parts.push(`for ${time(party.age_ms)}`);
    if (party.note) parts.push(`“${safe(party.note)}”`);
    if (party.client) parts.push(`owner ${safe(party.owner)}`);
    return { role, text: parts.join(", ") };
  };
  const more = (all, shown, what) =>
    all > shown.length ? [{ text: `and ${counted(all - shown.length, what)} more` }] : [];
  const lines = [
    ...lock.holders.map(line("held by")),
    ...more(lock.holder_count, lock.holders, "holder"),
    ...lock.waiters.map(line("waits:")),
    ...more(lock.waiter_count, lock.waiters, "waiter"),
  ];
  if (!lines.length) lines.push({ text: "no holder and no waiters known" });
  sync(list, lines, () => make("li"), (item, one) => {
    item.className = one.role ? "" : "hint";
    fill(item, one.text);
  });
}

function updateCycle(element, { possible, waits }) {
  if (!element.firstChild) element.append(make("h2"), make("div"));
  const who = (party) => {
    const at = party.registered;
    return safe(at ? `${at.label ?? at.program}@${at.host} (pid ${at.pid})` : party.owner);
  };
  element.classList.toggle("possible", possible);
  fill(element.firstChild, possible ? "Possible deadlock" : "Deadlock");
  sync(element.lastChild, waits, () => make("p"), (line, wait) =>
    fill(line, `${who(wait.waiter)} waits for ${safe(wait.name)}, held by ${wait.holders.map(who).join(" and ")}`));
}

function updateElection(element, { name, client, leader, value, epoch, age_ms, candidates }) {
  const texts = [safe(name), safe(client ?? leader), safe(value), String(epoch), time(age_ms), number(candidates)];
  texts.forEach((text, i) => fill(cells(element)[i], text));
  cells(element)[0].classList.add("name");
  cells(element)[2].classList.add("name");
}

function updateJob(element, job) {
  const [name, runs, last, next] = cells(element);
  const [latest] = job.runs;
  fill(name, safe(job.name));
  name.className = "wide name";
  if (!runs.firstChild) runs.append(make("div", "runs"));
  // The latest run is on the right.
  sync(runs.firstChild, [...job.runs].reverse(), () => make("span"), (square, run) => {
    square.className = `run ${run.state}`;
    square.title = safe(`${new Date(run.slot).toLocaleString()}: ${run.outcome || run.state}, ${time(run.took_ms)}, ${run.host}`);
  }, (run) => `${run.slot} ${run.attempt}`);
  const end = latest?.state === "failed" ? `failed: ${latest.outcome}` : latest?.state;
  fill(last, latest ? safe(`${end}, ${time(state.time_ms - Date.parse(latest.began))} ago`) : "–");
  last.classList.toggle("bad", latest?.state === "failed" || latest?.state === "lost");
  const due = job.next == null ? "–" : `in ${time(Date.parse(job.next) - state.time_ms)}`;
  fill(next, job.overdue == null ? due : `overdue by ${time(state.time_ms - Date.parse(job.overdue))}`);
}

function render() {
  tick();
  if (!state) return;
  fill($("source"), `${state.store}${state.pattern === "*" ? "" : ` · ${state.pattern}`}`);
  fill($("version"), `redlatch ${state.version}`);
  if (state.time_ms == null) return;
  const waiters = Object.values(state.kinds).reduce((sum, kind) => sum + kind.waiters, 0);
  fill($("held"), number(state.held));
  fill($("waiting"), number(waiters));
  fill($("longest"), time(state.longest_wait_ms));
  fill($("cycles"), number(state.deadlocks.length));
  fill($("leaders"), number(state.elections.length));
  fill($("took"), time(state.took_ms));
  $("longest").classList.toggle("warm", state.longest_wait_ms != null);
  $("cycles").classList.toggle("bad", state.deadlocks.length > 0);
  document.title = `${state.deadlocks.length ? "⚠ " : ""}${counted(waiters, "waiter")} – redlatch`;
  $("refused").hidden = !state.waits_refused;
  $("deadlocks").hidden = !state.deadlocks.length;
  sync($("deadlocks"), state.deadlocks, () => make("div", "cycle"), updateCycle);
  const locks = $("locks").querySelector("table");
  locks.hidden = !state.locks.length;
  sync(locks, state.locks, createLock, updateLock, (lock) => lock.name);
  open.forEach((name) => state.locks.some((lock) => lock.name === name) || open.delete(name));
  const shown = state.locks.length;
  fill($("matching"), number(state.matching));
  const none = $("filter").value ? "No lock matches." : "No lock is held.";
  const rest = `The ${number(shown)} locks with the longest waits are shown, and ${number(state.matching - shown)} are not: use the filter.`;
  fill($("rest"), !shown ? none : shown < state.matching ? rest : "");
  table("elections", state.elections, 3, updateElection);
  table("jobs", state.jobs, 3, updateJob);
}

/** Shows a section with a table, if it has rows. */
function table(id, items, wide, update) {
  $(id).hidden = !items.length;
  sync($(id).querySelector("table"), items, () => body($(id), wide), update, (one) => one.name);
}

/** Shows how current the state is. */
function tick() {
  const now = performance.now();
  const age = state?.time_ms == null ? null : now - began;
  const last = age == null ? "" : ` Last good reading: ${new Date(state.time_ms).toLocaleTimeString()}, ${time(age)} ago.`;
  let [text, kind, alarm] = [`live, ${time(Math.max(age, 1000))} ago`, "", ""];
  if (lost != null && now - lost > 2000) [text, kind, alarm] = ["not connected", "bad", `No connection to redlatch serve.${last}`];
  else if (!state) [text, kind] = ["connecting…", "wait"];
  else if (state.failure) [text, kind, alarm] = ["store does not answer", "bad", `The store does not answer: ${safe(state.failure)}.${last}`];
  else if (age > 20000 + 3 * state.took_ms) [text, kind, alarm] = ["no new reading", "wait", `Waiting for the store.${last}`];
  fill($("status"), text);
  $("status").className = kind;
  fill($("alarm"), alarm);
  $("alarm").hidden = !alarm;
}

function connect() {
  source?.close();
  if (document.hidden) return;
  source = new EventSource(`api/events?filter=${encodeURIComponent($("filter").value)}`);
  source.onmessage = (event) => {
    const before = state?.time_ms;
    state = JSON.parse(event.data);
    lost = null;
    if (state.time_ms !== before) began = performance.now() - state.age_ms;
    render();
  };
  // The browser connects again by itself, except after a refusal.
  source.onerror = () => {
    lost ??= performance.now();
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  };
}

let typing = 0;
$("filter").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    history.replaceState(null, "", `#${encodeURIComponent($("filter").value)}`);
    connect();
  }, 150);
});

function takeFilter() {
  try {
    $("filter").value = decodeURIComponent(location.hash.slice(1));
  } catch {
    $("filter").value = "";
  }
  connect();
}

addEventListener("hashchange", takeFilter);
// A page that nobody sees costs nothing.
document.addEventListener("visibilitychange", connect);
setInterval(tick, 1000);
takeFilter();
