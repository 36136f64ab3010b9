// Main script of the page: the runs, their live metrics, and the current view.

import { again, apiJson, duration, each, el, failure, isFile, number, place, quoted, remember, settled, visible } from './shared.js';
import * as charts from './charts.js';
import { card, problems } from './verdict.js';
import * as runs from './runs.js';
import * as distributions from './distributions.js';
import * as rollouts from './rollouts.js';
import * as rows from './rows.js';
import * as evaluations from './evaluations.js';

// The key 0 selects the first of them, 1 the second.
const VIEWS = { runs, charts, distributions, rollouts, rows, evaluations, settings: { show: showSettings } };
const COLOURS = 8;
// More runs than these are shown only when they are chosen.
const FIRST_SHOWN = 10;
const LISTED_RUNS = 6;
const LONG_EVERY_MS = 5000;
// The more runs are shown, the fewer buckets a run of many steps has: pairs of a number of runs and a number of buckets.
const BUCKETS = [[24, 75], [8, 150]];
// A browser has six connections to a server. The others are for the view and the events.
const RUNS_AT_ONCE = 3;
const main = document.getElementById('main');
const notices = document.getElementById('notices');
const verdicts = document.getElementById('verdicts');
const state = { runs: [], view: null, ended: null };

class Run {
  constructor(at, given) {
    Object.assign(this, given, { at, shown: true });
    this.colour = `var(--run-${at % COLOURS})`;
    this.clear();
  }

  clear() {
    this.generation = 0;
    this.bytes = null;
    this.steps = { x: [], seconds: [], columns: {} };
    this.evals = this.steps;
    this.thinned = false;
    this.detail = null;
    this.latest = {};
    this.events ??= [];
    this.warnings ??= [];
  }

  /// Takes rows: all of them in buckets, all of them, or those that are new.
  take(found) {
    const isNew = !found.thinned && !this.thinned && found.generation === this.generation && found.from === this.steps.x.length && found.from > 0;
    if (isNew) {
      const before = this.steps.x.length;
      this.steps.x.push(...found.steps.x);
      this.steps.seconds.push(...found.steps.seconds);
      for (const [name, values] of Object.entries(found.steps.columns)) (this.steps.columns[name] ??= new Array(before).fill(null)).push(...values);
    } else this.steps = found.steps;
    Object.assign(this, { generation: found.generation, capped: found.capped, thinned: found.thinned, evals: found.evaluations, latest: found.last, rows: found.rows });
  }

  /// Fetches new rows and events. Returns true if there were any. `progress` is called after each part of a long file.
  async fetch(metrics, progress) {
    this.metrics = metrics;
    if (!this.shown) return false;
    let news = false;
    this.judge(metrics);
    if (metrics.events !== this.known) {
      this.events = await apiJson('marks', { run: this.at });
      this.known = metrics.events;
      this.warnings = paired(this.events);
      news = true;
    }
    const wanted = `${metrics.id} ${metrics.bytes}`;
    // All buckets of a long run come again with each step.
    const isSoon = this.thinned && !metrics.done && Date.now() - this.fetched < LONG_EVERY_MS;
    if (this.bytes === wanted || isSoon) return news;
    for (let done = false; !done;) {
      const found = await apiJson('curves', { run: this.at, generation: this.generation || undefined, from: this.thinned ? undefined : this.steps.x.length || undefined, buckets: BUCKETS.find(([runs]) => shownRuns().length > runs)?.[1] });
      this.take(found);
      done = found.done;
      if (!done) progress?.();
    }
    Object.assign(this, { bytes: wanted, fetched: Date.now(), loaded: true });
    return true;
  }

  /// Asks for the verdict if there is news; of a live run not more often than for a long run's curves. Nothing waits for it.
  judge(metrics) {
    const judged = `${metrics.id} ${metrics.bytes} ${metrics.events}`;
    if (judged === this.judged || !(metrics.done || metrics.events !== this.known || !(Date.now() - this.judgedAt < LONG_EVERY_MS))) return;
    Object.assign(this, { judged, judgedAt: Date.now() });
    apiJson('verdict', { run: this.at }).then((verdict) => { this.verdict = verdict; notify(); }, () => { this.judged = null; });
  }

