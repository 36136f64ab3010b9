//! `config.json` of HumanOmni and R1-Omni, and of the three encoders that come with it.
//!
//! The towers and BERT are separate models: keys of the configuration name their directories. A name is looked up as a path, in
//! the checkpoint directory and next to it. If a directory with a published name is missing, the published sizes are used, since
//! the weights may be in the checkpoint itself.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::config_json::ConfigJson;
use crate::decoder::{DecoderConfig, TextDefaults};
use crate::encoders::bert::BertConfig;
use crate::encoders::siglip::SiglipConfig;
use crate::encoders::whisper::WhisperConfig;
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
    /// Returns the side of the output's grid.
    #[must_use]
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
        let text = |key: &str, default: &'static str| -> Result<String> {
            Ok(json.text(key)?.unwrap_or(default).to_owned())
        };
        let expect = |key: &str, got: String, expected: &str| match got == expected {
            true => Ok(()),
            false => Err(json.error(format!("{key} is {got:?}; only {expected:?} is supported"))),
        };
        expect("mm_vision_select_feature", text("mm_vision_select_feature", "patch")?, "patch")?;
        let vision = component(dir, json, "mm_vision_tower", None, &|json| SiglipConfig::parse(json))?;
        let audio = match json.get("mm_audio_tower") {
            None => None,
            Some(_) => {
                let kind = text("mm_audio_projector_type", "mlp2x_gelu")?;
                expect("mm_audio_projector_type", kind, "mlp2x_gelu")?;
                Some(component(dir, json, "mm_audio_tower", None, &|json| WhisperConfig::parse(json))?)
            }
        };
        let bert = component(dir, json, "mm_text_tower", Some(BERT), &|json| BertConfig::parse(json))?;
        let picture = &vision.config.picture;
        let kind = text("mm_projector_type", "")?;
        let (depth, padding) = match kind.as_str() {
            "all_in_one_small" => (2, 0),
            "all_in_one" => (4, 1),
            other => {
                let what = "expected \"all_in_one_small\" or \"all_in_one\"";
                return Err(json.error(format!("mm_projector_type is {other:?}; {what}")));
            }
        };
        let projector = ProjectorConfig {
            depth,
            padding,
            tower_width: picture.sizes.hidden,
            hidden: decoder.hidden,
            side: picture.side_px / picture.patch_px,
            compress: json.boolean("mm_dynamic_compressor", false)?,
        };
        if json.size("mm_hidden_size", Some(projector.tower_width))? != projector.tower_width {
            let what =
                format!("mm_hidden_size differs from the vision tower's width {}", projector.tower_width);
            return Err(json.error(what));
        }
        if projector.out_side() != projector.side.div_ceil(2) {
            return Err(json.error(format!(
                "mm_projector_type {kind:?} reduces the vision tower's {1}×{1} cells to {0}×{0}, but its face branch to {2}×{2}; \
                 all branches must have the same size",
                projector.out_side(),
                projector.side,
                projector.side.div_ceil(2)
            )));
        }
        let select = json.get("mm_vision_select_layer").map_or(Some(-2), serde_json::Value::as_i64);
        let vision_blocks = select
            .map_or(Err(json.error("mm_vision_select_layer is not an integer")), |index| {
                vision.config.blocks_at(index)
            })?;
        let pad = match text("image_aspect_ratio", "pad")?.as_str() {
            "pad" => true,
            "square" => false,
            other => {
                let what = format!("image_aspect_ratio is {other:?}; expected \"pad\" or \"square\"");
                return Err(json.error(what));
            }
        };
        let form = match text("prompt_form", "sft")?.as_str() {
            "sft" => PromptForm::Sft,
            "r1omni_grpo" => PromptForm::R1OmniGrpo,
            other => {
                let what = format!("prompt_form is {other:?}; expected \"sft\" or \"r1omni_grpo\"");
                return Err(json.error(what));
            }
        };
        Ok(Self {
            num_frames: json.size("num_frames", Some(8))?,
            markers: json.boolean("mm_use_x_start_end", true)?,
            initializer_range: json.spread("initializer_range", 0.02)?,
            text: bert,
            decoder,
            projector,
            vision,
            vision_blocks,
            audio,
            pad,
            form,
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
#[must_use]
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
