// The charts: which metrics belong together, smoothing, axes, runs on top of each other.

import { duration, el, number, remember } from './shared.js';

const LIVE_POINTS = 2000;
const PER_REWARD = /^rewards\/(.+)\/mean$/;

// A line is a metric and its label; `band` are the metrics of its edges, `spread` is a distance to either side.
const CHARTS = [
  { title: 'Reward', lines: [['reward', 'reward']], spread: 'reward_std', help: 'Mean of the weighted sum of all rewards, and its standard deviation' },
  { each: PER_REWARD },
  { title: 'Groups without variance', lines: [['frac_reward_zero_std', 'share']], zero: true, help: 'Share of prompts whose completions all got the same reward: nothing is learned from them' },
  { title: 'KL', lines: [['kl', 'kl']], help: 'Distance from the reference, in nats' },
  { title: 'Entropy', lines: [['entropy', 'entropy']], help: 'Mean entropy at completion tokens, in nats' },
  { title: 'Loss', lines: [['loss', 'loss']], help: 'Near 0 for GRPO, whatever is learned' },
  { title: 'Gradient norm', lines: [['grad_norm', 'norm']], help: 'Before clipping' },
  { title: 'Clip ratio', lines: [['clip_ratio/region_mean', 'all'], ['clip_ratio/low_mean', 'low'], ['clip_ratio/high_mean', 'high']], zero: true, help: 'Share of tokens whose ratio is clipped' },
  { title: 'Completion length', lines: [['completions/mean_length', 'mean']], band: ['completions/min_length', 'completions/max_length'], help: 'Tokens: mean, least and most' },
  { title: 'Cut off', lines: [['completions/clipped_ratio', 'share']], zero: true, help: 'Share of completions that hit the length limit' },
  { title: 'Rollout and training', lines: [['sampling/sampling_logp_difference/mean', 'mean'], ['sampling/sampling_logp_difference/max', 'max']], help: '|log p(rollout) − log p(training)| per token' },
  { title: 'Step time by phase', stack: /^time\//, help: 'Seconds of a step' },
  { title: 'Tokens per second', lines: [['\0tokens_per_second', 'tokens/s']], zero: true, help: 'Tokens that went through the model in training, by the time of the step' },
  { title: 'Memory', lines: [['memory/peak_mb', 'MB']], zero: true, help: 'Peak of the process, in MB' },
  { title: 'Learning rate', lines: [['learning_rate', 'rate']] },
  { title: 'Evaluation', lines: [['eval_accuracy', 'accuracy'], ['eval_reward', 'reward']], evals: true, help: 'On held-out rows' },
];

const STACK_COLOURS = 9;
let charts = [];
let root, grid, runs, controls;
const axis = { smooth: Number(remember('smooth') ?? 0.6), time: remember('x') === 'time', all: false };

export function show(main, given) {
  runs = given;
  root = main;
  const smooth = el('input', { type: 'range', min: '0', max: '0.99', step: '0.01', value: String(axis.smooth), oninput: () => { axis.smooth = Number(smooth.value); remember('smooth', smooth.value); said.textContent = smooth.value; data(); } });
  const said = el('output', {}, String(axis.smooth));
  const x = el('select', { onchange: () => { axis.time = x.value === 'time'; remember('x', x.value); rebuild(); } }, el('option', { value: 'step' }, 'steps'), el('option', { value: 'time' }, 'time'));
  x.value = axis.time ? 'time' : 'step';
  const all = el('input', { type: 'checkbox', checked: axis.all, onchange: () => { axis.all = all.checked; rebuild(); } });
  controls = el('div', { class: 'controls' }, el('label', {}, 'smoothing ', smooth, said), el('label', {}, 'over ', x), el('label', {}, all, ' every metric'));
  grid = el('div', { class: 'grid' });
  main.append(controls, grid);
  rebuild();
}

export function hide() {
  charts.forEach((chart) => chart.destroy());
  charts = [];
  grid = null;
}

export function update() {
  if (!grid) return;
  const wanted = layout().map((chart) => chart.title).join('\n');
  if (wanted !== charts.map((chart) => chart.spec.title).join('\n') || charts.some((chart) => chart.runs !== shown().map((run) => run.at).join())) rebuild();
  else data();
}

export function repaint() { if (grid) rebuild(); }

const shown = () => runs.filter((run) => run.shown && (run.rows.length || run.evals.length));

function names(evals) {
  const found = new Set();
  for (const run of shown()) {
    const rows = evals ? run.evals : run.rows;
    for (const row of [rows[0], rows[Math.floor(rows.length / 2)], rows.at(-1)]) {
      for (const name of Object.keys(row ?? {})) if (typeof row[name] === 'number' || row[name] === null) found.add(name);
    }
  }
  return found;
}

/// The charts that these runs have numbers for.
function layout() {
  const own = names(false);
  const evals = names(true);
  if (own.has('num_tokens') && own.has('step_time')) own.add('\0tokens_per_second');
  const used = new Set(['step', 'epoch', '\0seconds', '\0tokens_per_second']);
  const out = [];
  for (const chart of CHARTS) {
    if (chart.each) {
      for (const name of own) {
        const match = chart.each.exec(name);
        if (match) out.push({ title: `Reward: ${match[1]}`, lines: [[name, match[1]]], spread: `rewards/${match[1]}/std`, help: 'Mean and standard deviation' });
      }
    } else if (chart.stack) {
      const phases = [...own].filter((name) => chart.stack.test(name));
      if (phases.length) out.push({ ...chart, lines: phases.map((name) => [name, name.replace(chart.stack, '')]), stacked: true });
    } else {
      const lines = chart.lines.filter(([name]) => (chart.evals ? evals : own).has(name));
      if (lines.length) out.push({ ...chart, lines });
    }
  }
  if (axis.all) {
    out.forEach((chart) => chart.lines.forEach(([name]) => used.add(name)));
    for (const name of [...own].sort()) if (!used.has(name)) out.push({ title: name, lines: [[name, name]] });
    for (const name of [...evals].sort()) if (!used.has(name)) out.push({ title: name, lines: [[name, name]], evals: true });
  }
  return out;
}

function rebuild() {
  if (!grid) return;
  charts.forEach((chart) => chart.destroy());
  const specs = layout();
  charts = specs.map((spec) => new Chart(spec, shown()));
  grid.replaceChildren(...charts.map((chart) => chart.figure));
  if (!specs.length) grid.replaceChildren(el('p', { class: 'quiet' }, 'No step is done yet. Charts appear with the first one.'));
  charts.forEach((chart) => chart.draw());
}

function data() { charts.forEach((chart) => chart.set()); }

function value(row, name) {
  if (name === '\0tokens_per_second') return row.num_tokens / row.step_time;
  return row[name] ?? null;
}

/// Exponential means without the pull of the first value; gaps stay gaps.
function smoothed(values, weight) {
  if (!(weight > 0)) return values;
  let mean = 0;
  let total = 0;
  return values.map((own) => {
    if (own === null || own === undefined || !Number.isFinite(own)) return null;
    mean = weight * mean + (1 - weight) * own;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/// Of long runs every n-th row, so that drawing stays quick; the last one always.
function thinned(rows) {
  const every = Math.ceil(rows.length / LIVE_POINTS);
  return every < 2 ? rows : rows.filter((_, at) => (rows.length - 1 - at) % every === 0);
}

class Chart {
  constructor(spec, of) {
    this.spec = spec;
    this.of = spec.stacked ? of.slice(0, 1) : of;
    this.runs = of.map((run) => run.at).join();
    this.body = el('div', { class: 'plot' });
    this.said = el('span', { class: 'said' });
    const whose = spec.stacked && of.length > 1 ? ` (${of[0].name})` : '';
    this.figure = el('figure', { class: 'chart', tabindex: '0', title: spec.help, onkeydown: (event) => this.key(event) },
      el('figcaption', {}, el('b', {}, spec.title + whose), this.said), this.body);
    this.resize = new ResizeObserver(() => this.plot?.setSize({ width: this.body.clientWidth, height: this.height() }));
  }

  height() { return innerWidth < 500 ? 170 : 200; }

  /// x, then for each run its lines with their edges. All runs share one list of x.
  columns() {
    const { spec } = this;
    const tables = [];
    this.series = [];
    for (const run of this.of) {
      const rows = thinned(spec.evals ? run.evals : run.rows);
      const x = rows.map((row) => (axis.time ? row['\0seconds'] : row.step));
      const out = [x];
      const raw = (name) => rows.map((row) => value(row, name));
      const weight = spec.evals || spec.stacked ? 0 : axis.smooth;
      if (spec.stacked) {
        const sums = new Array(rows.length).fill(0);
        spec.lines.forEach(([name, label], at) => {
          const own = smoothed(raw(name), axis.smooth).map((own) => own ?? 0);
          own.forEach((own, i) => { sums[i] += own; });
          out.push([...sums]);
          this.series.push({ run, label, at, kind: 'stack', own });
        });
      } else {
        spec.lines.forEach(([name, label], at) => {
          const values = raw(name);
          const mean = smoothed(values, weight);
          const edges = spec.band?.map((edge) => smoothed(raw(edge), weight))
            ?? (spec.spread && rows.some((row) => spec.spread in row) ? [-1, 1].map((side) => smoothed(raw(spec.spread), weight).map((own, i) => (own === null || mean[i] === null ? null : mean[i] + side * own))) : null);
          if (edges && at === 0 && this.of.length < 3) {
            out.push(edges[1], edges[0]);
            this.series.push({ run, at, kind: 'edge' }, { run, at, kind: 'edge' });
          }
          if (weight > 0) { out.push(values); this.series.push({ run, at, kind: 'raw' }); }
          out.push(mean);
          this.series.push({ run, label, at, kind: 'line' });
        });
      }
      tables.push(out);
    }
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  }

  colour(series) {
    const style = getComputedStyle(document.documentElement);
    const name = this.spec.stacked || (this.of.length < 2 && this.spec.lines.length > 1) ? `--run-${series.at % STACK_COLOURS}` : `--run-${series.run.at % 8}`;
    return style.getPropertyValue(name).trim();
  }

  draw() {
    const columns = this.columns();
    if (!columns) return;
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue('--quiet').trim();
    const lines = style.getPropertyValue('--line').trim();
    const series = this.series.map((own) => {
      const stroke = this.colour(own);
      if (own.kind === 'edge') return { show: true, width: 0, points: { show: false } };
      if (own.kind === 'raw') return { stroke: `${stroke}55`, width: 1, points: { show: false } };
      const dash = this.of.length > 1 && own.at ? [4, 3] : undefined;
      return { stroke, width: own.kind === 'stack' ? 1 : 1.75, dash, fill: own.kind === 'stack' ? `${stroke}66` : undefined, points: { show: this.spec.evals, size: 5 }, spanGaps: true };
    });
    const bands = [];
    this.series.forEach((own, at) => {
      if (own.kind === 'edge' && this.series[at + 1]?.kind === 'edge') bands.push({ series: [at + 1, at + 2], fill: `${this.colour(own)}26` });
      if (own.kind === 'stack' && own.at > 0) bands.push({ series: [at + 1, at], fill: `${this.colour(own)}66` });
    });
    if (this.spec.stacked) series.forEach((own, at) => { if (at > 0) delete own.fill; });
    this.plot = new uPlot({
      width: this.body.clientWidth || 320,
      height: this.height(),
      legend: { show: false },
      cursor: { sync: { key: 'all' }, drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: (_, low, high) => range(low, high, this.spec.zero || this.spec.stacked) } },
      axes: [
        { stroke: ink, grid: { stroke: lines, width: 1 }, ticks: { show: false }, size: 28, font: '11px system-ui', values: (_, ticks) => ticks.map((tick) => (axis.time ? duration(tick) : String(tick))), incrs: axis.time ? [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400] : undefined, space: axis.time ? 80 : 50 },
        { stroke: ink, grid: { stroke: lines, width: 1 }, ticks: { show: false }, size: 52, font: '11px system-ui', values: (_, ticks) => ticks.map((tick) => number(tick)) },
      ],
      series: [{}, ...series],
      bands,
      hooks: { setCursor: [(plot) => this.say(plot.cursor.idx)] },
    }, columns, this.body);
    this.resize.observe(this.body);
    this.say(null);
  }

  /// New numbers in the same lines.
  set() {
    const before = this.series?.map((own) => own.kind).join();
    const columns = this.columns();
    if (!this.plot || !columns || this.series.map((own) => own.kind).join() !== before) {
      this.plot?.destroy();
      this.draw();
      return;
    }
    const zoomed = this.plot.scales.x.min > this.plot.data[0][0] || this.plot.scales.x.max < this.plot.data[0].at(-1);
    this.plot.setData(columns, !zoomed);
    if (zoomed) this.plot.redraw();
    this.say(this.plot.cursor.idx);
  }

  say(at) {
    if (!this.plot) return;
    const columns = this.plot.data;
    const last = columns[0].length - 1;
    const here = at ?? last;
    const parts = [];
    this.series.forEach((own, i) => {
      if (own.kind !== 'line' && own.kind !== 'stack') return;
      let row = here;
      // Where runs share x a run may have nothing at this place: what it had before holds.
      while (row > 0 && (columns[i + 1][row] === null || columns[i + 1][row] === undefined)) row -= 1;
      const found = own.kind === 'stack' ? own.own[row] : columns[i + 1][row];
      const mark = el('i', {});
      mark.style.background = this.colour(own);
      const label = this.spec.lines.length > 1 ? `${own.label} ` : '';
      parts.push(el('span', {}, mark, `${label}${number(found)}`));
    });
    const x = columns[0][here];
    const where = at === null || at === undefined ? '' : axis.time ? duration(x) : `step ${x}`;
    this.said.replaceChildren(...parts, ...(where ? [el('span', { class: 'quiet' }, where)] : []));
    this.figure.setAttribute('aria-label', `${this.spec.title}: ${this.said.textContent}`);
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !this.plot) return;
    event.preventDefault();
    const x = this.plot.data[0];
    const at = Math.max(0, Math.min(x.length - 1, (this.plot.cursor.idx ?? x.length - 1) + move));
    this.plot.setCursor({ left: this.plot.valToPos(x[at], 'x'), top: 10 });
  }

  destroy() {
    this.resize.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}

function range(low, high, zero) {
  if (low === null || high === null) return [0, 1];
  let from = zero ? Math.min(0, low) : low;
  let to = high;
  // Means of equal numbers differ by rounding: no axis has ticks for that.
  if (to - from <= 1e-9 * Math.max(Math.abs(from), Math.abs(to))) { const by = Math.abs(from) * 0.1 || 0.1; from -= zero ? 0 : by; to += by; }
  const room = (to - from) * 0.05;
  return [zero && from === 0 ? 0 : from - room, to + room];
}
