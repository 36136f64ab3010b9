//! Ranks as threads: the bits of one process, whatever the settings, and one outcome on all ranks.

use std::sync::Condvar;
use std::thread;
use std::time::Duration;

use omnigrpo_grpo::{AdvantageKind, Divergence, RECIPES};
use omnigrpo_models::{Checkpoint, ContextTemplate, LoadOptions, LoraConfig, PrivilegedContext, RouterPlan};
use omnigrpo_observe::RunLock;
use omnigrpo_ops::Device;
use omnigrpo_ranks::{Engine, Ranks, Threads};
use omnigrpo_train::{Batch, Evaluation, Judged, Offload, Shard, Split, evaluate_split};

use super::exact::{SETTINGS, Setting};
use super::turns::interact;
use super::*;

const LEAVES: usize = 4;

/// Runs a setup as each of `size` ranks, which write to `out`. `new` receives the rank.
fn over(
    size: usize,
    out: &Path,
    new: impl Fn(usize, &Path) -> TrainSetup + Sync,
    stop: impl Fn(usize) -> bool + Sync,
) -> Vec<Result<RunSummary, TrainError>> {
    let connected = Threads::new(size).into_iter().map(|engine| {
        let queue = engine.queue();
        Ranks::new(engine).with_queue(queue)
    });
    over_ranks(connected.collect(), out, new, stop)
}

/// Runs a setup as each of the given ranks.
fn over_ranks(
    connected: Vec<Ranks>,
    out: &Path,
    new: impl Fn(usize, &Path) -> TrainSetup + Sync,
    stop: impl Fn(usize) -> bool + Sync,
) -> Vec<Result<RunSummary, TrainError>> {
    let (new, stop, size) = (&new, &stop, connected.len());
    let rank = |(rank, ranks): (usize, Ranks)| {
        // A folder for the lock that a test's setup takes.
        let scratch = TempDir::new().unwrap();
        let mut setup = new(rank, if rank == 0 { out } else { scratch.path() });
        if rank > 0 {
            setup.lock = RunLock::of_first_rank(out);
        }
        let split = &mut setup.algorithm.split;
        // Three ranks have a number of leaves of their own.
        split.settings.leaves = Some(split.settings.leaves.unwrap_or(LEAVES));
        split.ranks = ranks.clone();
        if let (Device::Gpu(card), 2..) = (setup.model.device(), size) {
            card.connect(&ranks, &[]).unwrap();
        }
        let console = Console::plain(std::io::sink());
        let summary = train(setup, &console, &AtomicBool::new(stop(rank)));
        assert_eq!(names(scratch.path()).len(), usize::from(rank > 0), "rank {rank} has written files");
        summary
    };
    thread::scope(|scope| {
        let all: Vec<_> =
            connected.into_iter().enumerate().map(|own| scope.spawn(move || rank(own))).collect();
        all.into_iter().map(|rank| rank.join().unwrap().map(|trained| trained.summary)).collect()
    })
}

/// Runs a setup over ranks that all succeed, and returns the summary of the first.
fn done(size: usize, out: &Path, new: impl Fn(usize, &Path) -> TrainSetup + Sync) -> RunSummary {
    let (all, failed): (Vec<_>, Vec<_>) =
        over(size, out, new, |_| false).into_iter().partition(|own| own.is_ok());
    let failed: Vec<String> = failed.into_iter().map(|own| told(&own.unwrap_err())).collect();
    assert!(failed.is_empty(), "{failed:?}");
    let mut all: Vec<RunSummary> = all.into_iter().map(Result::unwrap).collect();
    let ends: BTreeSet<_> = all.iter().map(|own| (own.steps, own.interrupted)).collect();
    assert_eq!(ends.len(), 1, "{ends:?}");
    all.swap_remove(0)
}

/// Compares the records, the model and the newest checkpoint of two runs.
fn assert_same(a: &Path, b: &Path, what: &str) {
    assert_eq!(names(a), names(b), "{what}");
    assert_eq!(timeless(a), timeless(b), "{what}");
    assert_eq!(lines(&a.join("skipped.jsonl")), lines(&b.join("skipped.jsonl")), "{what}");
    for step in 1.. {
        let name = format!("rollouts/step-{step:06}.jsonl");
        if !a.join(&name).exists() {
            assert!(!b.join(&name).exists(), "{what}: {name}");
            break;
        }
        let of = |dir: &Path| -> Vec<Value> {
            let mut rows = lines(&dir.join(&name));
            rows.iter_mut().for_each(|row| drop(row.as_object_mut().unwrap().remove("timestamp")));
            rows
        };
        assert_eq!(of(a), of(b), "{what}: {name}");
    }
    let newest = checkpoints(a).pop().unwrap();
    for folder in ["", &newest] {
        let files = names(&a.join(folder)).into_iter().filter(|name| name.ends_with(".safetensors"));
        let files: Vec<String> = files.collect();
        assert!(!files.is_empty(), "{what}: {folder:?} has no weights");
        for file in files {
            let of = |dir: &Path| raw_tensors(&dir.join(folder).join(&file));
            assert!(of(a) == of(b), "{what}: {folder}/{file} differs");
        }
    }
}

/// A run of three updates with four prompts each, in micro-batches of one prompt.
fn plain(place: &Place, out: &Path) -> TrainSetup {
    let mut setup = setup::setup(NAME, &place.file, place.dir.path(), out);
    (setup.run.max_steps, setup.run.prompts_per_step, setup.run.save.when) = (Some(3), 4, SaveWhen::Steps(3));
    setup.algorithm.prompts_per_micro_batch = 1;
    // One row of six teaches nothing.
    setup.rewards = reward(|input| match input.prompt.contains("What is 0") {
        true => 0.5,
        false => input.key.sample as f64 + input.prompt.len() as f64 / 100.0,
    });
    setup
}

