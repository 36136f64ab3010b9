//! Projectors from tower features to the language model: three branches over the frames of a clip, mixed according to the
//! question, and a small one for sound.
//!
//! * `video` and `body`: RegNet blocks, a 3-D convolution that halves height and width, RegNet blocks, two layers.
//! * `face`: two layers per patch, then bilinear interpolation to the same grid.
//! * The gate: the \[CLS\] row of a BERT that reads the question, two layers, softmax over the branches.
//! * Sound: the mean of three consecutive rows, two layers.
//!
//! Source: HumanMLLM/HumanOmni and HumanMLLM/R1-Omni, `humanomni/model/{projector,humanomni_arch}.py`; the blocks are
//! `timm`'s `regnet.Bottleneck` with `LayerNormAct2d`. The branches are channels-last here, so that a 1×1 convolution is
//! a linear layer and the norm over channels is a norm over a row.
//!
//! Shapes: `t` frames, `s` side of the tower's grid, `o` side of the output's, `c` tower width, `h` language model width.

use std::sync::Arc;

use omnigrpo_ops::{
    Activation, Linear, Mix, Norm, OUTSIDE, Param, Part, Pass, Patches, Result as OpResult, RowMix, Tape, Var,
};

use super::config::ProjectorConfig;
use crate::error::Result;
use crate::weights::{Init, Scope, WeightSource};

/// Epsilon of `LayerNormAct2d`, which ignores the norm that the stage requests.
const NORM_EPS: f32 = 1e-5;

/// Width between the two layers of the gate, the same for models of all sizes.
const GATE_WIDTH: usize = 3584;

/// Number of rows of the audio tower per token.
const AUDIO_POOL: usize = 3;

/// A two-layer perceptron: `name.0`, GELU, `name.2`.
struct Mlp {
    first: Linear,
    second: Linear,
}

impl Mlp {
    fn build(weights: &mut Scope, name: &str, [input, inner, output]: [usize; 3]) -> Result<Self> {
        Ok(Self {
            first: plain(weights, &format!("{name}.0"), &[inner, input], true)?,
            second: plain(weights, &format!("{name}.2"), &[output, inner], true)?,
        })
    }

    fn forward(&self, x: &Var, pass: &Pass, tape: &mut Tape) -> OpResult<Var> {
        let x = tape.linear(x, &self.first, pass)?;
        let x = tape.activation(&x, Activation::GeluErf)?;
        tape.linear(&x, &self.second, pass)
    }
}

/// Returns a layer that takes no adapter, with a published weight of this shape.
fn plain(weights: &mut Scope, name: &str, shape: &[usize], bias: bool) -> Result<Linear> {
    weights.convolution(name, shape, bias)
}

/// A RegNet block: 1×1, depthwise 3×3, squeeze and excitation, 1×1, and a shortcut.
struct Block {
    conv1: Linear,
    norm1: Norm,
    conv2: Arc<Param>,
    norm2: Norm,
    squeeze: Linear,
    excite: Linear,
    conv3: Linear,
    norm3: Norm,
    shortcut: Option<(Linear, Norm)>,
}

impl Block {
    fn build(weights: &mut Scope, name: &str, input: usize, output: usize) -> Result<Self> {
        let at = |part: &str| format!("{name}.{part}");
        let inner = (input as f64 * 0.25).round_ties_even() as usize;
        Ok(Self {
            conv1: plain(weights, &at("conv1.conv"), &[output, input, 1, 1], false)?,
            norm1: weights.layer_norm(&at("conv1.bn"), output, NORM_EPS)?,
            conv2: weights.get(&at("conv2.conv.weight"), &[output, 1, 3, 3], Init::Normal)?,
            norm2: weights.layer_norm(&at("conv2.bn"), output, NORM_EPS)?,
            squeeze: plain(weights, &at("se.fc1"), &[inner, output, 1, 1], true)?,
            excite: plain(weights, &at("se.fc2"), &[output, inner, 1, 1], true)?,
            conv3: plain(weights, &at("conv3.conv"), &[output, output, 1, 1], false)?,
            norm3: weights.layer_norm(&at("conv3.bn"), output, NORM_EPS)?,
            shortcut: if input == output {
                None
            } else {
                let conv = plain(weights, &at("downsample.conv"), &[output, input, 1, 1], false)?;
                Some((conv, weights.layer_norm(&at("downsample.bn"), output, NORM_EPS)?))
            },
        })
    }

