// Distributions of rewards, lengths and advantages over the steps, and two of them against each other.

import { apiJson, choice, el, failure, hash, number, place, settled } from './shared.js';
import { CAPPED, measures } from './groups.js';

const FIELDS = ['run', 'measure', 'x', 'y', 'at'];
const SIZE = [860, 260];
const SQUARE = 320;

let runs, root, form, over, bars, joint, status;
let ticket = 0;
let found;

export async function show(main, given, params) {
  runs = given;
  root = main;
  const change = () => { location.hash = hash('distributions', { ...place().params, ...Object.fromEntries(['run', 'measure', 'x', 'y'].map((name) => [name, form.elements[name]?.value])) }); };
  form = el('form', { class: 'controls', onsubmit: (event) => event.preventDefault(), onchange: change, 'aria-label': 'Distributions' },
    runs.length > 1 ? choice('run', 'run', runs.map((run) => [String(run.at), run.name])) : '',
    el('label', {}, 'distribution of ', choice('measure', 'measure', [])),
    el('label', {}, 'and of ', choice('y', 'measure of y', [])), el('label', {}, 'by ', choice('x', 'measure of x', [])));
  status = el('p', { class: 'quiet', role: 'status' });
  over = el('div');
  bars = el('div');
  joint = el('div');
  main.append(el('section', { class: 'page' }, el('h2', {}, 'Distributions'), form, status, over, bars, joint));
  await open(params);
}

export function hide() { root = null; }

export function navigate(params) {
  if (!root) return false;
  open(params).catch((error) => over.replaceChildren(failure(error)));
  return true;
}

export const update = settled(2000, () => { if (root) open(place().params).catch(() => { /* the next step asks again */ }); });

export function repaint() { if (root && found) paint(); }

/// Asks until the catalogue of the run is complete. Each answer shows what is known so far.
async function whole(path, params, mine, then) {
  for (let done = false; !done;) {
    const answer = await apiJson(path, params);
    if (mine !== ticket || !root) return;
    done = answer.done;
    status.textContent = done ? `${answer.completions.toLocaleString('en')} completions of ${answer.steps} steps${answer.capped ? `; ${CAPPED}` : ''}` : `reading step ${answer.steps} of ${answer.all_steps} …`;
    then(answer);
  }
}

async function open(params) {
  const mine = (ticket += 1);
  const run = Number(params.run ?? 0);
  const measure = params.measure ?? 'reward';
  await whole('spread', { run, measure }, mine, (answer) => {
    options(answer.rewards, params);
    found = { spread: answer, params };
    paint();
  });
  if (mine !== ticket || !root) return;
  const rewards = found.spread.rewards;
  const y = params.y ?? (rewards.length ? `rewards/${rewards[0]}` : 'reward');
  const answer = await apiJson('joint', { run, x: params.x ?? 'length', y });
  if (mine !== ticket || !root) return;
  Object.assign(found, { joint: answer, x: params.x ?? 'length', y });
  paint();
}

function options(rewards, params) {
  const all = [...measures(rewards), ['length', 'length in tokens'], ['advantage', 'advantage']];
  const fallback = { run: '0', measure: 'reward', x: 'length', y: rewards.length ? `rewards/${rewards[0]}` : 'reward' };
  for (const name of ['measure', 'x', 'y']) if (form.elements[name].options.length !== all.length) form.elements[name].replaceChildren(...all.map(([value, label]) => el('option', { value }, label)));
  for (const name of FIELDS) if (form.elements[name]) form.elements[name].value = params[name] ?? fallback[name];
}

