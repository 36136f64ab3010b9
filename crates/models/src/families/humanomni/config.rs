//! `config.json` of HumanOmni and R1-Omni, and of the three encoders that come with it.
//!
//! The towers and BERT are separate models: keys of the configuration name their directories. A name is looked up as a path, in
//! the checkpoint directory and next to it. If a directory with a published name is missing, the published sizes are used, since
//! the weights may be in the checkpoint itself.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::config_json::ConfigJson;
use crate::decoder::{DecoderConfig, TextDefaults};
use crate::encoders::PictureConfig;
use crate::encoders::bert::BertConfig;
use crate::encoders::siglip::SiglipConfig;
use crate::encoders::whisper::{WhisperClass, WhisperConfig};
use crate::error::Result;
use crate::families::FamilyOption;

/// Keys of `config.json` that name the vision tower, the audio tower and BERT. The last key exists only in this program; the
/// original reads an environment variable.
pub const TOWER_KEYS: [&str; 3] = ["mm_vision_tower", "mm_audio_tower", "mm_text_tower"];

/// Name of BERT if the configuration has none.
const BERT: &str = "bert-base-uncased";

/// Sizes of the visual projector.
#[derive(Clone, Debug, PartialEq)]
pub struct ProjectorConfig {
    /// Number of blocks before, and after, the 3-D convolution.
    pub depth: usize,
    /// Cells of zero padding around a frame in the 3-D convolution.
    pub padding: usize,
    /// Width of the tower.
    pub tower_width: usize,
    /// Width of the language model.
    pub hidden: usize,
    /// Side of the tower's grid, in patches.
    pub side: usize,
    /// Whether the dynamic compressor reduces the number of tokens.
    pub compress: bool,
}

impl ProjectorConfig {
    fn parse(json: &ConfigJson, hidden: usize, tower: &PictureConfig) -> Result<Self> {
        let key = "mm_projector_type";
        let (depth, padding) =
            json.choice(key, "", &[("all_in_one_small", (2, 0)), ("all_in_one", (4, 1))])?;
        let this = Self {
            depth,
            padding,
            tower_width: tower.sizes.hidden,
            hidden,
            side: tower.side_px / tower.patch_px,
            compress: json.boolean("mm_dynamic_compressor", false)?,
        };
        json.only("mm_hidden_size", this.tower_width)?;
        let (side, from_face) = (this.out_side(), this.side.div_ceil(2));
        if side != from_face {
            let what =
                format!("its face branch to {from_face}×{from_face}; all branches must have the same size");
            return Err(json.error(format!(
                "{key} reduces the vision tower's {0}×{0} cells to {side}×{side}, but {what}",
                this.side
            )));
        }
        Ok(this)
    }

    /// Returns the side of the output's grid.
    pub fn out_side(&self) -> usize {
        (self.side + 2 * self.padding).saturating_sub(2) / 2 + 1
    }
}

/// An encoder and the directory of its files.
#[derive(Clone, Debug, PartialEq)]
pub struct Component<T> {
    /// Sizes of the tower.
    pub config: T,
    /// Directory of the tower, if it exists.
    pub dir: Option<PathBuf>,
}

/// Form of prompts. The original GRPO code uses another form than the rest of the original project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptForm {
    /// Form of supervised training and inference.
    Sft,
    /// Form of the original GRPO trainer: an empty Qwen2-VL video before the media.
    R1OmniGrpo,
}

const PROMPT_FORMS: [(&str, PromptForm); 2] =
    [("sft", PromptForm::Sft), ("r1omni_grpo", PromptForm::R1OmniGrpo)];

/// A whole HumanOmni configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct HumanOmniConfig {
    /// Configuration of the language model.
    pub decoder: DecoderConfig,
    /// Configuration of the visual projector.
    pub projector: ProjectorConfig,
    /// The vision tower.
    pub vision: Component<SiglipConfig>,
    /// Number of blocks of the vision tower that run.
    pub vision_blocks: usize,
    /// The audio tower; a checkpoint may have none.
    pub audio: Option<Component<WhisperConfig>>,
    /// Encoder of the question.
    pub text: Component<BertConfig>,
    /// Number of frames of a video.
    pub num_frames: usize,
    /// Whether frames become square by padding; otherwise they are stretched.
    pub pad: bool,
    /// Whether media are enclosed in markers.
    pub markers: bool,
    /// Form of prompts.
    pub form: PromptForm,
    /// Standard deviation of new weights.
    pub initializer_range: f32,
}

