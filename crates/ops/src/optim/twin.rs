//! The optimizer on the f64 twin.

use omnigrpo_kernels::twin;

use crate::twin::{Twin, values};

use super::*;

impl OptimOps for Twin {
    fn sum_of_squares(&self, x: &Rows) -> f64 {
        x.twin().iter().map(|x| x * x).sum()
    }

    /// Computes the update in f64, and rounds it to the f32 of the weight and the moments, which have no other form here.
    fn adamw(&self, param: &Param, grad: &Rows, moments: &mut Moments, step: &Step) -> Result<()> {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let round = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let keeps = step.master && param.dtype() != ParamDtype::F32;
        let by = step.kernel(moments.step).wide();
        let HostState { moments: HostMoments::F32([m, v]), master } =
            moments.on_host(param, 0..param.len(), keeps, false)?
        else {
            let what = "moments in 8 bits have no update in f64".to_owned();
            return Err(Error::Weight { name: param.name().to_owned(), what });
        };
        let mut weight = if keeps { wide(master) } else { values(param) };
        let (mut wide_m, mut wide_v) = (wide(m), wide(v));
        twin::adamw(grad.twin(), &by, &mut weight, &mut wide_m, &mut wide_v);
        m.copy_from_slice(&round(&wide_m));
        v.copy_from_slice(&round(&wide_v));
        let weight = round(&weight);
        if keeps {
            master.copy_from_slice(&weight);
        }
        param.store(&weight)
    }
}
