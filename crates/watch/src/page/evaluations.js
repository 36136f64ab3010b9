// Evaluations: results over the run and by category with intervals, confusion matrix, and each question before and after.

import { apiJson, block, choice, distinct, el, failure, number, signed, visible } from './shared.js';
import { gallery } from './media.js';
import { meanInterval, shareInterval } from './stats.js';

const PAGE = 20;
let runs, root, body;

export async function show(main, given) {
  runs = given;
  root = main;
  body = el('section', { class: 'page' });
  main.append(body);
  await draw();
}

export function hide() { root = null; }

export function update(news) {
  if (root && news.some((run) => run.evals.x.length !== run.drawnEvals)) draw().catch((error) => body.replaceChildren(failure(error)));
}

async function draw() {
  const of = runs.filter((run) => run.shown);
  const all = await Promise.all(of.map((run) => apiJson('evaluations', { run: run.at }).catch((error) => error)));
  of.forEach((run) => { run.drawnEvals = run.evals.x.length; });
  if (!root) return;
  const parts = of.flatMap((run, at) => {
    if (all[at] instanceof Error) return [failure(`${run.name}: ${all[at].message}`)];
    return all[at].evaluations.length ? [sectionOf(run, all[at])] : [];
  });
  const evaluated = of.map((run, at) => ({ run, evaluations: all[at].evaluations ?? [] })).filter(({ evaluations }) => evaluations.length);
  if (evaluated.length) parts.push(comparison(evaluated));
  body.replaceChildren(...(parts.length ? parts : [el('p', { class: 'quiet' }, 'No evaluation yet. Runs with `--eval_file` are evaluated at their end, and with `--eval_on_start` also at their beginning.')]));
}

function sectionOf(run, { evaluations, capped }) {
  const first = evaluations[0];
  const last = evaluations.at(-1);
  const all = [...new Set(evaluations.flatMap(({ summary }) => Object.keys(summary)))].filter((name) => evaluations.some(({ summary }) => typeof summary[name] === 'number'));
  const names = distinct(all, evaluations.map(({ summary }) => summary));
  const rows = names.map((name) => {
    const [a, b] = [first.summary[name], last.summary[name]];
    return el('tr', {}, el('th', { scope: 'row' }, name.replace(/^eval_/, '')), evaluations.map(({ summary }) => el('td', {}, number(summary[name]))),
      evaluations.length > 1 ? el('td', {}, typeof a === 'number' && typeof b === 'number' ? signed(b - a, 3) : '–') : '');
  });
  return el('div', {},
    el('h2', {}, runs.length > 1 ? run.name : 'Evaluation'),
    capped ? el('p', { class: 'quiet' }, `The run has more evaluations than are listed: the first one and the last ${evaluations.length - 1} are.`) : '',
    el('div', { class: 'scroll' }, el('table', {}, el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'number'), evaluations.map(({ step }) => el('th', { scope: 'col' }, `step ${step}`)), evaluations.length > 1 ? el('th', { scope: 'col' }, 'change') : '')), el('tbody', {}, rows))),
    categories(first, last), confusion(last));
}

function categories(first, last) {
  const after = last.summary.categories ?? [];
  if (!after.length) return '';
  const before = new Map((first === last ? [] : first.summary.categories ?? []).map((own) => [own.category, own]));
  const row = (label, own, kind) => {
    const share = own?.accuracy ?? null;
    const edges = shareInterval(share, own?.rows);
    const track = el('div', { class: `track ${kind}`, role: 'img', 'aria-label': `${label}: ${number(share)}` });
    if (edges) {
      const range = el('i', {});
      range.style.left = `${edges[0] * 100}%`;
      range.style.width = `${(edges[1] - edges[0]) * 100}%`;
      const dot = el('b', {});
      dot.style.left = `${share * 100}%`;
      track.append(range, dot);
    }
    return [track, el('span', { class: 'quiet' }, edges ? `${number(100 * share, 1)} % (${number(100 * edges[0], 0)}–${number(100 * edges[1], 0)})` : '–')];
  };
  return el('div', {}, el('h3', {}, 'Accuracy by category, 95 % intervals'),
    el('div', { class: 'categories' }, after.map((own) => [
      el('span', {}, visible(own.category), el('span', { class: 'quiet' }, ` ${own.rows} rows`)),
      el('div', {}, before.has(own.category) ? el('div', { class: 'bar' }, row('before', before.get(own.category), 'before')) : '', el('div', { class: 'bar' }, row('after', own, 'after'))),
    ])),
    first === last ? '' : el('p', { class: 'quiet' }, `Above step ${first.step}, below step ${last.step}.`));
}