fn ranks_give_the_bits_of_one_process(place: &Place, what: &str, change: impl Fn(&mut TrainSetup) + Sync) {
    let run = |size: usize| {
        let out = place.out(&format!("{what}-{size}"));
        done(size, &out, |_, out| {
            let mut setup = plain(place, out);
            change(&mut setup);
            setup
        });
        out
    };
    let alone = run(1);
    for size in [2, 4] {
        assert_same(&alone, &run(size), &format!("{what} on {size} ranks"));
    }
}

#[test]
fn every_setting_gives_the_bits_of_one_process() {
    fn reads_text_only(setup: &mut TrainSetup) {
        run_model(setup, "qwen3");
        let rows = (0..6).map(|n| json!({"question": format!("What is {n} + 1?"), "answer": n + 1}));
        setup.dataset = Arc::new(omnigrpo_data::RowReader::new("sums").dataset(rows).unwrap());
        setup.rows = (0..6).collect();
    }
    fn teaches_itself(setup: &mut TrainSetup) {
        setup.prompts = Arc::new(teachers::telling(Some(PrivilegedContext {
            column: "solution".to_owned(),
            template: ContextTemplate::default(),
        })));
        let loss = &mut setup.algorithm.loss;
        (loss.beta, loss.distillation) = (0.0, 0.5);
        loss.divergence = Divergence::Jsd { top_k: 4, beta: 0.5 };
    }
    let more: [Setting; 14] = [
        ("plain", |_| {}),
        ("deviation of the batch", |s| s.algorithm.advantage = AdvantageKind::Batch),
        ("rewards normalised first", |s| s.algorithm.normalize_then_sum = true),
        ("several leaves per micro-batch", |s| s.algorithm.prompts_per_micro_batch = 3),
        ("a prompt less than ranks", |s| s.run.prompts_per_step = 3),
        ("one prompt", |s| s.run.prompts_per_step = 1),
        ("recomputation", |s| s.algorithm.recompute = true),
        ("bf16", |s| s.model = omnigrpo_testkit::load(&checkpoint(NAME), WeightDtype::BFloat16).unwrap()),
        ("states in place of keys", |s| run_model(s, "qwen3_5")),
        ("states in place of keys, weights in parts", |s| {
            run_model(s, "qwen3_5");
            cut_weights(s);
        }),
        ("its own teacher", teaches_itself),
        ("its own teacher, weights in parts", |s| {
            teaches_itself(s);
            cut_weights(s);
        }),
        ("text alone", reads_text_only),
        ("text alone, weights in parts", |s| {
            reads_text_only(s);
            (s.algorithm.split.settings.shard, s.algorithm.split.settings.least_cut) = (Shard::Weights, 0);
        }),
    ];
    let place = Place::new();
    for (what, change) in SETTINGS.into_iter().chain(more) {
        ranks_give_the_bits_of_one_process(&place, what, change);
    }
}

/// The state of the optimizer has the same bits in files and in memory, whole and in parts, and a run resumes with another place.
#[test]
fn a_state_in_files_gives_the_same_bits() {
    let place = Place::new();
    let (folder, missing) = (place.dir.path().join("disk"), place.dir.path().join("no disk"));
    std::fs::create_dir(&folder).unwrap();
    for (dtype, model) in [("f32", WeightDtype::Float32), ("bf16", WeightDtype::BFloat16)] {
        let run = |what: &str, size: usize, shard: Shard, offload: [Offload; 2]| {
            let out = place.out(&format!("{what}-{dtype}"));
            for (steps, offload) in [2, 4].into_iter().zip(offload) {
                done(size, &out, |_, out| {
                    let mut setup = plain(&place, out);
                    setup.model = omnigrpo_testkit::load(&checkpoint(NAME), model).unwrap();
                    (setup.run.max_steps, setup.run.save.when) = (Some(steps), SaveWhen::Steps(2));
                    setup.algorithm.split.settings.shard = shard;
                    (setup.optimizer.offload, setup.optimizer.offload_folder) =
                        (offload, Some(folder.clone()));
                    setup
                });
            }
            out
        };
        let memory = run("memory", 1, Shard::None, [Offload::None; 2]);
        let cases = [
            ("file", 1, Shard::None, [Offload::File; 2]),
            ("file on ranks", 2, Shard::None, [Offload::File; 2]),
            ("file in parts", 2, Shard::Optimizer, [Offload::File; 2]),
            ("memory to file", 1, Shard::None, [Offload::None, Offload::File]),
            ("file to memory", 1, Shard::None, [Offload::File, Offload::None]),
        ];
        for (what, size, shard, offload) in cases {
            assert_same(&memory, &run(what, size, shard, offload), what);
        }
    }
    assert_eq!(names(&folder).len(), 0, "files have names");
    let mut setup = plain(&place, &place.out("missing"));
    (setup.optimizer.offload, setup.optimizer.offload_folder) = (Offload::File, Some(missing.clone()));
    let error = told(&super::run(setup).unwrap_err());
    assert!(error.contains("optimizer's state") && error.contains(&*missing.to_string_lossy()), "{error}");
}

/// A rank of two whose work between two exchanges begins when the first rank has done its own.
struct Late {
    engine: Threads,
    /// Number of exchanges that the first rank has reached.
    reached: Arc<(Mutex<u64>, Condvar)>,
    /// Number of exchanges that this rank has left.
    left: AtomicU64,
}

impl Late {
    fn pair() -> Vec<Self> {
        let reached = Arc::default();
        let of = |engine| Self { engine, reached: Arc::clone(&reached), left: AtomicU64::new(0) };
        Threads::new(2).into_iter().map(of).collect()
    }

    fn reach(&self, more: u64) {
        if self.engine.rank() == 0 {
            let mut reached = self.reached.0.lock().unwrap();
            *reached = reached.saturating_add(more);
            self.reached.1.notify_all();
        }
    }

