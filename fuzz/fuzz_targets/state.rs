//! Checks that any saved state is one to resume from, or an error, and that its rollout in progress is restored or refused.
#![no_main]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use omnigrpo_data::{Dataset, Order, RowReader};
use omnigrpo_fuzz::let_guarded_panics_pass;
use omnigrpo_models::{Checkpoint, LoadOptions, Model, PromptBuilder, PromptSettings};
use omnigrpo_train::Algorithm;
use omnigrpo_train::checkpoint::{list, read_state};
use serde_json::json;
use sha2::{Digest, Sha256};

/// A run directory with the checkpoint of step 2.
static FOLDER: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = folder.path().join("checkpoint-2");
    std::fs::create_dir(&checkpoint).expect("a folder");
    (folder, checkpoint)
});

/// A tiny model with the prompts of a few rows.
static RUN: LazyLock<(Model, PromptBuilder, Dataset)> = LazyLock::new(|| {
    let_guarded_panics_pass();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/models/tests/golden/checkpoints/qwen2_5_vl_tied");
    let checkpoint = Checkpoint::open(&folder).expect("a checkpoint");
    let model = Model::load(&checkpoint, &LoadOptions::default()).expect("a model");
    let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default()).expect("prompts");
    let rows = (0..4).map(|number| json!({ "problem": format!("What is {number}?"), "solution": "1" }));
    let dataset = RowReader::new("fuzz").dataset(rows).expect("rows");
    (model, prompts, dataset)
});

fuzz_target!(|bytes: &[u8]| {
    let (folder, checkpoint) = &*FOLDER;
    std::fs::write(checkpoint.join("trainer_state.json"), bytes).expect("a file");
    // Bytes that are no JSON stand for the sums, too.
    let sums = match bytes.first() {
        Some(b'{') => {
            let hash: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{hash}  trainer_state.json\n").into_bytes()
        }
        _ => bytes.to_vec(),
    };
    std::fs::write(checkpoint.join("SHA256SUMS"), sums).expect("a file");
    list(folder.path()).expect("a list");
    let Ok(state) = read_state(checkpoint) else { return };
    assert!(state.global_step == 2 && state.rollout <= 2);
    if let Some(buffer) = &state.buffer {
        for (row, ids) in buffer.ids.iter().enumerate() {
            assert_eq!((buffer.texts[row].len(), buffer.truncated[row].len()), (ids.len(), ids.len()));
            assert_eq!(buffer.old[row].len(), ids.len());
        }
        assert_eq!((buffer.rows.len(), buffer.epochs.len()), (buffer.ids.len(), buffer.ids.len()));
        assert_eq!(buffer.reward_totals.len(), buffer.ids.iter().map(Vec::len).sum::<usize>());
        let (model, prompts, dataset) = &*RUN;
        let algorithm = Algorithm { num_generations: buffer.ids.first().map_or(1, Vec::len), ..Algorithm::default() };
        // Most rows of a damaged state do not exist, and their prompts are not those of its completions.
        let mut buffer = buffer.clone();
        buffer.rows.iter_mut().for_each(|row| *row %= 5);
        buffer.prompts.clear();
        if let Ok(parts) = buffer.restore(&algorithm, model, prompts, dataset, 2, false) {
            let groups: usize = parts.iter().map(|part| part.groups.len()).sum();
            assert_eq!(groups, buffer.rows.len());
            assert!(parts.iter().flat_map(|part| part.completions()).all(|scored| scored.advantage.is_finite()));
        }
    }
    let mut order = Order::new((0..40).collect(), 7, true, BTreeSet::new());
    if order.resume(state.order).is_ok() {
        for _ in 0..3 {
            let _ = order.draw_batch(3);
        }
        assert!(order.epochs_done() >= 0.0 && order.num_usable() <= 40);
    }
});
