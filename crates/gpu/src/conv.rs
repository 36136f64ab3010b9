//! Convolutions over channels-last rows, computed by unfolding and products; depthwise convolutions; gates.

use crate::device::{Array, Dtype, Gpu};
use crate::launchers::conv;

/// The patches of a convolution, on a device.
#[derive(Debug)]
pub struct Unfolding {
    sources: Array,
    offsets: Array,
    entries: Array,
    taps: usize,
}

/// Number of rows in one part of the gradient of a depthwise weight.
const PER_PART: usize = 256;

impl Unfolding {
    /// Uploads the input row under each tap of each output row (`u32::MAX` if there is none), for an input of `rows` rows.
    pub fn new(gpu: &Gpu, sources: &[u32], taps: usize, rows: usize) -> Self {
        let mut counts = vec![0u32; rows + 1];
        for &source in sources.iter().filter(|&&source| source != u32::MAX) {
            counts[source as usize + 1] += 1;
        }
        for row in 0..rows {
            counts[row + 1] += counts[row];
        }
        let mut next = counts.clone();
        let mut entries = vec![0u32; counts[rows] as usize];
        for (i, &source) in sources.iter().enumerate().filter(|(_, source)| **source != u32::MAX) {
            let place = &mut next[source as usize];
            entries[*place as usize] = i as u32;
            *place += 1;
        }
        Self {
            sources: gpu.upload_words(sources),
            offsets: gpu.upload_words(&counts),
            entries: gpu.upload_words(&entries),
            taps,
        }
    }

    /// Returns the input row under each tap of each output row.
    pub(crate) fn sources(&self) -> &Array {
        &self.sources
    }

    /// Returns, for each input row, the places that read it: their bounds, then the places.
    pub(crate) fn readers(&self) -> [&Array; 2] {
        [&self.offsets, &self.entries]
    }

    /// Returns the number of output rows.
    pub fn rows(&self) -> usize {
        self.sources.len() / self.taps.max(1)
    }
}

impl Gpu {
    /// Gathers patches from rows of `c` channels into rows `[outputs, c · taps]`.
    pub fn unfold(&self, x: &Array, patches: &Unfolding, c: usize) -> Array {
        let count = patches.rows() * patches.taps;
        let y = self.alloc(count * c, x.dtype());
        self.each(conv::unfold(&y, x, &patches.sources, count, patches.taps, c), count * c);
        y
    }

    /// Adds the gradient of [`Self::unfold`] to `dx [rows, c]`.
    pub fn fold(&self, dx: &mut Array, dy: &Array, patches: &Unfolding, c: usize) {
        let (len, Unfolding { offsets, entries, taps, .. }) = (dx.len(), patches);
        self.each(conv::fold(dx, dy, offsets, entries, len / c.max(1), *taps, c), len);
    }

    /// Computes a depthwise 3×3 convolution of images of `[h, w]` positions. If `flip`, computes the gradient with respect to the
    /// input.
    pub fn depthwise(&self, x: &Array, weight: &Array, [h, w]: [usize; 2], flip: bool) -> Array {
        let c = weight.len() / 9;
        let y = self.alloc(x.len(), x.dtype());
        let rows = x.len() / c.max(1);
        self.each(conv::depthwise(&y, x, weight, rows, h, w, c, usize::from(flip)), x.len());
        y
    }

    /// Adds the gradient of [`Self::depthwise`] with respect to its weight to `dw [c, 9]`.
    pub fn depthwise_weight(&self, dw: &mut Array, dy: &Array, x: &Array, [h, w]: [usize; 2]) {
        let c = dw.len() / 9;
        let rows = x.len() / c.max(1);
        let parts = rows.div_ceil(PER_PART);
        let partial = self.alloc(parts * 9 * c, Dtype::F32);
        let threads = (9 * c).next_multiple_of(32).clamp(32, 256);
        let kernel = conv::depthwise_weight(&partial, dy, x, rows, h, w, c, PER_PART);
        self.launch(kernel, [(9 * c).div_ceil(threads), parts, 1], threads, 0);
        self.add_parts(dw, &partial, parts);
    }

    /// Computes `x · sigmoid(gate)`. Each row of `gate [n, c]` applies to several consecutive rows of `x`.
    pub fn gate(&self, x: &Array, gate: &Array, c: usize) -> Array {
        let y = self.alloc(x.len(), x.dtype());
        let each = x.len() / gate.len().max(1);
        self.each(conv::gate(&y, x, gate, x.len(), each, c), x.len());
        y
    }

    /// Returns the gradients with respect to `x` and the gate.
    pub fn gate_back(&self, x: &Array, gate: &Array, dy: &Array, c: usize) -> [Array; 2] {
        let dgate = self.alloc(gate.len(), gate.dtype());
        let (rows, each) = (gate.len() / c.max(1), x.len() / gate.len().max(1));
        self.each(conv::gate_back(&dgate, dy, x, gate, rows, each, c), gate.len());
        [self.gate(dy, gate, c), dgate]
    }

    /// Computes `Σ softmax(logits)ᵢ · xᵢ` over the alternatives `xᵢ`, which are consecutive in `x`.
    pub fn blend(&self, x: &Array, logits: &Array) -> Array {
        let n = x.len() / logits.len().max(1);
        let y = self.alloc(n, x.dtype());
        self.each(conv::blend(&y, x, logits, n, logits.len()), n);
        y
    }

    /// Returns the gradients with respect to `x` and the logits.
    pub fn blend_back(&self, x: &Array, logits: &Array, dy: &Array) -> [Array; 2] {
        let (n, k) = (dy.len(), logits.len());
        let dx = self.alloc(x.len(), x.dtype());
        self.each(conv::blend_back(&dx, dy, logits, n, k), x.len());
        let alternatives: Vec<Array> = (0..k).map(|i| self.dots((dy, 0), (x, i * n), n)).collect();
        let parts = alternatives.first().map_or(0, |dots| dots.len() / 2);
        let mut dots = self.alloc(k * 2 * parts, Dtype::F32);
        for (i, own) in alternatives.iter().enumerate() {
            let place = |first| crate::Place::new(first, 2 * parts);
            self.copy_rows(&mut dots, place(i * 2 * parts), own, place(0), [1, 2 * parts]);
        }
        let dlogits = self.alloc(k, logits.dtype());
        self.launch(conv::blend_logits(&dlogits, &dots, logits, parts, k), [1; 3], 1, 0);
        [dx, dlogits]
    }
}
