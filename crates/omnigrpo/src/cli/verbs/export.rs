//! `export` and `convert`: a model in another form.

use std::path::Path;

use anyhow::{Context as _, Result};

use crate::settings::Settings;
use crate::settings::names::ExportFormat;
use crate::settings::problem::Problem;
use omnigrpo_session::{Session, setup};

/// Name of the GGUF file in the output directory.
const GGUF: &str = "model.gguf";

/// Writes the checkpoint to `--output_dir`, with its adapter merged, in the given layout or format. The directory appears only when
/// it is complete.
pub fn export(settings: &Settings, session: &Session) -> Result<()> {
    let Some(target) = &settings.io.output_dir else {
        return Err(Problem::usage("no output directory is given").expected("`--output_dir DIR`").into());
    };
    check_empty(target)?;
    let mut model = setup::model_to_change(settings, session.checkpoint()?)?;
    let layers = model.adapted().count();
    model.merge_adapters()?;
    let layout = settings.model.layout.as_deref();
    whole(target, |temporary| {
        match (settings.model.format, layout) {
            (ExportFormat::Gguf, _) => {
                std::fs::create_dir_all(temporary).with_context(|| temporary.display().to_string())?;
                model.save_gguf(&temporary.join(GGUF), settings.model.outtype)?;
            }
            (ExportFormat::Safetensors, Some(layout)) => model.save_as(temporary, layout)?,
            (ExportFormat::Safetensors, None) => model.save_pretrained(temporary)?,
        }
        Ok(())
    })?;
    let wrote = match settings.model.format {
        ExportFormat::Gguf => format!("wrote {}", target.join(GGUF).display()),
        ExportFormat::Safetensors => {
            let layout = layout.unwrap_or(model.family().format().layout());
            format!("wrote {} in layout {layout}", target.display())
        }
    };
    session.console.line(&format!("{wrote}, adapters of {layers} layers merged"));
    Ok(())
}

/// Writes a checkpoint directory from a GGUF file. The directory appears only when it is complete.
pub fn convert(settings: &Settings, session: &Session) -> Result<()> {
    let (Some(file), Some(target)) = (&settings.io.gguf_file, &settings.io.directory) else {
        return Err(Problem::usage("nothing to convert").expected("`convert FILE.gguf DIR`").into());
    };
    check_empty(target)?;
    let written =
        whole(target, |temporary| Ok(omnigrpo_models::convert_gguf(file, temporary, settings.model.dtype)?))?;
    for note in &written.notes {
        session.console.line(note);
    }
    let (place, weights, family) = (target.display(), written.num_weights, written.family);
    session.console.line(&format!("wrote {place}, {weights} weights of {family}"));
    Ok(())
}

/// Checks that a directory to write is new or empty.
fn check_empty(target: &Path) -> Result<()> {
    let taken = std::fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_some());
    if taken || target.is_file() {
        return Err(Problem::usage("the output directory is not empty")
            .at(target.display().to_string())
            .expected("a new or empty directory")
            .into());
    }
    Ok(())
}

/// Writes a directory under a temporary name and renames it. After an error, nothing is left.
fn whole<T>(target: &Path, write: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let mut name = target.file_name().unwrap_or_default().to_os_string();
    name.push(".tmp");
    let temporary = target.with_file_name(name);
    if temporary.exists() {
        std::fs::remove_dir_all(&temporary).with_context(|| temporary.display().to_string())?;
    }
    let written = write(&temporary).and_then(|value| {
        if target.is_dir() {
            std::fs::remove_dir(target).with_context(|| target.display().to_string())?;
        }
        std::fs::rename(&temporary, target).with_context(|| target.display().to_string())?;
        Ok(value)
    });
    if written.is_err() {
        // An error of the cleanup is ignored; the error above is reported.
        let _ = std::fs::remove_dir_all(&temporary);
    }
    written
}
