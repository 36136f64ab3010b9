// Rollout viewer: groups of a step or of all steps, filtered and sorted, and the completions of a group side by side.

import { api, apiJson, block, choice, el, failure, hash, isFile, link, number, place, remember, settled, signed, visible } from './shared.js';
import { CAPPED, ONLY, SORTS, groupsOf, measures, summary, triaged } from './groups.js';
import { gallery } from './media.js';

const PAGE = 50;
const FOUND = 100;
const STEP_GROUPS = 500;
const SAMPLES_AT_ONCE = 32;
const TOKENS_AT_ONCE = 4000;
const COLOURINGS = {
  none: 'no colours',
  advantage: 'advantage',
  probability: 'probability',
  ratio: 'ratio',
  kl: 'KL',
  entropy: 'entropy',
};

const TRIAGE = ['scope', 'sort', 'only', 'measure', 'least', 'hide'];

let runs, root, list, detail, stepBox, stepOf, form, triage, status;
let current = {};
let steps = { steps: [], tokens: [] };
let listed = { key: null };
let ticket = 0;

export async function show(main, given, params) {
  runs = given;
  root = main;
  list = el('ol', { class: 'groups', 'aria-label': 'Groups' });
  detail = el('article', { class: 'detail', 'aria-live': 'polite' });
  status = el('p', { class: 'quiet', role: 'status' });
  stepBox = el('input', { type: 'number', min: '0', class: 'step', 'aria-label': 'step', onchange: () => go({ step: nearest(Number(stepBox.value)) }) });
  stepOf = el('span', { class: 'quiet' });
  const move = (by) => el('button', { type: 'button', title: by < 0 ? 'previous step (p)' : 'next step (n)', onclick: () => moveStep(by), 'aria-label': by < 0 ? 'previous step' : 'next step' }, by < 0 ? '‹' : '›');
  const whose = runs.length > 1 ? el('select', { 'aria-label': 'run', onchange: () => go({ run: Number(whose.value), step: undefined }) }, runs.map((run) => el('option', { value: String(run.at) }, run.name))) : null;
  if (whose) whose.value = params.run ?? '0';
  form = filters();
  form.hidden = isFile;
  triage = triageForm();
  main.append(el('div', { class: 'viewer' },
    el('aside', {},
      el('div', { class: 'controls' }, whose, el('label', {}, 'step ', move(-1), stepBox, move(1)), stepOf,
        el('button', { type: 'button', onclick: () => go({ step: steps.steps.at(-1), newest: 1 }) }, 'newest')),
      triage, form, status, list),
    detail));
  listed = { key: null };
  await open(params);
}

export function hide() { root = null; }

/// Shows another place in the same view. Returns false if the page must rebuild the view.
export function navigate(params) {
  if (!root) return false;
  open(params).catch((error) => detail.replaceChildren(failure(error)));
  return true;
}

/// Handles new steps: the list follows them if it shows the newest one.
export const update = settled(300, async (news) => {
  if (!root || !news.some((run) => run.at === (current.run ?? 0))) return;
  steps = await apiJson('steps', { run: current.run });
  say();
  if (place().params.newest && steps.steps.at(-1) !== current.step) go({ step: steps.steps.at(-1), newest: 1 });
});

export function key(event) {
  if (event.key === 'n') moveStep(1);
  else if (event.key === 'p') moveStep(-1);
  else if (event.key === 'j' || event.key === 'k') moveGroup(event.key === 'j' ? 1 : -1);
  else if (event.key === '/') { event.preventDefault(); form.elements.text.focus(); }
}

function go(changes) {
  const params = { ...place().params, group: undefined, sample: undefined, newest: undefined, ...changes };
  // The defaults stand in no address.
  if (params.sort === 'spread') params.sort = undefined;
  if (params.measure === 'reward') params.measure = undefined;
  location.hash = hash('rollouts', params);
}