impl HumanOmniConfig {
    /// Reads the configuration of the checkpoint in `dir`.
    ///
    /// # Errors
    /// Returns an error that names the field if a field is missing or invalid.
    pub fn parse(dir: &Path, json: &ConfigJson) -> Result<Self> {
        let decoder = DecoderConfig::parse(json, json, TextDefaults::QWEN2)?;
        json.only("mm_vision_select_feature", "patch")?;
        let vision = component(dir, json, "mm_vision_tower", None, &|json| SiglipConfig::parse(json))?;
        let audio = match json.get("mm_audio_tower") {
            None => None,
            Some(_) => {
                json.only("mm_audio_projector_type", "mlp2x_gelu")?;
                Some(component(dir, json, "mm_audio_tower", None, &|json| {
                    WhisperConfig::parse(json, &WhisperClass::WHISPER)
                })?)
            }
        };
        let select = json.get("mm_vision_select_layer").map_or(Some(-2), serde_json::Value::as_i64);
        let select = select.ok_or_else(|| json.error("mm_vision_select_layer is not an integer"))?;
        Ok(Self {
            num_frames: json.size("num_frames", Some(8))?,
            markers: json.boolean("mm_use_x_start_end", true)?,
            initializer_range: json.spread("initializer_range", 0.02)?,
            text: component(dir, json, "mm_text_tower", Some(BERT), &|json| BertConfig::parse(json))?,
            projector: ProjectorConfig::parse(json, decoder.hidden, &vision.config.picture)?,
            decoder,
            vision_blocks: vision.config.blocks_at(select)?,
            vision,
            audio,
            pad: json.choice("image_aspect_ratio", "pad", &[("pad", true), ("square", false)])?,
            form: json.choice("prompt_form", "sft", &PROMPT_FORMS)?,
        })
    }
}

/// Finds the encoder that `key` names.
fn component<T>(
    dir: &Path,
    json: &ConfigJson,
    key: &str,
    default: Option<&str>,
    parse: &dyn Fn(&ConfigJson) -> Result<T>,
) -> Result<Component<T>> {
    let Some(name) = json.text(key)?.or(default).map(str::to_owned) else {
        return Err(json.error(format!("{key} is missing; expected the directory of this encoder")));
    };
    if let Some(at) = find_tower(dir, &name) {
        return Ok(Component { config: parse(&ConfigJson::read(&at.join("config.json"))?)?, dir: Some(at) });
    }
    let short = name.rsplit('/').next().unwrap_or(&name);
    match published(short) {
        Some(sizes) => Ok(Component { config: parse(&json.with_object(sizes))?, dir: None }),
        None => Err(json.error(format!(
            "{key} is {name:?}, which was not found as a path, in the checkpoint directory or next to it; give the directory with \
             {}",
            FamilyOption::setting(option(key))
        ))),
    }
}

/// Returns the option that gives the directory of an encoder.
pub(super) fn option(key: &str) -> &'static str {
    super::OPTIONS.iter().find(|option| option.key == key).map_or("", |option| option.name)
}

/// Finds the directory of an encoder that a configuration names. An absolute path is used as it is, and a relative name is looked
/// up in the checkpoint directory. If that fails, the last component is looked up next to the checkpoint directory.
pub fn find_tower(dir: &Path, name: &str) -> Option<PathBuf> {
    let given = Path::new(name);
    let plain = given.components().all(|part| matches!(part, std::path::Component::Normal(_)));
    let beside = || Some(std::path::absolute(dir).ok()?.parent()?.join(given.file_name()?));
    let places = match (given.is_absolute(), plain) {
        (true, _) => vec![Some(given.to_path_buf()), beside()],
        (false, true) => vec![Some(dir.join(given)), beside()],
        (false, false) => Vec::new(),
    };
    places.into_iter().flatten().find(|place| place.join("config.json").is_file())
}

/// Returns the configuration of an encoder that published checkpoints name.
fn published(name: &str) -> Option<serde_json::Value> {
    Some(match name {
        "siglip-base-patch16-224" => json!({"hidden_size": 768}),
        "siglip-so400m-patch14-384" => json!({
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": 384, "patch_size": 14,
        }),
        "whisper-large-v3" => json!({
            "d_model": 1280, "encoder_ffn_dim": 5120, "encoder_layers": 32, "encoder_attention_heads": 20,
            "num_mel_bins": 128,
        }),
        BERT => json!({"model_type": "bert"}),
        _ => return None,
    })
}
