//! Converts a checkpoint of InternVL to the other layout: tensors, configuration, processor and prompt.
//!
//! Source: the conversion script of `transformers` for names, the published directories for files. A setting that the target
//! layout cannot express is an error, not a guess. The original layout identifies prompts by the names of its own code. If the
//! template of an hf checkpoint is not one of these, the converted checkpoint uses `internvl2_5`.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_media::tiles::TileProcessor;
use omnigrpo_ops::{Activation, Param, ParamDtype, Values};
use omnigrpo_text::ChatTemplate;
use serde_json::{Map, Value, json};

use super::config::InternVlConfig;
use super::layout::Layout;
use super::media::MediaReader;
use super::{CLOSE, CONTEXT, OPEN, template};
use crate::config_json::ConfigJson;
use crate::encoders::ACTIVATIONS;
use crate::error::{ModelError, Result};
use crate::families::{Converted, TextClass};
use crate::rope::RopeScaling;

/// Fields of a language model's configuration that both layouts keep. Published files contain many that concern other programs.
const TEXT_KEYS: &str = "attention_bias attention_dropout bos_token_id decoder_sparse_step dtype eos_token_id head_dim hidden_act \
    hidden_size initializer_range intermediate_size max_position_embeddings max_window_layers mlp_only_layers \
    moe_intermediate_size norm_topk_prob num_attention_heads num_experts num_experts_per_tok num_hidden_layers \
    num_key_value_heads num_local_experts pad_token_id rms_norm_eps rope_scaling \
    rope_theta sliding_window tie_word_embeddings torch_dtype use_cache use_sliding_window \
    vocab_size";

/// Converts a checkpoint to the other layout; `json` is its `config.json`.
///
/// # Errors
/// Returns an error if the layout is unknown, the other layout cannot express the settings, or files are unreadable.
pub fn convert(
    dir: &Path,
    json: &ConfigJson,
    config: &InternVlConfig,
    context_token: u32,
    params: &[Arc<Param>],
    layout: &str,
) -> Result<Converted> {
    match (config.layout, Layout::from_name(layout)) {
        (Layout::Original, Some(Layout::Hf)) => to_hf(dir, json, config, context_token, params),
        (Layout::Hf, Some(Layout::Original)) => to_original(dir, json, config, params),
        _ => Err(ModelError::layout(format!(
            "layout {layout:?} is unsupported; this checkpoint has the layout {:?}, and the layouts are \"hf\" and \"original\"",
            config.layout.name()
        ))),
    }
}

/// Renames tensors. A tensor that consists of several in one of the layouts is split or joined.
fn tensors(params: &[Arc<Param>], from: Layout, to: Layout) -> Result<Vec<Arc<Param>>> {
    let find = |name: &str| {
        params.iter().find(|p| p.name() == name).ok_or_else(|| {
            ModelError::layout(format!(
                "tensor {name} is missing, but other projections of its block are present"
            ))
        })
    };
    let mut out = Vec::with_capacity(params.len());
    for param in params {
        let names = from.renamed(param.name(), to);
        let Some(first) = names.first() else {
            let what = format!("tensor {} does not exist in the other layout", param.name());
            return Err(ModelError::layout(what));
        };
        let parts = to.renamed(first, from);
        let mut shape = param.shape().to_vec();
        if names.len() > 1 {
            let (values, len) = (param.values()?, param.len() / names.len());
            shape[0] /= names.len();
            for (i, name) in names.iter().enumerate() {
                let values = values.slice(i * len..(i + 1) * len);
                out.push(Arc::new(Param::new(name.clone(), param.part(), &shape, values)?));
            }
        } else if parts.len() > 1 {
            if parts[0] == param.name() {
                let values =
                    parts.iter().map(|name| Ok(find(name)?.values()?)).collect::<Result<Vec<_>>>()?;
                shape[0] *= parts.len();
                out.push(Arc::new(Param::new(first.clone(), param.part(), &shape, Values::concat(values))?));
            }
        } else if let ParamDtype::Quantised(_) = param.dtype() {
            let what = format!("tensor {} is quantised and cannot be converted", param.name());
            return Err(ModelError::layout(what));
        } else {
            out.push(Arc::new(param.named(first.clone())));
        }
    }
    // The original code reads the head from the file even if it equals the embedding.
    if to == Layout::Original && out.iter().all(|p| p.name() != super::NAMES.head) {
        let embed = find(&format!("{}embed_tokens.weight", super::NAMES.model))?;
        out.push(Arc::new(embed.named(super::NAMES.head)));
    }
    Ok(out)
}

