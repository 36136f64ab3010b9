// Measures the page in a headless Chromium: the time to the table of runs, to the first chart and to another view, and the memory of the
// page and of its server.
//
//   npm i playwright-core && node tools/watch/speed.mjs target/release/omnigrpo --runs 50 --steps 20000 --completions 100000
//   node tools/watch/speed.mjs target/release/omnigrpo --runs 200 --steps 20000 --completions 64 --table 1   # the table alone
//   node tools/watch/speed.mjs target/debug/omnigrpo --runs 4 --steps 3000 --completions 4000        # the case of the full gate
//
// It makes the runs up in a temporary directory: --steps rows of 50 metrics each, and --completions completions in the first run. Every
// eighth run has the same rows, as another link to one file. It fails above the limits: table of runs and first chart 2 s, another view
// 300 ms until its frame is shown (times --slack on a slower machine), 200 MB in the page and, with the table, in the server, which may
// read 64 MB of the files for it. A view of completions is shown as soon as the first of them are indexed; the time until all are is printed. The processor
// time of the page's thread is printed too, since other programs hardly change it.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { closeSync, linkSync, mkdirSync, mkdtempSync, openSync, readFileSync, rmSync, writeFileSync, writeSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const { chromium } = createRequire(join(process.cwd(), 'x.js'))('playwright-core');
const [program, ...rest] = process.argv.slice(2);
const option = (name, fallback) => Number(rest[rest.indexOf(`--${name}`) + 1] * (rest.indexOf(`--${name}`) >= 0) || fallback);
const [runs, steps, completions, slack, tableOnly] = [option('runs', 50), option('steps', 20000), option('completions', 100000), option('slack', 1), option('table', 0)];
const LIMITS = { first: 2000 * slack, view: 300 * slack, heap: 200, read: 64 };
const FILES = 8;
const GROUP = 8;

const dir = mkdtempSync(join(tmpdir(), 'omnigrpo-speed-'));
const name = (at) => `run-${String(at).padStart(2, '0')}`;

function write(path, lines) {
  const file = openSync(path, 'w');
  let part = [];
  for (const line of lines) {
    part.push(line);
    if (part.length === 500) { writeSync(file, part.join('')); part = []; }
  }
  writeSync(file, part.join(''));
  closeSync(file);
}

function* metrics(seed) {
  for (let step = 1; step <= steps; step += 1) {
    const noise = Math.sin(step * (seed + 1)) / 10;
    const row = { step, epoch: step / 1000, loss: noise / 100, kl: step === 12345 ? 1000 : 0.01 + noise ** 2, entropy: 1 / Math.sqrt(step), grad_norm: 1 + noise, reward: 1 - 1 / Math.sqrt(step) + noise, reward_std: 0.2, frac_reward_zero_std: 0.3 + noise, step_time: 2, num_tokens: 9000, 'completions/mean_length': 40 + noise, 'completions/min_length': 10, 'completions/max_length': 90, 'completions/clipped_ratio': 0.1, 'clip_ratio/region_mean': 0.02, 'time/rollout': 1.2, 'time/backward': 0.7, 'memory/peak_mb': 900 };
    for (let at = 0; at < 30; at += 1) row[`other/metric_${at}`] = noise * at;
    yield `${JSON.stringify(row)}\n`;
  }
}