    fn exchange(
        &self,
        exchange: impl FnOnce(&Threads) -> omnigrpo_ranks::Result<()>,
    ) -> omnigrpo_ranks::Result<()> {
        self.reach(1);
        exchange(&self.engine)?;
        let left = self.left.fetch_add(1, Ordering::Relaxed) + 1;
        if self.engine.rank() == 1 {
            let reached = self.reached.0.lock().unwrap();
            let waits = |reached: &mut u64| *reached <= left;
            drop(self.reached.1.wait_timeout_while(reached, Duration::from_secs(60), waits).unwrap());
        }
        Ok(())
    }
}

impl Engine for Late {
    fn rank(&self) -> usize {
        self.engine.rank()
    }

    fn size(&self) -> usize {
        self.engine.size()
    }

    fn name(&self) -> String {
        self.engine.name()
    }

    fn all_to_all(&self, send: &[u8], recv: &mut [u8]) -> omnigrpo_ranks::Result<()> {
        self.exchange(|engine| engine.all_to_all(send, recv))
    }

    fn all_gather(&self, own: &[u8], all: &mut [u8]) -> omnigrpo_ranks::Result<()> {
        self.exchange(|engine| engine.all_gather(own, all))
    }

    fn broadcast(&self, root: usize, bytes: &mut [u8]) -> omnigrpo_ranks::Result<()> {
        self.exchange(|engine| engine.broadcast(root, bytes))
    }

    fn barrier(&self) -> omnigrpo_ranks::Result<()> {
        self.exchange(Engine::barrier)
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        self.reach(u64::MAX);
    }
}

/// A rank that is free takes the prompts of a slow one, with the same bits.
#[test]
fn a_free_rank_takes_the_prompts_of_a_slow_one() {
    let place = Place::new();
    let new = |_: usize, out: &Path| {
        let mut setup = plain(&place, out);
        setup.run.prompts_per_step = 6;
        // Prompts whose results are kept for the update stay where they are.
        setup.algorithm.recall = false;
        setup
    };
    let (alone, shared) = (place.out("alone"), place.out("shared"));
    done(1, &alone, new);
    let ranks = Late::pair();
    let queue = ranks[0].engine.queue();
    let with_queue = |rank: Late| {
        let queue = rank.engine.queue();
        Ranks::new(rank).with_queue(queue)
    };
    let ended = over_ranks(ranks.into_iter().map(with_queue).collect(), &shared, new, |_| false);
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
    assert_eq!(queue.takers(), [0; 6], "three of the prompts belong to each rank");
    assert_same(&alone, &shared, "a slow rank");
}

/// Videos of all ranks are sampled with shuffled frames, and answers that need the order of frames earn a bonus.
#[test]
fn the_bonus_for_order_gives_the_bits_of_one_process() {
    let place = Place::new();
    // The row without a video earns no bonus.
    let clips = [0, 1, 3, 4, 5];
    let row = |i: usize| {
        let question = if clips.contains(&i) { "<video>Which way?" } else { "What is 1 + 2?" };
        let turns = [("human", question), ("gpt", "right")]
            .map(|(from, value)| json!({"from": from, "value": value}));
        let mut row = json!({"id": format!("text {i}"), "conversations": turns});
        if clips.contains(&i) {
            let video = json!({"id": format!("clip {i}"), "video": format!("{i}.gif"), "fps": 2.0, "min_pixels": 3136,
                "max_pixels": 12544});
            row.as_object_mut().unwrap().extend(video.as_object().unwrap().clone());
        }
        row
    };
    clips.iter().for_each(|i| {
        std::fs::copy(golden("media/clip.gif"), place.dir.path().join(format!("{i}.gif"))).unwrap();
    });
    std::fs::write(&place.file, (0..6).map(|i| format!("{}\n", row(i))).collect::<String>()).unwrap();
    let shuffled = {
        let mut settings = prompts(&checkpoint(NAME), 8).settings().clone();
        settings.media.shuffle_frames = true;
        Arc::new(
            omnigrpo_models::PromptBuilder::open(&Checkpoint::open(&checkpoint(NAME)).unwrap(), settings)
                .unwrap(),
        )
    };
    ranks_give_the_bits_of_one_process(&place, "order", |setup| {
        setup.shuffled = Some(Arc::clone(&shuffled));
        setup.rewards = RewardSet::new(vec![Box::new(Answer)], &[]).unwrap();
        (setup.run.prompts_per_step, setup.algorithm.num_generations) = (6, 4);
    });
    let bonuses = |id: &str| -> Vec<Value> {
        let rows = (1..=3)
            .flat_map(|step| lines(&place.out("order-4").join(format!("rollouts/step-{step:06}.jsonl"))));
        rows.filter(|row| row["id"].as_str().unwrap().starts_with(id))
            .map(|row| row["rewards"]["temporal_order"].clone())
            .collect()
    };
    let (of_clips, of_text) = (bonuses("clip"), bonuses("text"));
    let earned = of_clips.iter().filter(|bonus| **bonus == json!(0.3)).count();
    assert!(earned > 0 && of_clips.iter().any(|bonus| *bonus == json!(0.0)), "{of_clips:?}");
    assert!(of_text.len() >= 4 && of_text.iter().all(Value::is_null), "{of_text:?}");
}

/// Correctness that depends on the tokens of the completion alone.
struct Answer;

impl Reward for Answer {
    fn name(&self) -> &str {
        "accuracy"
    }

    fn range(&self) -> (f64, f64) {
        (0.0, 1.0)
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        Ok(batch.iter().map(|input| Some(f64::from(input.completion_ids.iter().sum::<u32>() % 2))).collect())
    }
}

/// Turns of an environment reach the ranks that score, record and train on them.
#[test]
fn turns_give_the_bits_of_one_process() {
    let more: [Setting; 3] = [
        ("turns", |_| {}),
        ("turns, two updates per rollout", |s| s.run.num_iterations = 2),
        ("turns, dynamic sampling", |s| s.algorithm.max_resample_times = 2),
    ];
    let place = Place::new();
    for (what, change) in more {
        ranks_give_the_bits_of_one_process(&place, what, |setup| {
            interact(setup, None);
            change(setup);
        });
        let records = lines(&place.out(&format!("{what}-1")).join("rollouts/step-000001.jsonl"));
        assert!(
            records.iter().any(|row| row["turns"][0]["media"][0].is_string()),
            "{what}: no turn has a picture"
        );
    }
}

