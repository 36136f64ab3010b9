//! Rows multiplied by weights, on a GPU.

use crate::gpu::Card;

use super::*;

impl WeighOps for Card {
    fn weigh(&self, x: &Rows, logits: &Rows, by: Weighing) -> Rows {
        let (rows, cols, experts) = (by.rows(x, logits), x.cols(), logits.cols());
        let (x, logits) = (self.of(x), self.of(logits));
        let y = match by {
            Weighing::Gate => self.gpu.gate(x, logits, cols),
            Weighing::Blend => self.gpu.blend(x, logits),
            Weighing::Experts(routes) => {
                let (places, of) = (self.sums(routes.of_rows()), self.experts_of(routes));
                self.gpu.weigh(x, logits, &places, &of, experts)
            }
        };
        self.rows(y, rows, cols)
    }

    fn weigh_back(&self, x: &Rows, logits: &Rows, dy: &Rows, by: Weighing) -> [Rows; 2] {
        let ((rows, cols), (t, experts)) = (x.dims(), logits.dims());
        let (x, logits, dy) = (self.of(x), self.of(logits), self.of(dy));
        let [dx, dlogits] = match by {
            Weighing::Gate => self.gpu.gate_back(x, logits, dy, cols),
            Weighing::Blend => self.gpu.blend_back(x, logits, dy),
            Weighing::Experts(routes) => {
                let (places, of) = (self.sums(routes.of_rows()), self.experts_of(routes));
                self.gpu.weigh_back([x, dy], logits, &places, &of, experts)
            }
        };
        [self.rows(dx, rows, cols), self.rows(dlogits, t, experts)]
    }
}
