// Charts: groups of metrics, smoothing, axes, marks, several runs in one chart, and files of what is shown.

import { PLACES, api, apiJson, choice, distinct, duration, el, hash, isFile, number, place, remember, settled, visible } from './shared.js';
import { moments, quantile, smoothed } from './stats.js';
import { csv, fileName, picture, save, svg } from './export.js';
import { CHARTS } from './table.js';

// With more runs, a chart has one line per run and metric: no edges and no faint values.
const FULL_RUNS = 4;
// With more runs, lines are thin.
const MANY_RUNS = 16;
// With more lines, a caption has their number instead of their values.
const SAID_LINES = 8;
// Points of a time axis that several long runs share.
const TIME_POINTS = 800;
// Settings in which runs of one experiment may differ.
const SEED_SETTINGS = new Set(['seed', 'data_seed', ...PLACES]);
const LISTED_MARKS = 300;
const MARKS = { checkpoint: '▲', evaluation: '◆', resumption: '↻', warning: '!', stop: '■', failure: '✕' };

const [RUN_COLOURS, STACK_COLOURS] = [8, 9];
let charts = [];
let root, grid, runs, controls, events, reset, bounds;
const axis = { smooth: Number(remember('smooth') ?? 0.6), time: remember('x') === 'time', all: false, log: false, clip: false, seeds: false, range: null };

export function show(main, given, params) {
  runs = given;
  root = main;
  take(params);
  const smooth = el('input', { type: 'range', min: '0', max: '0.99', step: '0.01', value: String(axis.smooth), oninput: () => { axis.smooth = Number(smooth.value); remember('smooth', smooth.value); said.textContent = smooth.value; data(); said2(); } });
  const said2 = settled(200, address);
  const said = el('output', {}, String(axis.smooth));
  const x = choice('x', 'x axis', [['step', 'steps'], ['time', 'time']], { onchange: () => { axis.time = x.value === 'time'; axis.range = null; remember('x', x.value); rebuild(); } });
  x.value = axis.time ? 'time' : 'step';
  const box = (name, label, title) => {
    const own = el('input', { type: 'checkbox', name, checked: axis[name], onchange: () => { axis[name] = own.checked; rebuild(); } });
    return el('label', { title }, own, ` ${label}`);
  };
  reset = el('button', { type: 'button', onclick: () => { axis.range = null; runs.forEach((run) => { run.detail = null; }); rebuild(); } }, 'whole run');
  // These fields do with the keyboard and by touch what dragging does with a mouse.
  bounds = ['from', 'to'].map((name) => el('input', { type: 'number', step: 'any', class: 'step', placeholder: name, 'aria-label': `x axis ${name}`, title: `x axis ${name}: a step, or seconds over time`, onchange: ranged }));
  const copy = el('button', { type: 'button', onclick: async () => {
    address();
    try { await navigator.clipboard.writeText(location.href); copy.textContent = 'copied'; } catch { copy.textContent = 'copy the address above'; }
    setTimeout(() => { copy.textContent = 'copy link'; }, 2000);
  } }, 'copy link');
  controls = el('div', { class: 'controls' }, el('label', {}, 'smoothing ', smooth, said), el('label', {}, 'over ', x), el('span', {}, bounds),
    box('log', 'log axis', 'Logarithmic y axis where all values are above 0'), box('clip', 'without outliers', 'y axis from the 1 % to the 99 % quantile of the values'),
    box('all', 'every metric'), runs.length > 1 ? box('seeds', 'join seeds', 'Mean and standard deviation of runs whose settings differ in the seed only') : '', reset, copy);
  events = el('details', { class: 'events', hidden: true });
  grid = el('div', { class: 'grid' });
  main.append(controls, events, grid);
  watch = new IntersectionObserver((entries) => entries.forEach(({ target: { chart }, isIntersecting, boundingClientRect: { top } }) => {
    chart.seen = isIntersecting;
    // A chart just below the visible part can wait.
    if (isIntersecting && top < innerHeight) chart.fresh(); else if (isIntersecting) idle(() => { if (chart.seen) chart.fresh(); });
  }), { rootMargin: '200px' });
  rebuild();
  listEvents();
}

let watch;
const idle = globalThis.requestIdleCallback ?? ((then) => setTimeout(then, 50));
let palette;