/// A run that four ranks began between two updates of a rollout with turns goes on in two, with the same weights and without a
/// question to the environment.
#[test]
fn a_rollout_with_turns_is_resumed_on_other_ranks() {
    let place = Place::new();
    let new = |steps: u64| {
        let place = &place;
        move |_: usize, out: &Path| {
            let mut setup = plain(place, out);
            interact(&mut setup, None);
            setup.run.num_iterations = 2;
            setup.run.save.when = SaveWhen::Steps(1);
            setup.run.max_steps = Some(steps);
            setup.run.schedule.kind = omnigrpo_train::ScheduleKind::Constant;
            setup
        }
    };
    let (whole, parts) = (place.out("whole"), place.out("parts"));
    done(1, &whole, new(4));
    done(4, &parts, new(3));
    done(2, &parts, new(4));
    let weights = |dir: &Path| raw_tensors(&dir.join("model.safetensors"));
    assert!(weights(&whole) == weights(&parts));
}

#[test]
fn every_loss_gives_the_bits_of_one_process() {
    let place = Place::new();
    let kinds: [Setting; 4] = [
        ("f32", |_| {}),
        ("bf16", in_bf16),
        ("f32, adapters", adapters),
        ("bf16, adapters", |s| {
            in_bf16(s);
            adapters(s);
        }),
    ];
    // Kinds of weights do not depend on the loss: the first one has all kinds, and each other one the next kind.
    for (at, recipe) in RECIPES.iter().enumerate() {
        let own = if at == 0 { &kinds[..] } else { &kinds[at % 4..=at % 4] };
        for &(kind, change) in own {
            ranks_give_the_bits_of_one_process(&place, &format!("{}, {kind}", recipe.name), |setup| {
                change(setup);
                setup.algorithm.follow(recipe);
                setup.algorithm.loss.beta = 0.02;
                (setup.run.num_iterations, setup.run.max_steps) = (2, Some(2));
                setup.run.save.when = SaveWhen::Steps(2);
            });
        }
    }
}

/// Losses of the routers have sums over all rows of a step.
#[test]
fn experts_give_the_bits_of_one_process() {
    let place = Place::new();
    ranks_give_the_bits_of_one_process(&place, "experts", |setup| {
        run_model(setup, "aria");
        setup.algorithm.router = RouterPlan { aux: 0.01, z: 0.001 };
    });
}

/// Three ranks have other sums than one, two or four, but the same ones however the state and the weights are divided, and those of one
/// process with three leaves.
#[test]
fn three_ranks_are_exact_among_themselves() {
    let place = Place::new();
    let run = |what: &str, size: usize, shard: Shard| {
        let out = place.out(what);
        done(size, &out, |_, out| {
            let mut setup = plain(&place, out);
            cut_into(&mut setup, shard);
            setup.algorithm.split.settings.leaves = Some(3);
            setup
        });
        out
    };
    let alone = run("alone", 1, Shard::None);
    assert_same(&alone, &run("three", 3, Shard::None), "three ranks");
    assert_same(&alone, &run("three, cut", 3, Shard::Weights), "three ranks with cut weights");
}

/// Trains adapters with dropout on all linear layers.
pub(super) fn adapters(setup: &mut TrainSetup) {
    let lora = LoraConfig {
        rank: 2,
        alpha: 4.0,
        dropout: 0.1,
        rslora: false,
        targets: vec!["all-linear".into()],
        seed: 5,
    };
    setup.model.add_lora(&lora).unwrap();
    (setup.selection.llm, setup.selection.projector, setup.selection.towers) = (false, false, false);
}

#[test]
fn adapters_and_evaluations_give_the_bits_of_one_process() {
    let place = Place::new();
    ranks_give_the_bits_of_one_process(&place, "lora", adapters);
    ranks_give_the_bits_of_one_process(&place, "evaluation", |setup| {
        let mut plan = EvalPlan::new(Arc::clone(&setup.prompts), Arc::clone(&setup.dataset));
        plan.options.batch_rows = 2;
        setup.eval = Some(plan);
        (setup.run.eval.when, setup.run.eval.on_start) = (EvalWhen::Steps(1), true);
        (setup.run.save.when, setup.run.eval.best_metric) = (SaveWhen::Best, "eval_reward".into());
    });
}

/// Moves the model to an emulator of the rank, whose gradients are exchanged in several pieces, and shortens the run.
fn on_a_card(setup: &mut TrainSetup, dtype: WeightDtype) {
    let options = LoadOptions { dtype, device: Device::emulator().unwrap(), ..LoadOptions::default() };
    setup.model = Model::load(&Checkpoint::open(&checkpoint(NAME)).unwrap(), &options).unwrap();
    (setup.run.max_steps, setup.run.save.when) = (Some(2), SaveWhen::Steps(2));
    setup.algorithm.split.settings.bucket = 5000;
}

/// Gradients are summed on the cards, over a stand-in of NCCL.
#[test]
fn cards_give_the_bits_of_one_card() {
    let place = Place::new();
    let run = |what: &str, size: usize, change: fn(&mut TrainSetup)| {
        let out = place.out(&format!("{what}-{size}"));
        done(size, &out, |_, out| {
            let mut setup = plain(&place, out);
            change(&mut setup);
            setup
        });
        out
    };
    let cases: [Setting; 2] = [
        ("a card, bf16", |s| on_a_card(s, WeightDtype::BFloat16)),
        ("a card, adapters", |s| {
            on_a_card(s, WeightDtype::Auto);
            let targets = vec!["all-linear".into()];
            let lora = LoraConfig { rank: 2, alpha: 4.0, dropout: 0.0, rslora: false, targets, seed: 5 };
            s.model.add_lora(&lora).unwrap();
            (s.selection.llm, s.selection.projector, s.selection.towers) = (false, false, false);
        }),
    ];
    for (what, change) in cases {
        assert_same(&run(what, 1, change), &run(what, 2, change), what);
    }
    // The CPU updates a state that is cut, and sums squares in its own order. The bits are the same however much is cut.
    let state = run("a cut state on cards", 2, |s| {
        on_a_card(s, WeightDtype::Auto);
        s.algorithm.split.settings.shard = Shard::Optimizer;
    });
    let weights = run("cut weights on cards", 4, |s| {
        on_a_card(s, WeightDtype::Auto);
        cut_weights(s);
    });
    assert_same(&state, &weights, "what is cut on cards");
}

