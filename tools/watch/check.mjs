// Opens the page of `omnigrpo watch` in a headless Chromium: charts draw, live rows arrive, filters find, hostile text stays
// text, media show and clips play, a run of 10,000 completions answers at once, and the console says nothing.
//
//   npm i playwright-core axe-core && node tools/watch/check.mjs target/debug/omnigrpo watch
//   node tools/watch/check.mjs target/debug/omnigrpo watch --shots DIR RUN_DIR     # pictures of a run
//
// It needs ffmpeg, which makes a clip. CHROMIUM names the browser where it is not /usr/bin/chromium. The program is called with the directory of a made-up run as
// its last argument and prints the page's address.

import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import { appendFileSync, cpSync, linkSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, realpathSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createRequire } from 'node:module';

const require = createRequire(join(process.cwd(), 'x.js'));
const { chromium } = require('playwright-core');
const axe = readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8');
const argv = process.argv.slice(2);
const at = argv.indexOf('--shots');
const [shots, shown] = at < 0 ? [] : argv.splice(at, 3).slice(1);
const [program, ...words] = argv;

const HOSTILE = '<think>x</think><script>globalThis.owned = 1</script><img src=x onerror="globalThis.owned = 1">';
// A dot of one pixel, and 0.1 s of silence.
const PNG = Buffer.from('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg==', 'base64');

function wav(seconds) {
  const samples = Math.round(16000 * seconds);
  const out = Buffer.alloc(44 + 2 * samples);
  out.write('RIFF'); out.writeUInt32LE(36 + 2 * samples, 4); out.write('WAVEfmt ', 8); out.writeUInt32LE(16, 16);
  out.writeUInt16LE(1, 20); out.writeUInt16LE(1, 22); out.writeUInt32LE(16000, 24); out.writeUInt32LE(32000, 28);
  out.writeUInt16LE(2, 32); out.writeUInt16LE(16, 34); out.write('data', 36); out.writeUInt32LE(2 * samples, 40);
  for (let i = 0; i < samples; i += 1) out.writeInt16LE(Math.round(8000 * Math.sin(i / 10)), 44 + 2 * i);
  return out;
}

const metrics = (step) => JSON.stringify({
  'kl/token_mean': 0.01, 'rewards/accuracy': 0.4 + step / 200, clip_ratio: 0.02,
  step, epoch: step / 100, loss: 1e-4, kl: 0.01 * step, entropy: 1 / step, grad_norm: 1, reward: 0.5 + step / 200, reward_std: 0.2,
  'rewards/accuracy/mean': 0.4 + step / 200, 'rewards/accuracy/std': 0.4, 'rewards/format/mean': 0.9, 'rewards/format/std': 0.1,
  frac_reward_zero_std: 0.3, 'completions/mean_length': 40, 'completions/min_length': 10, 'completions/max_length': 90,
  'completions/clipped_ratio': 0.1, 'clip_ratio/region_mean': 0.02, 'sampling/sampling_logp_difference/mean': 1e-4,
  'sampling/sampling_logp_difference/max': 1e-3, num_tokens: 9000, step_time: 2, 'time/rollout': 1.2, 'time/backward': 0.7, 'memory/peak_mb': 900, 'machine/cpu_percent': 80, 'machine/memory_mb': 9000, 'machine/gpu_percent': 95, 'machine/gpu_memory_mb': 20000,
});

// A call with a box in pixels of the first picture, which has one, and the answer.
const turn = (dir) => ({
  model: '<tool_call>{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0.25, 0.5, 0.75, 1]}}</tool_call>', model_tokens: 9,
  text: 'a closer look', tokens: 5, media: [join(dir, 'part.png')],
});

const rollout = (step, group, sample, completion, media, turns) => JSON.stringify({
  step, timestamp: '2026-01-01T00:00:00Z', epoch: 0.1, id: `row-${group}`, group, sample, prompt: `<|im_start|>user\nWhich colour? (${group})<|im_end|>\n`,
  completion, solution: '<answer>red</answer>', rewards: { accuracy: sample % 2, format: 1 }, reward: sample % 2, advantage: sample % 2 ? 1 : -1,
  length: 4, finish_reason: sample === 3 ? 'length' : 'stop', media, frame_times_secs: [], turns, columns: {}, ...(sample === 0 ? { row: { type: group % 2 ? 'shape' : 'colour' } } : {}),
});

// Stands for a byte that is no UTF-8.
const BAD = '\ue000';

function withBadBytes(text) {
  const parts = text.split(BAD).map((part) => Buffer.from(part));
  return Buffer.concat(parts.flatMap((part, at) => (at ? [Buffer.from([0xff]), part] : [part])));
}

const made = [];

function temporary(name) {
  made.push(realpathSync(mkdtempSync(join(tmpdir(), name))));
  return made.at(-1);
}

