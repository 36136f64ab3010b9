//! Sparse sums of rows, on a GPU.

use omnigrpo_gpu::{Dtype, Mixture};

use crate::gpu::{Card, words};

use super::*;

impl MixOps for Card {
    fn embed(&self, table: &Param, ids: &Tokens, h: usize) -> Rows {
        let index = ids.on(self.device(), |ids| self.gpu.upload_words(ids));
        let weights = self.weights(table);
        let y = self.gpu.weight_rows(weights.weight(), h, Some(&index), ids.len(), Dtype::F32);
        self.rows(y, ids.len(), h)
    }

    fn add_rows(&self, x: &mut Rows, table: &Param, mix: &Mix) {
        let (h, weights) = (x.cols(), self.weights(table));
        let copy = mix.on(self.device(), |mix| {
            let own: Vec<u32> = (0..mix.rows.len() as u32).collect();
            let sums = Mixture::new(self.gpu, &words(&mix.offsets), &own, Some(&mix.weights));
            (sums, self.gpu.upload_words(&mix.rows))
        });
        let (sums, index) = &*copy;
        // Gathers the table rows in order of use, in f32.
        let own = self.gpu.weight_rows(weights.weight(), h, Some(index), mix.rows.len(), Dtype::F32);
        self.change(x, |x| self.gpu.mix(x, &own, sums, h, true));
    }

    fn add_rows_back(&self, table: &Param, mix: &Mix, dy: &Rows) {
        self.accumulate(table, |to| {
            let sums = Mixture::reversed(self.gpu, transposed(mix));
            self.gpu.mix(to, self.of(dy), &sums, dy.cols(), true);
        });
    }

    fn mix(&self, x: &Rows, mix: &Mix) -> Rows {
        let sums = self.sums(mix);
        let mut y = self.gpu.alloc(mix.len() * x.cols(), self.of(x).dtype());
        self.gpu.mix(&mut y, self.of(x), &sums, x.cols(), false);
        self.rows(y, mix.len(), x.cols())
    }

    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows {
        let sums = Mixture::reversed(self.gpu, transposed(mix));
        let mut dx = self.gpu.zeros(rows * dy.cols(), self.of(dy).dtype());
        self.gpu.mix(&mut dx, self.of(dy), &sums, dy.cols(), true);
        self.rows(dx, rows, dy.cols())
    }
}

/// Returns the terms of the transposed sums.
fn transposed(mix: &Mix) -> Vec<(u32, u32, f32)> {
    mix.terms().map(|(r, row, weight)| (row, r as u32, weight)).collect()
}

impl Card {
    pub(crate) fn sums(&self, mix: &Mix) -> Arc<Mixture> {
        mix.on(self.device(), |mix| {
            Mixture::new(self.gpu, &words(&mix.offsets), &mix.rows, Some(&mix.weights))
        })
    }
}