/// Cuts the state of the optimizer. Buckets of several weights, of one weight and of a part of a weight occur.
fn cut(setup: &mut TrainSetup) {
    cut_into(setup, Shard::Optimizer);
}

/// Cuts what `shard` names. All weights of blocks are cut, however small.
fn cut_into(setup: &mut TrainSetup, shard: Shard) {
    let split = &mut setup.algorithm.split;
    (split.settings.shard, split.settings.bucket, split.settings.least_cut) = (shard, 5000, 0);
}

fn cut_weights(setup: &mut TrainSetup) {
    cut_into(setup, Shard::Weights);
}

fn in_bf16(setup: &mut TrainSetup) {
    setup.model = omnigrpo_testkit::load(&checkpoint(NAME), WeightDtype::BFloat16).unwrap();
}

#[test]
fn a_cut_state_gives_the_bits_of_one_process() {
    let place = Place::new();
    let alone = place.out("whole");
    done(1, &alone, |_, out| plain(&place, out));
    let cases: [Setting; 5] = [
        ("cut", cut),
        ("cut with large buckets", |s| s.algorithm.split.settings.shard = Shard::Optimizer),
        ("small buckets", |s| s.algorithm.split.settings.bucket = 5000),
        ("buckets of one element", |s| {
            cut(s);
            s.algorithm.split.settings.bucket = 1000;
        }),
        ("sums of the engine", |s| {
            cut(s);
            // The threads of a test have no sum of their own, so it is the ordered one.
            s.algorithm.split.settings.sum = omnigrpo_train::GradientSum::Engine;
        }),
    ];
    for (what, change) in cases {
        for size in [2, 4] {
            let out = place.out(&format!("{what}-{size}"));
            done(size, &out, |_, out| {
                let mut setup = plain(&place, out);
                change(&mut setup);
                setup
            });
            assert_same(&alone, &out, &format!("{what} on {size} ranks"));
        }
    }
    for shard in [Shard::Optimizer, Shard::Gradients, Shard::Weights] {
        let what = |what: &str| format!("{shard:?}, {what}");
        ranks_give_the_bits_of_one_process(&place, &what("in bf16"), |setup| {
            in_bf16(setup);
            cut_into(setup, shard);
        });
        ranks_give_the_bits_of_one_process(&place, &what("in bf16 without masters"), |setup| {
            in_bf16(setup);
            cut_into(setup, shard);
            setup.optimizer.pure_bf16 = true;
        });
        ranks_give_the_bits_of_one_process(&place, &what("moments in 8 bits"), |setup| {
            in_bf16(setup);
            cut_into(setup, shard);
            let own = &mut setup.optimizer;
            (own.pure_bf16, own.stochastic_rounding, own.optim) = (true, true, Optim::AdamW8bit);
        });
        ranks_give_the_bits_of_one_process(&place, &what("adapters"), |setup| {
            adapters(setup);
            cut_into(setup, shard);
        });
        // The bits are those of ranks that cut nothing.
        for size in [2, 4] {
            let out = place.out(&format!("{shard:?}-{size}"));
            done(size, &out, |_, out| {
                let mut setup = plain(&place, out);
                cut_into(&mut setup, shard);
                setup
            });
            assert_same(&alone, &out, &format!("{shard:?} on {size} ranks"));
        }
    }
}

/// Gradients and weights that are cut, with streams, leaves and prompts that are uneven on the ranks.
#[test]
fn cut_weights_give_the_bits_of_one_process_with_every_setting() {
    let more: [Setting; 9] = [
        ("two micro-batches per leaf", |s| s.run.prompts_per_step = 8),
        ("a prompt less than ranks", |s| s.run.prompts_per_step = 3),
        ("one prompt", |s| s.run.prompts_per_step = 1),
        ("recomputation", |s| s.algorithm.recompute = true),
        ("no reference", |s| s.algorithm.loss.beta = 0.0),
        ("adapters in bf16 with a reference", |s| {
            in_bf16(s);
            adapters(s);
            s.algorithm.loss.beta = 0.02;
        }),
        ("a frozen language model", |s| s.selection.llm = false),
        ("a copied reference", |s| {
            s.algorithm.loss.beta = 0.02;
            s.reference_device = s.model.device();
        }),
        ("two streams on some ranks", |s| {
            (s.algorithm.max_stream_tokens, s.run.num_iterations) = (Some(40), 2);
            s.algorithm.loss.beta = 0.02;
        }),
    ];
    let place = Place::new();
    for (what, change) in SETTINGS.into_iter().chain(more) {
        for shard in [Shard::Gradients, Shard::Weights] {
            ranks_give_the_bits_of_one_process(&place, &format!("{what}, {shard:?}"), |setup| {
                change(setup);
                cut_into(setup, shard);
            });
        }
    }
    ranks_give_the_bits_of_one_process(&place, "evaluation with cut weights", |setup| {
        cut_weights(setup);
        let mut plan = EvalPlan::new(Arc::clone(&setup.prompts), Arc::clone(&setup.dataset));
        plan.options.batch_rows = 2;
        setup.eval = Some(plan);
        (setup.run.eval.when, setup.run.eval.on_start) = (EvalWhen::Steps(1), true);
    });
}