function madeUp() {
  const dir = temporary('omnigrpo-page-');
  ['rollouts', 'tokens', 'eval'].forEach((name) => mkdirSync(join(dir, name)));
  ['dot.png', 'part.png'].forEach((name) => writeFileSync(join(dir, name), PNG));
  writeFileSync(join(dir, 'tone.wav'), wav(0.5));
  writeFileSync(join(dir, 'config.yaml'), 'run_name: made up    # flag\nlearning_rate: 1e-6    # default\nmax_steps: 80    # flag\n');
  const all = Array.from({ length: 60 }, (_, at) => at + 1);
  // Lines that are no rows hide none.
  writeFileSync(join(dir, 'metrics.jsonl'), `null\n[1]\n5\n{"step":"7"}\n${all.map((step) => `${metrics(step)}\n`).join('')}`);
  const problem = (step, rule, begins, text) => JSON.stringify({ step, time: '', kind: 'problem', rule, begins, since: 8, text });
  writeFileSync(join(dir, 'events.jsonl'), [problem(10, 'cut_off', true, 'all completions are cut off'), problem(20, 'cut_off', false, ''), problem(50, 'ran_away', true, 'the policy ran away')].map((line) => `${line}\n`).join(''));
  // An evaluation that is incomplete.
  writeFileSync(join(dir, 'eval/step-000030.jsonl'), '{}\n');
  for (const step of all) {
    const media = [join(dir, 'dot.png'), join(dir, 'tone.wav')];
    const lines = [0, 1, 2].flatMap((group) => [0, 1, 2, 3].map((sample) => rollout(step, group, sample,
      sample === 2 ? HOSTILE + BAD : sample === 3 && group === 0 ? `\u202egnorw\u0007 ${'long '.repeat(200000)}` : `<think>it is</think><answer>${group === 2 && step === 42 ? 'needle' : 'red'}</answer>`, group === 0 ? media : [], step === 59 && group === 0 && sample === 0 ? [turn(dir)] : undefined)));
    writeFileSync(join(dir, `rollouts/step-${String(step).padStart(6, '0')}.jsonl`), withBadBytes(lines.map((line) => `${line}\n`).join('')));
  }
  const tokens = { group: 0, sample: 1, tokens: ['<think>', 'it', ' is', '<b>'], logprobs: [-0.1, -2, -0.01, -1], sampled_logprobs: [-0.1, -1.9, -0.01, -1], reference_logprobs: [-0.2, -1, -0.01, -1], entropies: [0.1, 2, 0.1, 1] };
  writeFileSync(join(dir, 'tokens/step-000060.jsonl'), `${JSON.stringify(tokens)}\n`);
  for (const [step, good] of [[0, 0], [60, 1]]) {
    const name = join(dir, `eval/step-${String(step).padStart(6, '0')}`);
    const row = (n) => JSON.stringify({ id: `e${n}`, dataset: 'eval', prompt: `question ${n}`, solution: 'red', category: n % 2 ? 'shape' : 'colour', completions: [n === 3 ? HOSTILE : 'red'], answers: ['red'], rewards: { accuracy: [n % 2 ? good : 0] }, reward: [n % 2 ? good : 0] });
    writeFileSync(`${name}.jsonl`, [0, 1, 2, 3].map((n) => `${row(n)}\n`).join(''));
    writeFileSync(`${name}.summary.json`, JSON.stringify({ eval_reward: good / 2, eval_accuracy: good / 2, categories: [{ category: 'colour', rows: 20, accuracy: 0.2 }, { category: 'shape', rows: 20, accuracy: good }], confusion: { labels: ['red', 'blue'], counts: [[3, 1, 0], [0, 2, 1]], unlabelled: 0 } }));
  }
  return dir;
}

const TIMES = [0.4, 4.2, 8.6, 13.4];

/// Six clips of 14 s with sound, too large for the buffers between server and player, whose index is at the end of the file.
function clips(dir) {
  const first = join(dir, 'clip-0.mp4');
  execFileSync('ffmpeg', ['-v', 'error', '-f', 'lavfi', '-i', 'testsrc2=size=480x270:rate=15:duration=14,noise=alls=60:allf=t', '-f', 'lavfi', '-i', 'sine=440:duration=14',
    '-c:v', 'libx264', '-preset', 'ultrafast', '-qp', '12', '-pix_fmt', 'yuv420p', '-c:a', 'aac', first]);
  const names = [0, 1, 2, 3, 4, 5].map((n) => join(dir, `clip-${n}.mp4`));
  names.slice(1).forEach((name) => linkSync(first, name));
  return names;
}

/// 10,000 completions in 41 steps, one of them with 2,000; the first prompt has clips.
function large() {
  const dir = temporary('omnigrpo-large-');
  mkdirSync(join(dir, 'rollouts'));
  const media = clips(dir);
  const times = media.map((_, at) => (at ? [1] : TIMES));
  // The sound of the first clip is a medium too.
  media.push(media[0]);
  times.push([]);
  writeFileSync(join(dir, 'metrics.jsonl'), Array.from({ length: 41 }, (_, at) => `${metrics(at + 1)}\n`).join(''));
  for (let step = 1; step <= 41; step += 1) {
    const lines = [];
    for (let group = 0; group < (step === 41 ? 250 : 25); group += 1) {
      for (let sample = 0; sample < 8; sample += 1) {
        const own = JSON.parse(rollout(step, group, sample, `<think>${`step ${step} prompt ${group} sees it. `.repeat(30)}</think><answer>red</answer>`, group === 0 ? media : []));
        if (group === 0) own.frame_times_secs = times;
        lines.push(`${JSON.stringify(own)}\n`);
      }
    }
    writeFileSync(join(dir, `rollouts/step-${String(step).padStart(6, '0')}.jsonl`), lines.join(''));
  }
  return dir;
}

