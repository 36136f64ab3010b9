// Functions for all views: server requests, elements without markup, text with invisible characters made visible, numbers.

/// Command that serves this page again.
export const again = { command: 'omnigrpo watch RUN_DIR' };

// A report has the answers to the requests of its page inside.
const inside = document.getElementById('data') ? JSON.parse(document.getElementById('data').textContent) : null;

/// True if this page is a report.
export const isFile = inside !== null;

const meant = (params) => Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== '');

export async function api(path, params = {}) {
  if (inside) throw new Error('This is not in the report. `omnigrpo watch RUN_DIR` shows everything.');
  let response;
  try { response = await fetch(`api/${path}?${new URLSearchParams(meant(params))}`); } catch { throw new Error(`This part was not loaded before the program that serves the page ended. \`${again.command}\` serves it again.`); }
  if (response.ok) return response;
  let what = `${response.status} ${response.statusText}`;
  try { what = (await response.json()).error ?? what; } catch { /* not ours: the status says it */ }
  throw new Error(what);
}

export async function apiJson(path, params = {}) {
  if (!inside) return (await api(path, params)).json();
  const key = `${path}?${meant(params).map(([name, value]) => [name, String(value)]).sort(([a], [b]) => (a < b ? -1 : 1)).map((own) => own.join('=')).join('&')}`;
  return inside.answers[key] ?? api(path, params);
}

/// Returns a small copy of a medium that is in the report; null if it is not there.
export const kept = ({ step, group, row }, at) => inside?.media[`${step}-${group ?? `row${row}`}-${at}`] ?? null;

/// Returns the address of a file that the server answers with.
export const link = (path, params) => (inside ? kept(params, params.at)?.src ?? '' : `api/${path}?${new URLSearchParams(params)}`);

/// Creates an element. Children are nodes or text; text is never parsed as markup.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'class') node.className = value;
    else if (name in node && typeof value !== 'string') node[name] = value;
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}

/// Creates a field of a form that offers a choice. `options` are pairs of a value and its label.
export function choice(name, label, options, attributes = {}) {
  return el('select', { name, 'aria-label': label, title: label, ...attributes }, options.map(([value, text]) => el('option', { value }, text)));
}

// Characters that are invisible or that change the writing direction.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/u;

/// Converts text to nodes and makes invisible characters visible.
export function visible(text) {
  if (!UNSEEN.test(text)) return [text];
  const nodes = [];
  let rest = text;
  let plain = '';
  for (const character of rest) {
    if (!UNSEEN.test(character)) { plain += character; continue; }
    if (plain) nodes.push(plain);
    plain = '';
    const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, '0');
    nodes.push(el('span', { class: 'unseen', title: `U+${code}` }, `U+${code}`));
  }
  if (plain) nodes.push(plain);
  return nodes;
}

/// Creates a block of text. A long one scrolls, so the keyboard must reach it.
export function block(text, parts = visible(text)) {
  const isLong = text.length > 600 || text.split('\n').length > 15;
  return el('pre', isLong ? { tabIndex: 0, role: 'region', 'aria-label': 'text' } : {}, parts);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  const size = Math.abs(value);
  // Rounding errors, including those of means that have long been 0.
  if (size < 1e-12) return '0';
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
  return String(Number(value.toFixed(size >= 100 ? 1 : digits)));
}

// Metrics that repeat a number under the name that another program uses for it.
const ALIASES = [/^rewards\/[^/]+$/, /^clip_ratio$/, /^completion_length$/, /^grpo\/(kl_div|format_reward|accuracy_reward|total_reward|total_loss)$/, /^eval_(accuracy|format|total)_reward$/];

/// Removes the names of metrics that only repeat another number of `rows`.
export function distinct(names, rows) {
  const known = new Set(names);
  const repeats = (name) => {
    const plain = name.replace(/rewards\/([^/]+)\/mean$/, '$1');
    return plain !== name && known.has(plain) && rows.every((row) => row[plain] === row[name]);
  };
  return names.filter((name) => !ALIASES.some((alias) => alias.test(name)) && !repeats(name));
}

/// Settings that say where a run writes, not what it does.
export const PLACES = ['output_dir', 'run_name', 'log_file', 'dashboard', 'dashboard_port', 'prometheus_port', 'report_to', 'resume_from_checkpoint', 'push_to_hub'];

/// Returns the names of the settings whose values differ between runs, without places and the names in `without`. Those that somebody chose
/// come before those that only follow from others.
export function differing(runs, without) {
  const names = new Map();
  for (const { name, origin } of runs.flatMap((run) => run.settings)) names.set(name, names.get(name) || origin !== 'default');
  const all = [...names.keys()].filter((name) => !PLACES.includes(name) && !without.has(name) && new Set(runs.map((run) => run.setting(name))).size > 1);
  return [true, false].flatMap((isChosen) => all.filter((name) => names.get(name) === isChosen));
}

/// Quotes a text as one word of a shell command.
export const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

export const signed = (value, digits = 2) =>
  value === null || value === undefined ? '–' : `${value < 0 ? '−' : '+'}${number(Math.abs(value), digits)}`;

export function duration(secs) {
  if (!Number.isFinite(secs)) return '–';
  if (secs < 60) return `${Math.round(secs)} s`;
  if (secs < 3600) return `${Math.floor(secs / 60)} min ${Math.round(secs % 60)} s`;
  return `${Math.floor(secs / 3600)} h ${Math.round((secs % 3600) / 60)} min`;
}

/// Current view and its parameters, stored in the part of the URL that the server does not receive.
export function place() {
  const [view, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
  return { view, params: Object.fromEntries(new URLSearchParams(query)) };
}

export function hash(view, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== '');
  const query = new URLSearchParams(given).toString();
  return `#/${view}${query ? `?${query}` : ''}`;
}

export function remember(name, value) {
  try {
    if (value === undefined) return localStorage.getItem(`omnigrpo.${name}`);
    localStorage.setItem(`omnigrpo.${name}`, value);
  } catch { /* storage may be off: the page works without */ }
  return null;
}

/// Calls `act` for each item, for at most `most` of them at the same time, and returns the results.
export async function each(items, most, act) {
  const out = [];
  const rest = items.entries();
  // All workers take from the same iterator.
  const worker = async () => { for (const [at, item] of rest) out[at] = await act(item, at); };
  await Promise.all(Array.from({ length: most }, worker));
  return out;
}

/// Wraps a function so that it runs once, after calls have stopped for a while.
export function settled(wait, then) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => then(...given), wait);
  };
}

export const failure = (error) => (isFile ? el('p', { class: 'quiet', role: 'status' }, String(error.message ?? error)) : told(error));

const told = (error) => el('p', { class: 'error', role: 'alert' }, visible(String(error.message ?? error)));
