//! Normalisation on the f64 twin.

use omnigrpo_kernels::twin;

use crate::twin::{Twin, accumulate, values};

use super::*;

/// Returns the factors by which a norm multiplies.
fn scale(norm: &Norm) -> Vec<f64> {
    let one = if let Norm::AroundOne { .. } = norm { 1.0 } else { 0.0 };
    values(norm.weight()).into_iter().map(|w| one + w).collect()
}

impl NormOps for Twin {
    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows) {
        let (rows, dim) = x.dims();
        let weight = scale(norm);
        let (count, (y, stats)) = match norm {
            Norm::Rms { eps, .. } | Norm::AroundOne { eps, .. } => {
                (1, twin::rms_forward(x.mat64(), &weight, f64::from(*eps)))
            }
            Norm::Layer { bias, eps, .. } => {
                (2, twin::layer_forward(x.mat64(), &weight, &values(bias), f64::from(*eps)))
            }
        };
        (Rows::on_twin(y, rows, dim), Rows::on_twin(stats, count, rows))
    }

    fn norm_back(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows, norm: &Norm) {
        let (x, dy, stats, weight) = (x.mat64(), dy.mat64(), stats.twin(), norm.weight());
        let own = match norm {
            Norm::Rms { .. } | Norm::AroundOne { .. } => {
                let (own, dw) = twin::rms_backward(dy, x, &scale(norm), stats);
                accumulate(weight, &dw);
                own
            }
            Norm::Layer { bias, .. } => {
                let (own, dw, db) = twin::layer_backward(dy, x, &values(weight), stats);
                accumulate(weight, &dw);
                accumulate(bias, &db);
                own
            }
        };
        dx.twin_mut().iter_mut().zip(own).for_each(|(dx, own)| *dx += own);
    }
}
