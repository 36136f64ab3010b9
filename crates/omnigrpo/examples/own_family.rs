//! A model family that is not in the table: Mistral's language models without sliding windows, which read text only. The
//! example draws random weights for a small one and samples from it:
//! `cargo run --release --example own_family -- runs/mistral`
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::sync::Arc;

use omnigrpo::family::{
    Architecture, Decoder, DecoderConfig, DecoderNames, FamilyRow, Format, Network, Processor, Result, Roles,
    TextDefaults, WeightSource,
};
use omnigrpo::{
    Checkpoint, GenerateOptions, Generator, LoadOptions, Model, PromptBuilder, PromptSettings, Request,
    RowReader, SamplingParams, demo,
};
use serde_json::json;

const MISTRAL: FamilyRow = FamilyRow {
    name: "mistral",
    doc: "Mistral from version 0.3: text",
    source: "transformers models/mistral",
    published: "mistralai/Mistral-7B-Instruct-v0.3",
    task: "text-generation",
    model_types: &["mistral"],
    architectures: &["MistralForCausalLM"],
    open: |_, json| {
        // Earlier versions have sliding windows.
        json.only("sliding_window", serde_json::Value::Null)?;
        let class = TextDefaults { kv_heads: Some(8), max_positions: 131_072, ..TextDefaults::LLAMA };
        let config = Arc::new(Mistral { decoder: DecoderConfig::parse(json, json, class)? });
        Ok(Roles { processor: Box::new(TextOnly), architecture: Arc::clone(&config) as _, format: config })
    },
    vision_modules: &[],
    options: &[],
};

struct Mistral {
    decoder: DecoderConfig,
}

impl Architecture for Mistral {
    fn decoder_config(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn initializer_range(&self) -> f32 {
        0.02
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Network> {
        let names = DecoderNames { model: "model.", head: "lm_head.weight" };
        let decoder = Decoder::build(self.decoder.clone(), names, source)?;
        Ok(Network { decoder, encoder: None })
    }
}

impl Format for Mistral {
    fn published_name(&self, key: &str) -> Option<String> {
        (!key.ends_with("rotary_emb.inv_freq")).then(|| key.to_owned())
    }
}

/// The default methods are those of a family that reads text only.
struct TextOnly;

impl Processor for TextOnly {}

fn main() -> anyhow::Result<()> {
    let dir = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| "runs/mistral".into()));
    // A small configuration with the tokenizer of the embedded model.
    demo::write_model(&dir)?;
    std::fs::remove_file(dir.join("model.safetensors"))?;
    let vocab = omnigrpo::Tokenizer::from_dir(&dir)?.vocab_size();
    let config = json!({
        "model_type": "mistral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab, "eos_token_id": 0,
    });
    std::fs::write(dir.join("config.json"), config.to_string())?;

    let checkpoint = Checkpoint::open_as(&dir, &MISTRAL)?;
    let model = Model::load(&checkpoint, &LoadOptions { random: Some(1), ..LoadOptions::default() })?;
    let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default())?;
    let row = json!({ "prompt": "Tell me something." });
    let sample = RowReader::new("mine").sample(row)?;
    let prompt = prompts.build(&sample)?;
    let params =
        SamplingParams { min_completion_length: 8, max_completion_length: 8, ..SamplingParams::default() };
    let generator = Generator::new(&model, &prompts, &params);
    let generated = generator.generate([Request::new(&prompt, &[])], GenerateOptions::default())?;
    let completion = &generated[0].completions[0];
    println!("{}: {} tokens, {:?}", prompts.family().name(), completion.ids.len(), completion.text);
    Ok(())
}