function nearest(step) {
  return steps.steps.reduce((best, own) => (Math.abs(own - step) < Math.abs(best - step) ? own : best), steps.steps[0]);
}

function moveStep(by) {
  const at = steps.steps.indexOf(current.step);
  const next = steps.steps[Math.max(0, Math.min(steps.steps.length - 1, at + by))];
  if (next !== undefined && next !== current.step) go({ step: next });
}

function moveGroup(by) {
  const links = [...list.querySelectorAll('a')];
  const at = links.findIndex((link) => link.getAttribute('aria-current'));
  links[Math.max(0, Math.min(links.length - 1, at + by))]?.click();
}

function say() {
  stepOf.textContent = steps.steps.length ? `of ${steps.steps.length} (${steps.steps[0]}–${steps.steps.at(-1)})${steps.capped ? '; earlier steps are not read' : ''}` : '';
}

async function open(params) {
  const mine = (ticket += 1);
  const run = Number(params.run ?? 0);
  if (current.run !== run || !steps.steps.length || (params.step && !steps.steps.includes(Number(params.step)))) {
    steps = await apiJson('steps', { run });
  }
  if (mine !== ticket) return;
  current = { run, step: params.step === undefined ? steps.steps.at(-1) : Number(params.step) };
  say();
  if (!steps.steps.length) {
    status.textContent = '';
    detail.replaceChildren(el('p', { class: 'quiet' }, 'No completions are recorded yet. The first step writes them.'));
    return;
  }
  stepBox.value = current.step;
  for (const name of ['text', 'min', 'max', 'category']) form.elements[name].value = params[name] ?? '';
  for (const name of ['cut', 'unparsed']) form.elements[name].checked = params[name] === 'true';
  const filter = chosen();
  triage.show(params, Boolean(filter));
  const wanted = JSON.stringify([run, filter ?? [params.scope === 'all' || current.step, ...TRIAGE.map((name) => params[name])]]);
  if (listed.key !== wanted) {
    listed = { key: wanted };
    list.replaceChildren();
    await (filter ? find(run, filter, mine) : groups(run, params, mine));
  }
  if (mine !== ticket) return;
  const first = params.group === undefined ? list.querySelector('a')?.dataset : null;
  if (params.group === undefined && !first && !filter) { detail.replaceChildren(el('p', { class: 'quiet' }, 'No group matches this selection.')); return; }
  if (first) current.step = Number(first.step);
  stepBox.value = current.step;
  const group = params.group ?? first?.group;
  if (group === undefined) { detail.replaceChildren(); return; }
  current.group = Number(group);
  current.sample = params.sample ?? first?.sample;
  mark();
  await prompt(mine);
}

function mark() {
  for (const link of list.querySelectorAll('a')) {
    const { step, group, sample = current.sample } = link.dataset;
    if (Number(step) === current.step && Number(group) === current.group && sample === current.sample) link.setAttribute('aria-current', 'true');
    else link.removeAttribute('aria-current');
  }
}

function filters() {
  const apply = settled(250, () => go({ ...Object.fromEntries(['text', 'min', 'max', 'category'].map((name) => [name, form.elements[name].value || undefined])), cut: form.elements.cut.checked || undefined, unparsed: form.elements.unparsed.checked || undefined }));
  return el('form', { class: 'filters', onsubmit: (event) => event.preventDefault(), oninput: apply, 'aria-label': 'Filters over all steps' },
    el('input', { name: 'text', type: 'search', placeholder: 'find in all steps', 'aria-label': 'find text' }),
    el('input', { name: 'min', type: 'number', step: 'any', placeholder: 'reward ≥', 'aria-label': 'lowest reward' }),
    el('input', { name: 'max', type: 'number', step: 'any', placeholder: 'reward ≤', 'aria-label': 'highest reward' }),
    el('input', { name: 'category', placeholder: 'category', 'aria-label': 'category' }),
    el('label', {}, el('input', { name: 'cut', type: 'checkbox' }), ' cut off'),
    el('label', {}, el('input', { name: 'unparsed', type: 'checkbox' }), ' no answer'),
  );
}