  get last() { return this.rows ? { ...this.latest, step: this.thinned ? this.latest.step : this.steps.x.at(-1) } : undefined; }

  setting(name) {
    if (this.read !== this.settings) Object.assign(this, { read: this.settings, values: new Map(this.settings.map((setting) => [setting.name, setting.value])) });
    return this.values.get(name);
  }

  /// True if a row has arrived within the time of a few steps.
  get isLive() {
    const patience = 30 + 5 * (this.last?.step_time ?? 30);
    return !this.metrics.done && this.metrics.bytes > 0 && this.metrics.age_secs + (Date.now() - this.seen) / 1000 < patience;
  }
}

/// Returns the training problems among events, each with the step at which it ended.
function paired(events) {
  const found = [];
  for (const { step, problem } of events.filter((own) => own.problem && !own.problem.good)) {
    if (problem.begins) found.push({ ...problem, step, until: null });
    else { const own = found.findLast((other) => other.rule === problem.rule); if (own) own.until = step; }
  }
  return found;
}

async function start() {
  state.runs = (await apiJson('runs')).map((given, at) => new Run(at, given));
  // The newest runs are shown at first.
  const newest = [...state.runs].sort((a, b) => a.metrics.age_secs - b.metrics.age_secs).slice(0, FIRST_SHOWN);
  state.runs.forEach((run) => { run.shown = newest.includes(run); });
  document.querySelector('nav a[href="#/runs"]').hidden = state.runs.length < 2;
  named();
  addEventListener('hashchange', route);
  addEventListener('keydown', keys);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => state.view?.repaint?.());
  document.getElementById('theme').addEventListener('click', nextTheme);
  document.getElementById('stop').addEventListener('click', () => ask('stop', 'The run finishes the step under way, writes a checkpoint and ends. The same command resumes it.'));
  document.getElementById('save').addEventListener('click', () => ask('save', 'The run writes a checkpoint after the step under way and continues.'));
  setTheme(remember('theme') ?? 'auto');
  route();
  if (isFile) {
    state.told = state.runs.map((run) => run.metrics);
    await fetchNews();
    return;
  }
  listen();
  setInterval(status, 5000);
}

function listen() {
  const events = new EventSource('api/events');
  let queue = Promise.resolve();
  events.onmessage = (event) => {
    queue = queue.then(() => arrived(JSON.parse(event.data))).catch(() => { /* the next event asks again */ });
  };
  events.addEventListener('doing', (event) => { Object.assign(state, JSON.parse(event.data)); status(); });
  events.addEventListener('end', (event) => { state.ended = JSON.parse(event.data).how; notify(); status(); });
  events.onerror = () => {
    // The browser reconnects automatically, but not after an error response.
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
    state.gone = true;
    notify();
    status();
  };
  events.onopen = () => {
    const back = state.gone;
    Object.assign(state, { gone: false, ended: null });
    if (back) describe().then(route).catch(() => { /* the next event asks again */ });
    notify();
    status();
  };
  state.events = events;
}

/// Asks the run to stop or to save, after a confirmation. The token in a header shows that the request comes from this page.
function ask(action, question) {
  const dialog = el('dialog', { 'aria-labelledby': 'question' }, el('p', { id: 'question' }, question),
    el('form', { method: 'dialog', class: 'controls' }, el('button', { value: 'yes' }, action === 'stop' ? 'Stop the run' : 'Save a checkpoint'), el('button', { value: '' }, 'Cancel')));
  dialog.addEventListener('close', async () => {
    dialog.remove();
    if (dialog.returnValue !== 'yes') return;
    try {
      const response = await fetch(`api/${action}`, { method: 'POST', headers: { 'X-Token': location.pathname.split('/')[1] } });
      state.answer = response.ok ? (await response.json()).told : `the run refused: ${await response.text()}`;
    } catch { state.answer = 'the run did not answer'; }
    notify();
  });
  document.body.append(dialog);
  dialog.showModal();
}

