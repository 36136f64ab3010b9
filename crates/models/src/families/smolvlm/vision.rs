//! The tower and the connector.
//!
//! Source: `transformers` 5.23 `models/smolvlm/modeling_smolvlm.py`. The tower is a SigLIP without its pooling head. The connector
//! joins `merge × merge` patches and maps them with one layer without a bias.
//!
//! Shapes: `n` squares of `g × g` patches, `c` width of the tower, `h` width of the language model.

use std::sync::Arc;

use omnigrpo_ops::{Index, Linear, Part, Pass, Tape, Var};

use super::config::SmolVlmConfig;
use crate::encoders::siglip::Siglip;
use crate::encoders::space_to_depth;
use crate::error::{ModelError, Result};
use crate::families::{Encoder, MediumInput};
use crate::weights::{Scope, WeightSource};

/// The tower and the connector.
pub struct VisionTower {
    tower: Siglip,
    merge: usize,
    connector: Linear,
}

impl VisionTower {
    /// Builds the tower from a source of weights.
    pub fn build(config: &SmolVlmConfig, source: &mut dyn WeightSource) -> Result<Self> {
        let tower = Siglip::build(config.tower.clone(), "model.vision_model.", Part::Vision, source)?;
        let wide = config.tower.picture.sizes.hidden * config.merge * config.merge;
        let mut weights = Scope::new(source, "model.connector.", Part::Projector);
        let connector = weights.linear("modality_projection.proj", config.decoder.hidden, wide, false)?;
        Ok(Self { tower, merge: config.merge, connector })
    }
}

impl Encoder for VisionTower {
    /// Maps squares `[n, 3, side, side]` to `[n · g², c]`.
    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        let ([count, side], expected) = (medium.shape.squares()?, self.tower.config().picture.side_px);
        if side != expected {
            return Err(ModelError::shape(format!(
                "vision tower: got squares of {side} px; expected {expected} px"
            )));
        }
        self.tower.forward(&medium.data, count, pass, tape)
    }

    /// Maps `[n · g², c]` to features `[n · (g / merge)², h]`, row by row.
    fn project(
        &self,
        tower: &Var,
        medium: &MediumInput,
        _instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        let [count, _] = medium.shape.squares()?;
        let picture = &self.tower.config().picture;
        let order = space_to_depth(count, picture.side_px / picture.patch_px, self.merge, 0);
        let (tokens, wide) = (order.len() / self.merge.pow(2), picture.sizes.hidden * self.merge.pow(2));
        let (order, pass): (Arc<Index>, _) = (Arc::new(order.into()), pass.clone());
        let connector = self.connector.clone();
        Ok(tape.segment([tower], move |tape, [x]| {
            let x = tape.select(x, &order)?;
            let x = tape.reshape(&x, tokens, wide)?;
            tape.linear(&x, &connector, &pass)
        })?)
    }
}
