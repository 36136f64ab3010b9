//! `export`: conversion of a checkpoint to another form.

use anyhow::{Context as _, Result};

use super::{Context, setup};
use crate::settings::Settings;
use crate::settings::problem::Problem;

/// Writes the checkpoint to `--output_dir`, with its adapter merged and in the given layout. The directory appears only when it
/// is complete.
pub fn export(settings: &Settings, context: &Context) -> Result<()> {
    let Some(target) = &settings.io.output_dir else {
        return Err(Problem::usage("no output directory is given").expected("`--output_dir DIR`").into());
    };
    let taken = std::fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_some());
    if taken || target.is_file() {
        return Err(Problem::usage("the output directory is not empty")
            .at(target.display().to_string())
            .expected("a new or empty directory")
            .into());
    }
    let mut model = setup::model_to_change(settings, context.checkpoint()?)?;
    let layers = model.adapted().count();
    model.merge_adapters()?;
    let mut name = target.file_name().unwrap_or_default().to_os_string();
    name.push(".tmp");
    let temporary = target.with_file_name(name);
    if temporary.exists() {
        std::fs::remove_dir_all(&temporary).with_context(|| temporary.display().to_string())?;
    }
    let layout = settings.model.layout.as_deref();
    let written = match layout {
        Some(layout) => model.save_as(&temporary, layout),
        None => model.save_pretrained(&temporary),
    };
    let written = written.map_err(anyhow::Error::from).and_then(|()| {
        if target.is_dir() {
            std::fs::remove_dir(target).with_context(|| target.display().to_string())?;
        }
        std::fs::rename(&temporary, target).with_context(|| target.display().to_string())
    });
    if written.is_err() {
        // An error of the cleanup is ignored; the error above is reported.
        let _ = std::fs::remove_dir_all(&temporary);
    }
    written?;
    let form = layout.unwrap_or(model.family().format().layout());
    context
        .console
        .line(&format!("wrote {} in layout {form}, adapters of {layers} layers merged", target.display()));
    Ok(())
}