function chosen() {
  const filter = { text: form.elements.text.value, min: form.elements.min.value, max: form.elements.max.value, category: form.elements.category.value, cut: form.elements.cut.checked || '', unparsed: form.elements.unparsed.checked || '' };
  return Object.values(filter).some((value) => value !== '') ? filter : null;
}

/// Controls that choose, filter and sort groups. `show` sets them from the parameters of the address.
function triageForm() {
  const change = () => go(Object.fromEntries(TRIAGE.map((name) => [name, value(box.elements[name]) || undefined])));
  const value = (field) => (field.type === 'checkbox' ? (field.checked ? 'true' : '') : field.value);
  const options = (from) => Object.entries(from).map(([name, [label]]) => [name, label]);
  const box = el('form', { class: 'filters triage', onsubmit: (event) => event.preventDefault(), onchange: change, 'aria-label': 'Groups' },
    choice('scope', 'groups of', [['', 'this step'], ['all', 'all steps']]),
    choice('sort', 'sorted by', options(SORTS)),
    choice('only', 'shown groups', Object.entries(ONLY).map(([name, { label }]) => [name, label])),
    choice('measure', 'measure', measures([])),
    el('input', { name: 'least', type: 'number', step: 'any', placeholder: 'passes from', 'aria-label': 'smallest value that passes' }),
    el('label', {}, el('input', { name: 'hide', type: 'checkbox' }), ' hide solved'));
  box.show = (params, searches) => {
    box.hidden = searches;
    for (const name of TRIAGE) {
      const field = box.elements[name];
      if (field.type === 'checkbox') field.checked = params[name] === 'true';
      else field.value = params[name] ?? { sort: 'spread', measure: 'reward' }[name] ?? '';
    }
    for (const option of box.elements.only.options) option.disabled = Boolean(ONLY[option.value].all) && params.scope !== 'all';
    box.elements.sort.querySelector('[value=order]').disabled = params.scope === 'all';
    box.elements.sort.querySelector('[value=change]').disabled = params.scope !== 'all';
  };
  box.rewards = (names, params) => {
    const field = box.elements.measure;
    if (field.options.length === names.length + 1) return;
    field.replaceChildren(...measures(names).map(([name, label]) => el('option', { value: name }, label)));
    field.value = params.measure ?? 'reward';
  };
  return box;
}

function line({ step, group, sample }, ...content) {
  const params = { ...place().params, step, group, sample, newest: undefined };
  return el('li', {}, el('a', { href: hash('rollouts', params), 'data-step': String(step), 'data-group': String(group), 'data-sample': sample === undefined ? null : String(sample) }, content));
}

/// Fetches the groups of the selection and lists them page by page.
async function groups(run, params, mine) {
  const { measure = 'reward', least } = params;
  const table = groupsOf(run, measure, least);
  if (params.scope === 'all') {
    const { key } = listed;
    await table.load(({ about }) => {
      status.textContent = `reading step ${about.steps} of ${about.all_steps} …`;
      return root && listed.key === key;
    });
    if (mine !== ticket) return;
    triage.rewards(table.about.rewards, params);
    const rows = triaged([...table.rows], params, table);
    status.textContent = `${rows.length} of ${table.rows.length} groups${table.about.capped ? `; ${CAPPED}` : ''}`;
    await page(rows, 0, (part) => withTexts(run, part, measure, table.least));
    return;
  }
  const lines = [];
  for (let all = 1; lines.length < all;) {
    const found = await apiJson('groups', { run, step: current.step, from: lines.length, limit: STEP_GROUPS });
    if (mine !== ticket) return;
    all = found.all;
    lines.push(...found.groups);
    if (!found.groups.length) break;
  }
  // The largest value of the run, as far as it is known, tells what passes.
  const known = await apiJson('catalogue', { run, measure, least, from: 1e9 });
  if (mine !== ticket) return;
  triage.rewards(known.rewards, params);
  const rows = lines.map((own) => summary(own, measure, known.least));
  const shown = triaged(rows, params);
  status.textContent = shown.length === rows.length ? `${rows.length} groups` : `${shown.length} of ${rows.length} groups`;
  await page(shown, 0, (part) => part);
}

