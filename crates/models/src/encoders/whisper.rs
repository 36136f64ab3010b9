//! The Whisper encoder.
//!
//! Two convolutions over the log-mel spectrogram, the second of which halves the time resolution, are followed by blocks. Source:
//! arXiv 2212.04356; `transformers` 5.23 `models/whisper/modeling_whisper.py`. The table of positions, which contains sinusoids,
//! is read from the checkpoint.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_ops::{
    Activation, AttentionLayout, Linear, Norm, OUTSIDE, Param, Part, Pass, Patches, RowMix, Tape, Var,
};

use super::{Blocks, EncoderSizes, LayerNames, SizeKeys, constant, load};
use crate::block::NormOrder;
use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};
use crate::weights::{Init, Scope, WeightDtype, WeightSource};

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

/// Kernel size of both convolutions.
const TAPS: usize = 3;

/// A Whisper encoder configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct WhisperConfig {
    /// Sizes of the blocks.
    pub sizes: EncoderSizes,
    /// Frequency bands of the spectrogram.
    pub num_mels: usize,
    /// Number of rows of the output. The spectrogram has twice as many columns.
    pub num_positions: usize,
}

impl WhisperConfig {
    /// Reads the `config.json` of a Whisper model.
    ///
    /// # Errors
    /// Returns an error that names the field if a field is invalid.
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
    /// Builds the encoder. Names below `prefix` are those of `WhisperEncoder`, such as `conv1.weight`. In the files of the
    /// Hugging Face Hub the prefix is `model.encoder.`.
    pub fn build(
        config: WhisperConfig,
        prefix: &str,
        part: Part,
        source: &mut dyn WeightSource,
    ) -> Result<Self> {
        let mut weights = Scope::new(source, prefix, part);
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
    /// Returns an error if files are unreadable, the architecture is another one or tensors do not fit.
    pub fn load(dir: &Path, part: Part, dtype: WeightDtype) -> Result<Self> {
        load(dir, dtype, "Whisper", published_name, |json, source| {
            Self::build(WhisperConfig::parse(json)?, "", part, source)
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &WhisperConfig {
        &self.config
    }

    /// Maps a log-mel spectrogram `[mels, 2 · positions]` to `last_hidden_state` `[positions, c]`.
    ///
    /// # Errors
    /// Returns an error if the spectrogram has another size.
    pub fn forward(&self, mel: &[f32], pass: &Pass, tape: &mut Tape) -> Result<Var> {
        let (mels, rows) = (self.config.num_mels, self.config.num_positions);
        let columns = 2 * rows;
        if mel.len() != mels * columns {
            return Err(ModelError::shape(format!(
                "Whisper: the spectrogram has {} values; expected {mels} bands × {columns} columns",
                mel.len()
            )));
        }
        // Each column of the spectrogram gives a row: three taps of every band, in the order of the convolution's weight.
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
        let x = constant(windows, columns, mels * TAPS, pass)?;
        let ids = Arc::new(RowMix::select((0..rows as u32).collect()).into());
        // Returns the row of the first convolution that a tap of the second one reads.
        let source = |row: usize, tap: usize| match (2 * row + tap).checked_sub(1) {
            Some(source) if source < columns => source as u32,
            _ => OUTSIDE,
        };
        let sources = (0..rows).flat_map(|row| (0..TAPS).map(move |tap| source(row, tap))).collect();
        let patches = Arc::new(Patches { sources, taps: TAPS });
        let x = tape.linear(&x, &self.conv1, pass)?;
        let x = tape.activation(&x, Activation::GeluErf)?;
        let x = tape.convolution(&x, &self.conv2, &patches)?;
        let x = tape.activation(&x, Activation::GeluErf)?;
        let x = tape.add_rows(&x, &self.positions, &ids)?;
        let layout = AttentionLayout::full_blocks(&[rows]);
        let x = self.blocks.forward(x, self.config.sizes.layers, layout, pass, tape)?;
        Ok(tape.norm(&x, &self.last_norm)?)
    }
}

/// Maps the name of a tensor in a Whisper directory to its name below an empty prefix, or to `None` for the decoder's tensors.
pub fn published_name(key: &str) -> Option<String> {
    let key = key.strip_prefix("model.").unwrap_or(key);
    let decoder = key.starts_with("decoder.") || key == "proj_out.weight";
    (!decoder).then(|| key.strip_prefix("encoder.").unwrap_or(key).to_owned())
}
