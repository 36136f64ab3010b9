//! Files that commands write.

use std::path::Path;

use anyhow::Result;
use omnigrpo_guard::inside::is_same_file;
use omnigrpo_settings::Problem;

/// Writes lines of JSON. The file appears only when it is complete.
pub fn write_lines<T: std::fmt::Display>(path: &Path, lines: impl IntoIterator<Item = T>) -> Result<()> {
    let mut lines = lines.into_iter();
    Ok(omnigrpo_observe::write_atomic(path, |out| {
        for line in lines.by_ref() {
            writeln!(out, "{line}")?;
        }
        Ok(())
    })?)
}

/// Returns an error if any row failed. The output contains the reasons.
pub fn all_rows(failed: u64, rows: u64) -> Result<()> {
    if failed == 0 {
        return Ok(());
    }
    Err(Problem::failure(format!("{failed} of {rows} rows failed"))
        .help("each failed row has an `error` in the output; the other rows are complete")
        .into())
}

/// Returns an error if a file cannot be written at this path, so that the command fails before hours of work.
pub fn can_write(path: &Path) -> Result<()> {
    let problem = |got: String| {
        Problem::failure("the output cannot be written")
            .at(path.display().to_string())
            .got(got)
            .expected("a file in a writable directory")
            .help("choose another --output")
    };
    if path.is_dir() {
        return Err(problem("a directory".into()).into());
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.probe", std::process::id()));
    let probe = folder.join(name);
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&probe, b""))
        .and_then(|()| std::fs::remove_file(&probe))
        .map_err(|e| problem(e.to_string()).into())
}

/// Returns an error if the output would overwrite an input, by any path or link.
pub fn keep_inputs<'a>(output: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<()> {
    let written = [output.to_owned(), output.with_extension("summary.json")];
    for input in inputs {
        if let Some(written) = written.iter().find(|written| is_same_file(input, written)) {
            return Err(Problem::usage("the output would overwrite the input")
                .at("--output")
                .got(format!("{}, which is the same file as {}", written.display(), input.display()))
                .expected("another file name")
                .into());
        }
    }
    Ok(())
}