/// Returns the state of the optimizer on each rank after one update, in bytes.
#[test]
fn a_rank_has_its_part_of_the_state() {
    let place = Place::new();
    let of = |size: usize, shard: Shard| {
        let out = place.out(&format!("state-{size}-{shard:?}"));
        done(size, &out, |_, out| {
            let mut setup = plain(&place, out);
            setup.run.max_steps = Some(1);
            setup.run.save.when = SaveWhen::Steps(1);
            setup.algorithm.split.settings.shard = shard;
            setup
        });
        number(timeless(&out).last().unwrap(), "params_without_grad");
        let row = lines(&out.join("metrics.jsonl")).pop().unwrap();
        row["memory/optimizer_mb"].as_f64().unwrap() * 1e6
    };
    let trained = setup::setup(NAME, &place.file, place.dir.path(), &place.out("count"));
    trained.selection.apply(&trained.model).unwrap();
    let all: usize = trained.model.params().iter().filter(|p| p.trainable()).map(|p| 8 * p.len()).sum();
    assert_eq!(of(2, Shard::None), all as f64);
    for size in [2, 4] {
        let (own, share) = (of(size, Shard::Optimizer), (all / size) as f64);
        // Both moments of a block of 4096 elements.
        assert!((own - share).abs() <= 8.0 * 4096.0, "{own} of {all} bytes on one of {size} ranks");
    }
}

#[test]
fn a_checkpoint_of_a_cut_state_that_fails_ends_all_ranks() {
    let place = Place::new();
    let out = place.out("blocked");
    std::fs::create_dir_all(&out).unwrap();
    // A file in place of the directory in which the checkpoint is prepared.
    std::fs::write(out.join("tmp-checkpoint-3"), "").unwrap();
    let new = |_: usize, out: &Path| {
        let mut setup = plain(&place, out);
        cut(&mut setup);
        setup
    };
    let told_by: Vec<String> =
        over(2, &out, new, |_| false).into_iter().map(|own| told(&own.unwrap_err())).collect();
    assert!(told_by.iter().all(|own| own.contains("tmp-checkpoint-3")), "{told_by:?}");
    assert!(checkpoints(&out).is_empty());
}

#[test]
fn a_broken_row_gives_the_bits_of_one_process() {
    let place = with_a_broken_row();
    ranks_give_the_bits_of_one_process(&place, "a broken row", |_| {});
    assert_eq!(number(timeless(&place.out("a broken row-4")).last().unwrap(), "data/skipped"), 1.0);
}

/// Four ranks write checkpoints; two ranks or one process continue, also in the middle of a generation.
#[test]
fn a_run_resumes_to_the_bit_with_another_number_of_ranks() {
    let cases: [Setting; 6] = [
        ("plain", |_| {}),
        ("imitation", |s| s.run.objective = Objective::Imitate),
        ("a cut state", cut),
        ("cut weights", cut_weights),
        ("several iterations", |s| s.run.num_iterations = 2),
        ("several steps of a generation", |s| {
            (s.run.steps_per_generation, s.run.sync_reference) =
                (2, Some(omnigrpo_train::SyncReference { every: 1, mixup: 0.5 }));
        }),
    ];
    for (what, change) in cases {
        let place = Place::new();
        let new = |_: usize, out: &Path| {
            let mut setup = plain(&place, out);
            (setup.run.max_steps, setup.run.save.when) = (Some(6), SaveWhen::Steps(1));
            change(&mut setup);
            setup
        };
        done(4, &place.out("whole"), new);
        let others =
            [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights].map(|shard| (2, shard));
        for (size, shard) in [(1, Shard::None)].into_iter().chain(others) {
            let name = format!("on-{size}-{shard:?}");
            let resumed = || {
                done(size, &place.out(&name), |rank, out| {
                    let mut setup = new(rank, out);
                    setup.algorithm.split.settings.shard = shard;
                    setup
                })
            };
            resumes_by(&place, 3, &name, resumed, &format!("{what} on {size} ranks, {shard:?}"));
        }
    }
}

#[test]
fn a_failure_of_one_rank_ends_all_with_its_message() {
    let place = Place::new();
    // Rank 1 has another file in place of a picture, so it cannot read what the others can.
    let other = Place::new();
    for i in 0..4 {
        std::fs::write(other.dir.path().join(format!("{i}.png")), "no picture").unwrap();
    }
    let strict = |rank: usize, out: &Path| {
        let from = if rank == 1 { &other } else { &place };
        let mut setup = plain(from, out);
        setup.run.rows.skip.strict = true;
        setup
    };
    let told_by: Vec<String> = over(2, &place.out("strict"), strict, |_| false)
        .into_iter()
        .map(|own| told(&own.unwrap_err()))
        .collect();
    assert!(told_by[0].contains("cannot be used") && told_by[0] == told_by[1], "{told_by:?}");

    // The first rank scores for all.
    let failing = |_: usize, out: &Path| {
        let mut setup = plain(&place, out);
        setup.rewards = RewardSet::new(vec![Box::new(Failing)], &[]).unwrap();
        setup
    };
    let told_by: Vec<String> = over(4, &place.out("reward"), failing, |_| false)
        .into_iter()
        .map(|own| told(&own.unwrap_err()))
        .collect();
    assert!(told_by[0].contains("no more room"), "{told_by:?}");
    assert!(
        told_by[1..].iter().all(|own| own.starts_with("rank 0: ") && own.contains("no more room")),
        "{told_by:?}"
    );
}

/// The weights of rank 1 are damaged, so only its loss is not finite. It takes part in the exchanges of its second leaf.
#[test]
fn a_loss_that_is_not_finite_on_one_rank_ends_all_with_its_message() {
    for shard in [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights] {
        not_finite_on_one_rank(shard);
    }
}