/// Returns the smallest and the largest value in a part of an axis. Bins of whole numbers begin and end between two of them.
const ends = (low, high, { whole }) => (whole ? [low + 0.5, high - 0.5] : [low, high]);
const span = (low, high) => (low === high ? number(low) : `${number(low)} to ${number(high)}`);
const label = (name) => name.replace(/^rewards\//, '');
const steps = ({ from, until }) => (from === until ? `step ${from}` : `steps ${from} to ${until}`);
const colours = () => { const style = getComputedStyle(document.documentElement); return (name) => style.getPropertyValue(name).trim(); };

function canvas(width, height, text) {
  const node = el('canvas', { width: 2 * width, height: 2 * height, class: 'heat', role: 'img', 'aria-label': text });
  node.style.width = `${width}px`;
  const context = node.getContext('2d');
  context.scale(2, 2);
  context.font = '11px system-ui';
  context.fillStyle = colours()('--quiet');
  return [node, context];
}

/// Draws cells of a grid by their share of the largest one. The colour grows with the root, so that rare values are seen.
function cells(context, counts, most, [left, top, width, height]) {
  const of = colours();
  const size = [width / counts.length, height / (counts[0]?.length ?? 1)];
  counts.forEach((column, x) => column.forEach((count, y) => {
    if (!count) return;
    context.globalAlpha = 0.1 + 0.9 * Math.sqrt(count / most);
    context.fillStyle = of('--heat-high');
    context.fillRect(left + x * size[0], top + height - (y + 1) * size[1], Math.max(1, size[0] - 0.5), Math.max(1, size[1] - 0.5));
  }));
  context.globalAlpha = 1;
}

/// Draws the frame of a plot, with the values of both axes. Those of whole numbers are in the middle of their bins.
function frame(context, [left, top, width, height], y, x) {
  const of = colours();
  context.fillStyle = of('--quiet');
  context.strokeStyle = of('--line');
  context.strokeRect(left, top, width, height);
  context.textAlign = 'right';
  const at = (axis, value) => (axis.high > axis.low ? (value - axis.low) / (axis.high - axis.low) : 0.5);
  const [least, most] = ends(y.low, y.high, y);
  const middle = (least + most) / 2;
  const ticks = least === most ? [least] : y.whole && !Number.isInteger(middle) ? [least, most] : [least, middle, most];
  for (const value of ticks) context.fillText(number(value, 2), left - 6, top + height - at(y, value) * height + 4);
  for (const [share, align] of [[0, 'left'], [1, 'right']]) { context.textAlign = align; context.fillText(x[share], left + share * width, top + height + 15); }
}

function paint() {
  const { axis, ranges } = found.spread;
  if (!ranges.length) { over.replaceChildren(el('p', { class: 'quiet' }, 'No completions are recorded yet.')); return; }
  const name = label(form.elements.measure.value || 'reward');
  const box = [56, 8, Math.min(SIZE[0], (over.clientWidth || SIZE[0])) - 66, SIZE[1] - 34];
  const most = Math.max(...ranges.flatMap((own) => own.counts), 1);
  const last = ranges.at(-1);
  const middle = last.quantiles[1];
  const [node, context] = canvas(box[2] + 66, SIZE[1], `Distribution of ${name} over ${ranges.length} ranges of steps. In the last one, ${steps(last)}, the median is ${number(middle)}, and 10 % to 90 % of the completions lie from ${number(last.quantiles[0])} to ${number(last.quantiles[2])}.`);
  cells(context, ranges.map((own) => own.counts), most, box);
  frame(context, box, axis, [`step ${ranges[0].from}`, `step ${last.until}`]);
  context.strokeStyle = colours()('--warm');
  for (const [at, dash] of [[0, [3, 3]], [1, []], [2, [3, 3]]]) {
    context.setLineDash(dash);
    context.beginPath();
    ranges.forEach((own, x) => {
      if (own.quantiles[at] === null) return;
      const place = [box[0] + ((x + 0.5) * box[2]) / ranges.length, box[1] + box[3] * (1 - (own.quantiles[at] - axis.low) / (axis.high - axis.low || 1))];
      if (x) context.lineTo(...place); else context.moveTo(...place);
    });
    context.stroke();
  }
  const slider = el('input', { type: 'range', min: '0', max: String(ranges.length - 1), value: String(found.at ?? ranges.length - 1), 'aria-label': 'steps of the histogram', oninput: () => { found.at = Number(slider.value); histogram(ranges[found.at], axis, name); } });
  node.addEventListener('click', (event) => { slider.value = String(Math.floor((ranges.length * (event.offsetX - box[0])) / box[2])); slider.dispatchEvent(new Event('input')); });
  over.replaceChildren(el('h3', {}, `${name}: shares by colour, median and 10 % and 90 % quantiles as lines`), el('div', { class: 'scroll' }, node), el('div', { class: 'controls' }, el('label', {}, 'histogram of ', slider)));
  histogram(ranges[Number(slider.value)], axis, name);
  pairs();
}

/// Shows the histogram of one range of steps.
function histogram(range, axis, name) {
  const largest = Math.max(...range.counts, 1);
  const [least, most] = ends(axis.low, axis.high, axis);
  const total = range.counts.reduce((sum, own) => sum + own, 0);
  const width = (axis.high - axis.low) / axis.bins;
  const items = range.counts.map((count, at) => {
    const [low, high] = [axis.low + at * width, axis.low + (at + 1) * width];
    const bar = el('i', { title: `${span(...ends(low, high, axis))}: ${count}` });
    bar.style.height = `${count ? Math.max(2, (100 * count) / largest) : 0}%`;
    return bar;
  });
  const text = `${steps(range)}: ${total} completions, median ${number(range.quantiles[1])}, 10 % to 90 % from ${number(range.quantiles[0])} to ${number(range.quantiles[2])}${range.none ? `; ${range.none} without a value` : ''}`;
  bars.replaceChildren(el('div', { class: 'histogram', role: 'img', 'aria-label': `${name}, ${text}` }, items), el('p', { class: 'quiet edges' }, el('span', {}, number(least)), el('span', {}, text), el('span', {}, number(most))));
}

function pairs() {
  if (!found.joint) { joint.replaceChildren(); return; }
  const { x, y, counts, means, r, interval, pairs: count } = found.joint;
  const names = [label(found.x), label(found.y)];
  const box = [56, 8, SQUARE, SQUARE - 60];
  const told = r === null ? 'One of them does not vary.' : `Correlation ${number(r, 2)}${interval ? `, 95 % interval ${number(interval[0], 2)} to ${number(interval[1], 2)}` : ''}, over ${count.toLocaleString('en')} completions, which are treated as independent.`;
  const [node, context] = canvas(SQUARE + 70, SQUARE - 30, `${names[1]} by ${names[0]}. ${told}`);
  cells(context, counts, Math.max(...counts.flat(), 1), box);
  frame(context, box, y, ends(x.low, x.high, x).map((own) => number(own)));
  context.fillStyle = colours()('--warm');
  means.forEach((own, at) => {
    if (own === null) return;
    context.beginPath();
    context.arc(box[0] + ((at + 0.5) * box[2]) / means.length, box[1] + box[3] * (1 - (own - y.low) / (y.high - y.low || 1)), 3, 0, 7);
    context.fill();
  });
  joint.replaceChildren(el('h3', {}, `${names[1]} by ${names[0]}: counts by colour, means as dots`), el('p', {}, told), el('div', { class: 'scroll' }, node));
}
