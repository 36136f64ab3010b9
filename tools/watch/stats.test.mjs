// Checks crates/watch/src/page/stats.js against values from tables and by hand.
//
//   node --test tools/watch/stats.test.mjs

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';

const source = readFileSync(new URL('../../crates/watch/src/page/stats.js', import.meta.url));
const stats = await import(`data:text/javascript;base64,${source.toString('base64')}`);
const near = (got, expected, within) => assert.ok(Math.abs(got - expected) <= within, `${got} instead of ${expected}`);

test('quantiles of t are those of the table', () => {
  for (const [degrees, expected] of [[1, 12.706], [2, 4.303], [3, 3.182], [4, 2.776], [5, 2.571], [10, 2.228], [30, 2.042], [1000, 1.962]]) near(stats.tQuantile(degrees), expected, 0.01 * expected);
});

test('the interval of a share is that of Wilson', () => {
  // 8 of 10: (0.8 + 0.19207) / 1.38415 = 0.71674, and 1.95996 * sqrt(0.016 + 0.0096036) / 1.38415 = 0.22657.
  const [low, high] = stats.shareInterval(0.8, 10);
  near(low, 0.49016, 1e-4);
  near(high, 0.94331, 1e-4);
  assert.deepEqual(stats.shareInterval(0, 0), null);
  assert.equal(stats.shareInterval(0, 5)[0], 0);
});

test('the interval of a mean uses t', () => {
  // 1, 2, 3, 4, 5: mean 3, deviation sqrt(2.5), and 2.776 * 1.5811 / sqrt(5) = 1.963.
  const own = stats.moments([1, 2, 3, 4, 5]);
  assert.equal(own.mean, 3);
  near(own.deviation, Math.sqrt(2.5), 1e-12);
  const [low, high] = stats.meanInterval(own);
  near(low, 1.037, 0.01);
  near(high, 4.963, 0.01);
  assert.equal(stats.meanInterval(stats.moments([1])), null);
  assert.equal(stats.moments([]).mean, null);
});

test('smoothing corrects the beginning and leaves gaps', () => {
  // 0.5 * 1 / 0.5 = 1; (0.5 * 0.5 + 0.5 * 3) / 0.75 = 2.3333.
  const own = stats.smoothed([1, null, 3], 0.5);
  assert.deepEqual(own.slice(0, 2), [1, null]);
  near(own[2], 7 / 3, 1e-12);
  assert.deepEqual(stats.smoothed([1, 3], 0), [1, 3]);
});

test('quantiles lie between neighbours', () => {
  assert.equal(stats.quantile([0, 10], 0.25), 2.5);
  assert.equal(stats.quantile([7], 0.9), 7);
  assert.equal(stats.quantile([], 0.5), null);
});

test('words that differ are marked on their side', () => {
  const [left, right] = stats.wordDifference('the red ball', 'the blue ball');
  assert.deepEqual(left, [{ text: 'the ', differs: false }, { text: 'red', differs: true }, { text: ' ball', differs: false }]);
  assert.deepEqual(right, [{ text: 'the ', differs: false }, { text: 'blue', differs: true }, { text: ' ball', differs: false }]);
  assert.deepEqual(stats.wordDifference('', 'a'), [[], [{ text: 'a', differs: true }]]);
  assert.equal(stats.wordDifference('a '.repeat(2000), ''), null);
});