fn not_finite_on_one_rank(shard: Shard) {
    let place = Place::new();
    let new = |rank: usize, out: &Path| {
        let mut setup = setup::setup(NAME, &golden("replay/rows_ids.jsonl"), &golden(""), out);
        (setup.run.rows.replay, setup.run.prompts_per_step) = (true, 4);
        setup.algorithm.prompts_per_micro_batch = 1;
        cut_into(&mut setup, shard);
        if rank == 1 {
            let norm = setup.model.params().iter().find(|p| p.name() == "model.norm.weight").unwrap();
            norm.store(&vec![f32::NAN; norm.len()]).unwrap();
        }
        setup
    };
    let out = place.out("not-finite");
    let told_by: Vec<String> =
        over(2, &out, new, |_| false).into_iter().map(|own| told(&own.unwrap_err())).collect();
    let expected = "is NaN, expected a finite number";
    assert!(told_by.iter().all(|own| own.contains(expected)), "{shard:?}: {told_by:?}");
    assert!(told_by[0].starts_with("rank 1: "), "{shard:?}: {told_by:?}");
    assert!(!out.join("model.safetensors").exists());
}

struct Failing;

impl Reward for Failing {
    fn name(&self) -> &str {
        "failing"
    }

    fn range(&self) -> (f64, f64) {
        (0.0, 1.0)
    }

    fn score(&self, _: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        Err(RewardError::Row { reward: "failing".into(), row: "0".into(), what: "no more room".into() })
    }
}

#[test]
fn a_stop_of_one_rank_stops_all_with_a_checkpoint() {
    let place = Place::new();
    let out = place.out("run");
    let summaries = over(2, &out, |_, out| plain(&place, out), |rank| rank == 1);
    for summary in summaries {
        let summary = summary.unwrap();
        assert_eq!((summary.steps, summary.interrupted), (0, true));
    }
    assert_eq!(checkpoints(&out), ["checkpoint-0"]);
}

#[test]
fn a_reward_is_asked_once_whatever_the_number_of_ranks() {
    let place = Place::new();
    let asked = |size: usize| {
        let count = Arc::new(AtomicU64::new(0));
        done(size, &place.out(&format!("asked-{size}")), |_, out| {
            let mut setup = plain(&place, out);
            let count = Arc::clone(&count);
            setup.rewards = reward(move |input| {
                count.fetch_add(1, Ordering::Relaxed);
                input.key.sample as f64
            });
            setup
        });
        count.load(Ordering::Relaxed)
    };
    assert_eq!([asked(1), asked(4)], [3 * 4 * 3; 2]);
}

/// Examples of uneven lengths and media, whose tokens all ranks count.
#[test]
fn imitation_gives_the_bits_of_one_process() {
    let cases: [Setting; 9] = [
        ("plain", |_| {}),
        ("a prompt less than ranks", |s| s.run.prompts_per_step = 3),
        ("one prompt", |s| s.run.prompts_per_step = 1),
        ("two micro-batches per leaf", |s| s.run.prompts_per_step = 8),
        ("several streams", |s| (s.algorithm.max_stream_tokens, s.run.prompts_per_step) = (Some(24), 8)),
        ("recomputation", |s| s.algorithm.recompute = true),
        ("adapters in bf16", |s| {
            in_bf16(s);
            adapters(s);
        }),
        ("states in place of keys", |s| run_model(s, "qwen3_5")),
        ("evaluation", |s| {
            s.eval = Some(EvalPlan::new(Arc::clone(&s.prompts), Arc::clone(&s.dataset)));
            s.run.eval.when = EvalWhen::Steps(2);
        }),
    ];
    let place = Place::new();
    // The first case has every division, and each other one none and the next one.
    let shards = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights];
    for (at, (what, change)) in cases.into_iter().enumerate() {
        for shard in shards
            .into_iter()
            .enumerate()
            .filter(|(i, _)| at == 0 || [0, at % 3 + 1].contains(i))
            .map(|(_, s)| s)
        {
            ranks_give_the_bits_of_one_process(&place, &format!("imitation, {what}, {shard:?}"), |setup| {
                setup.run.objective = Objective::Imitate;
                change(setup);
                cut_into(setup, shard);
            });
        }
    }
    // One process gives the same bits with whole and with cut weights.
    let whole = place.out("imitation, plain, None-1");
    assert_same(&whole, &place.out("imitation, plain, Weights-2"), "cut weights");

    let place = with_a_broken_row();
    ranks_give_the_bits_of_one_process(&place, "imitation", |setup| setup.run.objective = Objective::Imitate);
    assert_eq!(number(timeless(&place.out("imitation-4")).last().unwrap(), "data/skipped"), 1.0);
}

/// A step of one leaf is what one process without leaves does: its sum over tokens has no tree.
#[test]
fn leaves_change_imitation_by_rounding_alone() {
    let place = Place::new();
    let norm = |leaves: usize| {
        let out = place.out(&format!("leaves-{leaves}"));
        done(1, &out, |_, out| {
            let mut setup = plain(&place, out);
            (setup.run.objective, setup.run.max_steps, setup.run.prompts_per_step) =
                (Objective::Imitate, Some(1), 6);
            setup.algorithm.split.settings.leaves = Some(leaves);
            setup.run.save.when = SaveWhen::Steps(1);
            setup
        });
        let first = timeless(&out).remove(0);
        ["loss", "entropy", "grad_norm", "num_tokens"].map(|name| number(&first, name))
    };
    let (one, four) = (norm(1), norm(4));
    for (one, four) in one.into_iter().zip(four) {
        assert!((one - four).abs() <= 1e-6 * one, "{one} and {four}");
    }
}

