//! The generator of launchers refuses kernels of decoding steps that do not wait for the kernels before them.
#![allow(clippy::unwrap_used, missing_docs)]

use std::fs;
use std::path::Path;

#[path = "../build/launchers.rs"]
mod launchers;

/// Each kernel that starts early, without its wait. Those of a file that share a function share its wait.
#[test]
fn a_kernel_of_a_decoding_step_without_a_wait_is_refused() {
    let cuda = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
    assert!(launchers::generate(&cuda).is_ok());
    let mut planted = 0;
    for file in fs::read_dir(&cuda).unwrap().map(|entry| entry.unwrap().path()) {
        let text = fs::read_to_string(&file).unwrap();
        if file.extension().unwrap() != "cu" {
            continue;
        }
        let wait = "wait_previous()";
        for (at, _) in text.match_indices(wait) {
            let folder = tempfile::tempdir().unwrap();
            fs::copy(cuda.join("prim.cuh"), folder.path().join("prim.cuh")).unwrap();
            // A comment does not wait. The last kernel of attention.cu waits in several places.
            let (before, after) = (&text[..at], &text[at + wait.len()..]);
            let own = before.rfind("\ntemplate").max(before.rfind("KERNEL")).unwrap();
            let end = after.find("\n}\n").unwrap();
            let without = |text: &str| text.replace(wait, "0; // wait_previous()\n");
            let changed = [
                &before[..own],
                &without(&before[own..]),
                "0; // wait_previous()\n",
                &without(&after[..end]),
                &after[end..],
            ];
            fs::write(folder.path().join(file.file_name().unwrap()), changed.concat()).unwrap();
            let said = launchers::generate(folder.path()).unwrap_err();
            let named = said.contains("starts early, but does not call wait_previous()");
            assert!(named && said.contains(file.file_name().unwrap().to_str().unwrap()), "{said}");
            planted += 1;
        }
    }
    assert!(planted >= 20, "{planted}");
}
