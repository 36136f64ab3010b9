// The card above all views: whether a run learned and, if not, why.

import { el, hash, isFile, kept, link, visible } from './shared.js';

const TONES = { learned: 'good', learning: 'good', not_learned: 'warning', worse: 'bad', too_early: '' };

/// Returns the card of a run. With several runs, it is one line that opens, with the problems inside.
export function card(run, several) {
  const { verdict } = run;
  const attributes = { class: `notice verdict ${TONES[verdict.kind] ?? ''}` };
  if (!several) return el('div', attributes, el('p', { class: 'sentence' }, visible(verdict.sentence)), details(run, false));
  const swatch = el('span', { class: 'swatch' });
  swatch.style.background = run.colour;
  const box = el('details', { ...attributes, ontoggle: () => { run.isCardOpen = box.open; } },
    el('summary', {}, swatch, el('b', {}, visible(run.name), ': '), visible(verdict.sentence)), problems(run), details(run, false));
  box.open = Boolean(run.isCardOpen);
  return box;
}

/// Returns the problems of a run in paragraphs, those that are over in a list that opens.
export function problems(run) {
  const lasting = run.warnings.filter((own) => own.until === null);
  const over = run.warnings.filter((own) => own.until !== null);
  return [lasting.map((own) => el('p', {}, visible(own.text))),
    over.length ? el('details', {}, el('summary', {}, `${over.length} earlier ${over.length > 1 ? 'problems' : 'problem'}`), over.map((own) => el('p', {}, visible(own.text), ` Ended at step ${own.until}.`))) : ''];
}

/// Returns what explains a verdict, and with `whole` also its sentence.
export function details(run, whole) {
  const { verdict } = run;
  return [
    whole ? el('p', {}, visible(verdict.sentence)) : '',
    verdict.example ? shown(run, verdict.example) : '',
    verdict.remarks.map((remark) => el('p', { class: 'quiet' }, visible(remark))),
    verdict.next ? el('p', {}, el('b', {}, 'Next: '), visible(verdict.next)) : '',
    verdict.command ? el('p', {}, el('code', {}, visible(verdict.command))) : '',
  ].flat().filter(Boolean);
}

/// Shows the completion that explains the verdict, with its picture and its solution.
function shown(run, own) {
  const where = { run: run.at, step: own.step, group: own.group, at: own.picture };
  const source = own.picture === null ? null : isFile ? kept(where, own.picture)?.src : link('preview', where);
  const reward = own.reward === null ? '' : `, reward ${own.reward}`;
  return el('div', { class: 'case' },
    source ? el('img', { src: source, alt: own.media[own.picture] ?? 'medium of the row' }) : '',
    el('dl', {},
      el('dt', {}, 'Row'), el('dd', {}, el('a', { href: hash('rollouts', { run: run.at, step: own.step, group: own.group }) }, visible(own.id)), ': ', visible(own.question)),
      el('dt', {}, own.is_nearest ? `Nearest completion${reward}` : `Best-paid completion${reward}`), el('dd', {}, own.completion === '' ? el('i', {}, 'empty') : visible(own.completion)),
      own.solution === null ? '' : [el('dt', {}, 'Its solution'), el('dd', {}, visible(own.solution))]));
}
