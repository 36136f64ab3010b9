//! Each test breaks one thing of a run that works, and [`Run::prepare`] finds it before the first step.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod setup;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use omnigrpo_models::{
    Checkpoint, LoadOptions, LoraConfig, Model, Prompt, PromptBuilder, PromptSettings, QuantBits, WeightDtype,
};
use omnigrpo_observe::{Console, Metric, RunLock, Trackers};
use omnigrpo_ops::{Card, Device};
use omnigrpo_ranks::{Ranks, Threads};
use omnigrpo_rewards::{RewardOptions, RewardSet, build, reward};
use omnigrpo_rollout::TurnLimits;
use omnigrpo_train::{
    AdamWConfig, Algorithm, Divided, EvalPlan, MemoryOf, MemoryPlan, ModelPlan, Objective, Observer, Output,
    Policy, Prepared, PreparedRow, ReferenceKept, ResumeFrom, RowPlan, Run, RunPlan, SavePlan, SaveWhen,
    Selection, Shard, Signals, Split, TrainError, Trained, Work, media_bytes, memory,
};
use setup::{algorithm, checkpoint, dataset, lines, optimizer, prompts, questions};

const MODEL: &str = "qwen2_5_vl_tied";

fn quiet() -> Console {
    Console::plain(std::io::sink())
}

fn by_name(name: &str) -> RewardSet {
    build(&[name], &RewardOptions::default()).unwrap()
}

/// A run of two updates on the rows of a file.
fn run(file: &Path, output_dir: &Path) -> Run {
    let dir = checkpoint(MODEL);
    let dataset = Arc::new(dataset(file, file.parent().unwrap()));
    let model = Policy::Planned(Box::new(ModelPlan::of(&Checkpoint::open(&dir).unwrap())));
    Run {
        algorithm: algorithm(3, 8),
        optimizer: optimizer(),
        selection: Selection::ALL,
        plan: RunPlan {
            max_steps: Some(2),
            prompts_per_step: 2,
            save: SavePlan { when: SaveWhen::Steps(1), ..SavePlan::default() },
            rows: RowPlan { seed: 1, ..RowPlan::default() },
            ..RunPlan::default()
        },
        media_bytes: Some(0),
        output_dir: Some(output_dir.to_owned()),
        ..Run::new(model, Arc::new(prompts(&dir, 8)), dataset, by_name("random"))
    }
}

fn train(prepared: Prepared, dir: &Path, observer: impl Observer + 'static) -> Result<Trained, TrainError> {
    let output = Output {
        lock: RunLock::acquire(dir, "this test").unwrap(),
        observer: Box::new(observer),
        trackers: Box::new(|| Trackers::none(&quiet())),
        signals: Signals::default(),
        curves: None,
    };
    prepared.train(output, &quiet(), &AtomicBool::new(false))
}