/// Reads the colours of the theme once for all charts, since each look at the style makes the browser compute it.
function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  palette = { runs: Array.from({ length: STACK_COLOURS }, (_, at) => of(`--run-${at}`)), ink: of('--ink'), quiet: of('--quiet'), line: of('--line'), warm: of('--warm'), paper: of('--card') };
}

/// Takes the view from the parameters of the address.
function take(params) {
  for (const name of ['all', 'log', 'clip', 'seeds']) if (params[name] !== undefined) axis[name] = params[name] === '1';
  if (params.smooth !== undefined) axis.smooth = Number(params.smooth) || 0;
  if (params.x !== undefined) axis.time = params.x === 'time';
  const [low, high] = [params.from, params.to].map(Number);
  axis.range = params.from !== undefined && low < high ? [low, high] : null;
  if (params.runs !== undefined) { const own = new Set(params.runs.split('.').map(Number)); runs.forEach((run) => { run.shown = own.has(run.at); }); }
}

/// Writes the view into the address, so that its link shows the same.
function address() {
  const flags = Object.fromEntries(['all', 'log', 'clip', 'seeds'].filter((name) => axis[name]).map((name) => [name, '1']));
  const own = runs.filter((run) => run.shown);
  const params = { ...flags, smooth: axis.smooth, x: axis.time ? 'time' : undefined, from: axis.range?.[0].toFixed(2), to: axis.range?.[1].toFixed(2), runs: own.length < runs.length ? own.map((run) => run.at).join('.') : undefined };
  try { history.replaceState(null, '', hash('charts', params)); } catch { /* a page without an address of its own */ }
}

export function hide() {
  charts.forEach((chart) => chart.destroy());
  watch?.disconnect();
  charts = [];
  grid = null;
}

/// Takes another address of this view. The address that the view itself wrote changes nothing.
export function navigate(params) {
  if (!grid || !Object.keys(params).length) return Boolean(grid);
  return false;
}

export function update() {
  if (!grid) return;
  listEvents();
  const wanted = layout().map((chart) => chart.title).join('\n');
  if (wanted !== charts.map((chart) => chart.spec.title).join('\n') || charts.some((chart) => chart.key !== keyOf(chart.spec))) rebuild();
  else data();
}

export function repaint() { if (grid) rebuild(); }

const shown = () => runs.filter((run) => run.shown && (run.steps.x.length || run.evals.x.length));
const keyOf = (spec) => lanes(spec).map((lane) => lane.members.map((run) => run.at).join('+')).join();

/// Runs of a chart. With joined seeds, a lane is all runs of one experiment.
function lanes(spec) {
  const all = shown();
  if (spec.stacked || !axis.seeds) return (spec.stacked ? all.slice(0, 1) : all).map((run) => ({ members: [run], at: run.at, name: run.name }));
  const groups = new Map();
  for (const run of all) {
    const key = JSON.stringify(run.settings.filter(({ name }) => !SEED_SETTINGS.has(name)).map(({ name, value }) => [name, value]));
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(run);
  }
  return [...groups.values()].map((members) => ({ members, at: members[0].at, name: members.length > 1 ? `${members[0].name} and ${members.length - 1} more seeds` : members[0].name }));
}

/// Returns the events of a run that have a sign.
const marked = (run) => run.events.filter((own) => MARKS[own.kind]);

/// Lists checkpoints, evaluations, warnings and resumptions with their lines of the log.
function listEvents() {
  const several = runs.length > 1;
  const all = shown().flatMap((run) => marked(run).map((own) => ({ ...own, run })));
  events.hidden = !all.length;
  const counts = Object.keys(MARKS).map((kind) => [kind, all.filter((own) => own.kind === kind).length]).filter(([, count]) => count);
  events.replaceChildren(el('summary', {}, counts.map(([kind, count]) => `${MARKS[kind]} ${count} ${kind}${count > 1 ? 's' : ''}`).join(' · ')),
    el('ul', {}, all.length > LISTED_MARKS ? el('li', { class: 'quiet' }, `${all.length - LISTED_MARKS} earlier ones are not listed`) : '', all.slice(-LISTED_MARKS).map((own) => el('li', {}, el('b', {}, `${MARKS[own.kind]} step ${own.step} `), several ? el('span', { class: 'quiet' }, `${own.run.name} `) : '', visible(own.text)))));
}

