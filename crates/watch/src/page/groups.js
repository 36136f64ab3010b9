// Groups of a run as rows with numbers: all completions of a prompt in a step. The table of a run is fetched once and kept up to date.

import { apiJson, isFile } from './shared.js';

const tables = new Map();

/// Says that the numbers of a view are incomplete.
export const CAPPED = 'the run has more completions than are indexed';

/// Groups of a run under one measure. A completion passes if its measure is at least `least`.
export class Groups {
  constructor(run, measure, least) {
    Object.assign(this, { run, measure, asked: least });
    this.clear();
  }

  clear() {
    this.rows = [];
    this.byId = new Map();
    this.next = 0;
    this.generation = 0;
    this.least = undefined;
  }

  /// Fetches groups that are new. Calls `progress` after each response; returning false from it ends the fetch.
  async load(progress = () => true) {
    // Two callers at the same time would add rows twice.
    this.loading = (this.loading ?? Promise.resolve()).catch(() => {}).then(() => this.fetch(progress));
    await this.loading;
    return this;
  }

  async fetch(progress) {
    // A report does not grow.
    if (isFile && this.rows.length) return;
    for (;;) {
      const found = await apiJson('catalogue', { run: this.run, measure: this.measure, least: this.asked, generation: this.generation || undefined, from: this.next || undefined });
      // The run resumed from an earlier step, or a larger value changes what passes.
      if (this.rows.length && (found.from !== this.next || found.least !== this.least)) { this.clear(); this.generation = found.generation; continue; }
      Object.assign(this, { generation: found.generation, least: found.least, next: found.next, about: found });
      this.add(found);
      if ((found.done && found.next === found.groups) || progress(this) === false) return;
    }
  }

  add({ columns, ids, categories }) {
    for (let at = 0; at < columns.step.length; at += 1) {
      const id = ids[columns.id[at]];
      const row = { id, category: categories[columns.category[at]] ?? null };
      for (const name of ['step', 'group', 'completions', 'mean', 'min', 'max', 'pass', 'length', 'cut', 'unparsed']) row[name] = columns[name][at];
      const earlier = this.byId.get(id);
      row.change = earlier ? difference(row.mean, earlier.at(-1).mean) : null;
      if (earlier) earlier.push(row); else this.byId.set(id, [row]);
      this.rows.push(row);
    }
  }

  /// Returns true if no completion of the row has passed so far.
  neverSolved(id) { return this.byId.get(id).every((row) => row.pass === 0); }
}

const difference = (a, b) => (a === null || b === null ? null : a - b);

/// Returns the table of a run. The same request returns the same table.
export function groupsOf(run, measure, least) {
  const key = JSON.stringify([run, measure, least || null]);
  if (!tables.has(key)) {
    // A table of a long run takes some megabytes.
    if (tables.size > 7) tables.delete(tables.keys().next().value);
    tables.set(key, new Groups(run, measure, least || undefined));
  }
  return tables.get(key);
}

/// Computes the numbers of a group from an entry of a list.
export function summary(line, measure, least) {
  const of = measure === 'reward' ? line.reward : measure === 'length' ? line.length : line.rewards[measure.replace(/^rewards\//, '')] ?? [];
  const values = of.filter((own) => own !== null && own !== undefined);
  const mean = values.length ? values.reduce((sum, own) => sum + own, 0) / values.length : null;
  const length = line.length.reduce((sum, own) => sum + own, 0) / line.length.length;
  const pass = values.length ? values.filter((own) => least !== null && own >= least).length / values.length : null;
  return { ...line, values: of, mean, min: values.length ? Math.min(...values) : null, max: values.length ? Math.max(...values) : null, pass, length, change: null };
}

const spread = (row) => (row.max === null ? -1 : row.max - row.min);

export const SORTS = {
  spread: ['largest spread', (a, b) => spread(b) - spread(a)],
  order: ['order in the step', () => 0],
  worst: ['lowest mean', (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity)],
  best: ['highest mean', (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity)],
  unsolved: ['lowest pass rate', (a, b) => (a.pass ?? 2) - (b.pass ?? 2)],
  long: ['longest', (a, b) => b.length - a.length],
  short: ['shortest', (a, b) => a.length - b.length],
  change: ['largest loss since the last pass', (a, b) => (a.change ?? Infinity) - (b.change ?? Infinity)],
};

/// Filters. Those with `all` need the groups of all steps.
export const ONLY = {
  '': { label: 'all groups', test: () => true },
  mixed: { label: 'with variance', test: (row) => spread(row) > 1e-9 },
  flat: { label: 'without variance', test: (row) => spread(row) <= 1e-9 },
  solved: { label: 'all passed', test: (row) => row.pass === 1 },
  failed: { label: 'none passed', test: (row) => row.pass === 0 },
  cut: { label: 'cut off', test: (row) => row.cut > 0 },
  unparsed: { label: 'without answer', test: (row) => row.unparsed > 0 },
  worse: { label: 'got worse', all: true, test: (row) => row.change < 0 },
  never: { label: 'rows never solved', all: true, test: (row, table) => table.neverSolved(row.id) },
};

/// Returns the rows that a selection keeps, in its order. Rows that compare as equal keep their order.
export function triaged(rows, { sort = 'spread', only = '', hide }, table) {
  const test = (ONLY[only] ?? ONLY['']).test;
  const kept = rows.filter((row) => test(row, table) && !(hide && row.pass === 1));
  return kept.sort((SORTS[sort] ?? SORTS.spread)[1]);
}

/// Returns the measures of a run: the total reward and each reward.
export const measures = (rewards) => [['reward', 'total reward'], ...rewards.map((name) => [`rewards/${name}`, name])];
