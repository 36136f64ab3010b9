//! The Whisper encoder.
//!
//! Two convolutions over the log-mel spectrogram, of which the second halves the time, then blocks. Source: arXiv
//! 2212.04356; `transformers` 5.23 `models/whisper/modeling_whisper.py`. The table of positions is read from the
//! checkpoint; it holds sinusoids.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use omnigrpo_ops::{
    Activation, AttentionLayout, Linear, MatmulMode, Norm, Param, Part, Segments, activation, add_rows,
    linear, rows_from_vec,
};

use super::{Blocks, EncoderSizes, LayerNames, Scope, SizeKeys, load, step, step_norm};
use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};
use crate::tower::NormOrder;
use crate::weights::{Init, WeightDtype, WeightSource};

const LAYERS: LayerNames = LayerNames {
    prefix: "layers.",
    order: NormOrder::Pre,
    norm1: "self_attn_layer_norm",
    qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    out: "self_attn.out_proj",
    norm2: "final_layer_norm",
    fc: ["fc1", "fc2"],
    key_bias: false,
};

/// Taps of both convolutions.
const TAPS: usize = 3;

/// A Whisper encoder configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct WhisperConfig {
    /// The blocks.
    pub sizes: EncoderSizes,
    /// Bands of the spectrogram.
    pub num_mels: usize,
    /// Rows of the output; the spectrogram has twice as many columns.
    pub num_positions: usize,
}

impl WhisperConfig {
    /// Reads the `config.json` of a Whisper model.
    ///
    /// # Errors
    /// An impossible field, by name.
    pub fn parse(json: &ConfigJson) -> Result<Self> {
        let keys = SizeKeys {
            hidden: ("d_model", 384),
            intermediate: ("encoder_ffn_dim", 1536),
            layers: ("encoder_layers", 4),
            heads: ("encoder_attention_heads", 6),
            activation: ("activation_function", "gelu"),
            norm_eps: 1e-5,
        };
        Ok(Self {
            sizes: EncoderSizes::parse(json, &keys)?,
            num_mels: json.size("num_mel_bins", Some(80))?,
            num_positions: json.size("max_source_positions", Some(1500))?,
        })
    }
}

/// A Whisper encoder.
pub struct Whisper {
    config: WhisperConfig,
    conv1: Linear,
    conv2: Linear,
    positions: Arc<Param>,
    blocks: Blocks,
    last_norm: Norm,
}

impl Whisper {
    /// Builds the encoder. Names below `prefix` are those of `WhisperEncoder`, such as `conv1.weight`; the prefix is
    /// `model.encoder.` in the hub's files.
    ///
    /// # Errors
    /// As the source.
    pub fn build(
        config: WhisperConfig,
        prefix: &str,
        part: Part,
        source: &mut dyn WeightSource,
    ) -> Result<Self> {
        let mut weights = Scope { source, prefix, part };
        let c = config.sizes.hidden;
        let conv1 = weights.convolution("conv1", &[c, config.num_mels, TAPS], true)?;
        let conv2 = weights.convolution("conv2", &[c, c, TAPS], true)?;
        let positions = weights.get("embed_positions.weight", &[config.num_positions, c], Init::Normal)?;
        let blocks = Blocks::build(&config.sizes, &LAYERS, &mut weights)?;
        let last_norm = weights.layer_norm("layer_norm", c, config.sizes.norm_eps)?;
        Ok(Self { conv1, conv2, positions, blocks, last_norm, config })
    }

    /// Loads the encoder of a Whisper directory, frozen.
    ///
    /// # Errors
    /// Unreadable files, another architecture, tensors that do not fit.
    pub fn load(dir: &Path, part: Part, dtype: WeightDtype) -> Result<Self> {
        load(dir, dtype, "Whisper", published_name, |json, source| {
            Self::build(WhisperConfig::parse(json)?, "", part, source)
        })
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &WhisperConfig {
        &self.config
    }

    /// A log-mel spectrogram `[mels, 2 · positions]` → `last_hidden_state` `[positions, c]`.
    ///
    /// # Errors
    /// A spectrogram of another size.
    pub fn forward<'a>(&'a self, mel: &[f32], mut tape: Option<&mut Segments<'a>>) -> Result<Tensor> {
        let (mels, rows) = (self.config.num_mels, self.config.num_positions);
        let columns = 2 * rows;
        if mel.len() != mels * columns {
            return Err(ModelError::shape(format!(
                "Whisper: a spectrogram of {} numbers; expected {mels} bands × {columns} columns",
                mel.len()
            )));
        }
        // A row per column of the spectrogram: its three taps of every band, the order of the convolution's weight.
        let mut windows = vec![0.0; columns * mels * TAPS];
        for (at, window) in windows.chunks_exact_mut(mels * TAPS).enumerate() {
            for (band, taps) in window.chunks_exact_mut(TAPS).enumerate() {
                for (tap, x) in taps.iter_mut().enumerate() {
                    if let Some(column) = (at + tap).checked_sub(1).filter(|&column| column < columns) {
                        *x = mel[band * columns + column];
                    }
                }
            }
        }
        let x = rows_from_vec(windows, columns, mels * TAPS)?;
        let tape = &mut tape;
        let ids: Arc<[_]> = (0..rows as u32).map(Some).collect();
        // Which row of the first convolution each tap of the second sees; one row of zeros stands behind the last.
        let taps: Vec<u32> = (0..rows)
            .flat_map(|row| {
                (0..TAPS).map(move |tap| (2 * row + tap).checked_sub(1).unwrap_or(columns) as u32)
            })
            .collect();
        let taps = Tensor::from_vec(taps, rows * TAPS, &Device::Cpu)?;
        let c = self.config.sizes.hidden;
        let x = step(tape, &x, move |x| {
            let x = activation(&linear(x, &self.conv1, MatmulMode::Gemm)?, Activation::GeluErf)?;
            let padded = Tensor::cat(&[&x, &Tensor::zeros((1, c), DType::F32, &Device::Cpu)?], 0)?;
            let windows = padded.index_select(&taps, 0)?.reshape((rows, TAPS, c))?.transpose(1, 2)?;
            let windows = windows.contiguous()?.reshape((rows, c * TAPS))?;
            let x = activation(&linear(&windows, &self.conv2, MatmulMode::Gemm)?, Activation::GeluErf)?;
            add_rows(&x, &self.positions, &ids)
        })?;
        let layout = Arc::new(AttentionLayout::full_blocks(&[rows]));
        let x = self.blocks.forward(x, self.config.sizes.layers, &layout, tape)?;
        step_norm(tape, &x, &self.last_norm)
    }
}

/// The name of a tensor of a Whisper directory below an empty prefix; `None` for the decoder's.
#[must_use]
pub fn published_name(key: &str) -> Option<String> {
    let key = key.strip_prefix("model.").unwrap_or(key);
    let decoder = key.starts_with("decoder.") || key == "proj_out.weight";
    (!decoder).then(|| key.strip_prefix("encoder.").unwrap_or(key).to_owned())
}