fn refusal(run: Run) -> String {
    match run.prepare(&quiet()) {
        Err(error @ TrainError::Refused(_)) => error.to_string(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("the run was not refused"),
    }
}

struct Place {
    _dir: tempfile::TempDir,
    rows: PathBuf,
    out: PathBuf,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    let (rows, out) = (questions(dir.path()), dir.path().join("run"));
    std::fs::create_dir(&out).unwrap();
    Place { _dir: dir, rows, out }
}

#[test]
fn a_row_that_cannot_be_used_is_found_and_never_drawn() {
    let place = place();
    std::fs::remove_file(place.rows.with_file_name("1.png")).unwrap();
    // One of six rows is more than the default share of unusable rows.
    let said = refusal(run(&place.rows, &place.out));
    assert!(said.contains("too many rows cannot be used: got 1 of 6 rows"), "{said}");
    let mut lenient = run(&place.rows, &place.out);
    lenient.plan.rows.skip.max_share = 0.5;
    let prepared = lenient.prepare(&quiet()).unwrap();
    assert_eq!(prepared.usable_rows(), 5);
    let [(row, id, why)] = prepared.bad_rows() else { panic!("{:?}", prepared.bad_rows()) };
    assert_eq!((*row, id.as_str()), (1, "colour-1"));
    assert!(why.contains("1.png"), "{why}");
    train(prepared, &place.out, ()).unwrap();
    assert_eq!(lines(&place.out.join("skipped.jsonl")).len(), 1);
    // Without the check, the same run begins.
    let unchecked = Run { check_rows: false, ..run(&place.rows, &place.out) };
    assert_eq!(unchecked.prepare(&quiet()).unwrap().bad_rows(), []);
}

#[test]
fn a_reward_that_applies_to_no_row_or_does_not_answer_is_refused() {
    let place = place();
    let said = refusal(Run { rewards: by_name("iou"), ..run(&place.rows, &place.out) });
    assert!(said.contains("the reward `iou` applies to no row"), "{said}");
    let unchecked = Run { check_rows: false, rewards: by_name("iou"), ..run(&place.rows, &place.out) };
    assert!(refusal(unchecked).contains("applies to no row"));
    let dead = build(&["cmd:false"], &RewardOptions::default()).unwrap();
    let said = refusal(Run { rewards: dead, ..run(&place.rows, &place.out) });
    assert!(said.contains("TrainSetup::rewards") && said.contains("nothing was sampled yet"), "{said}");
}

#[test]
fn evaluation_rows_are_checked_too() {
    let place = place();
    let other = tempfile::tempdir().unwrap();
    let file = other.path().join("rows.jsonl");
    std::fs::write(
        &file,
        "{\"problem\": \"<image>What?\", \"image\": \"missing.png\", \"solution\": \"x\"}\n",
    )
    .unwrap();
    let held_out = || Arc::new(dataset(&file, other.path()));
    let eval = || EvalPlan::new(Arc::new(prompts(&checkpoint(MODEL), 8)), held_out());
    let said = refusal(Run { eval: Some(eval()), ..run(&place.rows, &place.out) });
    assert!(said.contains("too many evaluation rows cannot be used"), "{said}");
    let said = refusal(Run { eval: Some(eval()), check_rows: false, ..run(&place.rows, &place.out) });
    assert!(said.contains("no evaluation row can be used"), "{said}");
}

#[test]
fn a_run_resumes_with_the_same_inputs_and_refuses_others() {
    let place = place();
    let first = run(&place.rows, &place.out).prepare(&quiet()).unwrap();
    assert_eq!(first.resumes_from(), None);
    let longer = |rows: &Path, resume: ResumeFrom| {
        let mut longer = run(rows, &place.out);
        (longer.plan.max_steps, longer.plan.resume.from) = (Some(3), resume);
        longer
    };
    assert!(
        refusal(longer(&place.rows, ResumeFrom::Must)).contains("no checkpoint to resume from was found")
    );
    train(first, &place.out, ()).unwrap();
    let again = longer(&place.rows, ResumeFrom::Must).prepare(&quiet()).unwrap();
    let newest = place.out.join("checkpoint-2");
    assert_eq!(again.resumes_from(), Some((newest.as_path(), 2)));
    // A copy of the rows in another folder has the same content.
    let moved = tempfile::tempdir().unwrap();
    let copy = questions(moved.path());
    let same = longer(&copy, ResumeFrom::Must).prepare(&quiet()).unwrap();
    assert_eq!(same.resumes_from(), Some((newest.as_path(), 2)));
    let text = std::fs::read_to_string(&copy).unwrap().replace("What is 0", "What is 7");
    std::fs::write(&copy, text).unwrap();
    let error = longer(&copy, ResumeFrom::Must).prepare(&quiet()).err().unwrap().to_string();
    assert!(error.contains("written with other settings (dataset: content has changed)"), "{error}");
    let error = longer(&copy, ResumeFrom::Newest).prepare(&quiet()).err().unwrap().to_string();
    assert!(error.contains("written with other settings (dataset: content has changed)"), "{error}");
    let mut again_from_the_start = longer(&copy, ResumeFrom::Newest);
    again_from_the_start.plan.resume.repeat_complete = true;
    assert_eq!(again_from_the_start.prepare(&quiet()).unwrap().resumes_from(), None);
    let trained = train(again, &place.out, ()).unwrap();
    assert_eq!((trained.summary.steps, trained.summary.steps_here), (3, 1));
}

#[test]
fn memory_is_forecast_and_a_hopeless_run_is_refused_before_it_loads() {
    let place = place();
    let prepared = run(&place.rows, &place.out).prepare(&quiet()).unwrap();
    let model = omnigrpo_testkit::load(&checkpoint(MODEL), WeightDtype::Auto).unwrap();
    let weights: usize = model.params().iter().map(|param| param.num_bytes()).sum();
    let forecast = prepared.forecast();
    assert_eq!(forecast.need.memory.weights, weights as u64);
    assert!(forecast.allows(&forecast.need) && forecast.refusal().is_none());
    assert!(forecast.need.memory.activations > 0 && forecast.need.memory.optimizer > 0);
    // A model in memory is not counted twice, and gives the same sizes.
    let mut loaded = run(&place.rows, &place.out);
    loaded.model = Policy::Loaded(Box::new(model));
    let loaded = loaded.prepare(&quiet()).unwrap();
    assert_eq!(loaded.forecast().need.memory.weights, forecast.need.memory.weights);
    assert_eq!(loaded.forecast().need.memory.activations, forecast.need.memory.activations);
    let mut small = forecast.clone();
    small.limit = Some((forecast.need.memory.lasting() - 1, "memory"));
    let said = small.refusal().unwrap().to_string();
    assert!(small.is_hopeless() && said.contains("this run does not fit into memory: got"), "{said}");
}

#[test]
fn a_card_with_room_decodes_more_completions_at_once() {
    const ROOM: u64 = 1 << 40;
    let place = place();
    let live = |num_generations, memory, change: &dyn Fn(&mut Run)| {
        let mut run = run(&place.rows, &place.out);
        let (start, device) =
            (Checkpoint::open(&checkpoint(MODEL)).unwrap(), Device::Gpu(Card::emulated(None)));
        run.model = Policy::Planned(Box::new(ModelPlan { device, ..ModelPlan::of(&start) }));
        (run.plan.prompts_per_step, run.gpu_memory) = (6, Some(memory));
        run.algorithm.num_generations = num_generations;
        // The caches of a rollout are more than what an update keeps.
        run.algorithm.max_stream_tokens = Some(300);
        run.algorithm.sampling.max_completion_length = 200;
        change(&mut run);
        let prepared = run.prepare(&quiet()).unwrap();
        (prepared.variant().algorithm.max_live, prepared.forecast().need.memory.total())
    };
    let same: &dyn Fn(&mut Run) = &|_| ();
    let given = |live| move |run: &mut Run| run.algorithm.max_live = live;
    // Six prompts. Up to 256 completions are decoded at once, in whole groups.
    for (num_generations, wanted) in [(10, 64), (16, 96), (30, 180), (50, 250), (100, 200), (300, 64)] {
        assert_eq!(live(num_generations, ROOM, same).0, wanted, "{num_generations}");
    }
    // A tenth of the memory stays free.
    let [wide, middle, narrow] = [250, 100, 63].map(|one| live(50, ROOM, &given(one)).1);
    assert!(narrow < middle && middle < wide, "{narrow} {middle} {wide}");
    let limit = |need: u64| (need as f64 / 0.9) as u64;
    assert_eq!(live(50, limit(wide) + 2, same), (250, wide));
    assert_eq!(live(50, limit(wide) - 2, same), (100, middle));
    assert_eq!(live(50, limit(middle) - 2, same).0, 64);
    // Completions of few tokens have a forecast, too.
    assert_eq!(live(50, ROOM, &|run| run.algorithm.sampling.max_completion_length = 2).0, 250);
    // Other numbers than the default, other devices and other objectives keep theirs.
    assert_eq!(live(50, ROOM, &given(8)).0, 8);
    assert_eq!(live(50, ROOM, &|run| run.plan.objective = Objective::Imitate).0, 64);
    let on_cpu = |run: &mut Run| {
        run.model = Policy::Planned(Box::new(ModelPlan::of(&Checkpoint::open(&checkpoint(MODEL)).unwrap())));
    };
    assert_eq!(live(50, ROOM, &on_cpu).0, 64);
}

#[test]
fn the_model_comes_back_and_an_observer_sees_every_number_of_the_log() {
    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<Vec<Vec<Metric>>>>);
    impl Observer for Seen {
        fn step(&mut self, _: u64, metrics: &[Metric]) -> std::ops::ControlFlow<()> {
            self.0.lock().unwrap().push(metrics.to_vec());
            std::ops::ControlFlow::Continue(())
        }
    }
    let place = place();
    let digits = reward("digits", (0.0, 64.0), |row| {
        row.completion.chars().filter(char::is_ascii_digit).count() as f64
    });
    let rewards = RewardSet::new(vec![digits], &[]).unwrap();
    let prepared = Run { rewards, ..run(&place.rows, &place.out) }.prepare(&quiet()).unwrap();
    let seen = Seen::default();
    let trained = train(prepared, &place.out, seen.clone()).unwrap();
    let logged = lines(&place.out.join("metrics.jsonl"));
    let seen = seen.0.lock().unwrap();
    assert_eq!((logged.len(), seen.len()), (2, 2));
    for (line, metrics) in logged.iter().zip(seen.iter()) {
        let names: Vec<&str> = line.as_object().unwrap().keys().map(String::as_str).skip(1).collect();
        assert_eq!(names, metrics.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>());
        for (name, value) in metrics {
            assert_eq!(line[name].as_f64(), *value, "{name}");
        }
    }
    // The weights in memory are those of the files that the run wrote.
    let saved = omnigrpo_testkit::load(&place.out, WeightDtype::Auto).unwrap();
    for (own, saved) in trained.model.params().iter().zip(saved.params()) {
        assert!(own.read().f32() == saved.read().f32(), "{}", own.name());
    }
}