for (let at = 0; at < runs; at += 1) {
  for (const folder of ['rollouts', 'eval']) mkdirSync(join(dir, name(at), folder), { recursive: true });
  if (at < FILES) write(join(dir, name(at), 'metrics.jsonl'), metrics(at));
  else linkSync(join(dir, name(at % FILES), 'metrics.jsonl'), join(dir, name(at), 'metrics.jsonl'));
  // As many settings as a run has.
  const others = Array.from({ length: 120 }, (_, own) => `setting_${own}: ${own === 7 ? at % 3 : own}   # default\n`).join('');
  writeFileSync(join(dir, name(at), 'config.yaml'), `model_name_or_path: models/vision-3b   # flag\ntrain_file: [data/rows-${at % 4}.jsonl]   # flag\nlearning_rate: ${(at % 5) + 1}e-6   # flag\nseed: ${at}   # flag\nmax_steps: ${steps}   # flag\n${others}`);
  for (const [step, share] of [[0, 0.3], [steps, 0.3 + (at % 7) / 10]]) {
    const own = join(dir, name(at), `eval/step-${String(step).padStart(6, '0')}`);
    writeFileSync(`${own}.jsonl`, '{}\n');
    writeFileSync(`${own}.summary.json`, JSON.stringify({ eval_rows: 200, eval_accuracy: share, eval_reward: share, accuracy_interval: [Math.max(0, share - 0.06), Math.min(1, share + 0.06)] }));
  }
  const event = (step, time, rest) => `${JSON.stringify({ step, time: `2026-01-0${time}Z`, ...rest })}\n`;
  writeFileSync(join(dir, name(at), 'events.jsonl'), [event(0, '1T08:00:00', { kind: 'started', num_steps: steps }), at % 6 ? '' : event(900, '1T09:00:00', { kind: 'problem', rule: 'flat', begins: true, since: 860, text: 'the reward does not rise', title: 'flat', what: 'KL is 0.0001', advice: 'Raise --learning_rate' }), event(steps, '2T08:00:00', { kind: 'finished' })].join(''));
}
const per = 64;
for (let step = 1; step <= Math.ceil(completions / per); step += 1) {
  write(join(dir, name(0), `rollouts/step-${String(step).padStart(6, '0')}.jsonl`), Array.from({ length: per }, (_, at) => {
    const [group, sample] = [Math.floor(at / GROUP), at % GROUP];
    const row = (step * 8 + group) % 2000;
    const right = (row * 7919 + sample * 31 + step) % 5 < 2 ? 1 : 0;
    return `${JSON.stringify({ step, timestamp: '', epoch: 0, id: `row-${row}`, group, sample, prompt: `<|im_start|>user\nWhich colour has number ${row}?<|im_end|>\n`, completion: `<think>${'it seems to be so. '.repeat(10)}</think><answer>red</answer>`, solution: 'red', rewards: { accuracy: right, format: 1 }, reward: right + 0.1, advantage: right - 0.4, length: 40 + ((row + sample) % 30), finish_reason: 'stop', media: [], ...(sample ? {} : { row: { type: row % 2 ? 'shape' : 'colour' } }) })}\n`;
  }));
}
console.log(`${runs} runs of ${steps} steps and ${completions} completions in ${dir}`);

