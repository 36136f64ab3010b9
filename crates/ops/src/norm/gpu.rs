//! Normalisation on a GPU.

use omnigrpo_gpu::{Array, Dtype};

use crate::gpu::Card;

use super::*;

impl Card {
    /// Calls `f` with the weights of two RMS norms of one kind, the constant of the mean square and that of the weights.
    pub(crate) fn both<T>(&self, norms: [&Norm; 2], f: impl FnOnce(([&Array; 2], [f32; 2])) -> T) -> T {
        let constants = match norms[0] {
            Norm::AroundOne { eps, .. } => [*eps, 1.0],
            Norm::Rms { eps, .. } | Norm::Layer { eps, .. } => [*eps, 0.0],
        };
        let [a, b] = norms.map(Norm::weight);
        self.vector(a, |a| self.vector(b, |b| f(([a, b], constants))))
    }
}

impl NormOps for Card {
    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows) {
        let (rows, dim) = x.dims();
        match norm {
            Norm::Rms { weight, eps } | Norm::AroundOne { weight, eps } => {
                let (y, rstd) = self.vector(weight, |weight| match norm {
                    Norm::AroundOne { .. } => {
                        self.gpu.rms(self.of(x), &self.gpu.shifted(weight, 1.0), *eps, weight.dtype())
                    }
                    _ => self.gpu.rms(self.of(x), weight, *eps, weight.dtype()),
                });
                (self.rows(y, rows, dim), self.rows(rstd, 1, rows))
            }
            Norm::Layer { weight, bias, eps } => {
                let (y, stats) = self.vector(weight, |weight| {
                    self.vector(bias, |bias| self.gpu.layer(self.of(x), weight, bias, *eps, weight.dtype()))
                });
                (self.rows(y, rows, dim), self.rows(stats, 2, rows))
            }
        }
    }

    fn norm_back(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows, norm: &Norm) {
        let (rows, h) = x.dims();
        let in_f32 = [x, &*dx].iter().all(|rows| self.of(rows).dtype() == Dtype::F32);
        let [x, stats, dy] = [x, stats, dy].map(|rows| self.of(rows));
        self.vector(norm.weight(), |weight| {
            // The layers before a stream in f32 read its gradient in bf16.
            let rounds = in_f32 && weight.dtype() == Dtype::Bf16;
            self.change(dx, |dx| match norm {
                Norm::Rms { .. } => self.gpu.rms_back(dx, dy, x, stats, weight, rounds),
                Norm::AroundOne { .. } => {
                    self.gpu.rms_back(dx, dy, x, stats, &self.gpu.shifted(weight, 1.0), rounds);
                }
                Norm::Layer { .. } => self.gpu.layer_back(dx, dy, x, stats, weight, rounds),
            });
        });
        match norm {
            Norm::Rms { weight, .. } | Norm::AroundOne { weight, .. } => {
                self.accumulate(weight, |dw| self.gpu.norm_weight(dw, dy, x, None, (stats, 0)));
            }
            Norm::Layer { weight, bias, .. } => {
                self.accumulate(weight, |dw| {
                    self.gpu.norm_weight(dw, dy, x, Some((stats, 0)), (stats, rows))
                });
                self.accumulate(bias, |db| self.gpu.add_column_sums(db, dy, [0, h], None, rows));
            }
        }
    }
}
