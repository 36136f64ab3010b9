//! What flags change about a HumanOmni checkpoint: where its towers are, and two switches.

use std::path::Path;

use anyhow::Result;
use omnigrpo_models::ConfigJson;
use omnigrpo_models::humanomni::{TOWER_KEYS, find_tower};
use serde_json::{Map, Value};

use super::setup::{cached, named_dir};
use crate::problem::Problem;
use crate::settings::Settings;

/// Keys of `json`, the `config.json` in `dir`, that flags replace, and the places of towers that are named there and lie in
/// the local Hugging Face cache. Empty for other families, for which these flags are an error.
pub fn overrides(settings: &Settings, dir: &Path, json: &ConfigJson) -> Result<Map<String, Value>> {
    let given = &settings.humanomni;
    let of_humanomni = json.get("model_type").is_some_and(|v| v == "HumanOmni_qwen2");
    let flags = [
        ("vision_tower", given.vision_tower.is_some()),
        ("audio_tower", given.audio_tower.is_some()),
        ("bert", given.bert.is_some()),
        ("mm_dynamic_compressor", given.dynamic_compressor.is_some()),
        ("prompt_form", given.prompt_form.is_some()),
        ("tune_bert", settings.selection.instruction),
    ];
    if !of_humanomni {
        return match flags.iter().find(|(_, given)| *given) {
            None => Ok(Map::new()),
            Some((flag, _)) => Err(Problem::usage(format!("`{flag}` has no effect"))
                .got(format!("{} is not a HumanOmni checkpoint", dir.display()))
                .expected("a checkpoint of the family that has this part")
                .into()),
        };
    }
    let mut keys = Map::new();
    let towers = [&given.vision_tower, &given.audio_tower, &given.bert];
    for (key, given) in TOWER_KEYS.into_iter().zip(towers) {
        let unnamed = (key == TOWER_KEYS[2]).then_some("bert-base-uncased");
        let configured = json.get(key).and_then(Value::as_str).or(unnamed);
        let place = match (given, configured) {
            (Some(name), _) => Some(std::path::absolute(named_dir("the tower", name, settings)?)?),
            (None, Some(name)) if find_tower(dir, name).is_none() => cached(name, settings),
            _ => None,
        };
        if let Some(place) = place {
            keys.insert(key.into(), place.to_string_lossy().into());
        }
    }
    if let Some(on) = given.dynamic_compressor {
        keys.insert("mm_dynamic_compressor".into(), on.into());
    }
    if let Some(form) = &given.prompt_form {
        keys.insert("prompt_form".into(), form.as_str().into());
    }
    Ok(keys)
}
