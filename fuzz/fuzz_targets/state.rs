//! Checks that any saved state is one to resume from, or an error.
#![no_main]

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use omnigrpo_data::Order;
use omnigrpo_train::checkpoint::{list, read_state};
use sha2::{Digest, Sha256};

/// A run directory with the checkpoint of step 2.
static FOLDER: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = folder.path().join("checkpoint-2");
    std::fs::create_dir(&checkpoint).expect("a folder");
    (folder, checkpoint)
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
    }
    let mut order = Order::new((0..40).collect(), 7, true, BTreeSet::new());
    if order.resume(state.order).is_ok() {
        for _ in 0..3 {
            let _ = order.draw_batch(3);
        }
        assert!(order.epochs_done() >= 0.0 && order.num_usable() <= 40);
    }
});