function names(of) {
  const found = new Set();
  for (const run of shown()) for (const [name, values] of Object.entries(run[of].columns)) if ((values.means ?? values).some((value) => value !== null)) found.add(name);
  return found;
}

/// Returns what `{}` of a pattern stands for in a name; null if the name does not match.
function filled(pattern, name) {
  const [start, end] = pattern.split('{}');
  if (end === undefined) return pattern === name ? '' : null;
  return name.startsWith(start) && name.endsWith(end) && name.length > start.length + end.length ? name.slice(start.length, name.length - end.length) : null;
}

/// Returns the charts of a row of the table for which there are numbers.
function charted(row, known) {
  const found = row.lines.flatMap(([pattern, label]) => known.flatMap((name) => {
    const part = filled(pattern, name);
    return part === null ? [] : [{ part, line: [name, label.replace('{}', () => part)] }];
  }));
  if (!row.title.includes('{}')) return found.length ? [{ ...row, lines: found.map((own) => own.line) }] : [];
  return found.map(({ part, line }) => ({ ...row, title: row.title.replace('{}', () => part), spread: row.spread.replace('{}', () => part), lines: [line] }));
}

/// True for the chart of a reward that is the total in every step: there is no other reward, and its weight is 1.
function isTotal({ lines: [[name]], evals }, all) {
  if (evals || !/^rewards\/.*\/mean$/.test(name) || !all.some((chart) => chart.lines[0][0] === 'reward')) return false;
  return shown().every(({ steps: { columns } }) => columns[name] === undefined || (columns.reward !== undefined && JSON.stringify(columns[name]) === JSON.stringify(columns.reward)));
}

/// Returns the charts for which these runs have numbers.
function layout() {
  const known = { steps: [...names('steps')], evals: [...names('evals')] };
  const out = CHARTS.flatMap((row) => charted(row, known[row.evals ? 'evals' : 'steps'])).filter((chart, _, all) => !isTotal(chart, all));
  if (!axis.all) return out;
  const used = new Set(['epoch', 'derived/tokens_per_second', 'derived/memory_rest_mb', ...out.flatMap((chart) => chart.lines.map(([name]) => name))]);
  for (const [of, found] of Object.entries(known)) {
    const last = (run, name) => (run[of].columns[name]?.means ?? run[of].columns[name])?.at(-1);
    const rows = shown().map((run) => Object.fromEntries(found.map((name) => [name, last(run, name)])));
    for (const name of distinct([...found].sort(), rows)) if (!used.has(name)) out.push({ title: name, lines: [[name, name]], evals: of === 'evals' });
  }
  return out;
}

function rebuild() {
  if (!grid) return;
  charts.forEach((chart) => chart.destroy());
  colours();
  const specs = layout();
  charts = specs.map((spec) => new Chart(spec));
  grid.replaceChildren(...charts.map((chart) => chart.figure));
  const waiting = runs.some((run) => run.shown && !run.loaded) ? 'Loading the metrics …' : 'No step is done yet. Charts appear with the first one.';
  if (!specs.length) grid.replaceChildren(el('p', { class: 'quiet', role: 'status' }, waiting));
  say();
  charts.forEach((chart) => watch.observe(chart.figure));
  if (specs.length) address();
  if (axis.range) finer();
}

function data() { charts.forEach((chart) => chart.stale()); }

/// Fetches every row of the visible range of runs that are drawn in buckets.
const finer = settled(150, async () => {
  if (!axis.range || !grid) return;
  const range = axis.range;
  await Promise.all(shown().map(async (run) => {
    if (!run.thinned) return;
    const step = (x) => (axis.time ? run.steps.x[Math.max(0, run.steps.seconds.findIndex((own) => own >= x))] ?? run.steps.x.at(-1) : x);
    const [low, high] = range.map(step);
    // The rows before the range let the smoothing settle.
    const found = await apiJson('curves', { run: run.at, low: Math.floor(low - 0.2 * (high - low)), high: Math.ceil(high) });
    run.detail = { low: found.steps.x[0], high: found.steps.x.at(-1), steps: found.steps };
  }));
  if (axis.range === range) data();
});

