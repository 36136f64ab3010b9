// Statistics: intervals with their sources, smoothing, and quantiles. `node --test tools/watch/stats.test.mjs` checks them.

const Z = 1.959964;

/// Returns the 97.5 % quantile of Student's t. Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5; the first two
/// degrees of freedom have closed forms. The error is below 1 %.
export function tQuantile(degrees) {
  if (degrees === 1) return Math.tan(Math.PI * 0.475);
  if (degrees === 2) return 0.95 / Math.sqrt((2 * (1 - 0.95 * 0.95)) / 4);
  const z = Z;
  return z + (z ** 3 + z) / (4 * degrees) + (5 * z ** 5 + 16 * z ** 3 + 3 * z) / (96 * degrees ** 2)
    + (3 * z ** 7 + 19 * z ** 5 + 17 * z ** 3 - 15 * z) / (384 * degrees ** 3);
}

/// Returns the 95 % interval of a share. Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
export function shareInterval(share, count) {
  if (share === null || share === undefined || !count) return null;
  const middle = (share + (Z * Z) / (2 * count)) / (1 + (Z * Z) / count);
  const half = (Z * Math.sqrt((share * (1 - share)) / count + (Z * Z) / (4 * count * count))) / (1 + (Z * Z) / count);
  return [Math.max(0, middle - half), Math.min(1, middle + half)];
}

/// Returns mean, standard deviation and number of values.
export function moments(values) {
  const count = values.length;
  if (!count) return { count, mean: null, deviation: null };
  const mean = values.reduce((sum, own) => sum + own, 0) / count;
  const squares = values.reduce((sum, own) => sum + (own - mean) ** 2, 0);
  return { count, mean, deviation: count > 1 ? Math.sqrt(squares / (count - 1)) : null };
}

/// Returns the 95 % interval of a mean, mean ± t s / √n. For differences of the same questions, this is the paired interval of
/// E. Miller, "Adding error bars to evals", 2024, with Student's t for few questions. Null for fewer than two values.
export function meanInterval({ count, mean, deviation }) {
  if (count < 2 || deviation === null) return null;
  const half = (tQuantile(count - 1) * deviation) / Math.sqrt(count);
  return [mean - half, mean + half];
}

/// Computes exponential means, corrected for the bias towards the first value. Gaps stay gaps.
export function smoothed(values, weight) {
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

/// Returns a quantile by linear interpolation between sorted values.
export function quantile(sorted, share) {
  if (!sorted.length) return null;
  const at = share * (sorted.length - 1);
  const below = Math.floor(at);
  return sorted[below] + (at - below) * ((sorted[below + 1] ?? sorted[below]) - sorted[below]);
}

/// Splits two texts into words and marks those that only one of them has: a longest common subsequence. Texts of more than `most` words
/// are not compared.
export function wordDifference(left, right, most = 1500) {
  const words = (text) => text.match(/\s+|\w+|[^\s\w]/gu) ?? [];
  const [a, b] = [words(left), words(right)];
  if (a.length > most || b.length > most) return null;
  const lengths = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) lengths[i][j] = a[i] === b[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
  }
  const out = [[], []];
  const add = (side, word, differs) => {
    const last = out[side].at(-1);
    if (last?.differs === differs) last.text += word; else out[side].push({ text: word, differs });
  };
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { add(0, a[i], false); add(1, b[j], false); i += 1; j += 1; }
    else if (j >= b.length || (i < a.length && lengths[i + 1][j] >= lengths[i][j + 1])) { add(0, a[i], true); i += 1; }
    else { add(1, b[j], true); j += 1; }
  }
  return out;
}
