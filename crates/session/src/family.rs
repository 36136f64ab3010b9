//! Check for settings that the model's family does not read. Only `config.json` names the family, so the check runs when a
//! command starts.

use anyhow::Result;
use omnigrpo_text::MediumKind;

use crate::Session;
use omnigrpo_settings::Settings;
use omnigrpo_settings::explain::yaml;
use omnigrpo_settings::flags::{self, Flag, Section};
use omnigrpo_settings::presets;
use omnigrpo_settings::problem::Problem;
use omnigrpo_settings::values::{Origin, Resolved, Value, Values};
use omnigrpo_settings::wording;

/// Settings for sound, which have no effect on a family without sound.
const SOUND: [&str; 3] = ["use_audio_in_video", "missing_audio", "audio_folders"];

/// Removes settings without effect on this model, and adds a note, if they come from a preset, or from a file while the command line
/// chooses the model.
///
/// # Errors
/// Returns an error if another setting without effect was given by flag or file, with a value other than its default and that of
/// the preset.
pub fn without_idle(resolved: &Resolved, session: &Session) -> Result<Resolved> {
    let mut out = resolved.clone();
    let settings = &resolved.settings;
    let given = |flag: &Flag| {
        let set = resolved.values.lookup(flag.name);
        set.is_some_and(|(_, origin)| *origin != Origin::Default)
    };
    let mut asked = flags::all().filter(|flag| flag.is_of_media()).chain(Section::Family.rows());
    if settings.model.name.is_none() || !asked.any(given) {
        return Ok(out);
    }
    let family = session.checkpoint()?.family();
    let idle = family.processor().idle_settings();
    let fields = idle.fields.iter().filter_map(|field| wording::flag(*field));
    let mut unread: Vec<(&str, String)> = fields.map(|flag| (flag.name, (idle.why)())).collect();
    if family.reads_text_only() {
        let of_media = flags::all().filter(|flag| flag.is_of_media());
        unread.extend(of_media.map(|flag| (flag.name, (idle.why)())));
    } else if !family.processor().kinds().contains(&MediumKind::Audio) {
        unread.extend(SOUND.map(|name| (name, "the family takes no sound".to_owned())));
    }
    let defaults = Values::defaults(resolved.verb);
    let (mut preset, mut dropped) = ("", Vec::new());
    let model = resolved.values.lookup("model_name_or_path");
    let is_other_model = model.is_some_and(|(_, origin)| matches!(origin, Origin::Flag | Origin::Caller));
    for (flag, why) in unread {
        let Some((value, origin)) = resolved.values.lookup(flag) else { continue };
        if defaults.lookup(flag).is_some_and(|(default, _)| default == value) {
            continue;
        }
        let name = match (origin, preset_of(resolved)) {
            (Origin::Preset(name), _) => Some(name.as_str()),
            // Launch scripts often repeat values of their preset.
            (_, Some(name)) => presets::layer(name, resolved.verb)
                .given
                .iter()
                .any(|given| given.flag.name == flag && given.value == *value)
                .then_some(name),
            _ => None,
        };
        if let (None, Origin::Config(place), true) = (name, origin, is_other_model) {
            out.notes.push(format!("`{flag}` {} of {place} is not used: {why}", yaml(value)));
            out.values.reset(flag, resolved.verb);
            out.idle.push((flag, why));
            continue;
        }
        let Some(name) = name else {
            let problem = Problem::usage(format!("`{flag}` has no effect on {}", family.name()))
                .got(yaml(value))
                .help(format!("{why}; leave `{flag}` out"));
            return Err(match origin {
                Origin::Config(place) => problem.at(place.clone()),
                _ => problem,
            }
            .into());
        };
        preset = name;
        dropped.push(format!("`{flag}` {}", yaml(value)));
        out.values.reset(flag, resolved.verb);
        out.idle.push((flag, why));
    }
    if !dropped.is_empty() {
        out.notes.push(format!(
            "left out of the preset {preset}, since they have no effect on {}: {}",
            family.name(),
            dropped.join(", ")
        ));
    }
    out.settings = Settings::from_values(&out.values, settings.env.clone())?;
    Ok(out)
}

fn preset_of(resolved: &Resolved) -> Option<&str> {
    match resolved.values.lookup("preset") {
        Some((Value::Text(name), _)) => Some(name),
        _ => None,
    }
}
