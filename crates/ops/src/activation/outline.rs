//! Activations on an outline.

use crate::outline::{Outline, like};
use crate::work::note_activation;

use super::*;

impl ActivationOps for Outline {
    fn activation(&self, x: &Rows, act: Nonlinearity) -> Rows {
        note_activation(x, act, false);
        like(x, x.rows(), if let Nonlinearity::SwiGlu = act { x.cols() / 2 } else { x.cols() })
    }

    fn activation_back(&self, x: &mut Rows, _: &Rows, act: Nonlinearity) {
        note_activation(x, act, true);
        x.touch();
    }
}