async function address(child) {
  let said = '';
  for await (const chunk of child.stdout) {
    said += chunk;
    const found = /http:\/\/127\.0\.0\.1:\d+\/[0-9a-f]{32}\//.exec(said);
    if (found) return found[0];
  }
  throw new Error(`no address: ${said}`);
}

async function serve(dirs) {
  const child = spawn(program, [...words, ...dirs], { stdio: ['ignore', 'pipe', 'inherit'] });
  return [child, await address(child)];
}

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', args: ['--no-sandbox', '--no-proxy-server', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync', '--autoplay-policy=no-user-gesture-required'] });
const complaints = [];

async function page(url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const tab = await context.newPage();
  tab.on('console', (message) => complaints.push(`${message.type()}: ${message.text()}`));
  tab.on('pageerror', (error) => complaints.push(String(error.stack)));
  tab.on('request', (request) => { if (!request.url().startsWith(url) && !request.url().startsWith('blob:')) complaints.push(`asked elsewhere: ${request.url()}`); });
  return tab;
}

/// Returns what axe finds against WCAG 2.2 A and AA and its own best practices.
async function flaws(tab) {
  await tab.evaluate(axe);
  const { violations } = await tab.evaluate(() => globalThis.axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'] }));
  return violations.flatMap((own) => own.nodes.map((node) => `${own.id}: ${node.target.join(' ')} ${node.any.map((one) => one.message).join('; ')}`));
}

const children = [];
try {
  const dir = madeUp();
  const [child, url] = await serve([dir]);
  children.push(child);
  const tab = await page(url);

  await tab.goto(url);
  await tab.waitForSelector('.chart canvas');
  const titles = await tab.$$eval('.chart figcaption b', (all) => all.map((own) => own.textContent));
  for (const title of ['Reward', 'Reward: accuracy', 'Reward: format', 'KL', 'Entropy', 'Loss', 'Gradient norm', 'Clip ratio', 'Completion length', 'Groups without variance', 'Rollout and training', 'Step time by phase', 'Memory', 'Processor and card', 'Memory of machine and card', 'Tokens per second']) assert.ok(titles.includes(title), `no chart ${title}: ${titles}`);
  // Something is drawn in the line's colour, beside grid and text.
  const inked = () => tab.$$eval('.chart canvas', (all) => all.map((canvas) => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let coloured = 0;
    for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 60 && Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]) > 60) coloured += 1;
    return coloured;
  }));
  for (const [at, count] of (await inked()).entries()) assert.ok(count > 50, `the chart ${titles[at]} is empty: ${count}`);
  console.log(`${titles.length} charts draw`);

  const reward = () => tab.$eval('.chart .plot', (chart) => chart.getAttribute('aria-label'));
  const before = await reward();
  appendFileSync(join(dir, 'metrics.jsonl'), [61, 62, 63].map((step) => `${metrics(step)}\n`).join(''));
  await tab.waitForFunction((old) => document.querySelector('.chart .plot').getAttribute('aria-label') !== old, before, { timeout: 20000 });
  await tab.waitForFunction(() => /step 63\/80/.test(document.getElementById('live').textContent), null, { timeout: 20000 });
  console.log('live rows arrive');

  await tab.focus('.chart .plot');
  await tab.keyboard.press('ArrowLeft');
  const said = () => tab.$$eval('.chart .said', (all) => all.filter((own) => own.closest('.chart').chart.seen).map((own) => own.textContent));
  for (const text of await said()) assert.match(text, /step 62/);
  await tab.keyboard.press('Home');
  for (const text of await said()) assert.match(text, /step 1$/);
  await tab.keyboard.press('t');
  assert.equal(await tab.evaluate(() => document.documentElement.dataset.theme), 'light');
  await tab.keyboard.press('t');
  await tab.keyboard.press('t');
  await tab.click('.chart .about');
  assert.match(await tab.$eval('.chart .help', (own) => own.textContent), /Mean of the weighted sum/);
  for (const [key, view] of [['2', 'distributions'], ['3', 'rollouts'], ['4', 'rows'], ['5', 'evaluations'], ['6', 'settings'], ['1', 'charts']]) {
    await tab.keyboard.press(key);
    assert.match(await tab.evaluate(() => location.hash), new RegExp(`^#/${view}`));
  }
  await tab.waitForSelector('.chart canvas');
  await tab.fill('.controls input[placeholder=from]', '10');
  await tab.fill('.controls input[placeholder=to]', '20');
  await tab.keyboard.press('Enter');
  await tab.waitForFunction(() => { const { min, max } = document.querySelector('.chart').chart.plot.scales.x; return min === 10 && max === 20; });
  await tab.click('.controls button:has-text("whole run")');
  await tab.waitForFunction(() => document.querySelector('.chart').chart.plot?.scales.x.max === 63);
  await tab.check('.controls input[name=all]');
  const every = await tab.$$eval('.chart figcaption b', (all) => all.map((own) => own.textContent));
  assert.ok(every.includes('kl/token_mean') && !every.includes('rewards/accuracy') && !every.includes('clip_ratio'), `${every}`);
  await tab.uncheck('.controls input[name=all]');
  assert.match(await tab.$eval('.notice.warning', (own) => own.textContent), /the policy ran away.*1 earlier problem/);
  console.log('keys work in every chart, help opens, problems are shown');
  await tab.selectOption('.controls select[name=x]', 'time');
  await tab.waitForSelector('.chart canvas');

  await tab.goto(`${url}#/rollouts?step=60&group=0`);
  await tab.waitForSelector('.card');
  assert.equal(await tab.$$eval('.card', (all) => all.length), 4);
  assert.equal(await tab.evaluate(() => globalThis.owned), undefined, 'a script in a completion ran');
  assert.equal(await tab.$$eval('.card script, .card img', (all) => all.length), 0);
  assert.ok((await tab.$$eval('.card pre', (all) => all.map((own) => own.textContent))).some((text) => text.includes('<script>globalThis.owned') && text.endsWith('\ufffd')));
  assert.deepEqual(await tab.$$eval('.unseen', (all) => [...new Set(all.map((own) => own.textContent))].sort()), ['U+0007', 'U+202E']);
  await tab.waitForFunction(() => document.querySelector('.media img')?.naturalWidth === 1);
  await tab.waitForFunction(() => document.querySelector('.media audio')?.duration > 0.4);
  await tab.waitForFunction(() => { const wave = document.querySelector('.wave'); return wave && wave.getContext('2d').getImageData(0, 0, 600, 64).data.some((value) => value > 0); });
  const all = await tab.waitForSelector('.card button:has-text("show all")');
  await all.click();
  await tab.waitForFunction(() => [...document.querySelectorAll('.card pre')].some((own) => own.textContent.length > 1e6));
  console.log('hostile and long text is text, picture and sound are there');

  await tab.goto(`${url}#/rollouts?step=59&group=0`);
  const box = await tab.waitForSelector('.card[data-sample="0"] .boxed span');
  assert.deepEqual(await box.evaluate(({ style }) => [style.left, style.top, style.width, style.height]), ['25%', '50%', '50%', '50%']);
  await tab.waitForFunction(() => document.querySelector('.card[data-sample="0"] img.crop')?.naturalWidth === 1);
  assert.deepEqual((await tab.$$eval('.card[data-sample="0"] pre', (all) => all.map((own) => own.textContent))).slice(1, 3), ['a closer look', '<think>it is</think><answer>red</answer>']);
  assert.equal(await tab.$$eval('.boxed', (all) => all.length), 1);
  console.log('a completion of several turns is a conversation, with the box on the picture and the part beside it');
  await tab.goto(`${url}#/rollouts?step=60&group=0`);
  await tab.waitForSelector('.card');

  await tab.selectOption('select[aria-label="colour of tokens"]', 'probability');
  await tab.waitForSelector('.tokens [data-at="1"]');
  await tab.hover('.tokens [data-at="1"]');
  assert.match(await tab.$eval('.tip', (own) => own.textContent), /"it" p 0\.135 · log p −?-?2 · ratio 0\.905 · KL 0\.718 · entropy 2/);
  assert.ok((await tab.$eval('.tokens [data-at="1"]', (own) => own.style.background)).includes('color-mix'));
  console.log('tokens are coloured and tell their numbers');

  await tab.fill('input[name=text]', 'NEEDLE');
  await tab.waitForFunction(() => /found in 60 steps/.test(document.querySelector('aside [role=status]')?.textContent), null, { timeout: 20000 });
  assert.match(await tab.$eval('aside [role=status]', (own) => own.textContent), /^3 found/);
  await tab.waitForFunction(() => /step 42, prompt 2/.test(document.querySelector('.detail h2')?.textContent));
  // Completions of one prompt are found one by one.
  assert.equal(await tab.$eval('.step', (own) => own.value), '42');
  const current = () => tab.$$eval('.groups a', (all) => all.flatMap((own, at) => (own.getAttribute('aria-current') ? [at] : [])));
  assert.deepEqual(await current(), [0]);
  await tab.evaluate(() => document.activeElement.blur());
  for (const at of [1, 2]) {
    await tab.keyboard.press('j');
    await tab.waitForFunction((wanted) => document.querySelectorAll('.groups a')[wanted]?.getAttribute('aria-current'), at);
    assert.deepEqual(await current(), [at]);
  }
  await tab.fill('input[name=text]', '');
  await tab.check('input[name=cut]');
  await tab.fill('input[name=category]', 'shape');
  await tab.waitForFunction(() => /^60 found in 60 steps/.test(document.querySelector('aside [role=status]')?.textContent), null, { timeout: 20000 });
  console.log('search and filters find');

  // The viewer opens at the group with the largest spread; the list shows groups of all steps by selection.
  await tab.goto(`${url}#/rollouts?step=60`);
  await tab.waitForFunction(() => /^3 groups/.test(document.querySelector('aside [role=status]')?.textContent));
  await tab.waitForSelector('.groups .thumb');
  await tab.goto(`${url}#/rollouts?scope=all&only=mixed&sort=long&measure=rewards%2Faccuracy`);
  await tab.waitForFunction(() => /^180 of 180 groups/.test(document.querySelector('aside [role=status]')?.textContent), null, { timeout: 20000 });
  await tab.waitForSelector('.groups a');
  assert.match(await tab.$eval('.groups a', (own) => own.textContent), /step 1 · 2\/4 pass · row-0 · colour · 1 cut off · .* without answer/);
  await tab.goto(`${url}#/rollouts?scope=all&only=never&least=2`);
  await tab.waitForFunction(() => /^180 of 180 groups/.test(document.querySelector('aside [role=status]')?.textContent));
  console.log('groups of all steps are filtered and sorted');

  await tab.goto(`${url}#/rows?id=row-1&left=0-1-1&right=0-60-1`);
  await tab.waitForSelector('.sides pre');
  assert.match(await tab.$eval('.page [role=status]', (own) => own.textContent), /^3 of 3 rows · 0 never solved/);
  assert.equal(await tab.$$eval('.passes i', (own) => own.length), 60);
  await tab.selectOption('select[name=sample-1]', '2');
  await tab.waitForSelector('.sides ins');
  assert.match(await tab.$eval('.sides ins', (own) => own.textContent), /x/);
  assert.ok((await tab.$eval('.heat', (own) => own.getContext('2d').getImageData(2, 2, 1, 1).data))[3] > 0, 'the map of rows is empty');
  await tab.goto(`${url}#/distributions?measure=length`);
  await tab.waitForFunction(() => /720 completions of 60 steps/.test(document.querySelector('.page [role=status]')?.textContent));
  await tab.waitForFunction(() => /4 by|by length/.test(document.querySelector('.page')?.textContent));
  console.log('rows have their history, and distributions are drawn');

  await tab.goto(`${url}#/evaluations`);
  await tab.waitForSelector('.pair');
  assert.match(await tab.$eval('.page', (own) => own.textContent), /2 better · 0 worse · 2 unchanged/);
  await tab.selectOption('select[aria-label=change]', 'better');
  await tab.waitForFunction(() => document.querySelectorAll('.pair').length === 2);
  assert.ok(await tab.$('.confusion td'));
  assert.equal(await tab.$$eval('.track.after', (own) => own.length), 2);
  await tab.goto(`${url}#/settings`);
  await tab.waitForSelector('.settings td');
  console.log('evaluations and settings are there');

  // Two runs, one with another setting.
  const other = temporary('omnigrpo-page-');
  cpSync(dir, other, { recursive: true });
  writeFileSync(join(other, 'config.yaml'), 'run_name: other    # flag\nlearning_rate: 2e-6    # flag\nmax_steps: 80    # flag\n');
  const [second, both] = await serve([dir, other]);
  children.push(second);
  const pair = await page(both);
  await pair.goto(`${both}#/settings`);
  await pair.waitForSelector('.settings tbody tr');
  assert.deepEqual(await pair.$$eval('.settings tbody th', (own) => own.map((cell) => cell.textContent)), ['run_name', 'learning_rate']);
  assert.deepEqual(await pair.$$eval('.chip', (own) => own.map((chip) => chip.textContent)), ['made up', 'other']);
  // The table of runs is the first view of several.
  await pair.goto(`${both}?table`);
  await pair.waitForSelector('.runs tbody tr');
  const cells = () => pair.$$eval('.runs tbody tr', (all) => all.map((row) => [...row.children].map((cell) => cell.textContent)));
  const table = await cells();
  assert.deepEqual(await pair.$$eval('.runs thead th', (all) => all.map((own) => own.textContent)), ['run', 'verdict', 'before → after', 'steps', 'time', 'state', 'model', 'data', 'learning_rate']);
  assert.deepEqual(table.map((row) => [row[0].trim(), row.at(-1)]), [['made up', '1e-6'], ['other', '2e-6']]);
  assert.match(table[0][1], /^Worse ! ran_away$/);
  assert.match(table[0][2], /^0.55 → 0.770.75 to 0.78 \(training\)$/);
  assert.match(table[0][3], /^63$/);
  await pair.click('.runs summary');
  await pair.waitForFunction(() => /Worse than before: the policy ran away/.test(document.querySelector('.runs details').textContent));
  await pair.click('.runs thead button:has-text("learning_rate")');
  await pair.click('.runs thead button:has-text("learning_rate")');
  assert.deepEqual((await cells()).map((row) => row.at(-1)), ['2e-6', '1e-6']);
  assert.equal(await pair.$eval('.runs thead th:last-child', (own) => own.getAttribute('aria-sort')), 'descending');
  assert.ok(await pair.$eval('.runs tr:last-child details', (own) => own.open), 'sorting has closed a line');
  await pair.uncheck('input[name=problems]');
  assert.match((await cells())[1][1], /^Worse (?!!)/);
  await pair.check('input[name=problems]');
  await pair.fill('input[aria-label="find runs"]', 'learning_rate=1e-6');
  assert.deepEqual((await cells()).map((row) => row[0].trim()), ['made up']);
  await pair.click('.runs tbody a');
  await pair.waitForSelector('.chart canvas');
  assert.deepEqual(await pair.$$eval('.chip input', (all) => all.map((own) => own.checked)), [true, false]);
  assert.match(await pair.$eval('#verdicts', (own) => own.textContent), /Verdicts on 1 runs · 1 worse/);
  for (const colorScheme of ['light', 'dark']) {
    const seen = await page(both, { colorScheme });
    await seen.goto(`${both}#/runs`);
    await seen.waitForSelector('.runs tbody tr');
    await seen.click('.runs summary');
    await seen.waitForFunction(() => document.querySelector('.runs details p'));
    assert.deepEqual(await flaws(seen), [], `runs, ${colorScheme}`);
    await seen.close();
  }
  // Both runs have their verdicts on the other views in one line that stays closed.
  await pair.goto(`${both}?both#/charts`);
  await pair.waitForFunction(() => /Verdicts on 2 runs · 2 worse · 2 with problems/.test(document.getElementById('verdicts').textContent));
  assert.equal(await pair.$eval('#verdicts > details', (own) => own.open), false);
  console.log('the table of runs tells, sorts, finds and opens');

  // Runs that share a name are told apart by their directories; one that cannot be read does not hide the other.
  writeFileSync(join(other, 'config.yaml'), 'run_name: made up    # flag\nlearning_rate: 2e-6    # flag\nmax_steps: 80    # flag\n');
  writeFileSync(join(other, 'eval/step-000060.summary.json'), '{');
  await pair.goto(`${both}?again#/evaluations`);
  await pair.waitForSelector('.pair');
  assert.match(await pair.$eval('.page .error', (own) => own.textContent), /step-000060\.summary\.json, byte 0/);
  assert.deepEqual(await pair.$$eval('.chip', (own) => own.map((chip) => chip.textContent)), [dir, other].map((own) => `made up (${own.split('/').at(-1)})`));
  // The browser names the answer that failed.
  complaints.splice(0, complaints.length, ...complaints.filter((own) => !own.includes('status of 500')));
  await pair.goto(`${both}#/charts`);
  await pair.waitForSelector('.chart canvas');
  assert.equal(await pair.$$eval('.chart:first-child .said i', (own) => own.length), 2);
  console.log('two runs are compared');

  const many = large();
  const [third, whole] = await serve([many]);
  children.push(third);
  const slow = await page(whole);
  const parts = [];
  slow.on('response', (response) => { if (response.url().includes('api/media')) parts.push([response.status(), Number(response.headers()['content-length'])]); });
  await slow.goto(`${whole}#/rollouts?step=1&group=0`);
  await slow.waitForFunction(() => [...document.querySelectorAll('video')].filter((own) => own.readyState > 0 && Math.abs(own.duration - 14) < 0.2).length === 6, null, { timeout: 60000 });
  assert.equal(await slow.$$eval('figure:first-child .timeline button', (own) => own.length), TIMES.length);
  await slow.$$eval('figure:first-child .timeline button', (own) => own.at(-1).click());
  await slow.waitForFunction((time) => { const own = document.querySelector('video'); return !own.seeking && own.currentTime === time && own.readyState > 1; }, TIMES.at(-1), { timeout: 20000 });
  await slow.evaluate(() => { const own = document.querySelector('video'); own.muted = true; own.currentTime = 0; own.playbackRate = 4; return own.play(); });
  await slow.waitForFunction(() => document.querySelector('video').ended, null, { timeout: 60000 });
  assert.ok(statSync(join(many, 'clip-0.mp4')).size > 12e6, 'a clip that fits the buffers shows nothing');
  const ranges = parts.filter(([status]) => status === 206);
  assert.ok(ranges.length > 12 && ranges.every(([, bytes]) => bytes <= 1 << 20), `${ranges.length} parts`);
  await slow.waitForFunction(() => document.querySelector('figure:last-child audio')?.duration > 13 && document.querySelector('figure:last-child .wave').getContext('2d').getImageData(0, 0, 600, 64).data.some((value) => value > 0), null, { timeout: 20000 });
  console.log(`six clips of ${Math.round(statSync(join(many, 'clip-0.mp4')).size / 1e6)} MB are there, one plays to its end in ${ranges.length} parts; its sound has a waveform`);

  const memory = () => Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${third.pid}/status`, 'utf8'))?.[1] ?? 0) / 1024;
  const took = async (name, limit, act) => {
    const began = performance.now();
    await act();
    const time = performance.now() - began;
    console.log(`${name}: ${Math.round(time)} ms`);
    assert.ok(time < limit, `${name} took ${Math.round(time)} ms`);
  };
  const heading = (text) => slow.waitForFunction((wanted) => document.querySelector('.detail h2')?.textContent.includes(wanted), text);
  await took('another step', 2000, async () => { await slow.keyboard.press('n'); await heading('step 2, prompt'); });
  await took('another prompt', 2000, async () => { await slow.keyboard.press('j'); await slow.waitForFunction(() => document.querySelectorAll('.groups a')[1]?.getAttribute('aria-current')); });
  await took('a step of 2,000 completions', 4000, async () => { await slow.goto(`${whole}#/rollouts?step=41&group=249`); await heading('step 41, prompt 249'); });
  assert.equal(await slow.$$eval('.groups li', (own) => own.length), 51);
  await took('a link into it', 2000, async () => { await slow.goto(`${whole}#/rollouts?step=41&group=100`); await heading('step 41, prompt 100'); });
  await took('a search through all', 20000, async () => {
    await slow.fill('input[name=text]', 'step 40 prompt 24 sees');
    await slow.waitForFunction(() => /^8 found in 41 steps/.test(document.querySelector('aside [role=status]')?.textContent), null, { timeout: 30000 });
  });
  console.log(`10,000 completions of ${Math.round(Array.from({ length: 41 }, (_, at) => statSync(join(many, `rollouts/step-${String(at + 1).padStart(6, '0')}.jsonl`)).size).reduce((a, b) => a + b) / 1e6)} MB, and the server has ${Math.round(memory())} MB`);
  assert.ok(memory() < 200, `the server has ${memory()} MB`);
  await slow.close();

  const stranger = new URL('/', url).href;
  for (const path of ['', 'api/runs', `${'0'.repeat(32)}/api/runs`, '../metrics.jsonl', `${new URL(url).pathname.slice(1)}..%2f..%2fetc/passwd`, `${new URL(url).pathname.slice(1)}page/%2e%2e/Cargo.toml`]) {
    assert.equal((await fetch(stranger + path)).status, 404, path);
  }
  console.log('nothing without the token, nothing beside the run');

  const phone = await page(url, { viewport: { width: 390, height: 800 }, colorScheme: 'dark' });
  for (const view of ['charts', 'rollouts?step=60&group=1', 'evaluations', 'settings']) {
    await phone.goto(`${url}#/${view}`);
    await phone.waitForSelector('.chart canvas, .card, .pair, .settings td');
    const [inner, wide] = await phone.evaluate(() => [innerWidth, document.documentElement.scrollWidth]);
    assert.ok(wide <= inner, `${view} is ${wide} px wide on a phone of ${inner}`);
  }
  console.log('a phone is wide enough');

  for (const colorScheme of ['light', 'dark']) {
    const seen = await page(url, { colorScheme });
    for (const [view, sign] of [['charts', '.chart canvas'], ['distributions', '.histogram'], ['rollouts?step=60&group=0', '.card'], ['rollouts?scope=all', '.groups a'], ['rows?id=row-1', '.sides pre'], ['evaluations', '.pair'], ['settings', '.settings td']]) {
      await seen.goto(`${url}#/${view}`);
      await seen.waitForSelector(sign);
      await seen.waitForTimeout(300);
      assert.deepEqual(await flaws(seen), [], `${view}, ${colorScheme}`);
    }
    await seen.close();
  }
  console.log('axe finds nothing');

  // The report is the page with its data inside. It asks nobody.
  execFileSync(program, ['report', dir], { stdio: ['ignore', 'ignore', 'inherit'] });
  const apart = await browser.newContext();
  const file = await apart.newPage();
  const heard = [];
  file.on('console', (message) => heard.push(message.text()));
  file.on('pageerror', (error) => heard.push(String(error.stack)));
  file.on('request', (request) => { if (!/^(file|data|blob):/.test(request.url())) heard.push(`asked ${request.url()}`); });
  const report = `file://${join(dir, 'report.html')}`;
  await file.goto(report);
  await file.waitForSelector('.chart canvas');
  assert.match(await file.$eval('#notices', (own) => own.textContent), /Run.*made up.*Steps.*63 of 80.*Last step20\d\d-.* UTC/);
  for (const [view, sign] of [['distributions', '.histogram'], ['rollouts', '.card'], ['rollouts?scope=all', '.groups a'], ['rows', '.page table td'], ['evaluations', '.pair'], ['settings', '.settings td'], ['charts', '.chart canvas']]) {
    await file.goto(`${report}#/${view}`);
    await file.waitForSelector(sign);
    assert.deepEqual(await file.$$eval('.error', (all) => all.map((own) => own.textContent)), [], view);
    assert.deepEqual(await flaws(file), [], view);
  }
  await file.goto(`${report}#/rollouts`);
  await file.waitForFunction(() => document.querySelector('.media img')?.naturalWidth > 0);
  assert.equal(await file.evaluate(() => globalThis.owned), undefined, 'a script in a completion ran in the report');
  await file.goto(`${report}#/charts`);
  await file.click('.chart .menu summary');
  for (const [button, start] of [['CSV', 'run,step,reward'], ['SVG', '<svg xmlns'], ['PNG', '\u0089PNG']]) {
    const [download] = await Promise.all([file.waitForEvent('download'), file.click(`.chart .menu button:has-text("${button}")`)]);
    assert.ok(readFileSync(await download.path(), 'latin1').startsWith(start), button);
  }
  const charts = await file.$$('.chart');
  assert.equal(readdirSync(join(dir, 'plots')).length, charts.length);
  assert.deepEqual(heard, []);
  await apart.close();
  console.log(`the report shows the same views without a server, and its ${charts.length} charts are files too`);

  // A spike of one step in 21,000 reaches the top of its chart, and a short run has no number behind its end.
  const long = temporary('omnigrpo-long-');
  writeFileSync(join(long, 'metrics.jsonl'), Array.from({ length: 21000 }, (_, at) => `${JSON.stringify({ step: at + 1, kl: at === 12344 ? 1000 : 0.1, reward: 0.5, step_time: 1 })}\n`).join(''));
  // A name of a metric that is too long is ignored, and the page says so.
  appendFileSync(join(long, 'metrics.jsonl'), `${JSON.stringify({ step: 21001, kl: 0.1, reward: 0.5, step_time: 1, ['x'.repeat(300)]: 1 })}\n`);
  const short = temporary('omnigrpo-short-');
  writeFileSync(join(short, 'metrics.jsonl'), Array.from({ length: 10 }, (_, at) => `${JSON.stringify({ step: at + 1, kl: 7, reward: 0.5, step_time: 1 })}\n`).join(''));
  const [fifth, spiked] = await serve([long, short]);
  children.push(fifth);
  const spike = await page(spiked);
  await spike.goto(`${spiked}#/charts`);
  await spike.waitForSelector('.chart canvas');
  await spike.waitForFunction(() => document.querySelectorAll('.chart').length === 2);
  // The server reads the file in pieces.
  await spike.waitForFunction(() => document.querySelector('#notices')?.textContent.includes('has more rows or metrics'));
  // The pixels of the line in the upper half of the chart of KL, where nothing but the spike is.
  const above = () => spike.$$eval('.chart canvas', (all) => {
    const { width, height } = all[1];
    const { data } = all[1].getContext('2d').getImageData(width / 4, height / 8, width * 0.7, height / 3);
    let count = 0;
    for (let i = 0; i < data.length; i += 4) if (Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]) > 30) count += 1;
    return count;
  });
  assert.match(await spike.$eval('#notices', (own) => own.textContent), /omnigrpo-long-.*has more rows or metrics than the page reads/);
  const drawn = await above();
  assert.ok(drawn > 5, `the spike is not drawn: ${drawn}`);
  await spike.focus('.chart:nth-child(2) .plot');
  await spike.keyboard.press('End');
  assert.match(await spike.$eval('.chart:nth-child(2) .said', (own) => own.textContent), /–step 21001/);
  console.log('a spike of one step is drawn');

  // The page outlives its server, and connects to the next one.
  writeFileSync(join(dir, 'page.url'), `${url}\n`, { mode: 0o600 });
  // The program believes the file only with the mark of its place on the disk.
  const { dev, ino } = statSync(join(dir, 'page.url'));
  appendFileSync(join(dir, 'page.url'), `# ${dev}:${ino}\n`);
  await tab.goto(`${url}#/charts`);
  await tab.waitForSelector('.chart canvas');
  child.kill();
  await tab.waitForFunction(() => /This page is no longer served.*omnigrpo watch/.test(document.getElementById('notices').textContent), null, { timeout: 20000 });
  await tab.keyboard.press('5');
  await tab.waitForFunction(() => /was not loaded before/.test(document.getElementById('main').textContent));
  const [sixth, same] = await serve([dir]);
  children.push(sixth);
  assert.equal(same, url);
  await tab.waitForSelector('.pair', { timeout: 30000 });
  assert.ok(!/no longer served/.test(await tab.$eval('#notices', (own) => own.textContent)));
  complaints.splice(0, complaints.length, ...complaints.filter((own) => !/ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE/.test(own)));
  console.log('a page whose server ended connects to the next one');

  if (shots) {
    const [fourth, own] = await serve([shown]);
    children.push(fourth);
    const views = [['charts', 'charts'], ['rollouts', 'rollouts?step=4&group=1'], ['evaluations', 'evaluations']];
    for (const [name, options] of [['light', {}], ['dark', { colorScheme: 'dark' }], ['phone', { viewport: { width: 390, height: 800 }, deviceScaleFactor: 2, colorScheme: 'dark' }]]) {
      const tab = await page(own, options);
      for (const [view, hash] of views) {
        await tab.goto(`${own}#/${hash}`);
        await tab.waitForSelector('.chart canvas, .card, .pair');
        await tab.waitForTimeout(700);
        await tab.screenshot({ path: join(shots, `${view}-${name}.png`) });
      }
    }
  }
  assert.deepEqual(complaints, []);
  console.log('the console is empty');
} finally {
  children.forEach((child) => child.kill());
  await browser.close();
  made.forEach((own) => rmSync(own, { recursive: true }));
}