/// Adds texts and rewards to rows of a table. A report does not have them.
async function withTexts(run, rows, measure, least) {
  if (isFile) return rows.map((row) => ({ ...row, values: [], excerpt: '', picture: null }));
  const { groups: found } = await apiJson('lines', { run, places: rows.map((own) => `${own.step}-${own.group}`).join(',') });
  return found.map((own) => ({ ...summary(own, measure, least), change: rows.find((row) => row.step === own.step && row.group === own.group).change }));
}

/// Adds a page of groups to the list. `fill` returns the list entries of some rows.
async function page(rows, from, fill) {
  const mine = listed.key;
  const part = await fill(rows.slice(from, from + PAGE));
  if (listed.key !== mine || !root) return;
  list.append(...part.map(entry));
  if (from + PAGE < rows.length) more(() => page(rows, from + PAGE, fill));
  mark();
}

function entry(own) {
  const [low, high] = range(current.run, own.values);
  const words = [place().params.scope === 'all' ? `step ${own.step}` : '', own.pass === null ? '' : `${Math.round(own.pass * own.completions)}/${own.completions} pass`, own.id, own.category,
    own.cut ? `${own.cut} cut off` : '', own.unparsed ? `${own.unparsed} without answer` : '', own.change ? `${signed(own.change)} since its last pass` : ''];
  return line(own,
    own.picture === null || !link('preview', { step: own.step, group: own.group, at: own.picture }) ? '' : el('img', { class: 'thumb', src: link('preview', { run: current.run, step: own.step, group: own.group, at: own.picture }), alt: '', loading: 'lazy', onerror: (event) => event.target.remove() }),
    el('span', { class: 'bars', role: 'img', 'aria-label': `rewards ${own.values.map((value) => number(value, 2)).join(', ')}` }, own.values.slice(0, SAMPLES_AT_ONCE).map((value) => bar(value, low, high))),
    el('span', { class: 'excerpt' }, visible(own.excerpt)),
    el('span', { class: 'quiet' }, visible(words.filter(Boolean).join(' · '))));
}

let ranges = {};

/// Returns the range of rewards seen so far in a run, so that bars are comparable across prompts.
function range(run, rewards) {
  const [low, high] = ranges[run] ?? [0, 1e-9];
  const own = rewards.filter((reward) => reward !== null);
  ranges[run] = [Math.min(low, ...own), Math.max(high, ...own)];
  return ranges[run];
}

function bar(reward, low, high) {
  const node = el('i', { class: reward === null ? 'none' : '' });
  node.style.height = `${reward === null ? 100 : 8 + (92 * (reward - low)) / (high - low)}%`;
  return node;
}

function more(then) {
  const button = el('button', { type: 'button', onclick: () => { item.remove(); then(); } }, 'more');
  const item = el('li', {}, button);
  list.append(item);
}

/// Searches until a page is full or all steps are searched. Each response arrives quickly and contains the position to continue from.
async function find(run, filter, mine) {
  let next = { step: 0, byte: 0 };
  const { key } = listed;
  const one = async () => {
    let count = 0;
    while (next && count < FOUND) {
      const found = await apiJson('find', { run, ...filter, step: next.step, byte: next.byte, limit: FOUND - count });
      if (mine !== ticket && listed.key !== key) return;
      list.append(...found.found.map((own) => line(own,
        el('span', { class: 'excerpt' }, visible(own.excerpt)),
        el('span', { class: 'quiet' }, visible([`step ${own.step}`, own.id, own.category, `reward ${number(own.reward, 2)}`, own.cut ? 'cut off' : '', own.parsed ? '' : 'no answer'].filter(Boolean).join(' · '))))));
      count += found.found.length;
      next = found.next;
      const all = list.querySelectorAll('a').length;
      status.textContent = next ? `${all} found up to step ${next.step}` : `${all} found in ${found.steps} steps`;
    }
    if (next) more(one);
    mark();
  };
  await one();
}

