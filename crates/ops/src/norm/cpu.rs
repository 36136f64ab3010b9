//! Normalisation on the CPU.

use std::borrow::Cow;

use omnigrpo_kernels::norm as norms;

use crate::cpu::{Cpu, accumulate};
use crate::device::Device;
use crate::param::{GradGuard, WeightGuard};

use super::*;

/// Returns the factors by which an RMS norm multiplies.
fn scale<'a>(norm: &Norm, weight: &'a WeightGuard) -> Cow<'a, [f32]> {
    match norm {
        Norm::AroundOne { .. } => weight.f32().iter().map(|w| 1.0 + w).collect(),
        _ => weight.f32(),
    }
}

impl NormOps for Cpu {
    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows) {
        let (rows, dim) = x.dims();
        let weight = norm.weight().read();
        let (count, (y, stats)) = match norm {
            Norm::Rms { eps, .. } | Norm::AroundOne { eps, .. } => {
                (1, norms::rms_forward(x.mat(), &scale(norm, &weight), *eps))
            }
            Norm::Layer { bias, eps, .. } => {
                (2, norms::layer_forward(x.mat(), &weight.f32(), &bias.read().f32(), *eps))
            }
        };
        (Rows::on_cpu(y, rows, dim), Rows::on_cpu(stats, count, rows))
    }

    fn norm_back(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows, norm: &Norm) {
        let (x, stats, dy, dx) = (x.mat(), stats.cpu(), dy.mat(), dx.mat_mut());
        match norm {
            Norm::Rms { weight, .. } | Norm::AroundOne { weight, .. } => {
                let (guard, mut gradient) = (weight.read(), weight.gradient(Device::Cpu));
                let dw = gradient.as_mut().map(GradGuard::cpu);
                norms::rms_backward(dy, x, &scale(norm, &guard), stats, dx, dw);
            }
            Norm::Layer { weight, bias, .. } => {
                let of = |param: &Param| param.trainable().then(|| vec![0.0; param.len()]);
                let (mut dw, mut db) = (of(weight), of(bias));
                let own = weight.read();
                norms::layer_backward(dy, x, &own.f32(), stats, dx, dw.as_deref_mut(), db.as_deref_mut());
                drop(own);
                for (param, grad) in [(weight, dw), (bias, db)] {
                    if let Some(grad) = grad {
                        accumulate(param, |sum| sum.iter_mut().zip(grad).for_each(|(s, g)| *s += g));
                    }
                }
            }
        }
    }
}
