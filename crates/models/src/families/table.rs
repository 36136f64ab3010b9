//! The table of model families.

use std::path::Path;

use omnigrpo_guard::Setting;
use omnigrpo_ops::Part;

use super::text::TextClass;
use super::{Family, Roles, aria, humanomni, internvl, qwen_audio, qwen_omni, qwen_vl, smolvlm, text};
use crate::config_json::ConfigJson;
use crate::error::Result;

/// One family in the table.
pub struct FamilyRow {
    /// Name that messages use.
    pub name: &'static str,
    /// Description in one line.
    pub doc: &'static str,
    /// Source that defines the architecture.
    pub source: &'static str,
    /// A small published checkpoint.
    pub published: &'static str,
    /// Pipeline tag of its models on the Hugging Face Hub.
    pub task: &'static str,
    /// Values of `model_type` in `config.json`.
    pub model_types: &'static [&'static str],
    /// Values of `architectures` in `config.json`.
    pub architectures: &'static [&'static str],
    /// Function that reads configuration and processor files of a checkpoint directory.
    pub open: fn(&Path, &ConfigJson) -> Result<Roles>,
    /// Parts that `freeze_vision_modules` freezes. VLM-R1 recognises them by parts of module names.
    pub vision_modules: &'static [Part],
    /// Settings of a checkpoint in addition to its files.
    pub options: &'static [FamilyOption],
}

/// A key of `config.json` that a user may replace.
#[derive(Clone, Copy, Debug)]
pub struct FamilyOption {
    /// Name of the setting.
    pub name: &'static str,
    /// Key in `config.json`.
    pub key: &'static str,
    /// Kind of the value.
    pub holds: OptionKind,
}

impl FamilyOption {
    /// Returns the setting of the option with a name.
    pub const fn setting(name: &'static str) -> Setting {
        Setting { plan: "FamilyOption", field: name }
    }
}

/// Kind of a family option's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionKind {
    /// A value that is used as it is.
    Value,
    /// The directory of a tower, or the name of a model, with the name that is used if `config.json` has none.
    Directory(Option<&'static str>),
}

impl FamilyRow {
    /// Returns whether models of the family hear.
    pub fn hears(&self) -> bool {
        self.vision_modules.contains(&Part::Audio)
    }

    /// Returns the row whose family matches the `model_type` or `architectures` of a configuration, if there is one.
    pub fn of(json: &ConfigJson) -> Option<&'static Self> {
        let architectures = json.get("architectures").and_then(|v| v.as_array());
        let architectures: Vec<&str> =
            architectures.into_iter().flatten().filter_map(|v| v.as_str()).collect();
        let model_type = json.get("model_type").and_then(|v| v.as_str()).unwrap_or_default();
        let by_type = FAMILIES.iter().find(|row| row.model_types.contains(&model_type));
        by_type.or_else(|| {
            FAMILIES.iter().find(|row| architectures.iter().any(|a| row.architectures.contains(a)))
        })
    }
}

