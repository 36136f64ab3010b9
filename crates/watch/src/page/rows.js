// Rows of the training data over the steps: pass rates as a heat map, the history of a row, and a comparison of two runs.

import { apiJson, block, choice, el, failure, hash, isFile, link, number, place, settled, signed, visible } from './shared.js';
import { CAPPED, groupsOf, measures } from './groups.js';
import { gallery } from './media.js';
import { meanInterval, moments, wordDifference } from './stats.js';

const PAGE = 100;
const FIELDS = ['run', 'other', 'measure', 'least', 'only', 'sort'];
const ONLY = { '': 'all rows', never: 'never solved', solved: 'solved last time', worse: 'worse than at first', better: 'better than at first' };
const SORTS = { last: 'by last pass rate', gain: 'by change', drawn: 'by number of passes', id: 'by id', difference: 'by difference of the runs' };

let runs, root, form, status, map, list, detail;
let ticket = 0;
let tables = [];
let shown = [];
let drawn = '';

export async function show(main, given, params) {
  runs = given;
  root = main;
  drawn = '';
  const names = runs.map((run) => [String(run.at), run.name]);
  const change = () => { location.hash = hash('rows', { ...place().params, ...Object.fromEntries(FIELDS.map((name) => [name, form.elements[name]?.value || undefined])) }); };
  form = el('form', { class: 'controls', onsubmit: (event) => event.preventDefault(), onchange: change, 'aria-label': 'Rows' },
    runs.length > 1 ? [choice('run', 'run', names), el('label', {}, 'against ', choice('other', 'other run', [['', 'no other run'], ...names]))] : '',
    choice('measure', 'measure', measures([])),
    el('input', { name: 'least', type: 'number', step: 'any', placeholder: 'passes from', 'aria-label': 'smallest value that passes', class: 'least' }),
    choice('only', 'shown rows', Object.entries(ONLY)), choice('sort', 'sorted', Object.entries(SORTS)));
  status = el('p', { class: 'quiet', role: 'status' });
  map = el('canvas', { class: 'heat', role: 'img' });
  map.addEventListener('click', (event) => { const at = rowAt(event); if (at) go(at.id); });
  map.addEventListener('pointermove', (event) => { const at = rowAt(event); map.title = at ? at.label : ''; });
  list = el('div', { class: 'scroll' });
  detail = el('article', { class: 'detail', 'aria-live': 'polite' });
  main.append(el('section', { class: 'page' }, el('h2', {}, 'Rows'), form, status, el('p', { class: 'quiet' }, 'A line is a row of the table below, in its order from the top; a column is one of its passes, the first at the left. The stronger the colour, the more of its completions passed.'), el('div', { class: 'heat-box', tabIndex: 0, role: 'region', 'aria-label': 'pass rates' }, map), detail, list));
  await open(params);
}

export function hide() { root = null; }

export function navigate(params) {
  if (!root) return false;
  open(params).catch((error) => detail.replaceChildren(failure(error)));
  return true;
}

export const update = settled(2000, async () => { if (root) { drawn = ''; await open(place().params); } });

export function repaint() { if (root) paint(); }

const go = (id) => { location.hash = hash('rows', { ...place().params, id, left: undefined, right: undefined }); };

async function open(params) {
  const mine = (ticket += 1);
  const key = JSON.stringify(FIELDS.map((name) => params[name]));
  if (key !== drawn) {
    const run = Number(params.run ?? 0);
    const wanted = [run, ...(params.other ? [Number(params.other)] : [])];
    tables = wanted.map((own) => groupsOf(own, params.measure ?? 'reward', params.least));
    for (const table of tables) {
      await table.load(({ about }) => {
        status.textContent = `reading step ${about.steps} of ${about.all_steps} …`;
        return root && mine === ticket;
      });
      if (mine !== ticket || !root) return;
    }
    const names = measures(tables[0].about.rewards);
    form.elements.measure.replaceChildren(...names.map(([name, label]) => el('option', { value: name }, label)));
    for (const name of FIELDS) if (form.elements[name]) form.elements[name].value = params[name] ?? { run: '0', measure: 'reward', sort: 'last' }[name] ?? '';
    form.elements.sort.querySelector('[value=difference]').disabled = tables.length < 2;
    select(params);
    drawn = key;
  }
  for (const link of list.querySelectorAll('a')) {
    if (link.dataset.id === params.id) link.setAttribute('aria-current', 'true'); else link.removeAttribute('aria-current');
  }
  if (params.id === undefined) detail.replaceChildren();
  else await history(params, mine);
}

/// Returns the rows of the first table, each with its last pass in the second table.
function rowsOf() {
  return [...tables[0].byId].map(([id, passes]) => {
    const [first, last] = [passes[0], passes.at(-1)];
    const other = tables[1]?.byId.get(id)?.at(-1) ?? null;
    const gain = passes.length < 2 || first.mean === null || last.mean === null ? null : last.mean - first.mean;
    return { id, category: last.category, passes, first, last, gain, other, difference: other && other.mean !== null && last.mean !== null ? other.mean - last.mean : null };
  });
}