async function prompt(mine) {
  const where = { run: current.run, step: current.step, group: current.group };
  let found;
  try { found = await apiJson('group', where); } catch (error) {
    if (mine === ticket) detail.replaceChildren(failure(error));
    return;
  }
  if (mine !== ticket) return;
  const colours = el('select', { 'aria-label': 'colour of tokens', onchange: () => { remember('colours', colours.value); paint(); } },
    Object.entries(COLOURINGS).map(([name, label]) => el('option', { value: name, disabled: !['none', 'advantage'].includes(name) && !found.samples.some((own) => own.tokens) }, label)));
  const kept = remember('colours');
  colours.value = kept in COLOURINGS && !colours.querySelector(`option[value=${kept}]`).disabled ? kept : 'none';
  const samples = [...found.samples].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const cards = el('div', { class: 'cards' });
  const scale = Math.max(...samples.map((own) => Math.abs(own.advantage ?? 0)), 1e-9);
  let shown = 0;
  const add = (count) => {
    const made = samples.slice(shown, shown + count).map((own) => card(own, where, scale, found.media));
    shown += made.length;
    cards.append(...made.map((one) => one.node));
    made.forEach((one) => one.paint(colours.value));
    cards.made = [...(cards.made ?? []), ...made];
    rest.hidden = shown >= samples.length;
  };
  const paint = () => cards.made.forEach((one) => one.paint(colours.value));
  const rest = el('button', { type: 'button', onclick: () => add(SAMPLES_AT_ONCE) }, 'more completions');
  const rewards = samples.map((own) => own.reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, own) => sum + own, 0) / (rewards.length || 1);
  detail.replaceChildren(
    el('h2', {}, visible(`${found.id}`), el('span', { class: 'quiet' }, ` step ${found.step}, prompt ${found.group}${found.category ? ` · ${found.category}` : ''} · mean reward ${number(mean)}`)),
    el('p', {}, el('a', { href: hash('rows', { run: current.run, id: found.id }) }, 'history of this row')),
    found.media.length ? gallery(found.media, where) : '',
    el('details', { open: found.prompt.chars < 1200 }, el('summary', {}, 'rendered prompt'), text(found.prompt, { ...where })),
    el('details', { open: true }, el('summary', {}, 'solution'), block(typeof found.solution === 'string' ? found.solution : JSON.stringify(found.solution))),
    Object.keys(found.row).length ? el('details', {}, el('summary', {}, 'row'), el('dl', {}, Object.entries(found.row).map(([name, value]) => [el('dt', {}, visible(name)), el('dd', {}, visible(typeof value === 'string' ? value : JSON.stringify(value)))]))) : '',
    el('div', { class: 'controls' }, el('h3', {}, `${samples.length} completions, best first`), el('label', {}, 'tokens by ', colours),
      found.samples.some((own) => own.tokens) ? '' : el('span', { class: 'quiet' }, '`train --log_token_stats` records numbers per token')),
    cards, rest,
  );
  add(Math.max(SAMPLES_AT_ONCE, samples.findIndex((own) => String(own.sample) === current.sample) + 1));
  if (current.sample !== undefined) cards.querySelector(`[data-sample="${CSS.escape(current.sample)}"]`)?.scrollIntoView({ block: 'nearest' });
}

/// Shows a text from the server. A very long text is shortened, with a button that shows all of it.
function text({ text: shown, chars }, where) {
  const pre = block(shown);
  const cut = chars > [...shown].length;
  if (!cut) return pre;
  const button = el('button', { type: 'button', onclick: async () => {
    button.disabled = true;
    try { pre.replaceChildren(...visible(await (await api('text', where)).text())); button.remove(); } catch (error) { button.replaceWith(failure(error)); }
  } }, `show all ${chars.toLocaleString('en')} characters`);
  return el('div', {}, pre, button);
}