/// Shows notices: unreadable runs, the end of the server, and training problems.
function notify() {
  const several = state.runs.length > 1;
  again.command = `omnigrpo watch ${state.runs.map((run) => quoted(run.dir)).join(' ')}`;
  const parts = isFile ? state.runs.map(about) : [];
  parts.push(...state.runs.filter((run) => run.failure).map((run) => failure(`${run.name}: ${run.failure.message}`)));
  if (state.answer) parts.push(el('div', { class: 'notice', role: 'status' }, el('p', {}, visible(state.answer))));
  if (state.ended || (state.gone && state.drawn)) {
    parts.push(el('div', { class: 'notice', role: 'status' },
      el('p', {}, el('b', {}, state.ended ? 'The run has ended: ' : 'This page is no longer served'), state.ended ? [visible(state.ended), '.'] : ': the run was killed, or `watch` was stopped.', ' Charts and texts that are already loaded stay visible.'),
      el('p', {}, el('code', {}, again.command), ' serves it again, and this tab reconnects automatically.')));
  }
  for (const run of shownRuns()) {
    if (run.capped) parts.push(el('div', { class: 'notice', role: 'status' }, el('p', {}, `${run.name}: metrics.jsonl has more rows or metrics than the page reads. The charts leave out the later ones; the CSV file of a chart has all.`)));
    if (!several && run.warnings.length) parts.push(el('div', { class: 'notice warning' }, problems(run)));
  }
  notices.replaceChildren(...parts);
  const cards = shownRuns().filter((run) => run.verdict).map((run) => card(run, several));
  // The table of runs has them itself.
  verdicts.replaceChildren(...(state.view === runs ? [] : several && cards.length ? [folded(cards)] : cards));
}

/// Returns the cards of several runs as one line that opens and stays as the reader left it.
function folded(cards) {
  const judged = shownRuns().filter((run) => run.verdict);
  const count = (test) => judged.filter(test).length;
  const parts = [[count((run) => /^learn/.test(run.verdict.kind)), 'learned'], [count((run) => run.verdict.kind === 'not_learned'), 'not learned'], [count((run) => run.verdict.kind === 'worse'), 'worse'], [count((run) => run.verdict.problems.length), 'with problems']];
  const box = el('details', { class: 'notice verdict', ontoggle: () => remember('verdicts', box.open ? 'open' : 'folded') },
    el('summary', {}, `Verdicts on ${judged.length} runs`, parts.filter(([own]) => own).map(([own, word]) => ` · ${own} ${word}`)), cards);
  box.open = remember('verdicts') === 'open';
  return box;
}

/// Returns the head of a report: what was trained, on what, by what, and when.
function about(run) {
  const rows = [['Run', run.name], ['Model', run.setting('model_name_or_path')], ['Data', ['train_file', 'dataset_use', 'data_file_paths'].map(run.setting, run).find(Boolean)], ['Rewards', run.setting('reward_funcs')],
    ['Steps', `${run.last?.step ?? 0} of ${run.setting('max_steps') > 0 ? run.setting('max_steps') : 'the data'}`], ['Last step', run.ended]];
  return el('div', { class: 'notice' }, el('dl', {}, rows.filter(([, value]) => value).map(([name, value]) => [el('dt', {}, name), el('dd', {}, visible(String(value)))])));
}

const shownRuns = () => state.runs.filter((run) => run.shown);

async function arrived(metrics) {
  if (state.runs.some((run) => !run.settings.length && !run.rows)) await describe();
  state.told = metrics;
  await fetchNews();
}

/// Fetches what is new of the runs that are shown. A view is drawn as soon as the first run is there.
async function fetchNews() {
  if (state.view === runs) {
    state.runs.forEach((run, at) => Object.assign(run, { metrics: state.told[at], seen: Date.now() }));
    state.drawn = true;
    runs.update();
    notify();
    status();
    return;
  }
  const drawn = settled(100, (run) => { state.drawn = true; state.view?.update?.([run]); });
  const news = await each(state.runs, RUNS_AT_ONCE, async (run, at) => {
    run.seen = Date.now();
    run.failure = null;
    try {
      const has = await run.fetch(state.told[at], () => drawn(run));
      if (has && !state.drawn) drawn(run);
      return has;
    } catch (error) {
      // The other runs are still shown.
      run.failure = error;
      return false;
    }
  });
  notify();
  status();
  if (news.some(Boolean) || !state.drawn) {
    state.drawn = true;
    state.view?.update?.(state.runs.filter((_, at) => news[at]));
  }
}

