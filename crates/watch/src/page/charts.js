// Charts: groups of metrics, smoothing, axes, and several runs in one chart.

import { distinct, duration, el, number, remember, settled } from './shared.js';

// Longest run that is drawn in full. A longer run shows the minimum and the maximum of each bucket of steps.
const MOST_POINTS = 2000;
const BUCKETS = 400;
const PER_REWARD = /^rewards\/(.+)\/mean$/;

// Each line is a metric and its label. `band` names the metrics of its lower and upper edge; `spread` is a distance to both sides.
const CHARTS = [
  { title: 'Reward', lines: [['reward', 'reward']], spread: 'reward_std', help: 'Mean of the weighted sum of all rewards, and its standard deviation' },
  { each: PER_REWARD },
  { title: 'Groups without variance', lines: [['frac_reward_zero_std', 'share']], zero: true, help: 'Share of prompts whose completions all got the same reward: nothing is learned from them' },
  { title: 'KL', lines: [['kl', 'kl']], help: 'Distance from the reference, in nats' },
  { title: 'Entropy', lines: [['entropy', 'entropy']], help: 'Mean entropy at completion tokens, in nats' },
  { title: 'Loss', lines: [['loss', 'loss']], help: 'Objective of the training; near 0 for GRPO, whatever the model learns' },
  { title: 'Gradient norm', lines: [['grad_norm', 'norm']], help: 'Norm of all gradients before clipping' },
  { title: 'Clip ratio', lines: [['clip_ratio/region_mean', 'all'], ['clip_ratio/low_mean', 'low'], ['clip_ratio/high_mean', 'high']], zero: true, help: 'Share of tokens whose ratio is clipped' },
  { title: 'Completion length', lines: [['completions/mean_length', 'mean']], band: ['completions/min_length', 'completions/max_length'], help: 'Tokens: mean, minimum and maximum' },
  { title: 'Cut off', lines: [['completions/clipped_ratio', 'share']], zero: true, help: 'Share of completions that hit the length limit' },
  { title: 'Rollout and training', lines: [['sampling/sampling_logp_difference/mean', 'mean'], ['sampling/sampling_logp_difference/max', 'max']], help: 'Difference of log-probabilities between rollout and training per token, in nats' },
  { title: 'Step time by phase', stack: /^time\//, help: 'Seconds of a step' },
  { title: 'Tokens per second', lines: [['\0tokens_per_second', 'tokens/s']], zero: true, help: 'Tokens processed in training, divided by the time of the step' },
  { title: 'Memory', stack: /^(memory\/media_store_mb|\0memory_rest)$/, names: { 'memory/media_store_mb': 'media kept', '\0memory_rest': 'rest of the peak' }, help: 'In MB: decoded media kept for later passes, and the rest of the peak memory of the process' },
  { title: 'Learning rate', lines: [['learning_rate', 'rate']] },
  { title: 'Evaluation', lines: [['eval_accuracy', 'accuracy'], ['eval_reward', 'reward']], evals: true, help: 'Share of correct answers and mean reward on held-out rows' },
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

/// Returns the charts for which these runs have numbers.
function layout() {
  const own = names(false);
  const evals = names(true);
  if (own.has('num_tokens') && own.has('step_time')) own.add('\0tokens_per_second');
  if (own.has('memory/peak_mb')) own.add('\0memory_rest');
  const used = new Set(['step', 'epoch', '\0seconds', '\0tokens_per_second', '\0memory_rest']);
  const out = [];
  for (const chart of CHARTS) {
    if (chart.each) {
      for (const name of own) {
        const match = chart.each.exec(name);
        if (match) out.push({ title: `Reward: ${match[1]}`, lines: [[name, match[1]]], spread: `rewards/${match[1]}/std`, help: 'Mean and standard deviation' });
      }
    } else if (chart.stack) {
      const parts = [...own].filter((name) => chart.stack.test(name));
      if (parts.length) out.push({ ...chart, lines: parts.map((name) => [name, chart.names?.[name] ?? name.replace(chart.stack, '')]), stacked: true });
    } else {
      const lines = chart.lines.filter(([name]) => (chart.evals ? evals : own).has(name));
      if (lines.length) out.push({ ...chart, lines });
    }
  }
  if (axis.all) {
    out.forEach((chart) => chart.lines.forEach(([name]) => used.add(name)));
    const rows = (of) => shown().map((run) => run[of].at(-1)).filter(Boolean);
    for (const name of distinct([...own].sort(), rows('rows'))) if (!used.has(name)) out.push({ title: name, lines: [[name, name]] });
    for (const name of distinct([...evals].sort(), rows('evals'))) if (!used.has(name)) out.push({ title: name, lines: [[name, name]], evals: true });
  }
  return out;
}

function rebuild() {
  if (!grid) return;
  charts.forEach((chart) => chart.destroy());
  const specs = layout();
  charts = specs.map((spec) => new Chart(spec, shown()));
  grid.replaceChildren(...charts.map((chart) => chart.figure));
  const waiting = runs.some((run) => run.shown && !run.loaded) ? 'Loading the metrics …' : 'No step is done yet. Charts appear with the first one.';
  if (!specs.length) grid.replaceChildren(el('p', { class: 'quiet', role: 'status' }, waiting));
  charts.forEach((chart) => chart.draw());
}

function data() { charts.forEach((chart) => chart.set()); }

function value(row, name) {
  if (name === '\0tokens_per_second') return row.num_tokens / row.step_time;
  if (name === '\0memory_rest') return row['memory/peak_mb'] - (row['memory/media_store_mb'] ?? 0);
  return row[name] ?? null;
}

/// Computes exponential means, corrected for the bias towards the first value. Gaps stay gaps.
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

/// Selects the indices of long columns to draw: both ends, and for each bucket the minimum and the maximum of every line. The first
/// column is x. The visible range is divided into separate buckets.
function places([x, ...lines], visible) {
  const kept = new Set([0, x.length - 1]);
  const add = (from, until) => {
    const size = until - from > MOST_POINTS ? Math.ceil((until - from) / BUCKETS) : 1;
    for (let begin = from; begin < until; begin += size) {
      const end = Math.min(until, begin + size);
      if (size === 1) { kept.add(begin); continue; }
      for (const line of lines) {
        let [low, high] = [-1, -1];
        for (let at = begin; at < end; at += 1) {
          if (line[at] === null || line[at] === undefined) continue;
          if (low < 0 || line[at] < line[low]) low = at;
          if (high < 0 || line[at] > line[high]) high = at;
        }
        if (low >= 0) kept.add(low).add(high);
      }
    }
  };
  add(0, x.length);
  if (visible && x.length > MOST_POINTS) {
    const from = x.findIndex((own) => own >= visible[0]);
    const until = x.findLastIndex((own) => own <= visible[1]) + 1;
    if (from >= 0) add(from, until);
  }
  return [...kept].filter((at) => at >= 0).sort((a, b) => a - b);
}

class Chart {
  constructor(spec, of) {
    this.spec = spec;
    this.of = spec.stacked ? of.slice(0, 1) : of;
    this.runs = of.map((run) => run.at).join();
    this.body = el('div', { class: 'plot' });
    this.said = el('span', { class: 'said' });
    const whose = spec.stacked && of.length > 1 ? ` (${of[0].name})` : '';
    const help = el('p', { class: 'help', hidden: true }, spec.help);
    const about = spec.help && el('button', { type: 'button', class: 'about', 'aria-expanded': 'false', 'aria-label': `about ${spec.title}`, onclick: () => { help.hidden = !help.hidden; about.setAttribute('aria-expanded', String(!help.hidden)); } }, '?');
    this.figure = el('figure', { class: 'chart', tabindex: '0', onkeydown: (event) => this.key(event) },
      el('figcaption', {}, el('span', {}, el('b', {}, spec.title + whose), about), this.said), help, this.body);
    this.visible = null;
    this.finer = settled(60, () => { if (this.plot) this.set(); });
    this.resize = new ResizeObserver(() => this.plot?.setSize({ width: this.body.clientWidth, height: this.height() }));
  }

  height() { return innerWidth < 500 ? 170 : 200; }

  /// Returns the x values, then for each run its lines with their edges. All runs share one list of x values.
  columns() {
    const { spec } = this;
    const tables = [];
    this.series = [];
    for (const run of this.of) {
      const rows = spec.evals ? run.evals : run.rows;
      const mine = this.series.length;
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
          if (edges && at === 0) {
            out.push(edges[1], edges[0]);
            this.series.push({ run, at, kind: 'edge' }, { run, at, kind: 'edge' });
          }
          if (weight > 0) { out.push(values); this.series.push({ run, at, kind: 'raw' }); }
          out.push(mean);
          this.series.push({ run, label, at, kind: 'line' });
        });
      }
      const kept = places(out, this.visible);
      for (const own of this.series.slice(mine)) {
        own.until = x.at(-1);
        if (own.own) own.own = kept.map((at) => own.own[at]);
      }
      tables.push(out.map((column) => kept.map((at) => column[at])));
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
      const dash = this.of.length > 1 ? [undefined, [6, 4], [2, 3]][own.at % 3] : undefined;
      return { stroke, width: own.kind === 'stack' ? 1 : 1.75, dash, fill: own.kind === 'stack' ? `${stroke}66` : undefined, points: { show: this.spec.evals, size: 5 }, spanGaps: true };
    });
    const bands = [];
    this.series.forEach((own, at) => {
      if (own.kind === 'edge' && this.series[at + 1]?.kind === 'edge') bands.push({ series: [at + 1, at + 2], fill: `${this.colour(own)}${this.of.length < 3 ? '26' : '14'}` });
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
      hooks: {
        setCursor: [(plot) => this.say(plot.cursor.idx)],
        setScale: [(plot, key) => { if (key === 'x') this.zoom(plot); }],
        drawClear: [(plot) => this.mark(plot, style.getPropertyValue('--warm').trim())],
      },
    }, columns, this.body);
    this.resize.observe(this.body);
    this.say(null);
  }

  /// Draws the rows of a zoomed range.
  zoom(plot) {
    const { min, max } = plot.scales.x;
    const x = plot.data[0];
    const visible = min > x[0] || max < x.at(-1) ? [min, max] : null;
    if (String(visible) === String(this.visible)) return;
    this.visible = visible;
    if (this.of.some((run) => run.rows.length > MOST_POINTS)) this.finer();
  }

  /// Shades the steps of a problem.
  mark(plot, colour) {
    const { left, top, width, height } = plot.bbox;
    for (const run of this.of) {
      const x = (step) => (axis.time ? run.rows.find((row) => row.step >= step)?.['\0seconds'] ?? run.seconds : step);
      for (const own of run.warnings) {
        const [from, to] = [own.since, own.until ?? run.last?.step ?? own.step].map((step) => Math.max(left, Math.min(left + width, plot.valToPos(x(step), 'x', true))));
        plot.ctx.fillStyle = `${colour}22`;
        plot.ctx.fillRect(from, top, Math.max(2, to - from), height);
      }
    }
  }

  /// Replaces the numbers of the existing lines.
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
      // Runs share one list of x values, so a run may have no value at this x. Its previous value applies, but not after its last one.
      let row = columns[0][here] > own.until && at !== null && at !== undefined ? -1 : here;
      while (row > 0 && (columns[i + 1][row] === null || columns[i + 1][row] === undefined)) row -= 1;
      const found = row < 0 ? null : own.kind === 'stack' ? own.own[row] : columns[i + 1][row];
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
    this.plot.setCursor({ left: this.plot.valToPos(x[at], 'x'), top: 10 }, true, true);
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
  // Means of equal numbers differ by rounding, and an axis cannot have ticks for such a small range.
  if (to - from <= 1e-9 * Math.max(Math.abs(from), Math.abs(to))) { const by = Math.abs(from) * 0.1 || 0.1; from -= zero ? 0 : by; to += by; }
  const room = (to - from) * 0.05;
  return [zero && from === 0 ? 0 : from - room, to + room];
}
