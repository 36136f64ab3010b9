//! The Whisper encoder.
//!
//! Two convolutions over the log-mel spectrogram, the second of which halves the time resolution, are followed by blocks. Source:
//! arXiv 2212.04356; `transformers` 5.23 `models/whisper/modeling_whisper.py`. The table of positions, which contains sinusoids,
//! is read from the checkpoint.
//!
//! The encoders of Qwen2-Audio and Qwen2.5-Omni (`models/{qwen2_audio,qwen2_5_omni}`) are of this kind. Neither hears the silence after
//! a sound, and both halve the number of rows before the last norm. That of Qwen2.5-Omni cuts a sound into pieces that do not see each
//! other and computes its positions, which begin at 0 in each piece.

use std::ops::Range;
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

/// Fixed values of a class of encoders, and its defaults.
#[derive(Debug)]
pub struct WhisperClass {
    /// Default width, feed-forward width, number of blocks and of heads, and frequency bands.
    sizes: [usize; 5],
    /// Name of the last norm.
    last_norm: &'static str,
    /// Whether the mean of each two neighbouring rows enters the last norm.
    pools: bool,
    /// Default of `n_window`, half the columns of a piece; `None` for a class that hears its whole window.
    half_piece: Option<usize>,
}

impl WhisperClass {
    /// `WhisperEncoder`.
    pub const WHISPER: Self =
        Self { sizes: [384, 1536, 4, 6, 80], last_norm: "layer_norm", pools: false, half_piece: None };
    /// `Qwen2AudioEncoder`.
    pub const QWEN2_AUDIO: Self =
        Self { sizes: [1280, 5120, 32, 20, 128], last_norm: "layer_norm", pools: true, half_piece: None };
    /// `Qwen2_5OmniAudioEncoder`.
    pub const QWEN25_OMNI: Self = Self { last_norm: "ln_post", half_piece: Some(100), ..Self::QWEN2_AUDIO };
}

/// A Whisper encoder configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct WhisperConfig {
    /// Sizes of the blocks.
    pub sizes: EncoderSizes,
    /// Frequency bands of the spectrogram.
    pub num_mels: usize,
    /// Number of positions. A piece of the spectrogram has at most twice as many columns.
    pub num_positions: usize,
    /// Columns of the pieces that do not see each other. Their positions are computed sinusoids. `None` for one piece with stored
    /// positions.
    pub piece: Option<usize>,
    /// Name of the last norm.
    pub last_norm: &'static str,
    /// Whether the mean of each two neighbouring rows enters the last norm.
    pub pools: bool,
}

impl WhisperConfig {
    /// Reads the `config.json` of an encoder of this class.
    ///
    /// # Errors
    /// Returns an error that names the field if a field is invalid.
    pub fn parse(json: &ConfigJson, class: &WhisperClass) -> Result<Self> {
        let [hidden, intermediate, layers, heads, mels] = class.sizes;
        let keys = SizeKeys {
            hidden: ("d_model", hidden),
            intermediate: ("encoder_ffn_dim", intermediate),
            layers: ("encoder_layers", layers),
            heads: ("encoder_attention_heads", heads),
            activation: ("activation_function", "gelu"),
            norm_eps: 1e-5,
        };
        let (sizes, num_positions) =
            (EncoderSizes::parse(json, &keys)?, json.size("max_source_positions", Some(1500))?);
        let half = class.half_piece.map(|half| json.size("n_window", Some(half))).transpose()?;
        if let Some(half) = half.filter(|&half| half > num_positions) {
            let what = format!("n_window is {half}, but max_source_positions only {num_positions}");
            return Err(json.error(what));
        }
        if half.is_some() && (sizes.hidden < 4 || sizes.hidden % 2 != 0) {
            let what = format!("d_model is {}; positions need an even width of at least 4", sizes.hidden);
            return Err(json.error(what));
        }
        Ok(Self {
            sizes,
            num_mels: json.size("num_mel_bins", Some(mels))?,
            num_positions,
            piece: half.map(|half| 2 * half),
            last_norm: class.last_norm,
            pools: class.pools,
        })
    }