function select(params) {
  const all = rowsOf();
  const never = (row) => row.passes.every((own) => own.pass === 0);
  const test = { never, solved: (row) => row.last.pass === 1, worse: (row) => row.gain < 0, better: (row) => row.gain > 0 }[params.only] ?? (() => true);
  const order = {
    gain: (a, b) => (a.gain ?? Infinity) - (b.gain ?? Infinity),
    drawn: (a, b) => b.passes.length - a.passes.length,
    id: (a, b) => a.id.localeCompare(b.id, 'en', { numeric: true }),
    difference: (a, b) => (a.difference ?? Infinity) - (b.difference ?? Infinity),
  }[params.sort] ?? ((a, b) => (a.last.pass ?? 2) - (b.last.pass ?? 2));
  shown = all.filter(test).sort(order);
  const parts = [`${shown.length} of ${all.length} rows`, `${all.filter(never).length} never solved`, `${all.filter((row) => row.last.pass === 1).length} solved in their last pass`];
  if (tables[0].least !== null) parts.push(`a completion passes from ${number(tables[0].least)}`);
  if (tables[0].about.capped) parts.push(CAPPED);
  status.replaceChildren(parts.join(' · '), tables.length > 1 ? against(all) : '');
  paint();
  table(0);
}

/// Says how the runs differ in the last pass of the rows that both have.
function against(all) {
  const own = moments(all.map((row) => row.difference).filter((value) => value !== null));
  if (!own.count) return '. The runs have no row in common.';
  const edges = meanInterval(own);
  return `. ${runs[tables[1].run].name} minus ${runs[tables[0].run].name}: ${signed(own.mean, 3)}${edges ? `, 95 % interval ${signed(edges[0], 3)} to ${signed(edges[1], 3)}` : ''}, over ${own.count} rows in their last pass`;
}

const cellOf = () => {
  const columns = Math.max(1, ...shown.map((row) => row.passes.length));
  const width = Math.max(1, Math.min(24, Math.floor((map.parentElement.clientWidth || 600) / columns)));
  return { columns, width, height: Math.max(1, Math.min(10, Math.floor(320 / Math.max(1, shown.length)))) };
};

/// Draws rows by passes. A pass without a score stays empty.
function paint() {
  const { columns, width, height } = cellOf();
  const rows = shown.slice(0, Math.floor(2000 / height));
  map.width = columns * width;
  map.height = Math.max(1, rows.length * height);
  const context = map.getContext('2d');
  const style = getComputedStyle(document.documentElement);
  const [low, high] = ['--heat-low', '--heat-high'].map((name) => style.getPropertyValue(name).trim());
  rows.forEach((row, y) => row.passes.forEach((own, x) => {
    if (own.pass === null) return;
    context.globalAlpha = 1;
    context.fillStyle = low;
    context.fillRect(x * width, y * height, width, height);
    context.globalAlpha = own.pass;
    context.fillStyle = high;
    context.fillRect(x * width, y * height, width, height);
  }));
  map.setAttribute('aria-label', `Pass rate of ${rows.length} rows by pass, ${columns} passes at most. The table below has the numbers.`);
}

function rowAt(event) {
  const { width, height } = cellOf();
  const box = map.getBoundingClientRect();
  const row = shown[Math.floor(((event.clientY - box.top) * map.height) / box.height / height)];
  const pass = row?.passes[Math.floor(((event.clientX - box.left) * map.width) / box.width / width)];
  if (!row) return null;
  return { id: row.id, label: pass ? `${row.id}: step ${pass.step}, ${share(pass)}` : row.id };
}

const share = (pass) => (pass.pass === null ? 'no score' : `${Math.round(pass.pass * pass.completions)}/${pass.completions}`);

function table(from) {
  const rows = shown.slice(from, from + PAGE).map((row) => el('tr', {},
    el('th', { scope: 'row', class: 'question' }, el('a', { href: hash('rows', { ...place().params, id: row.id, left: undefined, right: undefined }), 'data-id': row.id }, visible(row.id))),
    el('td', {}, visible(row.category ?? '–')),
    el('td', {}, String(row.passes.length)),
    el('td', {}, share(row.first)), el('td', {}, share(row.last)),
    el('td', { class: row.gain < 0 ? 'bad' : row.gain > 0 ? 'good' : '' }, signed(row.gain)),
    el('td', {}, number(row.last.length, 0)),
    tables.length > 1 ? [el('td', {}, row.other ? share(row.other) : '–'), el('td', { class: row.difference < 0 ? 'bad' : row.difference > 0 ? 'good' : '' }, signed(row.difference))] : ''));
  if (from === 0) {
    const heads = ['row', 'category', 'passes', 'first', 'last', 'change of the mean', 'tokens', ...(tables.length > 1 ? ['other run', 'difference'] : [])];
    list.replaceChildren(el('table', {}, el('thead', {}, el('tr', {}, heads.map((head) => el('th', { scope: 'col' }, head)))), el('tbody', {}, rows)));
  } else list.querySelector('tbody').append(...rows);
  questions(shown.slice(from, from + PAGE), list.querySelectorAll('tbody th')).catch(() => { /* the table has the numbers */ });
  list.querySelector('button')?.remove();
  if (from + PAGE < shown.length) list.append(el('button', { type: 'button', onclick: () => table(from + PAGE) }, `more of ${shown.length} rows`));
}