/// The pictures that an environment may return are counted, by the limits of its answers.
#[test]
fn plans_count_the_answers_of_an_environment() {
    let place = tempfile::tempdir().unwrap();
    let opened = Checkpoint::open(&checkpoint(MODEL)).unwrap();
    let prompts = PromptBuilder::open(&opened, PromptSettings::default()).unwrap();
    let rows_of = dataset(&questions(place.path()), place.path());
    let rows: Vec<PreparedRow> =
        (0..2).map(|row| PreparedRow::outline(&prompts, rows_of.get(row).unwrap()).unwrap()).collect();
    let answer = Arc::new(prompts.outline_turn(2, 60).unwrap().unwrap());
    assert!(
        answer.ids.len() <= 60 && answer.ids.len() > 40 && answer.media.len() == 2,
        "{}",
        answer.ids.len()
    );
    assert!(prompts.outline_turn(2, 3).unwrap().is_none(), "no picture fits");

    let mut algorithm = Divided::from(Algorithm { num_generations: 3, ..Algorithm::default() });
    algorithm.sampling.max_completion_length = 140;
    algorithm.sampling.turns = Some(TurnLimits { max_turns: 8, ..TurnLimits::default() });
    let options = LoadOptions { device: Device::Outline, ..LoadOptions::default() };
    let model = Model::load(&opened, &LoadOptions { outline: true, ..options }).unwrap();
    Selection::ALL.apply(&model).unwrap();
    let optimizer = AdamWConfig::default();
    let told = |answer: Option<Arc<Prompt>>| {
        let work = Work::Rollout(rows.clone());
        let plan = MemoryPlan {
            algorithm: &algorithm,
            optimizer: &optimizer,
            work,
            answer,
            prompts_per_step: 2,
            evaluation: None,
            reference: ReferenceKept::No,
            own_reference: None,
            of: MemoryOf::Host,
        };
        memory(&model, &plan).unwrap()
    };
    let (plain, counted) = (told(None), told(Some(Arc::clone(&answer))));
    // Two answers fit into a completion, so two rows with three completions have 24 pictures.
    assert_eq!(counted.media - plain.media, 2 * 3 * 2 * media_bytes(&answer));
    assert!(counted.features > plain.features, "{} {}", counted.features, plain.features);
}