    /// Returns the number of output rows for a spectrogram of which `heard` columns are heard.
    pub fn num_rows(&self, heard: usize) -> usize {
        let rows = heard.div_ceil(2);
        if self.pools { rows / 2 } else { rows }
    }
}

/// A Whisper encoder.
pub struct Whisper {
    config: WhisperConfig,
    conv1: Linear,
    conv2: Linear,
    /// Stored positions; `None` for computed ones.
    positions: Option<Arc<Param>>,
    blocks: Blocks,
    last_norm: Norm,
}

/// A piece of the spectrogram: the columns that the first convolution writes, and the column before which it reads.
struct Piece {
    columns: Range<usize>,
    end: usize,
}

impl Piece {
    fn num_rows(&self) -> usize {
        self.columns.len().div_ceil(2)
    }
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
        let positions = match config.piece {
            None => Some(weights.get("embed_positions.weight", &[config.num_positions, c], Init::Normal)?),
            Some(_) => None,
        };
        let blocks = Blocks::build(&config.sizes, &LAYERS, &mut weights)?;
        let last_norm = weights.layer_norm(config.last_norm, c, config.sizes.norm_eps)?;
        Ok(Self { conv1, conv2, positions, blocks, last_norm, config })
    }

    /// Loads the encoder of a Whisper directory, frozen.
    ///
    /// # Errors
    /// Returns an error if files are unreadable, the architecture is another one or tensors do not fit.
    pub fn load(dir: &Path, part: Part, dtype: WeightDtype) -> Result<Self> {
        load(dir, dtype, "Whisper", published_name, |json, source| {
            Self::build(WhisperConfig::parse(json, &WhisperClass::WHISPER)?, "", part, source)
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &WhisperConfig {
        &self.config
    }

    /// Maps a log-mel spectrogram `[mels, columns]`, of which the first `heard` columns are heard, to `last_hidden_state`
    /// `[rows, c]` ([`WhisperConfig::num_rows`]). The columns after those are read by the convolutions of an encoder without pieces.
    ///
    /// # Errors
    /// Returns an error if the spectrogram has another number of bands, or more is heard than it has or the encoder has positions for.
    pub fn forward(&self, mel: &[f32], heard: usize, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        let mels = self.config.num_mels;
        let columns = mel.len() / mels;
        let most = self.config.piece.map_or(2 * self.config.num_positions, |_| usize::MAX);
        if mel.len() != mels * columns || heard > columns.min(most) || self.config.num_rows(heard) == 0 {
            return Err(ModelError::shape(format!(
                "audio tower: the spectrogram has {} values, of which {heard} columns are heard; expected {mels} bands × at least \
                 as many columns, and from 3 to {most} that are heard",
                mel.len()
            )));
        }
        let pieces = self.pieces(columns, heard);
        let num_windows: usize = pieces.iter().map(|piece| piece.columns.len()).sum();
        // Each column of the spectrogram gives a row: three taps of every band, in the order of the convolution's weight.
        let mut windows = vec![0.0; num_windows * mels * TAPS];
        let places = pieces.iter().flat_map(|piece| piece.columns.clone().map(move |at| (piece, at)));
        for ((piece, at), window) in places.zip(windows.chunks_exact_mut(mels * TAPS)) {
            for (band, taps) in window.chunks_exact_mut(TAPS).enumerate() {
                for (tap, x) in taps.iter_mut().enumerate() {
                    let readable = |column: &usize| (piece.columns.start..piece.end).contains(column);
                    if let Some(column) = (at + tap).checked_sub(1).filter(readable) {
                        *x = mel[band * columns + column];
                    }
                }
            }
        }
        let x = constant(windows, num_windows, mels * TAPS, pass)?;
        let lengths: Vec<usize> = pieces.iter().map(Piece::num_rows).collect();
        let patches = Arc::new(Patches { sources: sources(&pieces), taps: TAPS });
        let x = tape.linear(&x, &self.conv1, pass)?;
        let x = tape.activation(&x, Activation::GeluErf)?;
        let x = tape.convolution(&x, &self.conv2, &patches)?;
        let x = tape.activation(&x, Activation::GeluErf)?;
        let x = match &self.positions {
            Some(table) => {
                let ids = Arc::new(RowMix::select((0..lengths[0] as u32).collect()).into());
                tape.add_rows(&x, table, &ids)?
            }
            None => {
                let c = self.config.sizes.hidden;
                let rows: Vec<f32> = lengths.iter().flat_map(|&rows| sinusoids(rows, c)).collect();
                let (num, rows) = (rows.len() / c, rows);
                tape.add(&x, &constant(rows, num, c, pass)?)?
            }
        };
        let layout = AttentionLayout::full_blocks(&lengths);
        let mut x = self.blocks.forward(x, self.config.sizes.layers, layout, pass, tape)?;
        if self.config.pools {
            let pairs = (0..self.config.num_rows(heard) as u32).map(|i| vec![2 * i, 2 * i + 1]);
            x = tape.mix(&x, &Arc::new(RowMix::means(pairs).into()))?;
        }
        Ok(tape.norm(&x, &self.last_norm)?)
    }

    /// Returns the pieces of a spectrogram. What a piece reads beyond its end is zero. Without pieces, the convolutions read the columns
    /// after those that are heard.
    fn pieces(&self, columns: usize, heard: usize) -> Vec<Piece> {
        match self.config.piece {
            None => {
                // The last row reads one column of the first convolution that no other row reads.
                let written = (2 * heard.div_ceil(2)).min(columns);
                vec![Piece { columns: 0..written, end: columns }]
            }
            Some(length) => {
                let starts = (0..heard).step_by(length);
                starts
                    .map(|start| {
                        let end = (start + length).min(heard);
                        Piece { columns: start..end, end }
                    })
                    .collect()
            }
        }
    }
}

/// Returns the row of the first convolution that each tap of the second one reads.
fn sources(pieces: &[Piece]) -> Vec<u32> {
    let (mut all, mut first) = (Vec::new(), 0);
    for piece in pieces {
        let columns = piece.columns.len();
        let source = |row: usize, tap: usize| match (2 * row + tap).checked_sub(1) {
            Some(source) if source < columns => (first + source) as u32,
            _ => OUTSIDE,
        };
        all.extend(
            (0..piece.num_rows())
                .flat_map(|row| (0..TAPS).map(move |tap| (row, tap)))
                .map(|(r, t)| source(r, t)),
        );
        first += columns;
    }
    all
}

/// Returns Whisper's positions `[rows, c]`: sines, then cosines, of frequencies from 1 to 1/10,000. All values are f32, as in the
/// reference.
fn sinusoids(rows: usize, c: usize) -> Vec<f32> {
    let half = c / 2;
    let step = (10_000f64.ln() / (half - 1) as f64) as f32;
    let frequencies: Vec<f32> = (0..half).map(|i| (-step * i as f32).exp()).collect();
    let mut table = Vec::with_capacity(rows * c);
    for row in 0..rows {
        let angles = || frequencies.iter().map(|f| row as f32 * f);
        table.extend(angles().map(f32::sin));
        table.extend(angles().map(f32::cos));
    }
    table
}

/// Maps the name of a tensor in a Whisper directory to its name below an empty prefix, or to `None` for the decoder's tensors.
pub fn published_name(key: &str) -> Option<String> {
    let key = key.strip_prefix("model.").unwrap_or(key);
    let decoder = key.starts_with("decoder.") || key == "proj_out.weight";
    (!decoder).then(|| key.strip_prefix("encoder.").unwrap_or(key).to_owned())
}
