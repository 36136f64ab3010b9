//! The forecast of `memory` for an update, compared with the allocator's requests. A program of its own, for its allocator.
#![allow(clippy::unwrap_used, missing_docs)]

mod setup;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use omnigrpo_models::{
    Checkpoint, LoadOptions, LoraConfig, Model, PromptBuilder, PromptSettings, ReferencePlace,
};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_ops::Device;
use omnigrpo_rewards::{RewardOptions, build};
use omnigrpo_train::checkpoint::{self, Parts, TrainerState};
use omnigrpo_train::{
    AdamW, AdamWConfig, Algorithm, Collector, Divided, GradDtype, MemoryOf, MemoryPlan, Optim, PreparedRow,
    ReferenceKept, Selection, UpdateAt, Work, memory, update,
};
use serde_json::{Value, json};

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: everything is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the same contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// A model in which activations are most of an update.
fn start(dir: &Path, name: &str) -> Checkpoint {
    omnigrpo_testkit::copy_dir(&setup::checkpoint(name), dir);
    let mut config: Value = serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
    let sizes = json!({ "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2 });
    let text = if name == "qwen3_5" { &mut config["text_config"] } else { &mut config };
    text.as_object_mut().unwrap().extend(sizes.as_object().unwrap().clone());
    if name == "qwen3_5" {
        let sizes = json!({ "head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32 });
        text.as_object_mut().unwrap().extend(sizes.as_object().unwrap().clone());
        // Every fourth block attends.
        text.as_object_mut().unwrap().remove("layer_types");
        text["rope_parameters"]["mrope_section"] = json!([4, 2, 2]);
    } else {
        text["rope_scaling"]["mrope_section"] = json!([4, 6, 6]);
    }
    config["vision_config"]["out_hidden_size"] = json!(128);
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    Checkpoint::open(dir).unwrap()
}

#[test]
fn an_update_holds_what_its_outline_says() {
    // Keys and values of a token in all blocks that attend, and the states of a sequence in all others: the last three inputs of 256
    // channels, and four heads of 32 × 32. Both in numbers.
    for (name, kept, state) in
        [("qwen2_5_vl_tied", 4 * 2 * 2 * 32, 0), ("qwen3_5", 2 * 2 * 32, 3 * (3 * 256 + 4 * 32 * 32))]
    {
        holds_what_its_outline_says(name, kept, state);
    }
}

fn holds_what_its_outline_says(family: &str, numbers_per_token: usize, numbers_per_sequence: usize) {
    let place = tempfile::tempdir().unwrap();
    let checkpoint = start(place.path(), family);
    let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default()).unwrap();
    let file = setup::questions(place.path());
    let dataset = setup::dataset(&file, place.path());
    let rows: Vec<PreparedRow> =
        (0..3).map(|row| PreparedRow::new(&prompts, dataset.get(row).unwrap(), 0).unwrap()).collect();
    let rewards = build(&["random".to_owned()], &RewardOptions::default()).unwrap();
    let few =
        AdamWConfig { optim: Optim::AdamW8bit, grad_dtype: GradDtype::Bfloat16, ..AdamWConfig::default() };
    let lora = LoraConfig { rank: 8, dropout: 0.1, ..LoraConfig::default() };

    for (way, selection, adapted, recompute) in [
        ("few bits", Selection::ALL, false, false),
        ("whole", Selection::ALL, false, false),
        ("whole, recomputed", Selection::ALL, false, true),
        ("adapters", Selection::NONE, true, false),
        ("adapters, recomputed", Selection::NONE, true, true),
    ] {
        let name = &format!("{family}, {way}");
        let optimizer = if way == "few bits" { few.clone() } else { AdamWConfig::default() };
        let mut algorithm =
            Divided::from(Algorithm { num_generations: 6, recompute, ..Algorithm::default() });
        // Two streams, so that the second finds gradients.
        algorithm.max_stream_tokens = Some(1400);
        (algorithm.sampling.max_completion_length, algorithm.sampling.min_completion_length) = (100, 100);
        assert!(algorithm.loss.needs_reference());
        let make = |device: Device| {
            let options = LoadOptions { device, ..LoadOptions::default() };
            let mut model = match device {
                Device::Outline => {
                    Model::load(&checkpoint, &LoadOptions { outline: true, random: Some(1), ..options })
                }
                _ => Model::load(&checkpoint, &LoadOptions { random: Some(1), ..options }),
            }
            .unwrap();
            if adapted {
                model.add_lora(&lora).unwrap();
            }
            selection.apply(&model).unwrap();
            model
        };
        let model = make(Device::Cpu);
        let reference = model.reference(ReferencePlace::Memory(model.device())).unwrap();
        let mut adamw = AdamW::new(optimizer.clone(), model.params());
        let mut step = || {
            let (before, mut timer) = (NOW.load(Ordering::Relaxed), PhaseTimer::start(Instant::now()));
            MOST.store(before, Ordering::Relaxed);
            let collector = Collector {
                model: &model,
                prompts: &prompts,
                shuffled: None,
                rewards: &rewards,
                interaction: None,
                algorithm: &algorithm,
            };
            let mut rollouts =
                collector.collect(rows.clone(), 0, &mut |_| Ok(Vec::new()), &mut timer).unwrap();
            let at = UpdateAt { step: 0, learning_rate_factor: 1.0 };
            update((&model, Some(&reference)), &mut adamw, at, &algorithm, &mut rollouts, &mut timer)
                .unwrap();
            MOST.load(Ordering::Relaxed) - before
        };
        // The first one makes moments, and the work space that kernels keep.
        step();
        let held = step() as f64;

        let plan = MemoryPlan {
            algorithm: &algorithm,
            optimizer: &optimizer,
            work: Work::Rollout(rows.clone()),
            answer: None,
            prompts_per_step: 3,
            evaluation: None,
            reference: ReferenceKept::Copied,
            own_reference: None,
            of: MemoryOf::Host,
        };
        let outline = make(Device::Outline);
        let told = memory(&outline, &plan).unwrap();
        assert_eq!(memory(&outline, &plan).unwrap(), told, "{name}: nothing is left behind");
        let passes = (told.gradients + told.features + told.activations) as f64;
        assert!(passes > 0.9 * held && passes < 1.1 * held, "{name}: {passes} for {held}\n{told:?}");

        let bytes = |model: &Model| model.params().iter().map(|p| p.num_bytes() as u64).sum::<u64>();
        assert_eq!(told.weights + told.adapters, bytes(&model));
        let trained = || model.params().iter().filter(|p| p.trainable()).map(|p| p.len() as u64);
        let all = trained().sum::<u64>();
        match way {
            "few bits" => {
                // Two codes, and two scales of 4 bytes for 256 values; weights of few values have 8 bytes.
                let small: u64 = trained().filter(|len| *len < 4096).sum();
                let scales: u64 = trained().filter(|len| *len >= 4096).map(|len| 8 * len.div_ceil(256)).sum();
                assert_eq!(told.optimizer, 2 * (all - small) + scales + 8 * small);
                // While something is added, a gradient is in f32.
                let params = || model.params().iter().filter(|p| p.trainable());
                let most = params().map(|p| optimizer.grad_bytes(p)).sum::<usize>()
                    + params().map(|p| 4 * p.len()).max().unwrap();
                assert!(
                    told.gradients <= most as u64 && most < 4 * all as usize,
                    "{name}: {} of {most}",
                    told.gradients
                );
            }
            _ => assert_eq!(told.optimizer, 8 * all),
        }
        assert_eq!(told.reference, if adapted { 0 } else { told.weights });
        // Keys and values of each prompt once, and of all tokens of a completion but the last; states of all.
        let tokens: usize = rows.iter().map(|row| row.prompt.ids.len() + 6 * 99).sum();
        let sequences = rows.len() * (1 + 6);
        let numbers = tokens * numbers_per_token + sequences * numbers_per_sequence;
        assert_eq!(told.cache, (4 * numbers) as u64, "{name}");

        // Resuming reads the optimizer's state one tensor at a time.
        let out = place.path().join(name);
        let parts = Parts { model: &model, optimizer: Some(&adamw), reference: None };
        let saved = checkpoint::save(&out, parts, TrainerState::default(), None, &[]).unwrap();
        let state: TrainerState =
            serde_json::from_slice(&fs::read(saved.join("trainer_state.json")).unwrap()).unwrap();
        drop(adamw);
        let mut adamw = AdamW::new(optimizer.clone(), model.params());
        let before = NOW.load(Ordering::Relaxed);
        MOST.store(before, Ordering::Relaxed);
        checkpoint::load(&saved, &model, &mut adamw, &state).unwrap();
        let (most, kept) = (MOST.load(Ordering::Relaxed) - before, NOW.load(Ordering::Relaxed) - before);
        assert!(kept as u64 >= told.optimizer, "{name}: {kept} for {}", told.optimizer);
        let largest = 4 * model.params().iter().map(|p| p.len()).max().unwrap();
        // Headers, sums and the model's own weights take some memory, too.
        let room = 2 * largest + (2 << 20);
        assert!(
            most < kept + room,
            "{name}: {most} while {kept} bytes are read, in tensors of {largest} at most"
        );
    }
}
