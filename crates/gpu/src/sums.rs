//! Sums over rows and elements, and weighted sums of rows.

use crate::device::{Array, Dtype, Gpu};
use crate::launchers::{Element, sums};

/// The second factor of a column sum: an array `[t, cols]`, and the means and the reciprocal standard deviations of its rows. Each
/// may be absent.
type By<'a> = (Element<'a>, Element<'a>, Element<'a>);

/// Number of rows in one part of a sum over rows.
const PER_PART: usize = 256;
/// Number of elements in one part of a sum over all elements.
const PER_BLOCK: usize = 1 << 16;

/// Weighted sums of rows, on a device. Output row `r` is `Σ weights[i] · x[rows[i]]` over `i` in `offsets[r]..offsets[r + 1]`.
#[derive(Debug)]
pub struct Mixture {
    offsets: Array,
    rows: Array,
    weights: Option<Array>,
    /// Indices of the output rows; `None` means all rows in order.
    targets: Option<Array>,
    len: usize,
}

impl Mixture {
    /// Uploads offsets (one more than there are outputs), rows and weights (`None` means 1).
    pub fn new(gpu: &Gpu, offsets: &[u32], rows: &[u32], weights: Option<&[f32]>) -> Self {
        Self {
            offsets: gpu.upload_words(offsets),
            rows: gpu.upload_words(rows),
            weights: weights.map(|weights| gpu.upload(weights)),
            targets: None,
            len: offsets.len().saturating_sub(1),
        }
    }

    /// Creates the plain sums of `len` outputs from tables on the device.
    pub(crate) fn over(offsets: Array, rows: Array, len: usize) -> Self {
        Self { offsets, rows, weights: None, targets: None, len }
    }

    /// Returns the input rows of all outputs, one output after the other.
    pub(crate) fn rows(&self) -> &Array {
        &self.rows
    }

    /// Creates the transposed sums from `(row of the input, row of the output, weight)`, in the order in which terms are added.
    /// Only rows that occur are outputs.
    pub fn reversed(gpu: &Gpu, mut terms: Vec<(u32, u32, f32)>) -> Self {
        // The sort is stable, so the terms of each row keep the given order.
        terms.sort_by_key(|term| term.0);
        let (mut targets, mut offsets) = (Vec::new(), Vec::new());
        for (i, term) in terms.iter().enumerate() {
            if targets.last() != Some(&term.0) {
                targets.push(term.0);
                offsets.push(i as u32);
            }
        }
        offsets.push(terms.len() as u32);
        let rows: Vec<u32> = terms.iter().map(|term| term.1).collect();
        let weights: Vec<f32> = terms.iter().map(|term| term.2).collect();
        Self { targets: Some(gpu.upload_words(&targets)), ..Self::new(gpu, &offsets, &rows, Some(&weights)) }
    }
}

impl Gpu {
    /// Sets the rows of `y` to weighted sums of the rows of `x`, as `mixture` describes, or adds the sums to them. Both arrays
    /// have `cols` columns.
    pub fn mix(&self, y: &mut Array, x: &Array, mixture: &Mixture, cols: usize, adds: bool) {
        let Mixture { offsets, rows, weights, targets, len } = mixture;
        let adds = usize::from(adds);
        let kernel = sums::mix_rows(y, x, targets.as_ref(), offsets, rows, weights.as_ref(), cols, adds);
        self.each_row(kernel, *len, cols);
    }

    /// Sums columns over `t` rows, and adds the sums to `to [cols]`. The columns start at `col` in `a`, whose rows have `stride`
    /// elements.
    pub(crate) fn column_sums(
        &self,
        to: &mut Array,
        a: &Array,
        [col, stride]: [usize; 2],
        (b, mean, rstd): By<'_>,
        t: usize,
    ) {
        let (cols, parts) = (to.len(), t.div_ceil(PER_PART));
        let partial = self.alloc(parts * cols, Dtype::F32);
        let threads = cols.next_multiple_of(32).clamp(32, 256);
        let kernel = sums::column_sums(&partial, a.element(col), stride, b, mean, rstd, t, cols, PER_PART);
        self.launch(kernel, [cols.div_ceil(threads), parts, 1], threads, 0);
        self.add_parts(to, &partial, parts);
    }

    /// Adds column sums of `a` to `to [cols]`. The columns start at `col` in rows of `stride` elements. They are multiplied by `b
    /// [t, cols]` if it is given.
    pub fn add_column_sums(&self, to: &mut Array, a: &Array, place: [usize; 2], b: Option<&Array>, t: usize) {
        self.column_sums(to, a, place, (b.into(), Element::default(), Element::default()), t);
    }

    pub(crate) fn add_parts(&self, to: &mut Array, partial: &Array, parts: usize) {
        let cols = to.len();
        self.each(sums::add_parts(to, partial, parts, cols), cols);
    }

    /// Returns partial sums of `Σ a · b` in f64. The `len` elements of each array start at the given index.
    pub(crate) fn dots(&self, a: (&Array, usize), b: (&Array, usize), len: usize) -> Array {
        let partial = self.alloc(2 * len.div_ceil(PER_BLOCK), Dtype::F32);
        self.dots_at(partial.element(0), a, b, len);
        partial
    }

    /// Writes the sums of [`Self::dots`] from an element on.
    fn dots_at(&self, to: Element, a: (&Array, usize), b: (&Array, usize), len: usize) {
        let kernel = sums::dots(to, a.0.element(a.1), b.0.element(b.1), len, PER_BLOCK);
        self.each_row(kernel, len.div_ceil(PER_BLOCK), len.min(PER_BLOCK));
    }

    /// Returns partial sums of squares in f64, as pairs of words.
    pub fn squares(&self, x: &Array) -> Array {
        self.dots((x, 0), (x, 0), x.len())
    }

    /// Returns the sum of squares in f64. Waits for queued work.
    pub fn sum_of_squares(&self, x: &Array) -> f64 {
        self.sums_of_squares(&[x]).into_iter().sum()
    }

    /// Returns the sum of squares of each array in f64. Waits once for queued work.
    pub fn sums_of_squares(&self, arrays: &[&Array]) -> Vec<f64> {
        let parts = |x: &Array| x.len().div_ceil(PER_BLOCK);
        let all = self.alloc(2 * arrays.iter().map(|x| parts(x)).sum::<usize>(), Dtype::F32);
        let mut first = 0;
        for x in arrays {
            self.dots_at(all.element(2 * first), (x, 0), (x, 0), x.len());
            first += parts(x);
        }
        let sums = all.words::<f64>();
        let mut rest = &sums[..];
        let sum = |x: &&Array| rest.split_off(..parts(x)).map_or(f64::NAN, |own| own.iter().sum());
        arrays.iter().map(sum).collect()
    }
}