function confusion({ step, summary }) {
  if (!summary.confusion) return '';
  const { labels, counts } = summary.confusion;
  const most = Math.max(1, ...counts.flat());
  const cell = (count, truth, answer) => {
    const node = el('td', { title: `truth ${labels[truth]}, answer ${labels[answer] ?? 'none of them'}: ${count}` }, count ? String(count) : '');
    node.style.background = count ? `color-mix(in oklab, var(${truth === answer ? '--good' : '--bad'}) ${Math.round((45 * count) / most)}%, transparent)` : '';
    return node;
  };
  return el('div', {}, el('h3', {}, `Confusion at step ${step}: truth by row, answer by column`),
    el('div', { class: 'scroll' }, el('table', { class: 'confusion' }, el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'truth'), [...labels, 'other'].map((label) => el('th', { scope: 'col' }, visible(label))))),
      el('tbody', {}, counts.map((row, truth) => el('tr', {}, el('th', { scope: 'row' }, visible(labels[truth])), row.map((count, answer) => cell(count, truth, answer))))))));
}

/// Compares the questions of two evaluations, of one run or of two.
function comparison(all) {
  const places = all.flatMap(({ run, evaluations }) => evaluations.map(({ step }) => ({ key: `${run.at}-${step}`, run: run.at, step, label: all.length > 1 ? `${run.name}, step ${step}` : `step ${step}` })));
  if (places.length < 2) return '';
  const choose = (value, label) => { const node = choice(label, label, places.map((own) => [own.key, own.label]), { onchange: () => fetchRows(0) }); node.value = value; return node; };
  // Two runs are compared by their last evaluations.
  const first = all.length > 1 ? places.findLast((own) => own.run === all[0].run.at) : places[0];
  const before = choose(first.key, 'before');
  const after = choose(places.at(-1).key, 'after');
  const names = [...new Set(all.flatMap(({ evaluations }) => evaluations.flatMap(({ summary }) => (summary.categories ?? []).map((own) => own.category))))];
  const category = choice('category', 'category', [['', 'all categories'], ...names.map((name) => [name, name])], { onchange: () => fetchRows(0) });
  const change = choice('change', 'change', [['', 'all'], ['better', 'got better'], ['worse', 'got worse'], ['same', 'unchanged']], { onchange: () => fetchRows(0) });
  const counts = el('p', { role: 'status' });
  const list = el('div', { class: 'pairs' });
  let ticket = 0;
  async function fetchRows(from) {
    const mine = (ticket += 1);
    const [old, own] = [before, after].map((field) => places.find(({ key }) => key === field.value));
    try {
      const found = await apiJson('compare', { run: own.run, other: old.run === own.run ? undefined : old.run, before: old.step, after: own.step, change: change.value, category: category.value, from, limit: PAGE });
      if (mine !== ticket) return;
      const edges = meanInterval(found.gain);
      counts.replaceChildren(el('b', { class: 'good' }, `${found.counts.better} better`), ' · ', el('b', { class: 'bad' }, `${found.counts.worse} worse`), ` · ${found.counts.same} unchanged`,
        found.gain.count ? ` · mean change ${signed(found.gain.mean, 3)}${edges ? `, 95 % interval ${signed(edges[0], 3)} to ${signed(edges[1], 3)}` : ''}` : '');
      if (from === 0) list.replaceChildren();
      list.append(...found.rows.map((row) => pair(own, row, [old, own].map(({ label }) => label))));
      if (from + found.rows.length < found.all) {
        const button = el('button', { type: 'button', onclick: () => { button.remove(); fetchRows(from + found.rows.length); } }, `more of ${found.all}`);
        list.append(button);
      }
      if (!found.all) list.append(el('p', { class: 'quiet' }, 'No question matches.'));
    } catch (error) { list.replaceChildren(failure(error)); }
  }
  fetchRows(0);
  return el('div', {}, el('h3', {}, 'Questions before and after'), el('div', { class: 'controls' }, el('label', {}, before), '→', el('label', {}, after), change, names.length ? category : ''), counts, list);
}

function pair({ run, step }, row, labels) {
  const side = (label, own) => el('div', {}, el('b', {}, `${label} `), el('span', { class: 'quiet' }, own.reward.map((value) => number(value, 2)).join(', ')), own.completions.map((text) => block(text)));
  return el('article', { class: `pair ${row.change}` },
    el('header', {}, visible(row.id), el('span', { class: row.gain < 0 ? 'bad' : row.gain > 0 ? 'good' : 'quiet' }, ` ${signed(row.gain)}`), row.category ? el('span', { class: 'quiet' }, visible(` ${row.category}`)) : ''),
    row.media.length ? gallery(row.media, { run, step, row: row.row }) : '',
    block(row.prompt.trim()), el('p', { class: 'quiet' }, 'truth ', visible(row.solution ?? 'none')),
    el('div', { class: 'sides' }, side(labels[0], row.before), side(labels[1], row.after)));
}