/// Shows the chosen range in the fields for it.
function say() {
  reset.hidden = !axis.range;
  bounds.forEach((field, at) => { field.value = axis.range ? String(Number(axis.range[at].toFixed(2))) : ''; });
}

/// Takes the range of the fields. An empty field stands for an end of the run.
function ranged() {
  const all = charts.flatMap((chart) => chart.plot?.data[0] ?? []);
  const [low, high] = [Math.min, Math.max].map((of, at) => (bounds[at].value === '' ? all.reduce((a, b) => of(a, b), all[0]) : Number(bounds[at].value)));
  const range = bounds.every((field) => field.value === '') || !(low < high) ? null : [low, high];
  if (!range) bounds.forEach((field) => { field.value = ''; });
  zoom(range);
}

/// Shows a range in all charts.
const zoom = settled(60, (range) => {
  if (String(range) === String(axis.range)) return;
  axis.range = range;
  if (!range) runs.forEach((run) => { run.detail = null; });
  say();
  address();
  charts.forEach((chart) => chart.zoomTo(range));
  if (range) finer();
});

/// Returns the x values of a part of a run and a column of it: the values, or both ends of each bucket.
function part(steps, name, weight) {
  const column = steps.columns[name];
  const x = axis.time ? steps.seconds : steps.x;
  if (!column) return { x, raw: new Array(x.length).fill(null), mean: new Array(x.length).fill(null) };
  if (!column.means) return { x, raw: column, mean: smoothed(column, weight) };
  // A bucket stands for many steps, so its weight is that of all of them.
  const mean = weight > 0 ? smoothed(column.means, weight ** steps.width).flatMap((own) => [own, own]) : column.ends;
  return { x, raw: column.ends, mean };
}

/// Returns a column of a run, with every row of the range that was fetched in detail.
function series(run, spec, name, weight) {
  const whole = part(spec.evals ? run.evals : run.steps, name, weight);
  if (!run.detail || spec.evals) return whole;
  const inner = part(run.detail.steps, name, weight);
  const [low, high] = [inner.x[0], inner.x.at(-1)];
  const join = (of) => [...whole[of].filter((_, at) => whole.x[at] < low), ...inner[of], ...whole[of].filter((_, at) => whole.x[at] > high)];
  return { x: join('x'), raw: join('raw'), mean: join('mean') };
}