const child = spawn(program, ['watch', dir], { stdio: ['ignore', 'pipe', 'inherit'] });
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', args: ['--no-sandbox', '--no-proxy-server', '--disable-gpu', '--enable-precise-memory-info'] });
const bad = [];
const tell = (what, value, unit, limit) => { console.log(`${what}: ${Math.round(value)} ${unit}`); if (value > limit) bad.push(`${what}: ${Math.round(value)} ${unit}, more than ${limit}`); };
try {
  let said = '';
  let url;
  for await (const chunk of child.stdout) { said += chunk; url = /http:\/\/127\.0\.0\.1:\d+\/[0-9a-f]{32}\//.exec(said)?.[0]; if (url) break; }
  const tab = await (await browser.newContext({ viewport: { width: 1280, height: 900 } })).newPage();
  const errors = [];
  tab.on('pageerror', (error) => errors.push(String(error)));
  const session = await tab.context().newCDPSession(tab);
  await session.send('Performance.enable', { timeDomain: 'threadTicks' });
  const processor = async () => 1000 * (await session.send('Performance.getMetrics')).metrics.find((own) => own.name === 'TaskDuration').value;
  const heap = async () => { await session.send('HeapProfiler.collectGarbage'); return (await session.send('Runtime.getHeapUsage')).usedSize / 1e6; };
  const server = (file, what) => Number(new RegExp(`${what}:\\s+(\\d+)`).exec(readFileSync(`/proc/${child.pid}/${file}`, 'utf8'))?.[1] ?? 0);
  const readBefore = server('io', 'rchar');
  let began = performance.now();
  const others = async () => {
    await tab.goto(`${url}#/charts`);
    await tab.waitForSelector('.chart canvas', { timeout: 60000 });
    tell('first chart', performance.now() - began, 'ms', LIMITS.first);
    const wanted = Math.min(runs, 10);
    await tab.waitForFunction((count) => (document.querySelector('.chart .said')?.textContent.match(/\d+ lines/)?.[0] ?? `${document.querySelectorAll('.chart:first-child .said i').length} lines`) === `${count} lines`, wanted, { timeout: 120000 });
    console.log(`the ${wanted} runs that are shown at first: ${Math.round(performance.now() - began)} ms`);
    if (runs > 10) {
      began = performance.now();
      await tab.click('.many summary');
      await tab.click('.many button:has-text("all")');
      await tab.waitForFunction((count) => document.querySelector('.chart .said')?.textContent.includes(`${count} lines`), runs, { timeout: 120000 });
      console.log(`all ${runs} runs: ${Math.round(performance.now() - began)} ms`);
      await tab.click('.many summary');
    }
    tell('heap with the charts', await heap(), 'MB', LIMITS.heap);
    const ready = {
      distributions: () => document.querySelector('.page canvas'),
      'rollouts?run=0': () => document.querySelector('.detail h2'),
      'rollouts?run=0&scope=all&sort=unsolved': () => /of \d+ groups/.test(document.querySelector('aside [role=status]').textContent) && document.querySelector('.groups a') && document.querySelector('.detail h2'),
      'rows?run=0': () => document.querySelector('.page table td'),
      settings: () => document.querySelector('.settings'),
      charts: () => document.querySelector('.chart canvas'),
    };
    const indexed = () => /completions of/.test(document.querySelector('.page [role=status]').textContent);
    // The first round builds the index of completions.
    for (const round of ['first', 'again']) {
      for (const [view, test] of Object.entries(ready)) {
        const before = await processor();
        began = performance.now();
        await tab.evaluate((to) => { location.hash = `#/${to}`; }, view);
        await tab.waitForFunction(test, null, { timeout: 120000, polling: 'raf' });
        await tab.evaluate(() => new Promise((shown) => { requestAnimationFrame(() => requestAnimationFrame(shown)); }));
        const time = performance.now() - began;
        tell(`${view}, ${round}, ${Math.round(await processor() - before)} ms of processor time`, time, 'ms', LIMITS.view);
        if (view !== 'distributions') continue;
        await tab.waitForFunction(indexed, null, { timeout: 120000 });
        console.log(`all completions are indexed: ${Math.round(performance.now() - began)} ms`);
      }
    }
  };
  if (runs > 1) {
    await tab.goto(url);
    await tab.waitForFunction((count) => [...document.querySelectorAll('.runs tbody tr')].filter((row) => / %.* → .* %/.test(row.children[2].textContent)).length === count, runs, { timeout: 120000, polling: 'raf' });
    tell(`the table of ${runs} runs`, performance.now() - began, 'ms', LIMITS.first);
    tell('heap with the table', await heap(), 'MB', LIMITS.heap);
    tell('the server with the table', server('status', 'VmRSS') / 1000, 'MB', LIMITS.heap);
    tell('read for the table', (server('io', 'rchar') - readBefore) / 1e6, 'MB', LIMITS.read);
    began = performance.now();
  }
  if (!tableOnly) await others();
  tell('heap at the end', await heap(), 'MB', LIMITS.heap);
  console.log(`the server has ${Math.round(Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${child.pid}/status`, 'utf8'))?.[1] ?? 0) / 1000)} MB`);
  assert.deepEqual(errors, []);
  assert.deepEqual(bad, []);
} finally {
  child.kill();
  await browser.close();
  rmSync(dir, { recursive: true });
}