/// Starts a run on two ranks, which are threads, and returns what each of them says. `change` gets the number of the rank.
fn on_two_ranks(place: &Place, change: impl Fn(usize, &mut Run) + Sync) -> Vec<Result<u64, String>> {
    let (change, lock) = (&change, &RunLock::acquire(&place.out, "this test").unwrap());
    let rank = move |(rank, engine): (usize, Threads)| {
        let mut own = run(&place.rows, &place.out);
        own.algorithm.split = Split::over(Ranks::new(engine));
        change(rank, &mut own);
        let prepared = own.prepare(&quiet()).unwrap();
        let output = Output {
            lock: RunLock::of_first_rank(lock.root()),
            observer: Box::new(()),
            trackers: Box::new(|| Trackers::none(&quiet())),
            signals: Signals::default(),
            curves: None,
        };
        match prepared.train(output, &quiet(), &AtomicBool::new(false)) {
            Ok(trained) => Ok(trained.summary.steps),
            Err(TrainError::Refused(refusal)) if refusal.by_settings => Err(refusal.to_string()),
            Err(error) => panic!("{error}"),
        }
    };
    std::thread::scope(|scope| {
        let ranks = Threads::new(2).into_iter().enumerate().map(|own| scope.spawn(move || rank(own)));
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Checks that both ranks end with one message, which contains `named`, before the first step.
fn assert_differ(place: &Place, named: &str, change: impl Fn(usize, &mut Run) + Sync) {
    let said = on_two_ranks(place, change);
    let first = said[0].clone().unwrap_err();
    assert!(first.starts_with("rank 1 and rank 0 differ in ") && first.contains(named), "{named}: {first}");
    assert_eq!(said[1], Err(first));
    assert!(!place.out.join("metrics.jsonl").exists(), "{named}");
}

#[test]
fn ranks_with_other_inputs_do_not_start() {
    let place = place();
    let other = tempfile::tempdir().unwrap();
    let copy = questions(other.path());
    let on_second = |change: fn(&mut Run)| {
        move |rank: usize, run: &mut Run| {
            if rank == 1 {
                change(run)
            }
        }
    };
    // A copy of the rows in another folder makes no difference.
    let moved = |rank: usize, run: &mut Run| {
        if rank == 1 {
            run.dataset = Arc::new(dataset(&copy, other.path()));
        }
    };
    assert_eq!(on_two_ranks(&place, moved), [Ok(2), Ok(2)]);
    std::fs::remove_dir_all(&place.out).unwrap();
    std::fs::create_dir(&place.out).unwrap();

    let picture = other.path().join("2.png");
    let mut bytes = std::fs::read(&picture).unwrap();
    bytes.push(0);
    std::fs::write(&picture, bytes).unwrap();
    assert_differ(&place, "media: other content on rank 1 than on rank 0", moved);
    let text = std::fs::read_to_string(&copy).unwrap();
    std::fs::write(&copy, text.replace("What is 0", "What is 7")).unwrap();
    assert_differ(&place, "content of training file 1: other content on rank 1", moved);
    let fewer: Vec<&str> = text.lines().skip(1).collect();
    std::fs::write(&copy, fewer.join("\n")).unwrap();
    assert_differ(&place, "rows of training file 1: 6 on rank 0, 5 on rank 1", moved);
    assert_differ(&place, "training rows: 6 on rank 0, 5 on rank 1", on_second(|run| run.rows.truncate(5)));
    assert_differ(
        &place,
        "max_steps: 2 on rank 0, 3 on rank 1",
        on_second(|run| run.plan.max_steps = Some(3)),
    );
    assert_differ(
        &place,
        "gradient_leaves: ",
        on_second(|run| run.algorithm.split.settings.leaves = Some(4)),
    );
    assert_differ(&place, "reduce_bucket_size: ", on_second(|run| run.algorithm.split.settings.bucket = 100));
    assert_differ(&place, "shard: ", on_second(|run| run.algorithm.split.settings.shard = Shard::Weights));
    assert_differ(
        &place,
        "evaluation rows: ",
        on_second(|run| {
            let eval = EvalPlan::new(Arc::clone(&run.prompts), Arc::clone(&run.dataset));
            run.eval = Some(eval);
        }),
    );
}

/// The second rank has one other bit in the middle of the largest tensor, which the digest before loading does not cover.
#[test]
fn one_bit_of_a_weight_is_found_however_weights_are_held() {
    let place = place();
    let files = tempfile::tempdir().unwrap();
    let golden = checkpoint(MODEL);
    for entry in std::fs::read_dir(&golden).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, files.path().join(path.file_name().unwrap())).unwrap();
    }
    let weights = files.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let (length, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let tensors = metadata.tensors();
    let (name, info) =
        tensors.iter().max_by_key(|(_, info)| info.data_offsets.1 - info.data_offsets.0).unwrap();
    let (start, end) = info.data_offsets;
    assert!(end - start > 3 * 8192, "{name} has {} bytes", end - start);
    bytes[8 + length + (start + end) / 2 / 4 * 4] ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    let named = format!("differ in their weights: got {name}: other content on rank 1 than on rank 0");

    let lora = |run: &mut Run| {
        let Policy::Planned(plan) = &mut run.model else { panic!("the model is loaded") };
        plan.lora = Some(LoraConfig { rank: 2, ..LoraConfig::default() });
        run.selection = Selection::NONE;
    };
    type Case<'a> = (&'a str, &'a (dyn Fn(&mut Run) + Sync));
    let cases: [Case; 6] = [
        ("whole", &|_| {}),
        ("reference in the files", &|run| run.algorithm.loss.beta = 0.04),
        ("cut", &|run| {
            (run.algorithm.split.settings.shard, run.algorithm.split.settings.least_cut) = (Shard::Weights, 0)
        }),
        ("mapped base", &|run| {
            lora(run);
            run.algorithm.split.local = 2;
        }),
        ("8 bits", &|run| {
            lora(run);
            let Policy::Planned(plan) = &mut run.model else { panic!("the model is loaded") };
            plan.bits = Some(QuantBits::Eight);
        }),
        ("rounded to bf16", &|run| {
            let Policy::Planned(plan) = &mut run.model else { panic!("the model is loaded") };
            plan.dtype = WeightDtype::BFloat16;
        }),
    ];
    for (what, change) in cases {
        println!("{what}");
        assert_differ(&place, &named, |rank, run| {
            let dir = if rank == 1 { files.path() } else { &golden };
            run.model = Policy::Planned(Box::new(ModelPlan::of(&Checkpoint::open(dir).unwrap())));
            change(run);
        });
    }
    // Ranks of which only one leaves its base in the file compare the same bytes.
    let mixed = |rank: usize, run: &mut Run| {
        lora(run);
        run.algorithm.split.local = 1 + rank;
    };
    assert_eq!(on_two_ranks(&place, mixed), [Ok(2), Ok(2)]);
}
