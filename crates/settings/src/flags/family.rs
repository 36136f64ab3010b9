//! Settings that only one family of models reads.

use super::*;
use crate::names::ExportFormat;
use Kind::{Bool, Choice, Text};

/// Returns the layouts in which a checkpoint can be written, for families that are published in two layouts.
fn layouts() -> Vec<(&'static str, &'static str)> {
    vec![
        ("hf", "For transformers, vLLM and TRL."),
        ("original", "For the code of the model's own repository."),
    ]
}

/// Returns the forms of HumanOmni prompts.
fn prompt_forms() -> Vec<(&'static str, &'static str)> {
    vec![
        ("sft", "As in supervised training and inference."),
        ("r1omni_grpo", "As the original GRPO trainer: an empty Qwen2-VL video before the media."),
    ]
}

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row("vision_tower", Text, of_family!("vision_tower"), FAMILY)
        .help(
            "HumanOmni: directory of the SigLIP tower, or its name in the local Hugging Face cache. Weights in \
             the checkpoint itself take precedence.",
        )
        .unset("config.json's mm_vision_tower")
        .free(LOOP)
        .per_rank(),
    row("audio_tower", Text, of_family!("audio_tower"), FAMILY)
        .help("HumanOmni: directory of the Whisper encoder, or its name in the local Hugging Face cache. Weights \
             in the checkpoint itself take precedence.")
        .unset("config.json's mm_audio_tower")
        .free(LOOP)
        .per_rank(),
    row("bert", Text, of_family!("bert"), FAMILY)
        .help("HumanOmni: directory of the BERT that reads the question, or its name in the local Hugging Face \
             cache. Weights in the checkpoint take precedence; the tokenizer always comes from here.")
        .unset("config.json's mm_text_tower, else bert-base-uncased")
        .free(LOOP)
        .per_rank(),
    row("mm_dynamic_compressor", Bool, of_family!("mm_dynamic_compressor"), FAMILY)
        .help("HumanOmni: compress visual tokens. Every fourth frame stays unchanged; the others are reduced to half \
         their width and height.")
        .unset("config.json's, else false"),
    row("prompt_form", Choice(prompt_forms), of_family!("prompt_form"), ROWS)
        .help(
            "HumanOmni: write prompts as in its supervised training and inference, or as the original GRPO \
             trainer did.",
        )
        .unset("config.json's, else sft"),
    row("tune_gate", Bool, at!(selection.gate), STEPS)
        .help(
            "HumanOmni: train the gate between the branches of the projector. It can be trained without the \
             projector, or stay fixed while the projector is trained.",
        )
        .unset("`tune_mm_mlp`"),
    row("tune_bert", Bool, at!(selection.instruction), STEPS)
        .help("HumanOmni: train the text encoder that steers the projector."),
    row("max_anyres_num", int(1, 1024), at!(prompts.media.max_tiles), ROWS)
        .help(
            "Families that cut images into tiles (InternVL, SmolVLM): maximum number of tiles of an image, each of which costs \
             vision tokens. The complete image is one additional tile.",
        )
        .unset("the checkpoint's; 12 for InternVL, 16 for SmolVLM"),
    row("layout", Choice(layouts), at!(model.layout), &[Export])
        .help("Layout to write, for families that are published in two layouts (InternVL).")
        .idle(|s, _| (s.model.format == ExportFormat::Gguf).then_some("a GGUF file has only one layout"))
        .unset("as it is"),
];
