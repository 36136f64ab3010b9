//! Teachers: the policy itself with more in its prompt, and divergences over the teacher's most probable tokens.

use omnigrpo_grpo::Divergence;
use omnigrpo_models::{PrivilegedContext, PromptBuilder, PromptSettings};
use omnigrpo_train::SyncReference;

use super::*;

/// The questions of [`questions`] with their answers as a hint.
fn hinted(place: &Place) {
    let rows = lines(&place.file).into_iter().map(|mut row| {
        let answer = row["conversations"][1]["value"].as_str().unwrap();
        row["hint"] = json!(format!("The answer is {answer}."));
        format!("{row}\n")
    });
    std::fs::write(&place.file, rows.collect::<String>()).unwrap();
}

fn context() -> PrivilegedContext {
    PrivilegedContext {
        column: "hint".to_owned(),
        template: "{prompt}\nHint: {privileged_context}".parse().unwrap(),
    }
}

pub(super) fn telling(context: Option<PrivilegedContext>) -> PromptBuilder {
    limited(context, None)
}

fn limited(context: Option<PrivilegedContext>, max_prompt_length: Option<usize>) -> PromptBuilder {
    let settings = PromptSettings {
        max_completion_length: 8,
        max_prompt_length,
        privileged_context: context,
        ..PromptSettings::default()
    };
    PromptBuilder::open(&omnigrpo_models::Checkpoint::open(&checkpoint(NAME)).unwrap(), settings).unwrap()
}

/// Lets the policy, or the reference if there is one, teach alone.
fn taught(setup: &mut TrainSetup, divergence: Divergence) {
    setup.prompts = Arc::new(telling(Some(context())));
    let loss = &mut setup.algorithm.loss;
    (loss.beta, loss.distillation, loss.divergence) = (0.0, 1.0, divergence);
    setup.rewards = reward(|_| 0.5);
}

fn metric(dir: &Path, key: &str) -> Vec<f64> {
    lines(&dir.join("metrics.jsonl")).iter().map(|row| number(row, key)).collect()
}

/// The teacher's prompt has the media, spans and tokens of the policy's up to the end of the question, and then the hint.
#[test]
fn both_prompts_have_a_common_beginning() {
    let place = Place::new();
    hinted(&place);
    let setup = place.setup("run");
    let (prompts, plain) = (telling(Some(context())), telling(None));
    for row in 0..6 {
        let sample = setup.dataset.get(row).unwrap();
        let row = PreparedRow::new(&prompts, sample.clone(), 0).unwrap();
        let (policy, teacher) = (&*row.prompt, &*row.teacher.unwrap());
        assert_eq!(*policy, plain.build(&sample).unwrap());
        let common = policy.ids.iter().zip(&teacher.ids).take_while(|(a, b)| a == b).count();
        let media: usize = policy.spans.last().map_or(0, |span| span.start + span.len);
        let question = plain.tokenizer().decode(&teacher.ids[..common], false).unwrap();
        assert!(common > media && (question.ends_with('?') || question.ends_with("colour")), "{question:?}");
        assert_eq!(
            (&policy.spans, &policy.positions[..common]),
            (&teacher.spans, &teacher.positions[..common])
        );
        assert!(policy.media.iter().zip(&teacher.media).all(|(a, b)| Arc::ptr_eq(a, b)));
        let answer = sample.solution.unwrap();
        assert!(
            teacher.text.contains(&format!("?\nHint: The answer is {answer}.<|im_end|>")),
            "{}",
            teacher.text
        );
        assert!(
            PreparedRow::new(&plain, setup.dataset.get(row.sample.row).unwrap(), 0)
                .unwrap()
                .teacher
                .is_none()
        );
    }
    // The error about a prompt that is too long says whose it is.
    let sample = setup.dataset.get(5).unwrap();
    let tokens = plain.build(&sample).unwrap().ids.len();
    let error = PreparedRow::new(&limited(Some(context()), Some(tokens)), sample, 0).unwrap_err().to_string();
    assert!(error.contains(&format!("expected at most {tokens} (")), "{error}");
    assert!(error.contains("for the teacher's prompt with the column `hint`"), "{error}");
    // A row without the column, and one with an empty text, cannot be used.
    let mut sample = setup.dataset.get(5).unwrap();
    let refused = |sample| PreparedRow::new(&prompts, sample, 0).unwrap_err().to_string();
    sample.columns.insert("hint".into(), " ".into());
    assert!(refused(sample.clone()).contains("the row has an empty text in it"));
    sample.columns.remove("hint");
    let error = refused(sample);
    assert!(
        error.contains("reads the column `hint`") && error.contains("the row has no value in it"),
        "{error}"
    );
}

/// A policy that is its own teacher encodes each medium once, also with a trained tower, and learns where all rewards are equal.
#[test]
fn a_policy_that_teaches_itself_encodes_media_once() {
    let place = Place::new();
    hinted(&place);
    for (name, towers, divergence) in [
        ("sampled", false, Divergence::Sampled),
        ("trained tower", true, Divergence::Sampled),
        ("jsd", true, Divergence::Jsd { top_k: 5, beta: 0.5 }),
        ("cut", true, Divergence::ForwardKl { top_k: 3 }),
    ] {
        let mut setup = place.setup(name);
        taught(&mut setup, divergence);
        (setup.run.prompts_per_step, setup.run.max_steps) = (6, Some(1));
        setup.selection = Selection { towers, ..Selection::ALL };
        if name == "cut" {
            setup.algorithm.max_stream_tokens = Some(16);
        }
        let console = Console::plain(std::io::sink());
        let trained = train(setup, &console, &AtomicBool::new(false)).unwrap();
        assert_eq!(trained.model.tower_runs(), 4, "{name}");
        let out = place.out(name);
        assert!(metric(&out, "grad_norm")[0] > 0.0 && metric(&out, "kl")[0] > 0.0, "{name}");
    }
}