/// Fetches the names and settings again: the page of a new run exists before its settings.
async function describe() {
  const told = await apiJson('runs');
  state.runs.forEach((run, at) => Object.assign(run, { name: told[at].name, settings: told[at].settings, controls: told[at].controls }));
  named();
  if (state.view === VIEWS.settings) state.view.update();
}

function named() {
  if (state.runs.length === 1) document.title = `${state.runs[0].name} · omnigrpo`;
  chips();
}

function status() {
  const live = document.getElementById('live');
  if (state.gone) {
    live.textContent = state.ended ? `ended · step ${state.runs[0]?.last?.step ?? 0}` : state.drawn ? 'not connected' : '';
    live.className = state.ended ? '' : 'off';
    return;
  }
  if (isFile) { live.textContent = `report · step ${state.runs[0]?.last?.step ?? 0}`; return; }
  const running = state.runs.filter((run) => run.isLive);
  live.className = running.length ? 'on' : '';
  const buttons = document.getElementById('controls');
  buttons.hidden = state.ended !== null || state.gone || !state.runs[0]?.controls;
  if (state.doing && !buttons.hidden) {
    live.className = 'on';
    live.textContent = state.doing;
    document.getElementById('machine').textContent = load(state.machine);
    return;
  }
  document.getElementById('machine').textContent = '';
  const isDone = state.runs.length > 0 && state.runs.every((run) => run.metrics?.done);
  live.textContent = running.length ? `live · ${running.some((run) => run.rows) ? running.filter((run) => run.rows).map(progress).join(' · ') : `${running.length} of ${state.runs.length} runs`}` : isDone ? 'done' : state.runs.some((run) => run.rows || run.metrics?.bytes) ? 'not training' : 'no step yet';
}

/// Describes the load of the machine and of its card. What is unknown is left out.
function load({ cpu_percent: cpu, memory_mb: memory, total_memory_mb: all, own_memory_mb: own, gpu }) {
  const gigabytes = (value) => number(value / 1000, 1);
  const parts = [cpu === null ? '' : `processor ${Math.round(cpu)} %`, memory === null ? '' : `memory ${gigabytes(memory)} of ${gigabytes(all)} GB`, own === null ? '' : `this run ${gigabytes(own)} GB`,
    gpu.busy_percent === null ? '' : `card ${Math.round(gpu.busy_percent)} %`, gpu.memory_mb === null ? '' : `its memory ${gigabytes(gpu.memory_mb)} of ${gigabytes(gpu.total_memory_mb)} GB`];
  return parts.filter(Boolean).join(' · ');
}

function progress(run) {
  const total = Number(run.setting('max_steps'));
  const step = run.last?.step ?? 0;
  if (!(total > 0)) return `step ${step}`;
  const recent = run.thinned ? [] : (run.steps.columns.step_time ?? []).slice(-20);
  const mean = recent.length ? recent.reduce((sum, own) => sum + (own ?? 0), 0) / recent.length : run.latest.step_time ?? 0;
  return `step ${step}/${total} · ${duration(mean * (total - step))} left`;
}

/// Shows the names of the runs, with a box for each of several. Many runs are in a list with a search.
function chips() {
  const box = document.getElementById('runs');
  if (state.runs.length < 2) { box.replaceChildren(el('b', {}, state.runs[0]?.name ?? 'no run')); return; }
  const isOpen = box.querySelector('.many')?.open;
  const chosen = () => { say(); choose(); };
  const labels = state.runs.map((run) => {
    const own = el('input', { type: 'checkbox', checked: run.shown, onchange: () => { run.shown = own.checked; chosen(); } });
    const swatch = el('span', { class: 'swatch' });
    swatch.style.background = run.colour;
    return el('label', { class: 'chip', title: run.dir }, own, swatch, run.name);
  });
  const summary = el('summary', {});
  const say = () => { summary.textContent = `${shownRuns().length} of ${state.runs.length} runs`; };
  say();
  if (state.runs.length <= LISTED_RUNS) { box.replaceChildren(...labels); return; }
  const set = (test) => { state.runs.forEach((run, at) => { run.shown = test(run); labels[at].querySelector('input').checked = run.shown; }); chosen(); };
  const find = el('input', { type: 'search', placeholder: 'find a run', 'aria-label': 'find a run', oninput: () => labels.forEach((label, at) => { label.hidden = !state.runs[at].name.toLowerCase().includes(find.value.toLowerCase()); }) });
  const button = (label, test) => el('button', { type: 'button', onclick: () => set(test) }, label);
  box.replaceChildren(el('details', { class: 'many', open: isOpen }, summary, el('div', { class: 'controls' }, find, button('all', () => true), button('none', () => false), button('those found', (run) => run.name.toLowerCase().includes(find.value.toLowerCase()))), el('div', { class: 'list' }, labels)));
}