/// Runs `of_rank` on each of `size` ranks, with a model of its own, and returns what the first one returns and how many have failed.
fn read_over<T: Send>(
    size: usize,
    of_rank: impl Fn(&Split, &Model) -> Result<T, TrainError> + Sync,
) -> Vec<Result<T, String>> {
    let of_rank = &of_rank;
    thread::scope(|scope| {
        let all: Vec<_> = Threads::new(size)
            .into_iter()
            .map(|engine| {
                scope.spawn(move || {
                    let model = omnigrpo_testkit::load(&checkpoint(NAME), WeightDtype::Auto).unwrap();
                    of_rank(&Split::over(Ranks::new(engine)), &model).map_err(|error| told(&error))
                })
            })
            .collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The first rank gets all rows, in their order, in the batches of one process, and what an earlier process has done is not done again.
#[test]
fn evaluations_and_completions_of_rows_are_those_of_one_process() {
    let place = with_a_broken_row();
    let setup = plain(&place, &place.out("rows"));
    let mut plan = EvalPlan::new(Arc::clone(&setup.prompts), Arc::clone(&setup.dataset));
    (plan.options.batch_rows, plan.options.num_generations) = (1, 2);
    plan.options.sampling = setup.algorithm.sampling.clone();
    let rewards = || reward(|input| input.key.sample as f64 + input.prompt.len() as f64 / 100.0);

    // Row numbers of all batches, the evaluation, and the rows that were stored before.
    let evaluated = |size: usize, done: &BTreeMap<u64, Judged>| {
        let each = read_over(size, |split, model| {
            let own = if split.ranks.is_first() { done.clone() } else { BTreeMap::new() };
            let (mut stored, mut ended) = (own.clone(), 0);
            let mut each = |batch: Batch<'_>| {
                stored.extend(batch.judged.iter().cloned());
                Ok(())
            };
            let concluded = |_: &Evaluation| {
                ended += 1;
                Ok(())
            };
            let own = evaluate_split(split, model, &rewards(), &plan, own, &mut each, concluded)?;
            Ok((own, stored, ended))
        });
        let mut each: Vec<_> = each.into_iter().map(Result::unwrap).collect();
        assert!(each[1..].iter().all(|(own, stored, ended)| {
            own.summary.metrics == each[0].0.summary.metrics && stored.is_empty() && *ended == 0
        }));
        each.swap_remove(0)
    };
    let (alone, stored, ended) = evaluated(1, &BTreeMap::new());
    assert_eq!((stored.len(), alone.skipped.len(), ended), (plan.rows.len() - 1, 1, 1));
    let half: BTreeMap<u64, Judged> = stored.iter().take(2).map(|(row, own)| (*row, own.clone())).collect();
    for (size, done) in [(2, &BTreeMap::new()), (3, &BTreeMap::new()), (4, &half)] {
        let (own, stored_again, _) = evaluated(size, done);
        let text = |own: &Evaluation| serde_json::to_string(&own.rows).unwrap();
        assert_eq!((text(&own), &own.skipped), (text(&alone), &alone.skipped), "{size} ranks");
        assert_eq!(own.summary.metrics, alone.summary.metrics, "{size} ranks");
        let text = |stored: &BTreeMap<u64, Judged>| serde_json::to_string(stored).unwrap();
        assert_eq!(text(&stored_again), text(&stored), "{size} ranks");
    }

    let generated = |size: usize, rows: &[u64]| {
        let each = read_over(size, |split, model| {
            let mut all = Vec::new();
            omnigrpo_train::generate_split(
                split,
                (model, &plan.prompts),
                // The others take the rows of the first.
                (&plan.dataset, if split.ranks.is_first() { rows } else { &[] }),
                (&plan.options, None),
                &mut |_| {},
                &|batch| {
                    let texts = batch.completions.iter().flatten().map(|own| own.text.clone());
                    let bad = batch.unusable.iter().map(|(row, own)| format!("{row}: {}", own.reason));
                    Ok(texts.chain(bad).collect::<Vec<String>>())
                },
                &mut |texts| {
                    all.extend(texts);
                    Ok(())
                },
            )?;
            Ok(all)
        });
        let mut each: Vec<_> = each.into_iter().map(Result::unwrap).collect();
        assert!(each[1..].iter().all(Vec::is_empty));
        each.swap_remove(0)
    };
    for rows in [&plan.rows[..], &plan.rows[2..], &[]] {
        let alone = generated(1, rows);
        assert_eq!(alone.len(), if rows.is_empty() { 0 } else { 2 * rows.len() - 1 });
        assert!([2, 4].iter().all(|&size| generated(size, rows) == alone));
    }
}

/// A failure of one rank, or of the first one while it stores or scores rows, ends all ranks.
#[test]
fn a_failure_while_rows_are_read_ends_all_ranks() {
    let place = Place::new();
    let setup = plain(&place, &place.out("rows"));
    let mut plan = EvalPlan::new(Arc::clone(&setup.prompts), Arc::clone(&setup.dataset));
    plan.options.batch_rows = 1;
    let full = || TrainError::Data { what: "no more room".into() };
    let stored = read_over(3, |split, model| {
        let mut each = |_: Batch<'_>| Err(full());
        let rewards = reward(|_| 1.0);
        evaluate_split(split, model, &rewards, &plan, BTreeMap::new(), &mut each, |_| Ok(())).map(drop)
    });
    let written = read_over(3, |split, model| {
        let rewards = reward(|_| 1.0);
        let each = &mut |_: Batch<'_>| Ok(());
        evaluate_split(split, model, &rewards, &plan, BTreeMap::new(), each, |_| Err(full())).map(drop)
    });
    let made = read_over(3, |split, model| {
        omnigrpo_train::generate_split(
            split,
            (model, &plan.prompts),
            (&plan.dataset, &plan.rows),
            (&plan.options, None),
            &mut |_| {},
            &|_| if split.ranks.rank() == 2 { Err(full()) } else { Ok(()) },
            &mut |()| Ok(()),
        )
    });
    for (failed, rank) in [(stored, 0), (written, 0), (made, 2)] {
        let failed: Vec<String> = failed.into_iter().map(Result::unwrap_err).collect();
        for (at, own) in failed.iter().enumerate() {
            let prefix = if at == rank { String::new() } else { format!("rank {rank}: ") };
            assert_eq!(own, &format!("{prefix}no more room"), "{failed:?}");
        }
    }
}
