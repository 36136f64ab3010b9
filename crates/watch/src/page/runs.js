// Table of runs: the first view of a folder. Each run has its result, its verdict, its problems, and the settings in which it differs.

import { apiJson, differing, duration, el, failure, hash, number, remember, settled, visible } from './shared.js';
import { details } from './verdict.js';

// Settings with a column of their own. The other differences are counted.
const MOST_SETTINGS = 6;
const WORDS = { learned: 'Learned', learning: 'Better so far', not_learned: 'Not learned', worse: 'Worse', too_early: 'Too early to say' };
const TONES = { learned: 'good', learning: 'good', not_learned: 'warn', worse: 'bad', too_early: 'quiet' };
const MEASURES = { accuracy: 'held-out accuracy', reward: 'held-out reward', training_reward: 'mean reward of training' };
const AGAIN_MS = 2000;
const DATA = ['train_file', 'dataset_name', 'dataset_use', 'data_file_paths'];

let runs, choose, body, said, head, find, lines = [], rows = new Map();
const view = { by: null, down: false };

export function show(main, given, params, then) {
  [runs, choose, lines, rows] = [given, then, [], new Map()];
  find = el('input', { type: 'search', placeholder: 'find: name, model, data, setting', 'aria-label': 'find runs', size: 34, oninput: order });
  const button = (label, act) => el('button', { type: 'button', onclick: act }, label);
  said = el('span', { class: 'quiet', role: 'status' }, 'Reading the runs …');
  head = el('thead', {});
  body = el('tbody', {});
  main.append(el('section', {}, el('h2', {}, 'Runs'),
    el('div', { class: 'controls' }, find, el('span', {}, 'in the charts: '), button('all', () => mark(() => true)), button('none', () => mark(() => false)), button('those found', () => mark(isFound)),
      el('label', {}, el('input', { type: 'checkbox', name: 'problems', checked: remember('problems') !== 'folded', onchange: ({ target }) => { remember('problems', target.checked ? 'open' : 'folded'); rows.forEach((row) => row.fill()); } }), ' problems'), said),
    el('div', { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'table of runs' }, el('table', { class: 'runs' }, head, body))));
  return load().catch((error) => body.replaceChildren(el('tr', {}, el('td', {}, failure(error)))));
}

export function hide() { [body, lines] = [null, []]; rows.clear(); }

/// Fetches the lines again. A running server is asked at most every few seconds.
const soon = settled(AGAIN_MS, () => { if (body) load().catch(() => { /* the next event asks again */ }); });
export const update = () => { if (body && lines.length) soon(); };

async function load() {
  const found = await apiJson('table');
  if (!body) return;
  lines = found;
  const differences = differing(runs, new Set(['model_name_or_path', ...DATA]));
  const columns = columnsOf(differences.slice(0, MOST_SETTINGS));
  head.replaceChildren(el('tr', {}, columns.map((column) => el('th', { scope: 'col', 'aria-sort': view.by === column.name ? (view.down ? 'descending' : 'ascending') : null },
    el('button', { type: 'button', title: `sort by ${column.name}`, onclick: () => sort(column.name, columns) }, column.name)))));
  for (const run of runs) {
    if (!rows.has(run.at)) rows.set(run.at, new Row(run, columns));
    rows.get(run.at).take(lines[run.at], columns);
  }
  view.columns = columns;
  const rest = differences.length - MOST_SETTINGS;
  said.textContent = '';
  said.append(tally(), rest > 0 ? ` · ${rest} more settings differ: ` : '', rest > 0 ? el('a', { href: hash('settings') }, 'settings') : '');
  order();
}

/// Counts the verdicts.
function tally() {
  const counts = Object.entries(WORDS).map(([kind, word]) => [lines.filter((line) => line.kind === kind && !line.error).length, word.toLowerCase()]).filter(([count]) => count);
  return [`${lines.length} runs`, ...counts.map(([count, word]) => `${count} ${word}`)].join(' · ');
}