    /// Maps `[t · side², in]` to `[t · side², out]`; `means` averages each frame.
    fn forward(&self, x: &Var, side: usize, means: &Arc<Mix>, pass: &Pass, tape: &mut Tape) -> OpResult<Var> {
        let y = tape.linear(x, &self.conv1, pass)?;
        let y = tape.norm(&y, &self.norm1)?;
        let y = tape.activation(&y, Activation::Silu)?;
        let y = tape.depthwise3(&y, &self.conv2, [side, side])?;
        let y = tape.norm(&y, &self.norm2)?;
        let y = tape.activation(&y, Activation::Silu)?;
        let mean = tape.mix(&y, means)?;
        let squeezed = tape.linear(&mean, &self.squeeze, pass)?;
        let squeezed = tape.activation(&squeezed, Activation::Silu)?;
        let excited = tape.linear(&squeezed, &self.excite, pass)?;
        let y = tape.gate(&y, &excited)?;
        let y = tape.linear(&y, &self.conv3, pass)?;
        let y = tape.norm(&y, &self.norm3)?;
        let y = match &self.shortcut {
            Some((conv, layer)) => {
                let shortcut = tape.linear(x, conv, pass)?;
                let shortcut = tape.norm(&shortcut, layer)?;
                tape.add(&y, &shortcut)?
            }
            None => tape.add(&y, x)?,
        };
        tape.activation(&y, Activation::Silu)
    }
}

/// A convolutional branch.
struct Branch {
    before: Vec<Block>,
    sampler: Linear,
    after: Vec<Block>,
    readout: Mlp,
}

impl Branch {
    fn build(weights: &mut Scope, name: &str, config: &ProjectorConfig) -> Result<Self> {
        let (c, h) = (config.tower_width, config.hidden);
        let stage = |weights: &mut Scope, stage: &str, first: usize| {
            (1..=config.depth)
                .map(|b| {
                    let input = if b == 1 { first } else { h };
                    Block::build(weights, &format!("{stage}_{name}.b{b}"), input, h)
                })
                .collect::<Result<Vec<_>>>()
        };
        Ok(Self {
            before: stage(weights, "s1", c)?,
            sampler: plain(weights, &format!("sampler_{name}.0"), &[h, h, 2, 2, 2], true)?,
            after: stage(weights, "s2", h)?,
            readout: Mlp::build(weights, &format!("readout_{name}"), [h, h, h])?,
        })
    }

    fn forward(&self, x: &Var, plan: &Plan, pass: &Pass, tape: &mut Tape) -> OpResult<Var> {
        let mut x = x.clone();
        for block in &self.before {
            x = block.forward(&x, plan.side, &plan.means_before, pass, tape)?;
        }
        x = tape.convolution(&x, &self.sampler, &plan.sampler)?;
        x = tape.activation(&x, Activation::Silu)?;
        for block in &self.after {
            x = block.forward(&x, plan.out_side, &plan.means_after, pass, tape)?;
        }
        self.readout.forward(&x, pass, tape)
    }
}

/// Row indices and mixtures for one number of frames.
pub(super) struct Plan {
    side: usize,
    out_side: usize,
    means_before: Arc<Mix>,
    means_after: Arc<Mix>,
    sampler: Arc<Patches>,
    resample: Arc<Mix>,
    compress: Option<Arc<Mix>>,
}

impl Plan {
    pub(super) fn new(config: &ProjectorConfig, frames: usize) -> Self {
        let (side, out_side) = (config.side, config.out_side());
        Self {
            side,
            out_side,
            means_before: Arc::new(frame_means(frames, side).into()),
            means_after: Arc::new(frame_means(frames, out_side).into()),
            sampler: Arc::new(sampler_patches(config, frames)),
            resample: Arc::new(bilinear(frames, side, out_side).into()),
            compress: config.compress.then(|| Arc::new(slow_and_fast(frames, out_side).into())),
        }
    }
}

/// Returns the mixture that computes the mean of each frame.
fn frame_means(frames: usize, side: usize) -> RowMix {
    let cells = (side * side) as u32;
    RowMix::means((0..frames as u32).map(|t| (t * cells..(t + 1) * cells).collect()))
}