/// Returns the value of a line at x, between its neighbours; null outside of it.
function interpolated(xs, values, x) {
  let [low, high] = [0, xs.length - 1];
  if (!xs.length || x < xs[0] || x > xs[high]) return null;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
  const [a, b] = [values[low], values[high]];
  if (a === null || b === null || a === undefined || b === undefined) return a ?? b ?? null;
  return xs[high] === xs[low] ? a : a + ((b - a) * (x - xs[low])) / (xs[high] - xs[low]);
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.lanes = lanes(spec);
    this.key = keyOf(spec);
    this.body = el('div', { class: 'plot' });
    this.said = el('span', { class: 'said' });
    this.title = spec.title + (spec.stacked && shown().length > 1 ? ` (${this.lanes[0].name})` : '');
    const help = el('p', { class: 'help', hidden: true }, spec.help);
    const about = spec.help && el('button', { type: 'button', class: 'about', 'aria-expanded': 'false', 'aria-label': `about ${spec.title}`, onclick: () => { help.hidden = !help.hidden; about.setAttribute('aria-expanded', String(!help.hidden)); } }, '?');
    this.menu = el('details', { class: 'menu', ontoggle: () => this.fill() }, el('summary', { 'aria-label': `range and files of ${spec.title}` }, '⋯'));
    this.figure = el('figure', { class: 'chart' },
      el('figcaption', {}, el('span', {}, el('b', {}, this.title), about, this.menu), this.said), help, this.body);
    // Arrow keys reach the plot; buttons in the caption keep their own.
    this.body.tabIndex = 0;
    this.body.setAttribute('role', 'img');
    this.body.addEventListener('keydown', (event) => this.move(event));
    this.figure.chart = this;
    this.isStale = true;
    this.resize = new ResizeObserver(() => this.plot?.setSize({ width: this.body.clientWidth, height: this.height() }));
  }

  height() { return innerWidth < 500 ? 170 : 200; }

  /// Draws again what has changed, at once if it can be seen.
  stale() { this.isStale = true; if (this.seen) this.fresh(); }

  fresh() {
    if (!this.isStale) return;
    this.isStale = false;
    if (this.plot) this.set(); else this.draw();
  }

  /// Controls of the y axis, and files of what the chart shows.
  fill() {
    if (!this.menu.open || this.menu.children.length > 1) return;
    const edge = (at) => el('input', { type: 'number', step: 'any', class: 'step', 'aria-label': at ? 'largest y' : 'smallest y', placeholder: at ? 'y to' : 'y from', onchange: (event) => { this.edges ??= [null, null]; this.edges[at] = event.target.value === '' ? null : Number(event.target.value); this.set(); } });
    const button = (label, act) => el('button', { type: 'button', onclick: act }, label);
    const name = fileName(this.title);
    this.menu.append(el('div', { class: 'controls' }, edge(0), edge(1),
      button('CSV', async () => save(`${name}.csv`, 'text/csv', await this.table())),
      button('SVG', () => save(`${name}.svg`, 'image/svg+xml', svg(this.drawing()))),
      button('PNG', async () => save(`${name}.png`, 'image/png', await picture(svg(this.drawing()))))));
  }

  /// Returns every step of the chart's metrics, and not only what is drawn.
  async table() {
    const wanted = [...this.spec.lines.map(([name]) => name), ...(this.spec.band ?? []), this.spec.spread].filter(Boolean);
    const rows = [];
    for (const run of this.lanes.flatMap((lane) => lane.members)) {
      for (const line of await metrics(run)) {
        if (wanted.some((name) => typeof line[name] === 'number')) rows.push([run.name, line.step, ...wanted.map((name) => line[name] ?? '')]);
      }
    }
    return csv([['run', 'step', ...wanted], ...rows]);
  }

  /// Returns what the chart shows, for `svg`.
  drawing() {
    const { x, y } = this.plot.scales;
    const { data } = this.plot;
    const name = (own) => (this.lanes.length > 1 ? `${own.lane.name}${this.spec.lines.length > 1 ? ` ${own.label}` : ''}` : own.label);
    const lines = [];
    const areas = [];
    this.series.forEach((own, at) => {
      const colour = this.colour(own);
      if (own.kind === 'line' || own.kind === 'stack') lines.push({ colour, label: name(own), values: data[at + 1] });
      if (own.kind === 'raw') lines.push({ colour, values: data[at + 1] });
      if (own.kind === 'edge' && this.series[at + 1]?.kind === 'edge') areas.push({ colour, opacity: 0.15, low: data[at + 2], high: data[at + 1] });
      if (own.kind === 'stack') areas.push({ colour, opacity: 0.4, low: own.at > 0 ? data[at] : data[0].map(() => 0), high: data[at + 1] });
    });
    const { ink, line: grid, paper } = palette;
    return { title: this.title, x: data[0], range: [x.min, x.max], y: [y.min, y.max], log: this.isLog, time: axis.time, dots: Boolean(this.spec.evals), lines, areas, ink, grid, paper };
  }

  /// Returns the x values, then for each lane its lines with their edges. All lanes share one list of x values.
  columns() {
    const { spec } = this;
    const weight = spec.evals || spec.stacked ? 0 : axis.smooth;
    const isFull = this.lanes.length <= FULL_RUNS;
    const tables = [];
    this.series = [];
    for (const lane of this.lanes) {
      const run = lane.members[0];
      const joins = lane.members.length > 1;
      const out = [null];
      const get = (name, own = run) => series(own, spec, name, weight);
      const first = get(spec.lines[0][0]);
      let x = first.x;
      if (joins) x = [...new Set(lane.members.flatMap((own) => get(spec.lines[0][0], own).x))].sort((a, b) => a - b);
      if (spec.stacked) {
        const sums = new Array(x.length).fill(0);
        spec.lines.forEach(([name, label], at) => {
          const own = series(run, spec, name, axis.smooth).mean.map((value) => value ?? 0);
          own.forEach((value, i) => { sums[i] += value; });
          out.push([...sums]);
          this.series.push({ lane, label, at, kind: 'stack', own });
        });
      } else {
        spec.lines.forEach(([name, label], at) => {
          let { raw, mean } = get(name);
          let edges = null;
          if (joins) {
            const all = lane.members.map((own) => get(name, own));
            const of = x.map((own) => moments(all.map((line) => interpolated(line.x, line.mean, own)).filter((value) => value !== null)));
            mean = of.map((own) => own.mean);
            raw = null;
            edges = [-1, 1].map((side) => of.map((own) => (own.deviation === null ? own.mean : own.mean + side * own.deviation)));
          } else if (isFull && spec.band) edges = spec.band.map((edge) => get(edge).mean);
          else if (isFull && spec.spread && spec.spread in run.steps.columns) {
            const spread = get(spec.spread).mean;
            edges = [-1, 1].map((side) => spread.map((own, i) => (own === null || mean[i] === null ? null : mean[i] + side * own)));
          }
          if (edges && at === 0) {
            out.push(edges[1], edges[0]);
            this.series.push({ lane, at, kind: 'edge' }, { lane, at, kind: 'edge' });
          }
          if (weight > 0 && raw && isFull) { out.push(raw); this.series.push({ lane, at, kind: 'raw' }); }
          out.push(mean);
          this.series.push({ lane, label, at, kind: 'line' });
        });
      }
      out[0] = x;
      for (const own of this.series) if (own.lane === lane) own.until = x.at(-1);
      tables.push(this.lanes.length > 1 && axis.time ? gridded(out) : out);
    }
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  }

  colour(series) {
    const isPart = this.spec.stacked || (this.lanes.length < 2 && this.spec.lines.length > 1);
    return palette.runs[isPart ? series.at % STACK_COLOURS : series.lane.at % RUN_COLOURS];
  }

  /// Returns the range of the y axis: by hand, by quantiles, or of all values.
  range(low, high) {
    const isZero = this.spec.zero || this.spec.stacked;
    if (axis.clip && this.plot && !this.spec.stacked) {
      const values = this.series.flatMap((own, at) => (own.kind === 'edge' ? [] : this.plot.data[at + 1])).filter((own) => Number.isFinite(own)).sort((a, b) => a - b);
      if (values.length > 20) [low, high] = [quantile(values, 0.01), quantile(values, 0.99)];
    }
    // Rounding errors near 0 would take most of a logarithmic axis, and uPlot cannot place ticks there.
    let [from, to] = this.isLog && high > 1e-12 ? [Math.max(low, high / 1e9, 1e-12), high] : this.isLog ? [0.1, 1] : room(low, high, isZero);
    if (this.isLog && from === to) [from, to] = [from / 2, to * 2];
    const [least, most] = this.edges ?? [null, null];
    if (least !== null) from = this.isLog ? Math.max(least, 1e-12) : least;
    if (most !== null) to = most;
    return from < to ? [from, to] : [from, from + 1];
  }

  draw() {
    const columns = this.columns();
    if (!columns || !columns[0].length) return;
    const { quiet: ink, line: lines } = palette;
    const isPositive = columns.slice(1).every((column, at) => this.series[at].kind === 'edge' || column.every((own) => !(own <= 0)) || column.every((own) => own === null || own === undefined));
    this.isLog = axis.log && !this.spec.stacked && isPositive;
    const series = this.series.map((own) => {
      const stroke = this.colour(own);
      if (own.kind === 'edge') return { show: true, width: 0, points: { show: false } };
      if (own.kind === 'raw') return { stroke: `${stroke}55`, width: 1, points: { show: false } };
      const dash = this.lanes.length > 1 ? [undefined, [6, 4], [2, 3]][own.at % 3] : undefined;
      return { stroke, width: own.kind === 'stack' || this.lanes.length > MANY_RUNS ? 1 : 1.75, dash, fill: own.kind === 'stack' ? `${stroke}66` : undefined, points: { show: Boolean(this.spec.evals), size: 5 }, spanGaps: true };
    });
    const bands = [];
    this.series.forEach((own, at) => {
      if (own.kind === 'edge' && this.series[at + 1]?.kind === 'edge') bands.push({ series: [at + 1, at + 2], fill: `${this.colour(own)}${this.lanes.length < 3 ? '26' : '14'}` });
      if (own.kind === 'stack' && own.at > 0) bands.push({ series: [at + 1, at], fill: `${this.colour(own)}66` });
    });
    if (this.spec.stacked) series.forEach((own, at) => { if (at > 0) delete own.fill; });
    // Edges below 0 cannot be drawn on a logarithmic axis.
    if (this.isLog) this.series.forEach((own, at) => { if (own.kind === 'edge') columns[at + 1] = columns[at + 1].map((value) => (value > 0 ? value : null)); });
    this.plot = new uPlot({
      width: this.body.clientWidth || 320,
      height: this.height(),
      legend: { show: false },
      cursor: { sync: { key: 'all' }, drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: { distr: this.isLog ? 3 : 1, range: (_, low, high) => this.range(low, high) } },
      axes: [
        { stroke: ink, grid: { stroke: lines, width: 1 }, ticks: { show: false }, size: 28, font: '11px system-ui', values: (_, ticks) => ticks.map((tick) => (axis.time ? duration(tick) : String(tick))), incrs: axis.time ? [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400] : undefined, space: axis.time ? 80 : 50 },
        { stroke: ink, grid: { stroke: lines, width: 1 }, ticks: { show: false }, size: 52, font: '11px system-ui', values: (_, ticks) => ticks.map((tick) => (tick === null ? '' : number(tick))) },
      ],
      series: [{}, ...series],
      bands,
      hooks: {
        setCursor: [(plot) => this.say(plot.cursor.idx)],
        setScale: [(plot, key) => { if (key === 'x' && this.plot === plot && !this.isQuiet) { const { min, max } = plot.scales.x; const [first, last] = [plot.data[0][0], plot.data[0].at(-1)]; zoom(min > first || max < last ? [min, max] : null); } }],
        drawClear: [(plot) => this.shade(plot, palette.warm)],
        draw: [(plot) => this.mark(plot, ink)],
      },
    }, columns, this.body);
    this.resize.observe(this.body);
    if (axis.range) this.zoomTo(axis.range);
    this.say(null);
  }

  zoomTo(range) {
    if (!this.plot) return;
    const x = this.plot.data[0];
    const [min, max] = range ?? [x[0], x.at(-1)];
    if (!(min < max) || (this.plot.scales.x.min === min && this.plot.scales.x.max === max)) return;
    this.isQuiet = true;
    this.plot.batch(() => this.plot.setScale('x', { min, max }));
    this.isQuiet = false;
  }

  /// Returns the place of a step of a run on the canvas.
  at(plot, run, step) {
    const { left, width } = plot.bbox;
    const rows = run.steps;
    const x = axis.time ? rows.seconds[rows.x.findIndex((own) => own >= step)] ?? rows.seconds.at(-1) ?? 0 : step;
    return Math.max(left, Math.min(left + width, plot.valToPos(x, 'x', true)));
  }

  /// Shades the steps of a problem. With several runs, a stripe at the upper edge has the colour of the run.
  shade(plot, colour) {
    const { top, height } = plot.bbox;
    const several = this.lanes.length > 1;
    for (const [at, run] of this.lanes.flatMap((lane) => lane.members).filter((run) => run.warnings.length).entries()) {
      for (const own of run.warnings) {
        const [from, to] = [own.since, own.until ?? run.last?.step ?? own.step].map((step) => this.at(plot, run, step));
        plot.ctx.fillStyle = several ? palette.runs[run.at % RUN_COLOURS] : `${colour}22`;
        plot.ctx.fillRect(from, several ? top + ((4 * at) % height) * devicePixelRatio : top, Math.max(2, to - from), several ? 3 * devicePixelRatio : height);
      }
    }
  }

  /// Draws a sign for each event at the lower edge. The list above the charts has its line of the log.
  mark(plot, ink) {
    const { left, top, width, height } = plot.bbox;
    const all = this.lanes.flatMap((lane) => lane.members.flatMap((run) => marked(run).map((own) => [run, own])));
    if (all.length > 200) return;
    plot.ctx.font = `${9 * devicePixelRatio}px system-ui`;
    plot.ctx.textAlign = 'center';
    plot.ctx.fillStyle = ink;
    for (const [run, own] of all) {
      const x = this.at(plot, run, own.step);
      if (x > left && x < left + width) plot.ctx.fillText(MARKS[own.kind], x, top + height - 2 * devicePixelRatio);
    }
  }

  /// Replaces the numbers of the existing lines.
  set() {
    const before = this.series?.map((own) => own.kind).join();
    const columns = this.columns();
    if (!this.plot || !columns || this.series.map((own) => own.kind).join() !== before || axis.log) {
      this.plot?.destroy();
      this.plot = null;
      this.draw();
      return;
    }
    this.isQuiet = true;
    this.plot.setData(columns, !axis.range);
    if (axis.range) this.plot.redraw();
    this.isQuiet = false;
    this.say(this.plot.cursor.idx);
  }

  say(at) {
    if (!this.plot) return;
    const columns = this.plot.data;
    const last = columns[0].length - 1;
    const here = at ?? last;
    const parts = [];
    const count = this.series.filter((own) => own.kind === 'line' || own.kind === 'stack').length;
    if (count <= SAID_LINES) this.series.forEach((own, i) => {
      if (own.kind !== 'line' && own.kind !== 'stack') return;
      // Lanes share one list of x values, so one may have no value at this x. Its previous value applies, but not after its last one.
      let row = columns[0][here] > own.until && at !== null && at !== undefined ? -1 : here;
      while (row > 0 && (columns[i + 1][row] === null || columns[i + 1][row] === undefined)) row -= 1;
      const found = row < 0 ? null : own.kind === 'stack' ? own.own[row] : columns[i + 1][row];
      const mark = el('i', {});
      mark.style.background = this.colour(own);
      const label = this.spec.lines.length > 1 ? `${own.label} ` : '';
      parts.push(el('span', { title: this.lanes.length > 1 ? own.lane.name : undefined }, mark, `${label}${number(found)}`));
    });
    const x = columns[0][here];
    const where = at === null || at === undefined ? '' : axis.time ? duration(x) : `step ${x}`;
    this.said.replaceChildren(...(parts.length ? parts : [`${count} lines`]), ...(where ? [el('span', { class: 'quiet' }, where)] : []));
    this.body.setAttribute('aria-label', `${this.spec.title}: ${this.said.textContent}. Arrow keys move from step to step.`);
  }

  move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || !this.plot) return;
    event.preventDefault();
    const x = this.plot.data[0];
    const at = Math.max(0, Math.min(x.length - 1, (this.plot.cursor.idx ?? x.length - 1) + by));
    this.plot.setCursor({ left: this.plot.valToPos(x[at], 'x'), top: 10 }, true, true);
  }

  destroy() {
    this.seen = false;
    this.resize.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}