/// All supported families.
pub const FAMILIES: &[FamilyRow] = &[
    FamilyRow {
        name: "qwen2_vl",
        doc: "Qwen2-VL: images and videos, three-axis positions",
        source: "arXiv 2409.12191; transformers models/qwen2_vl",
        published: "Qwen/Qwen2-VL-2B-Instruct",
        task: "image-text-to-text",
        model_types: &["qwen2_vl"],
        architectures: &["Qwen2VLForConditionalGeneration"],
        open: |dir, json| qwen_vl::open(dir, json, &qwen_vl::rules::QWEN2),
        vision_modules: &[Part::Vision, Part::Projector],
        options: &[],
    },
    FamilyRow {
        name: "qwen2_5_vl",
        doc: "Qwen2.5-VL: window attention in the tower, absolute time in positions",
        source: "arXiv 2502.13923; transformers models/qwen2_5_vl",
        published: "Qwen/Qwen2.5-VL-3B-Instruct",
        task: "image-text-to-text",
        model_types: &["qwen2_5_vl"],
        architectures: &["Qwen2_5_VLForConditionalGeneration"],
        open: |dir, json| qwen_vl::open(dir, json, &qwen_vl::rules::QWEN25),
        vision_modules: &[Part::Vision, Part::Projector],
        options: &[],
    },
    FamilyRow {
        name: "qwen3_vl",
        doc: "Qwen3-VL, dense: deep visual features, interleaved positions, times of video frames as text",
        source: "arXiv 2511.21631; transformers models/qwen3_vl",
        published: "Qwen/Qwen3-VL-2B-Instruct",
        task: "image-text-to-text",
        model_types: &["qwen3_vl"],
        architectures: &["Qwen3VLForConditionalGeneration"],
        open: |dir, json| qwen_vl::open(dir, json, &qwen_vl::rules::QWEN3),
        vision_modules: &[Part::Vision, Part::Projector],
        options: &[],
    },
    FamilyRow {
        name: "qwen3_vl_moe",
        doc: "Qwen3-VL with experts in place of each feed-forward layer",
        source: "arXiv 2511.21631; transformers models/qwen3_vl_moe",
        published: "Qwen/Qwen3-VL-30B-A3B-Instruct",
        task: "image-text-to-text",
        model_types: &["qwen3_vl_moe"],
        architectures: &["Qwen3VLMoeForConditionalGeneration"],
        open: |dir, json| qwen_vl::open(dir, json, &qwen_vl::rules::QWEN3_MOE),
        vision_modules: &[Part::Vision, Part::Projector],
        options: &[],
    },
    FamilyRow {
        name: "qwen3_5",
        doc: "Qwen3.5, 3.6 and 3.8, dense: the gated delta rule in three of four blocks, times of video frames as text",
        source: "arXiv 2412.06464; transformers models/qwen3_5",
        published: "Qwen/Qwen3.5-0.8B",
        task: "image-text-to-text",
        model_types: &["qwen3_5"],
        architectures: &["Qwen3_5ForConditionalGeneration"],
        open: |dir, json| qwen_vl::open(dir, json, &qwen_vl::rules::QWEN35),
        vision_modules: &[Part::Vision, Part::Projector],
        options: &[],
    },
    FamilyRow {
        name: "internvl",
        doc: "InternVL2 to 3.5 and Vintern on Qwen2 and Qwen3 (also with experts), as published for their own code: tiles, videos as frames",
        source: "arXiv 2412.05271, 2504.10479, 2508.18265; OpenGVLab/InternVL internvl_chat",
        published: "OpenGVLab/InternVL3-1B",
        task: "image-text-to-text",
        model_types: &["internvl_chat"],
        architectures: &["InternVLChatModel"],
        open: |dir, json| internvl::open(dir, json, internvl::Layout::Original),
        // `vision_model` names only the tower.
        vision_modules: &[Part::Vision],
        options: &[],
    },
    FamilyRow {
        name: "internvl_hf",
        doc: "the same models as published for transformers",
        source: "transformers models/internvl",
        published: "OpenGVLab/InternVL3-1B-hf",
        task: "image-text-to-text",
        model_types: &["internvl"],
        architectures: &["InternVLForConditionalGeneration"],
        open: |dir, json| internvl::open(dir, json, internvl::Layout::Hf),
        vision_modules: &[Part::Vision],
        options: &[],
    },
    FamilyRow {
        name: "aria",
        doc: "Aria: images and videos, a language model of experts",
        source: "arXiv 2410.05993; transformers models/aria; rhymes-ai/Aria",
        published: "rhymes-ai/Aria",
        task: "image-text-to-text",
        model_types: &["aria"],
        architectures: &["AriaForConditionalGeneration"],
        open: aria::open,
        vision_modules: &[Part::Vision],
        options: &[],
    },
    FamilyRow {
        name: "smolvlm",
        doc: "SmolVLM and SmolVLM2: images in tiles, clips as frames with their times (SmolVLM2)",
        source: "arXiv 2504.05299, 2408.12637; transformers models/smolvlm and models/idefics3",
        published: "HuggingFaceTB/SmolVLM2-256M-Video-Instruct",
        task: "image-text-to-text",
        model_types: &["smolvlm", "idefics3"],
        architectures: &["SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"],
        open: smolvlm::open,
        vision_modules: &[Part::Vision],
        options: &[],
    },
    FamilyRow {
        name: "humanomni",
        doc: "HumanOmni and R1-Omni: video, sound and text, features steered by the question",
        source: "arXiv 2501.15111, 2503.05379; HumanMLLM/HumanOmni, HumanMLLM/R1-Omni",
        published: "StarJiaxing/R1-Omni-0.5B",
        // Clips with picture and sound are the main use.
        task: "video-text-to-text",
        model_types: &["HumanOmni_qwen2"],
        architectures: &["HumanOmniQwen2ForCausalLM"],
        open: humanomni::open,
        vision_modules: &[Part::Vision, Part::Audio, Part::Projector],
        options: humanomni::OPTIONS,
    },
    FamilyRow {
        name: "qwen2_5_omni",
        doc: "Qwen2.5-Omni's thinker: images, videos, sounds, and videos with their sound interleaved in time",
        source: "arXiv 2503.20215; transformers models/qwen2_5_omni",
        published: "Qwen/Qwen2.5-Omni-3B",
        task: "any-to-any",
        model_types: &["qwen2_5_omni", "qwen2_5_omni_thinker"],
        architectures: &[
            "Qwen2_5OmniModel",
            "Qwen2_5OmniForConditionalGeneration",
            "Qwen2_5OmniThinkerForConditionalGeneration",
        ],
        open: qwen_omni::open,
        vision_modules: &[Part::Vision, Part::Audio, Part::Projector],
        options: &[],
    },
    FamilyRow {
        name: "qwen2_audio",
        doc: "Qwen2-Audio: sounds of up to 30 s",
        source: "arXiv 2407.10759; transformers models/qwen2_audio",
        published: "Qwen/Qwen2-Audio-7B-Instruct",
        task: "audio-text-to-text",
        model_types: &["qwen2_audio"],
        architectures: &["Qwen2AudioForConditionalGeneration"],
        open: qwen_audio::open,
        vision_modules: &[Part::Audio],
        options: &[],
    },
    FamilyRow {
        name: "qwen2",
        doc: "Qwen2 and Qwen2.5: text",
        source: "arXiv 2412.15115; transformers models/qwen2",
        published: "Qwen/Qwen2.5-0.5B-Instruct",
        task: "text-generation",
        model_types: &["qwen2"],
        architectures: &["Qwen2ForCausalLM"],
        open: |_, json| text::open(json, &TextClass::QWEN2),
        vision_modules: &[],
        options: &[],
    },
    FamilyRow {
        name: "qwen3_5_text",
        doc: "Qwen3.5 without a tower: text",
        source: "arXiv 2412.06464; transformers models/qwen3_5",
        published: "Qwen/Qwen3.5-0.8B",
        task: "text-generation",
        model_types: &["qwen3_5_text"],
        architectures: &["Qwen3_5ForCausalLM"],
        open: |_, json| text::open(json, &TextClass::QWEN35),
        vision_modules: &[],
        options: &[],
    },
    FamilyRow {
        name: "qwen3",
        doc: "Qwen3, dense: text, with or without thinking",
        source: "arXiv 2505.09388; transformers models/qwen3",
        published: "Qwen/Qwen3-0.6B",
        task: "text-generation",
        model_types: &["qwen3"],
        architectures: &["Qwen3ForCausalLM"],
        open: |_, json| text::open(json, &TextClass::QWEN3),
        vision_modules: &[],
        options: &[],
    },
    FamilyRow {
        name: "qwen3_moe",
        doc: "Qwen3 with experts: text, with or without thinking",
        source: "arXiv 2505.09388; transformers models/qwen3_moe",
        published: "Qwen/Qwen3-30B-A3B",
        task: "text-generation",
        model_types: &["qwen3_moe"],
        architectures: &["Qwen3MoeForCausalLM"],
        open: |_, json| text::open(json, &TextClass::QWEN3_MOE),
        vision_modules: &[],
        options: &[],
    },
    FamilyRow {
        name: "llama",
        doc: "Llama 2 and 3, SmolLM2 and other models of this class: text",
        source: "arXiv 2407.21783, 2502.02737; transformers models/llama",
        published: "HuggingFaceTB/SmolLM2-135M-Instruct",
        task: "text-generation",
        model_types: &["llama"],
        architectures: &["LlamaForCausalLM"],
        open: |_, json| text::open(json, &TextClass::LLAMA),
        vision_modules: &[],
        options: &[],
    },
];

/// Returns the family of a checkpoint, by the `model_type` and `architectures` of its `config.json`.
///
/// # Errors
/// Returns an error if the model is unsupported, or the configuration or processor is invalid.
pub(crate) fn family_of(dir: &Path, json: &ConfigJson) -> Result<Family> {
    let model_type = json.text("model_type")?.unwrap_or_default();
    let architectures: Vec<&str> = json
        .get("architectures")
        .and_then(|v| v.as_array())
        .map(|list| list.iter().filter_map(|v| v.as_str()).collect())
        .unwrap_or_default();
    match FamilyRow::of(json) {
        Some(row) => Family::open(row, dir, json),
        None => {
            let known: Vec<_> =
                FAMILIES.iter().map(|row| format!("{} (such as {})", row.name, row.published)).collect();
            Err(json.error(format!(
                "model_type {model_type:?} with architectures {architectures:?} is unsupported; use a \
                 checkpoint of one of these families: {}",
                known.join(", ")
            )))
        }
    }
}
