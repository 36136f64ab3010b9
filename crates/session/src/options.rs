//! Settings that change a checkpoint, i.e. the options of its family.

use std::path::Path;

use anyhow::Result;
use omnigrpo_fetch::cached;
use omnigrpo_models::humanomni::find_tower;
use omnigrpo_models::{ConfigJson, FamilyRow, OptionKind};
use serde_json::{Map, Value};

use super::setup::named_dir;
use omnigrpo_settings::Settings;
use omnigrpo_settings::problem::Problem;

/// Returns the keys of `json`, the `config.json` in `dir`, that settings replace, and the places of named towers in the local
/// Hugging Face cache.
///
/// # Errors
/// Returns an error if the family does not have an option that the settings give.
pub fn replaced(settings: &Settings, dir: &Path, json: &ConfigJson) -> Result<Map<String, Value>> {
    let options = FamilyRow::of(json).map_or(&[][..], |row| row.options);
    let mut given = settings.family.keys().map(String::as_str);
    let stranger = given.find(|name| options.iter().all(|option| option.name != *name));
    // The option `bert` names the text encoder.
    let no_encoder = settings.selection.instruction && options.iter().all(|option| option.name != "bert");
    if let Some(name) = stranger.or(no_encoder.then_some("tune_bert")) {
        return Err(Problem::usage(format!("`{name}` has no effect"))
            .got(format!("the family of {} does not have this part", dir.display()))
            .expected("a checkpoint of the family that has this part")
            .into());
    }
    let mut keys = Map::new();
    for option in options {
        let given = settings.family.get(option.name);
        let value = match option.holds {
            OptionKind::Value => given.cloned(),
            OptionKind::Directory(unnamed) => {
                let configured = json.get(option.key).and_then(Value::as_str).or(unnamed);
                let place = match (given.and_then(Value::as_str), configured) {
                    (Some(name), _) => Some(std::path::absolute(named_dir("the tower", name, settings)?)?),
                    (None, Some(name)) if find_tower(dir, name).is_none() => {
                        cached(&settings.env.hub.cache, name)
                    }
                    _ => None,
                };
                place.map(|place| place.to_string_lossy().into())
            }
        };
        keys.extend(value.map(|value| (option.key.to_owned(), value)));
    }
    Ok(keys)
}
