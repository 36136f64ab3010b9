//! `translate`.

use std::path::Path;

use anyhow::Result;

use super::print_raw;
use crate::cli::draft::one_line;
use crate::cli::translate;
use crate::settings::{Problem, Settings, config};
use omnigrpo_session::Session;

/// Maximum size of a script or a file of settings, bytes.
const MAX_BYTES: u64 = 1 << 18;

/// Translates a launch script, a training script or a file of settings of another trainer.
pub fn run(settings: &Settings, session: &Session) -> Result<()> {
    let Some(script) = &settings.io.script else {
        return Err(Problem::usage("nothing to translate").expected("`translate FILE`").into());
    };
    let read = |path: &Path| config::text(path, MAX_BYTES);
    let text = read(script)?;
    let home = settings.env.home.clone().unwrap_or_default();
    let translation = translate::translate(&text, script, &home, |named| {
        // A script names files relative to the place where it is started, which is its own directory or one above it.
        let places = script.parent().into_iter().flat_map(Path::ancestors).map(|place| place.join(named));
        std::iter::once(named.to_owned())
            .chain(places)
            .find(|path| path.is_file())
            .and_then(|path| read(&path).ok())
    })?;
    match &settings.io.output {
        Some(output) => {
            omnigrpo_session::files::keep_inputs(output, [script.as_path()])?;
            omnigrpo_observe::write_atomic(output, |out| out.write_all(translation.text.as_bytes()))?;
        }
        None => print_raw(&translation.text)?,
    }
    let changes = translation.changes.len();
    if changes > 0 {
        let lines: String =
            translation.changes.iter().map(|change| format!("\n  {}", one_line(change))).collect();
        session.console.line(&format!("changes training there, and is not in the file:{lines}"));
    }
    if settings.io.strict && changes > 0 {
        return Err(Problem::failure("the translation is incomplete")
            .got(match changes {
                1 => "1 line at its top".to_owned(),
                n => format!("{n} lines at its top"),
            })
            .expected("no setting that changes training without a counterpart")
            .help("decide on each, or leave `--strict` out")
            .into());
    }
    Ok(())
}