/// Returns the last two parts of a path, or of each path in a list.
function short(value) {
  if (!value) return '–';
  const parts = value.replace(/^\[|\]$/g, '').split(', ').map((path) => path.replace(/^["']|["']$/g, '').split('/').filter(Boolean).slice(-2).join('/'));
  return parts.join(', ');
}

const dataOf = (run) => DATA.map((name) => run.setting(name)).find((value) => value && value !== '[]');

/// Returns the columns: a name, the value by which the table is sorted, and the content of a cell.
function columnsOf(names) {
  const of = (name, key, cell, text = false) => ({ name, key, cell, text });
  const setting = (name) => of(name, (run) => { const own = run.setting(name); return own === undefined ? null : Number.isNaN(Number(own)) ? own : Number(own); }, (run) => el('span', { title: run.setting(name) }, visible(run.setting(name) ?? '–')));
  return [
    of('run', (run) => run.name, named, true),
    of('verdict', (_, line) => Object.keys(WORDS).indexOf(line.kind), judged, true),
    of('before → after', (_, line) => line.after?.value ?? null, result),
    of('steps', (_, line) => line.step, (_, line) => `${line.step}${line.num_steps && line.num_steps !== line.step ? ` / ${line.num_steps}` : ''}`),
    of('time', (_, line) => line.seconds, (_, line) => (line.seconds ? duration(line.seconds) : '–')),
    of('state', (_, line) => line.state, (_, line) => line.state, true),
    of('model', (run) => short(run.setting('model_name_or_path')), (run) => pathed(run.setting('model_name_or_path')), true),
    of('data', (run) => short(dataOf(run)), (run) => pathed(dataOf(run)), true),
    ...names.map(setting),
  ];
}

const pathed = (value) => el('span', { title: value }, visible(short(value)));

function named(run) {
  const box = el('input', { type: 'checkbox', checked: run.shown, 'aria-label': `show ${run.name} in the charts`, onchange: () => { run.shown = box.checked; choose(); } });
  const swatch = el('span', { class: 'swatch' });
  swatch.style.background = run.colour;
  return [box, ' ', swatch, el('a', { href: hash('charts', { runs: run.at }), title: run.dir }, visible(run.name))];
}

/// Shows a result with the interval of its last value.
function result(_, { before, after, is_share: isShare, measure }) {
  if (!after) return el('span', { class: 'quiet' }, '–');
  const digits = (value) => (isShare ? `${Math.round(100 * value)} %` : number(value, 2));
  const interval = after.interval ? `${digits(after.interval[0]).replace(' %', '')} to ${digits(after.interval[1])}` : '';
  return el('span', { title: `${MEASURES[measure]} at steps ${before.step} and ${after.step}, 95 % interval` }, `${digits(before.value)} → `, el('b', {}, digits(after.value)),
    el('span', { class: 'quiet interval' }, interval, measure === 'training_reward' ? ' (training)' : after.rows < 50 ? ` (${after.rows} rows)` : ''));
}

/// Shows the verdict in a word, with the titles of the problems. It opens to the whole verdict, which reads every step.
function judged(run, line) {
  if (line.error) return el('span', { class: 'bad' }, visible(line.error));
  const problems = line.problems.filter((own) => !own.good);
  const marks = remember('problems') === 'folded' ? '' : problems.map((own) => el('span', { class: 'mark', title: own.text }, `! ${own.title || own.rule}`));
  const whole = el('div', {});
  const box = el('details', {}, el('summary', {}, el('span', { class: TONES[line.kind] }, WORDS[line.kind]), ' ', marks), whole);
  box.addEventListener('toggle', async () => {
    run.isOpen = box.open;
    if (!box.open) return;
    try { run.verdict = await apiJson('verdict', { run: run.at }); whole.replaceChildren(...details(run, true)); } catch (error) { whole.replaceChildren(failure(error)); }
  });
  box.open = Boolean(run.isOpen);
  return box;
}

class Row {
  constructor(run, columns) {
    this.run = run;
    this.columns = columns;
    this.node = el('tr', {});
  }

  /// Takes a line of the server. A line that is the same is left alone, so that nothing closes or loses the focus.
  take(line, columns) {
    const said = JSON.stringify([line, columns.map((column) => column.name), this.run.name]);
    if (said === this.said) return;
    Object.assign(this, { line, columns, said });
    this.text = [this.run.name, this.run.dir, this.line.state, WORDS[line.kind], this.run.setting('model_name_or_path'), dataOf(this.run), ...line.problems.map((own) => own.title), ...columns.map((column) => `${column.name}=${this.run.setting(column.name) ?? column.key(this.run, line)}`)].join(' ').toLowerCase();
    this.fill();
  }

  fill() {
    this.node.replaceChildren(...this.columns.map(({ cell, text }, at) => el(at ? 'td' : 'th', { class: text ? 'text' : null, scope: at ? null : 'row' }, cell(this.run, this.line))));
  }
}

/// Shows which runs are in the charts.
export const chosen = () => rows.forEach((row) => { row.node.querySelector('input').checked = row.run.shown; });

const isFound = (run) => { const words = find.value.toLowerCase().split(/\s+/).filter(Boolean); return words.every((word) => rows.get(run.at)?.text.includes(word)); };

function mark(test) {
  runs.forEach((run) => { run.shown = test(run); });
  choose();
}

function sort(name, columns) {
  Object.assign(view, { down: view.by === name ? !view.down : false, by: name });
  [...head.querySelectorAll('th')].forEach((cell, at) => { if (columns[at].name === name) cell.setAttribute('aria-sort', view.down ? 'descending' : 'ascending'); else cell.removeAttribute('aria-sort'); });
  order();
}

/// Shows the rows that are found, in order. A value that is missing comes last.
function order() {
  if (!body) return;
  const column = view.columns?.find((own) => own.name === view.by);
  const all = runs.filter(isFound).map((run) => rows.get(run.at));
  if (column) {
    const key = (row) => column.key(row.run, row.line);
    const compare = (a, b) => (typeof a === 'number' && typeof b === 'number' ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
    all.sort((a, b) => { const [x, y] = [key(a), key(b)]; return x === null || y === null ? (x === null) - (y === null) : (view.down ? -1 : 1) * compare(x, y); });
  }
  const nodes = all.map((row) => row.node);
  const open = document.activeElement;
  if (nodes.length !== body.children.length || nodes.some((node, at) => node !== body.children[at])) body.replaceChildren(...nodes);
  if (open?.isConnected) open.focus();
}