/// Moves times of a lane to a common grid. Otherwise each of many runs would add x values of its own.
function gridded([x, ...lines]) {
  const most = Math.max(...shown().map((run) => run.steps.seconds.at(-1) ?? 0));
  const size = most / TIME_POINTS || 1;
  const kept = x.flatMap((own, at) => (at === 0 || Math.round(own / size) > Math.round(x[at - 1] / size) ? [at] : []));
  return [kept.map((at) => Math.round(x[at] / size) * size), ...lines.map((line) => kept.map((at) => line[at]))];
}

/// Reads every row of a run.
async function metrics(run) {
  const rows = [];
  // A report has what it draws.
  if (isFile) return run.steps.x.map((step, at) => ({ step, ...Object.fromEntries(Object.entries(run.steps.columns).map(([name, values]) => [name, (values.ends ?? values)[at]])) }));
  for (let from = 0; ;) {
    const response = await api('metrics', { run: run.at, from });
    for (const line of (await response.text()).split('\n')) { try { rows.push(JSON.parse(line)); } catch { /* no row */ } }
    const next = Number(response.headers.get('x-next'));
    if (next === from) return rows.filter((row) => typeof row?.step === 'number');
    from = next;
  }
}

function room(low, high, zero) {
  if (low === null || high === null || low === undefined) return [0, 1];
  let from = zero ? Math.min(0, low) : low;
  let to = high;
  // Means of equal numbers differ by rounding, and an axis cannot have ticks for such a small range.
  if (to - from <= 1e-6 * Math.max(Math.abs(from), Math.abs(to))) { const by = Math.abs(from) * 0.1 || 0.1; from -= zero ? 0 : by; to += by; }
  const space = (to - from) * 0.05;
  return [zero && from === 0 ? 0 : from - space, to + space];
}