/// Returns the 2×2×2 windows of the 3-D convolution. The stride is 2 in space and 1 in time, with one frame of zeros before the
/// clip, so that frame `t` sees `t − 1` and itself. The original also pads at the end and drops the results.
fn sampler_patches(config: &ProjectorConfig, frames: usize) -> Patches {
    let (side, out) = (config.side, config.out_side());
    let mut sources = Vec::with_capacity(frames * out * out * 8);
    let inside = |at: usize| at.checked_sub(config.padding).filter(|&at| at < side);
    for t in 0..frames {
        for (y, x) in (0..out * out).map(|i| (i / out, i % out)) {
            for (dt, dy, dx) in (0..8).map(|k| (k / 4, k / 2 % 2, k % 2)) {
                let row = match ((t + dt).checked_sub(1), inside(2 * y + dy), inside(2 * x + dx)) {
                    (Some(t), Some(y), Some(x)) => ((t * side + y) * side + x) as u32,
                    _ => OUTSIDE,
                };
                sources.push(row);
            }
        }
    }
    Patches { sources, taps: 8 }
}

/// Returns the bilinear interpolation of each frame between cell centres (`align_corners=False`).
fn bilinear(frames: usize, side: usize, out: usize) -> RowMix {
    let axis: Vec<[(usize, f32); 2]> = (0..out)
        .map(|i| {
            let at = ((i as f64 + 0.5) * side as f64 / out as f64 - 0.5).max(0.0);
            let low = (at as usize).min(side - 1);
            let share = (at - low as f64) as f32;
            [(low, 1.0 - share), ((low + 1).min(side - 1), share)]
        })
        .collect();
    let mut mix = RowMix { offsets: vec![0], rows: Vec::new(), weights: Vec::new() };
    for t in 0..frames {
        for (y, x) in (0..out * out).map(|i| (i / out, i % out)) {
            for (row, wy) in axis[y] {
                for (col, wx) in axis[x].iter().filter(|(_, wx)| wy * wx != 0.0) {
                    mix.rows.push(((t * side + row) * side + col) as u32);
                    mix.weights.push(wy * wx);
                }
            }
            mix.offsets.push(mix.rows.len());
        }
    }
    mix
}

/// Returns the mixture of the dynamic compressor: all frames at half the side, then every fourth frame, from the second, at full
/// size.
fn slow_and_fast(frames: usize, side: usize) -> RowMix {
    let half = side / 2;
    let at = |t: usize, y: usize, x: usize| ((t * side + y) * side + x) as u32;
    let fast = (0..frames * half * half).map(|i| {
        let (t, y, x) = (i / (half * half), i / half % half * 2, i % half * 2);
        vec![at(t, y, x), at(t, y, x + 1), at(t, y + 1, x), at(t, y + 1, x + 1)]
    });
    let slow =
        slow_frames(frames).flat_map(|t| (0..side * side).map(move |i| vec![at(t, i / side, i % side)]));
    RowMix::means(fast.chain(slow))
}

/// Returns the number of tokens of `frames` frames.
pub(super) fn num_tokens(config: &ProjectorConfig, frames: usize) -> usize {
    let cells = |side: usize| side * side;
    match config.compress {
        true => {
            frames * cells(config.out_side() / 2) + slow_frames(frames).count() * cells(config.out_side())
        }
        false => frames * cells(config.out_side()),
    }
}

/// Returns the frames that the dynamic compressor keeps at full size.
fn slow_frames(frames: usize) -> impl Iterator<Item = usize> {
    (usize::from(frames > 1)..frames).step_by(4)
}

/// The three visual branches and their gate.
pub(super) struct VisualProjector {
    video: Branch,
    body: Branch,
    face: Mlp,
    gate: Mlp,
}

impl VisualProjector {
    /// Builds the projector. `text_width` is the width of the BERT whose output controls the gate.
    pub(super) fn build(
        config: &ProjectorConfig,
        text_width: usize,
        source: &mut dyn WeightSource,
    ) -> Result<Self> {
        let (c, h) = (config.tower_width, config.hidden);
        let mut weights = Scope::new(source, "model.", Part::Projector);
        let mut projector = weights.sub("mm_projector.");
        let video = Branch::build(&mut projector, "video", config)?;
        let body = Branch::build(&mut projector, "body", config)?;
        let face = Mlp::build(&mut projector, "mlp_2xgelu_face", [c, h, h])?;
        let gate = Mlp::build(&mut weights, "bert_gate", [text_width, GATE_WIDTH, 3])?;
        Ok(Self { video, body, face, gate })
    }