/// Adds the question and the picture to rows of the table. A report does not have them.
async function questions(rows, cells) {
  if (isFile || !rows.length) return;
  const { run } = tables[0];
  const { groups } = await apiJson('lines', { run, places: rows.map((row) => `${row.last.step}-${row.last.group}`).join(',') });
  const known = new Map(groups.map((own) => [`${own.step}-${own.group}`, own]));
  const all = [...cells].slice(-rows.length);
  rows.forEach((row, at) => {
    const own = known.get(`${row.last.step}-${row.last.group}`);
    if (!own || !all[at]?.isConnected) return;
    const source = own.picture === null ? null : link('preview', { run, step: own.step, group: own.group, at: own.picture });
    all[at].append(el('span', { class: 'excerpt quiet' }, visible(own.excerpt)));
    if (source) all[at].prepend(el('img', { class: 'thumb', src: source, alt: '', loading: 'lazy', onerror: (event) => event.target.remove() }));
  });
}

/// Shows the passes of a row and the completions of two of them side by side.
async function history(params, mine) {
  const passes = tables.flatMap((own) => (own.byId.get(params.id) ?? []).map((pass) => ({ run: own.run, ...pass })));
  if (!passes.length) { detail.replaceChildren(el('p', { class: 'quiet' }, `No completion of the row ${params.id} is recorded.`)); return; }
  const key = (pass) => `${pass.run}-${pass.step}-${pass.group}`;
  const of = (name, fallback) => passes.find((pass) => key(pass) === params[name]) ?? fallback;
  const sides = [of('left', passes[0]), of('right', passes.at(-1))];
  const label = (pass) => `${tables.length > 1 ? `${runs[pass.run].name}, ` : ''}step ${pass.step}: ${share(pass)} pass, mean ${number(pass.mean, 2)}`;
  const chooser = (name, own) => {
    const field = choice(name, `${name} side`, passes.map((pass) => [key(pass), label(pass)]), { onchange: () => { location.hash = hash('rows', { ...place().params, [name]: field.value }); } });
    field.value = key(own);
    return field;
  };
  const found = await Promise.all(sides.map((own) => apiJson('group', { run: own.run, step: own.step, group: own.group })));
  if (mine !== ticket || !root) return;
  const bars = el('div', { class: 'passes', role: 'img', 'aria-label': passes.map(label).join('; ') }, passes.map((pass) => {
    const bar = el('i', { title: label(pass), class: pass.pass === null ? 'none' : '' });
    bar.style.height = `${6 + 94 * (pass.pass ?? 0)}%`;
    return bar;
  }));
  const best = (group) => [...group.samples].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const samples = found.map(best);
  const chosen = samples.map((all) => all[0]);
  const pair = el('div', { class: 'sides' });
  const compare = () => {
    const texts = chosen.map((own) => own.completion.text);
    const parts = wordDifference(...texts);
    pair.replaceChildren(...sides.map((own, at) => {
      const field = choice(`sample-${at}`, 'completion', samples[at].map((one) => [String(one.sample), `#${one.sample}: ${number(one.reward, 2)}`]), { onchange: () => { chosen[at] = samples[at].find((one) => String(one.sample) === field.value); compare(); } });
      field.value = String(chosen[at].sample);
      const text = parts ? parts[at].map((part) => (part.differs ? el(at ? 'ins' : 'del', {}, visible(part.text)) : visible(part.text))) : visible(texts[at]);
      return el('div', {}, el('div', { class: 'controls' }, chooser(at ? 'right' : 'left', own), field, el('a', { href: hash('rollouts', { run: own.run, step: own.step, group: own.group }) }, 'all completions')), block(texts[at], text));
    }));
  };
  compare();
  const first = found[0];
  detail.replaceChildren(el('h3', {}, visible(params.id), el('span', { class: 'quiet' }, ` ${passes.length} ${passes.length > 1 ? 'passes' : 'pass'}`)), bars,
    first.media.length ? gallery(first.media, { run: sides[0].run, step: sides[0].step, group: sides[0].group }) : '',
    el('p', { class: 'quiet' }, 'truth ', visible(typeof first.solution === 'string' ? first.solution : JSON.stringify(first.solution))), pair);
}
