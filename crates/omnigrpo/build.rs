//! Names the commit of a release build, which `omnigrpo --version`, logs and model cards show.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=OMNIGRPO_COMMIT");
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    // A development build would be compiled again after each commit. If the variable is set, it is taken as it is.
    if !is_release || std::env::var_os("OMNIGRPO_COMMIT").is_some() {
        return;
    }
    // In a copy without history, the files may lie in the repository of something else.
    if git(&["ls-files", "--error-unmatch", "build.rs"]).is_none() {
        return;
    }
    // The second file gets a line with each commit.
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--path-format=absolute", "--git-path", name])
            && Path::new(&path).exists()
        {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    if let Some(commit) = git(&["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]) {
        println!("cargo::rustc-env=OMNIGRPO_COMMIT={commit}");
    }
}

/// Returns the output of git in the folder of this package; `None` if it fails.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