/// Every divergence falls when the policy learns from its own first weights, which read the hint.
#[test]
fn every_divergence_from_a_teacher_falls() {
    let place = Place::new();
    hinted(&place);
    for (name, divergence) in [
        ("reverse", Divergence::ReverseKl { top_k: 6 }),
        ("forward", Divergence::ForwardKl { top_k: 6 }),
        ("jsd", Divergence::Jsd { top_k: 6, beta: 0.3 }),
        // A number beyond the vocabulary takes all of it.
        ("all", Divergence::Jsd { top_k: 1 << 20, beta: 0.5 }),
    ] {
        let mut setup = place.setup(name);
        taught(&mut setup, divergence);
        (setup.run.prompts_per_step, setup.run.max_steps) = (6, Some(12));
        setup.optimizer.learning_rate = 3e-3;
        let own = omnigrpo_testkit::load(&checkpoint(NAME), WeightDtype::Auto).unwrap();
        setup.reference_model = Some(own);
        run(setup).unwrap();
        let falls = metric(&place.out(name), "teacher_divergence");
        let loss = metric(&place.out(name), "loss");
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        assert!(mean(&falls[9..]) < 0.9 * mean(&falls[..3]) && falls[0] > 0.0, "{name}: {falls:?}");
        assert!((loss[0] - falls[0]).abs() < 0.2 * falls[0], "{name}: {loss:?}, {falls:?}");
    }
}

/// Sizes of one family pad the head to different lengths. The tokens of a longer one that the policy lacks do not count.
#[test]
fn a_teacher_may_have_a_longer_head() {
    let (place, folder) = (Place::new(), TempDir::new().unwrap());
    hinted(&place);
    omnigrpo_testkit::copy_dir(&checkpoint(NAME), folder.path());
    lengthen_head(folder.path(), 16);
    let teacher = omnigrpo_testkit::load(folder.path(), WeightDtype::Auto).unwrap();
    let vocab = |model: &Model| model.decoder().config().vocab;
    for (name, top_k) in [("few", 5), ("all", 1 << 20)] {
        let mut setup = place.setup(name);
        taught(&mut setup, Divergence::ForwardKl { top_k });
        (setup.run.prompts_per_step, setup.run.max_steps) = (6, Some(1));
        assert_eq!(vocab(&teacher), vocab(&setup.model) + 16);
        setup.reference_model = Some(omnigrpo_testkit::load(folder.path(), WeightDtype::Auto).unwrap());
        run(setup).unwrap();
        assert!(metric(&place.out(name), "teacher_divergence")[0] > 0.0, "{name}");
    }
}

/// Adds rows to the tables of tokens in a checkpoint. They are the first ones, three times as large, and so often the most probable.
fn lengthen_head(dir: &Path, more: usize) {
    let path = dir.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let vocab = json_of(dir, "config.json").pointer_mut("/vocab_size").unwrap().as_u64().unwrap() as usize;
    let tensors = file.iter().map(|(name, view)| {
        let (mut shape, mut data) = (view.shape().to_vec(), view.data().to_vec());
        if shape[0] == vocab && name.ends_with(".weight") && shape.len() == 2 {
            assert_eq!(view.dtype(), safetensors::Dtype::F32);
            let each = 4 * shape[1];
            let added = data[..more * each].as_chunks::<4>().0.iter();
            let added: Vec<u8> = added.flat_map(|x| (3.0 * f32::from_le_bytes(*x)).to_le_bytes()).collect();
            data.extend(added);
            shape[0] += more;
        }
        (name.to_owned(), view.dtype(), shape, data)
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let out = safetensors::serialize(views, None).unwrap();
    drop(bytes);
    std::fs::write(&path, out).unwrap();
    let mut config = json_of(dir, "config.json");
    config["vocab_size"] = json!(vocab + more);
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

fn json_of(dir: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join(name)).unwrap()).unwrap()
}

/// A run resumes to the bit in the middle of a rollout whose teacher had the weights that sampled, or followed them.
#[test]
fn resuming_with_a_teacher_is_exact() {
    let jsd = Divergence::Jsd { top_k: 4, beta: 0.5 };
    for (what, divergence, change) in [
        ("the sampled token", Divergence::Sampled, (|_| ()) as fn(&mut TrainSetup)),
        ("jsd", jsd, |_| ()),
        ("steps of a generation", jsd, |setup| {
            (setup.run.num_iterations, setup.run.steps_per_generation) = (1, 2);
        }),
        ("a teacher that follows", jsd, |setup| {
            setup.run.sync_reference = Some(SyncReference { every: 1, mixup: 0.1 });
        }),
    ] {
        let place = Place::new();
        hinted(&place);
        let change = |setup: &mut TrainSetup| {
            setup.run.num_iterations = 2;
            taught(setup, divergence);
            change(setup);
        };
        resume_is_exact(&place, change, what);
    }
}