/// Returns the language model's section, reduced to its own fields, with rotary settings in their published form.
fn text_section(json: &ConfigJson, config: &InternVlConfig) -> Result<Map<String, Value>> {
    let section = json.required_section(config.layout.rules().text)?;
    let mut out: Map<String, Value> = section.object().clone();
    out.retain(|name, _| TEXT_KEYS.split(' ').any(|key| key == name));
    if let (None, Some(rope)) = (section.section("rope_scaling")?, section.get("rope_parameters"))
        && config.decoder.rope.scaling != RopeScaling::None
    {
        out.insert("rope_scaling".into(), rope.clone());
    }
    out.insert("rope_theta".into(), json!(config.decoder.rope.theta));
    let class = match (config.decoder.qk_norm, config.decoder.experts) {
        (false, _) => TextClass::QWEN2,
        (true, None) => TextClass::QWEN3,
        (true, Some(_)) => TextClass::QWEN3_MOE,
    };
    out.insert("architectures".into(), json!([class.architecture]));
    out.insert("model_type".into(), json!(class.model_type));
    Ok(out)
}

fn activation_name(activation: Activation) -> &'static str {
    ACTIVATIONS.iter().find(|(_, known)| *known == activation).map_or("gelu", |(name, _)| *name)
}

/// Returns the fields of the tower that have the same names in both layouts.
fn vision_section(config: &InternVlConfig) -> Map<String, Value> {
    let v = &config.vision;
    let fields = json!({
        "architectures": ["InternVisionModel"],
        "attention_dropout": 0.0,
        "hidden_act": activation_name(v.activation),
        "hidden_size": v.hidden,
        "intermediate_size": v.intermediate,
        "layer_norm_eps": number(v.norm_eps),
        "norm_type": if v.rms { "rms_norm" } else { "layer_norm" },
        "num_attention_heads": v.heads.q,
        "num_channels": 3,
        "num_hidden_layers": v.depth,
    });
    fields.as_object().cloned().unwrap_or_default()
}

/// Returns the shortest decimal that reads back as this f32, so that 1e-6 stays 1e-6.
fn number(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, |x| json!(x))
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn text(value: &Value) -> String {
    format!("{value:#}\n")
}

fn to_hf(
    dir: &Path,
    json: &ConfigJson,
    config: &InternVlConfig,
    context_token: u32,
    params: &[Arc<Param>],
) -> Result<Converted> {
    let (v, tiles) = (&config.vision, &config.tiles);
    if tiles.max_tiles > 1 && !tiles.thumbnail {
        return Err(json.error(
            "use_thumbnail is false; a processor of the hf layout always appends the thumbnail, so prompts would differ",
        ));
    }
    if v.qk_norm_eps.is_some_and(|eps| eps != 1e-6) {
        return Err(
            json.error("layer_norm_eps is not 1e-6, which the hf layout always uses for queries and keys")
        );
    }
    let mut vision = vision_section(config);
    let image = v.grid * v.patch;
    vision.extend(object(json!({
        "attention_bias": v.qkv_bias,
        "hidden_dropout_prob": 0.0,
        "image_size": [image, image],
        "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision",
        "patch_size": [v.patch, v.patch],
        "projection_dropout": 0.0,
        "use_absolute_position_embeddings": true,
        "use_mask_token": false,
        "use_mean_pooling": true,
        "use_qk_norm": v.qk_norm_eps.is_some(),
    })));
    let mut root = object(json!({
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 1.0 / config.merge as f64,
        "image_seq_length": config.tokens_per_tile(),
        "image_token_id": context_token,
        "model_type": "internvl",
        "projector_hidden_act": activation_name(config.projector_activation),
        "text_config": text_section(json, config)?,
        "vision_config": vision,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }));
    keep_dtype(json, &mut root);
    Ok(Converted {
        params: tensors(params, Layout::Original, Layout::Hf)?,
        config: Value::Object(root),
        files: hf_files(dir, json, config)?,
        left_out: &["chat_template.json", "configuration.json"],
    })
}

