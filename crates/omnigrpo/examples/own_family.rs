//! A model family that is not in the table: Llama's language models, which read text only. The example draws random
//! weights for a small one and samples from it: `cargo run --release --example own_family -- runs/llama`
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::sync::Arc;

use omnigrpo::family::{
    Architecture, Decoder, DecoderConfig, DecoderNames, Encoder, FamilyRow, Format, IdleSettings, MediumInfo,
    MediumInput, MediumKind, MediumPlan, MediumRef, MediumShape, MediumTokens, ModelError, Network, Part,
    Pass, Processor, Result, Roles, Tape, TextDefaults, Var, WeightSource,
};
use omnigrpo::{
    Checkpoint, GenerateOptions, Generator, LoadOptions, MediaSettings, Model, PromptBuilder, PromptSettings,
    Request, RowReader, SamplingParams, demo,
};
use serde_json::json;

const LLAMA: FamilyRow = FamilyRow {
    name: "llama",
    doc: "Llama: text",
    source: "transformers models/llama",
    published: "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    task: "text-generation",
    model_types: &["llama"],
    architectures: &["LlamaForCausalLM"],
    open: |_, json| {
        let config = Arc::new(Llama { decoder: DecoderConfig::parse(json, json, TextDefaults::LLAMA)? });
        Ok(Roles { processor: Box::new(TextOnly), architecture: Arc::clone(&config) as _, format: config })
    },
    vision_modules: &[Part::Vision],
    options: &[],
};

struct Llama {
    decoder: DecoderConfig,
}

impl Architecture for Llama {
    fn decoder_config(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn initializer_range(&self) -> f32 {
        0.02
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Network> {
        let names = DecoderNames { model: "model.", head: "lm_head.weight" };
        let decoder = Decoder::build(self.decoder.clone(), names, source)?;
        Ok(Network { decoder, encoder: Box::new(TextOnly) })
    }
}

impl Format for Llama {
    fn published_name(&self, key: &str) -> Option<String> {
        (!key.ends_with("rotary_emb.inv_freq")).then(|| key.to_owned())
    }
}

struct TextOnly;

fn no_media<T>(kind: MediumKind) -> Result<T> {
    Err(ModelError::MediumKind { kind, what: "this model reads text only" })
}

impl Processor for TextOnly {
    fn idle_settings(&self) -> IdleSettings {
        IdleSettings { fields: &[], why: || "it reads text only".into() }
    }

    fn shorten(&self, _: MediumKind) -> Option<String> {
        None
    }

    fn plan(&self, medium: &MediumRef, _: &MediumInfo, _: &MediaSettings) -> Result<MediumPlan> {
        no_media(medium.kind)
    }

    fn prepare(&self, medium: &MediumRef, _: &MediaSettings) -> Result<MediumInput> {
        no_media(medium.kind)
    }

    fn tokens(&self, kind: MediumKind, _: &MediumShape, _: &[f64]) -> Result<MediumTokens> {
        no_media(kind)
    }

    fn placeholder_ids(&self) -> Vec<u32> {
        Vec::new()
    }
}

impl Encoder for TextOnly {
    fn tower(&self, medium: &MediumInput, _: &Pass, _: &mut Tape) -> Result<Var> {
        no_media(medium.kind)
    }

    fn project(&self, _: &Var, medium: &MediumInput, _: &[u32], _: &Pass, _: &mut Tape) -> Result<Var> {
        no_media(medium.kind)
    }
}

fn main() -> anyhow::Result<()> {
    let dir = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| "runs/llama".into()));
    // A small configuration with the tokenizer of the embedded model.
    demo::write_model(&dir)?;
    std::fs::remove_file(dir.join("model.safetensors"))?;
    let vocab = omnigrpo::Tokenizer::from_dir(&dir)?.vocab_size();
    let config = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab, "eos_token_id": 0,
    });
    std::fs::write(dir.join("config.json"), config.to_string())?;

    let checkpoint = Checkpoint::open_as(&dir, &LLAMA)?;
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