/// Returns the boxes in the calls of a turn of the model: the number of the picture, from 1, and the corners.
function boxes(said) {
  return said.split('<tool_call>').slice(1).flatMap((call) => {
    const corners = call.match(/bbox_2d"?\s*[:>]\s*\[([^\]]*)\]/)?.[1].split(',').map(Number) ?? [];
    if (corners.length !== 4 || !corners.every(Number.isFinite)) return [];
    return [{ picture: Number(call.match(/"image"\s*:\s*(\d+)|<parameter=image>\s*(\d+)/)?.slice(1).find(Boolean) ?? 1), corners }];
  });
}

/// Shows the pictures of a record with the boxes that a turn of the model asks for.
function marked(turn, where, media) {
  const pictures = media.map((medium, at) => ({ medium, at })).filter(({ medium }) => medium.mime?.startsWith('image/') && !medium.times?.length);
  const all = boxes(turn.model.text).filter(({ picture }) => pictures[picture - 1]);
  return [...new Set(all.map(({ picture }) => picture))].map((picture) => {
    const src = link('media', { ...where, at: pictures[picture - 1].at });
    if (!src) return '';
    const image = el('img', { src, alt: 'the picture with the box of the call', class: pictures[picture - 1].medium.stored ? 'stored' : '', loading: 'lazy', onerror: (event) => event.target.parentElement.remove() });
    const figure = el('div', { class: 'boxed' }, image);
    image.addEventListener('load', () => {
      const thousandths = runs[Number(current.run ?? 0)]?.setting?.('environment') === 'zoom:1000';
      const size = thousandths ? [1000, 1000] : [image.naturalWidth, image.naturalHeight];
      for (const own of all.filter((other) => other.picture === picture)) {
        const [left, top, right, bottom] = own.corners.map((value, i) => 100 * Math.min(1, Math.max(0, value / size[i % 2])));
        const box = el('span', { title: `the box ${own.corners.join(', ')}` });
        Object.assign(box.style, { left: `${left}%`, top: `${top}%`, width: `${right - left}%`, height: `${bottom - top}%` });
        figure.append(box);
      }
    });
    return figure;
  });
}

/// Shows a turn of the model and the answer of an environment that follows it.
function added(turn, where, media) {
  const addresses = turn.media.map((at) => link('preview', { ...where, at })).filter(Boolean);
  const pictures = addresses.map((src) => el('img', { class: 'crop', src, alt: 'a picture of the answer', loading: 'lazy', onerror: (event) => event.target.remove() }));
  return el('div', {}, el('div', { class: 'completion' }, block(turn.model.text)), el('div', { class: 'answer' }, marked(turn, where, media), pictures, turn.text.text ? block(turn.text.text) : ''));
}

function card(own, where, scale, media) {
  const body = el('div', { class: 'completion' }, text(own.completion, { ...where, sample: own.sample }));
  const link = el('a', { href: hash('rollouts', { ...where, sample: own.sample }), title: 'a link to this completion' }, `#${own.sample}`);
  const marks = [own.cut && 'cut off', !own.parsed && 'no answer'].filter(Boolean).map((mark) => el('span', { class: 'mark' }, mark));
  const rewards = Object.entries(own.rewards).map(([name, value]) => el('span', { class: 'reward' }, `${name} `, el('b', {}, number(value, 2))));
  const columns = Object.entries(own.columns).map(([name, value]) => [el('dt', {}, visible(name)), el('dd', {}, visible(typeof value === 'string' ? value : JSON.stringify(value)))]);
  const node = el('section', { class: 'card', 'data-sample': String(own.sample), 'data-current': current.sample === String(own.sample) ? 'true' : null },
    el('header', {}, link, el('b', { class: 'total' }, number(own.reward, 2)), el('span', { class: own.advantage < 0 ? 'bad' : own.advantage > 0 ? 'good' : 'quiet', title: 'advantage' }, `A ${signed(own.advantage)}`), el('span', { class: 'quiet' }, `${own.length} tokens`), marks),
    el('div', { class: 'rewards' }, rewards), (own.turns ?? []).map((turn) => added(turn, where, media)), body, columns.length ? el('dl', {}, columns) : '');
  let numbers = null;
  const paint = async (how) => {
    node.style.background = '';
    if (how === 'advantage') node.style.background = tint(own.advantage / scale);
    if (how === 'none' || how === 'advantage' || !own.tokens) { if (numbers) body.replaceChildren(text(own.completion, { ...where, sample: own.sample })); return; }
    try { numbers ??= await apiJson('tokens', { ...where, sample: own.sample }); } catch (error) { body.append(failure(error)); return; }
    body.replaceChildren(tokens(numbers, how, own.advantage));
  };
  return { node, paint };
}

/// Returns a colour for a value from −1 to 1: green above 0, red below.
function tint(value) {
  const share = Math.min(1, Math.abs(value || 0));
  return share < 0.01 ? '' : `color-mix(in oklab, var(${value < 0 ? '--bad' : '--good'}) ${Math.round(share * 30)}%, var(--card))`;
}

/// Computes the numbers of one token from the recorded ones.
function at(numbers, i) {
  const logprob = numbers.logprobs[i];
  const before = (numbers.old_logprobs ?? numbers.sampled_logprobs)?.[i];
  const reference = numbers.reference_logprobs?.[i];
  const gap = reference === undefined ? undefined : reference - logprob;
  return {
    logprob,
    probability: Math.exp(logprob),
    ratio: before === undefined ? undefined : Math.exp(logprob - before),
    kl: gap === undefined ? undefined : Math.exp(gap) - gap - 1,
    entropy: numbers.entropies?.[i],
  };
}

function tokens(numbers, how, advantage) {
  const box = el('pre', { class: 'tokens', tabIndex: 0, role: 'region', 'aria-label': 'tokens' });
  const tip = el('output', { class: 'tip' });
  const add = (from) => {
    const until = Math.min(numbers.tokens.length, from + TOKENS_AT_ONCE);
    const spans = [];
    for (let i = from; i < until; i += 1) {
      const own = at(numbers, i);
      const span = el('span', { 'data-at': String(i) }, visible(numbers.tokens[i].replace(/^$/, '␀')));
      const strength = { probability: 1 - own.probability, entropy: Math.min(1, (own.entropy ?? 0) / 3), kl: Math.min(1, (own.kl ?? 0) / 0.5) }[how];
      if (how === 'ratio') span.style.background = tint(own.ratio === undefined ? 0 : Math.log(own.ratio) * 5);
      else if (strength > 0.01) span.style.background = `color-mix(in oklab, var(--warm) ${Math.round(strength * 45)}%, transparent)`;
      spans.push(span);
    }
    box.append(...spans);
    if (until < numbers.tokens.length) {
      const button = el('button', { type: 'button', onclick: () => { button.remove(); add(until); } }, `${numbers.tokens.length - until} more tokens`);
      box.append(button);
    }
  };
  const tell = (event) => {
    const i = event.target.closest?.('[data-at]')?.dataset.at;
    if (i === undefined) return;
    const own = at(numbers, Number(i));
    tip.replaceChildren(el('b', {}, visible(JSON.stringify(numbers.tokens[i]))), ` p ${number(own.probability)} · log p ${number(own.logprob)} · ratio ${number(own.ratio)} · KL ${number(own.kl)} · entropy ${number(own.entropy)} · A ${signed(advantage)}`);
  };
  box.addEventListener('pointerover', tell);
  box.addEventListener('click', tell);
  tip.textContent = `${COLOURINGS[how]}: point at a token for its numbers`;
  add(0);
  return el('div', {}, tip, box);
}