    /// Maps tower features `[t · s², c]` and the question `[1, text width]` to `[tokens, h]`.
    pub(super) fn forward(
        &self,
        x: &Var,
        question: &Var,
        plan: &Plan,
        pass: &Pass,
        tape: &mut Tape,
    ) -> OpResult<Var> {
        let face = self.face.forward(x, pass, tape)?;
        let face = tape.mix(&face, &plan.resample)?;
        let video = self.video.forward(x, plan, pass, tape)?;
        let body = self.body.forward(x, plan, pass, tape)?;
        let logits = self.gate.forward(question, pass, tape)?;
        let branches = tape.concat([&video, &body, &face])?;
        let mixed = tape.blend(&branches, &logits)?;
        match &plan.compress {
            Some(mix) => tape.mix(&mixed, mix),
            None => Ok(mixed),
        }
    }
}

/// The projector for sound.
pub(super) struct AudioProjector {
    mlp: Mlp,
}

impl AudioProjector {
    pub(super) fn build(tower_width: usize, hidden: usize, source: &mut dyn WeightSource) -> Result<Self> {
        let mut weights = Scope::new(source, "model.", Part::Projector);
        Ok(Self { mlp: Mlp::build(&mut weights, "audio_projector", [tower_width, hidden, hidden])? })
    }

    /// Maps tower output `[rows, c]` to `[rows / 3, h]`.
    pub(super) fn forward(&self, x: &Var, pass: &Pass, tape: &mut Tape) -> OpResult<Var> {
        let tokens = audio_tokens(x.rows().rows()) as u32;
        let groups = (0..tokens).map(|i| (i * AUDIO_POOL as u32..(i + 1) * AUDIO_POOL as u32).collect());
        let x = tape.mix(x, &Arc::new(RowMix::means(groups).into()))?;
        self.mlp.forward(&x, pass, tape)
    }
}

/// Returns the number of tokens for `rows` rows of the audio tower.
pub(super) fn audio_tokens(rows: usize) -> usize {
    rows / AUDIO_POOL
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(side: usize) -> ProjectorConfig {
        ProjectorConfig { depth: 2, padding: 0, tower_width: 8, hidden: 8, side, compress: false }
    }

    #[test]
    fn published_sizes_give_published_counts() {
        assert_eq!(num_tokens(&small(14), 8), 392);
        assert_eq!(num_tokens(&small(14), 1), 49);
        assert_eq!(audio_tokens(1500), 500);
        let large = ProjectorConfig { depth: 4, padding: 1, side: 27, ..small(27) };
        assert_eq!(num_tokens(&large, 32), 6272);
        let compressed = ProjectorConfig { compress: true, ..small(14) };
        assert_eq!(num_tokens(&compressed, 8), 170);
        for frames in 1..12 {
            assert_eq!(slow_and_fast(frames, 7).len(), num_tokens(&compressed, frames), "{frames} frames");
        }
    }

    /// The first window of the first frame sees zeros in time, the other windows see the previous frame.
    #[test]
    fn windows_look_one_frame_back() {
        let patches = sampler_patches(&small(4), 2);
        assert_eq!(patches.rows(), 8);
        assert_eq!(patches.sources[..8], [OUTSIDE, OUTSIDE, OUTSIDE, OUTSIDE, 0, 1, 4, 5]);
        assert_eq!(patches.sources[4 * 8..5 * 8], [0, 1, 4, 5, 16, 17, 20, 21]);
        let padded = ProjectorConfig { padding: 1, ..small(3) };
        let patches = sampler_patches(&padded, 1);
        assert_eq!(patches.sources[4..8], [OUTSIDE, OUTSIDE, OUTSIDE, 0]);
        assert_eq!(patches.sources[3 * 8 + 4..], [4, 5, 7, 8]);
    }

    #[test]
    fn halving_is_the_mean_of_four() {
        let mix = bilinear(1, 4, 2);
        assert_eq!(mix.rows[..4], [0, 1, 4, 5]);
        assert_eq!(mix.weights, [0.25; 16]);
        // 3 → 2: centres at 0.25 and 1.75 of the source.
        let mix = bilinear(1, 3, 2);
        assert_eq!(mix.rows[..4], [0, 1, 3, 4]);
        assert_eq!(mix.weights[..4], [0.5625, 0.1875, 0.1875, 0.0625]);
    }
}