/// Returns the files of processor, tokenizer and prompt in the hf layout.
fn hf_files(dir: &Path, json: &ConfigJson, config: &InternVlConfig) -> Result<Vec<(&'static str, String)>> {
    let tiles = &config.tiles;
    let pixels = object(json!({
        "do_convert_rgb": true,
        "do_normalize": true,
        "do_rescale": true,
        "do_resize": true,
        "image_mean": tiles.mean,
        "image_std": tiles.std,
        "processor_class": "InternVLProcessor",
        "resample": 3,
        "rescale_factor": 1.0 / 255.0,
        "size": { "height": tiles.side_px, "width": tiles.side_px },
    }));
    let mut image = pixels.clone();
    image.extend(object(json!({
        "crop_to_patches": true,
        "image_processor_type": "GotOcr2ImageProcessor",
        "max_patches": tiles.max_tiles,
        "min_patches": tiles.min_tiles,
    })));
    let mut video = pixels;
    video.insert("video_processor_type".into(), json!("InternVLVideoProcessor"));
    let processor =
        json!({ "image_seq_length": config.tokens_per_tile(), "processor_class": "InternVLProcessor" });
    let template = json
        .get("template")
        .and_then(|name| template::original_for_hf(name.as_str()?))
        .unwrap_or_else(|| template::HF.to_owned());
    let mut tokenizer = ConfigJson::read(&dir.join("tokenizer_config.json"))?.object().clone();
    let named = object(json!({
        "context_image_token": CONTEXT,
        "end_image_token": CLOSE,
        "start_image_token": OPEN,
        "video_token": "<video>",
    }));
    // The prompt comes from the processor, and the code of the original repository is not needed.
    for key in ["chat_template", "auto_map"] {
        tokenizer.remove(key);
    }
    tokenizer.insert("extra_special_tokens".into(), Value::Object(named.clone()));
    tokenizer.extend(named);
    tokenizer.insert("processor_class".into(), json!("InternVLProcessor"));
    Ok(vec![
        ("preprocessor_config.json", text(&Value::Object(image))),
        ("video_preprocessor_config.json", text(&Value::Object(video))),
        ("processor_config.json", text(&processor)),
        ("chat_template.jinja", template),
        ("tokenizer_config.json", text(&Value::Object(tokenizer))),
    ])
}

/// Checks that the code of the original repository, which has fixed values for some settings, computes the same.
fn check_original(json: &ConfigJson, config: &InternVlConfig, tiles: &TileProcessor) -> Result<()> {
    let published = TileProcessor::default();
    if (tiles.mean, tiles.std) != (published.mean, published.std) {
        return Err(json.error(
            "image_mean and image_std are not those of ImageNet, which the original code always uses",
        ));
    }
    if config.projector_activation != Activation::GeluErf {
        return Err(json.error("projector_hidden_act is not gelu, which the original code always uses"));
    }
    if config.vision.qk_norm_eps.is_some_and(|eps| eps != config.vision.norm_eps) {
        return Err(
            json.error("layer_norm_eps is not 1e-6; the original layout also uses it for queries and keys")
        );
    }
    Ok(())
}

fn to_original(
    dir: &Path,
    json: &ConfigJson,
    config: &InternVlConfig,
    params: &[Arc<Param>],
) -> Result<Converted> {
    let v = &config.vision;
    let tiles = MediaReader::open(dir, config)?.tiling().clone();
    check_original(json, config, &tiles)?;
    let mut vision = vision_section(config);
    vision.extend(object(json!({
        "drop_path_rate": 0.0,
        "dropout": 0.0,
        "image_size": v.grid * v.patch,
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "model_type": "intern_vit_6b",
        "patch_size": v.patch,
        "qk_normalization": v.qk_norm_eps.is_some(),
        "qkv_bias": v.qkv_bias,
        "use_flash_attn": false,
    })));
    let name = template::name_of(ChatTemplate::from_dir(dir)?.source()).unwrap_or("internvl2_5");
    let mut root = object(json!({
        "architectures": ["InternVLChatModel"],
        "auto_map": {
            "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
            "AutoModel": "modeling_internvl_chat.InternVLChatModel",
            "AutoModelForCausalLM": "modeling_internvl_chat.InternVLChatModel",
        },
        "downsample_ratio": 1.0 / config.merge as f64,
        "dynamic_image_size": tiles.max_tiles > 1,
        "force_image_size": tiles.side_px,
        "llm_config": text_section(json, config)?,
        "max_dynamic_patch": tiles.max_tiles,
        "min_dynamic_patch": tiles.min_tiles,
        "model_type": "internvl_chat",
        "pad2square": false,
        "ps_version": "v2",
        "select_layer": -1,
        "template": name,
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": true,
        "vision_config": vision,
    }));
    keep_dtype(json, &mut root);
    let image = json!({
        "crop_size": tiles.side_px,
        "do_center_crop": true,
        "do_normalize": true,
        "do_resize": true,
        "feature_extractor_type": "CLIPFeatureExtractor",
        "image_mean": tiles.mean,
        "image_std": tiles.std,
        "resample": 3,
        "size": tiles.side_px,
    });
    Ok(Converted {
        params: tensors(params, Layout::Hf, Layout::Original)?,
        config: Value::Object(root),
        files: vec![("preprocessor_config.json", text(&image))],
        left_out: &[
            "chat_template.jinja",
            "chat_template.json",
            "processor_config.json",
            "video_preprocessor_config.json",
        ],
    })
}

fn keep_dtype(json: &ConfigJson, root: &mut Map<String, Value>) {
    for key in ["torch_dtype", "dtype"] {
        if let Some(value) = json.get(key) {
            root.insert(key.into(), value.clone());
        }
    }
}