/// Takes the choice of runs that are shown.
function choose() {
  notify();
  if (state.view === runs) runs.chosen();
  else state.view?.update?.(state.runs);
  if (state.told) fetchNews().catch(() => { /* the next event asks again */ });
}

function route() {
  const { view, params } = place();
  const chosen = VIEWS[view] ? view : state.runs.length > 1 ? 'runs' : 'charts';
  for (const link of document.querySelectorAll('nav a')) {
    if (link.hash === `#/${chosen}`) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  if (state.view === VIEWS[chosen] && state.view.navigate?.(params)) return;
  const before = state.view;
  state.view?.hide?.();
  state.view = VIEWS[chosen];
  main.replaceChildren();
  Promise.resolve(state.view.show(main, state.runs, params, () => { choose(); chips(); })).catch((error) => main.append(failure(error)));
  if (state.runs.length < 2 || !before) return;
  // The address may choose other runs, and the table needs no curves.
  chips();
  choose();
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input:not([type=checkbox], [type=range]), select, textarea')) return;
  const view = /^\d$/.test(event.key) ? Object.keys(VIEWS)[event.key] : undefined;
  if (view && (view !== 'runs' || state.runs.length > 1)) location.hash = `#/${view}`;
  else if (event.key === 't') nextTheme();
  else state.view?.key?.(event);
}

function setTheme(theme) {
  const button = document.getElementById('theme');
  document.documentElement.dataset.theme = theme;
  button.textContent = { auto: '◐', light: '☀', dark: '☾' }[theme];
  button.setAttribute('aria-label', `theme: ${theme}`);
  remember('theme', theme);
  state.view?.repaint?.();
}

function nextTheme() {
  const themes = ['auto', 'light', 'dark'];
  setTheme(themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length]);
}

function showSettings(root, runs) {
  const draw = () => {
    const names = [...new Set(runs.filter((r) => r.shown).flatMap((run) => run.settings.map((setting) => setting.name)))];
    const shown = runs.filter((run) => run.shown);
    const rows = names.map((name) => {
      const all = shown.map((run) => run.settings.find((setting) => setting.name === name));
      return { name, all, differs: new Set(all.map((setting) => setting?.value)).size > 1 };
    });
    const kept = rows.filter((row) => !only.checked || row.differs);
    table.replaceChildren(
      el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'setting'), shown.map((run) => el('th', { scope: 'col' }, run.name)), el('th', { scope: 'col' }, 'from'))),
      el('tbody', {}, kept.map(({ name, all, differs }) => el('tr', { class: differs ? 'differs' : '' },
        el('th', { scope: 'row' }, name),
        all.map((setting) => el('td', {}, setting?.value ?? '–')),
        el('td', { class: 'quiet' }, [...new Set(all.map((setting) => setting?.origin).filter(Boolean))].join(', '))))),
    );
    empty.hidden = kept.length > 0;
    empty.textContent = names.length ? 'These runs have the same settings.' : 'No config.yaml in this run.';
  };
  const only = el('input', { type: 'checkbox', checked: runs.length > 1, onchange: draw });
  const table = el('table', { class: 'settings' });
  const empty = el('p', { class: 'quiet' });
  root.append(el('section', { class: 'page' },
    el('h2', {}, 'Settings'),
    runs.length > 1 && el('label', {}, only, ' only differences'),
    el('div', { class: 'scroll' }, table), empty));
  if (runs.length < 2) only.checked = false;
  draw();
  VIEWS.settings.update = draw;
}

start().catch((error) => main.append(failure(error)));
