//! Packed group streams: equal to `transformers` on separate sequences, equal to our own separate sequences, and a
//! completion does not see the others. Data and scripts: `tests/golden/README.md`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::ops::Range;

use omnigrpo_grpo::{Batch, LossPlan, Normalizer, evaluate, recipe};
use omnigrpo_models::{Features, GroupStream, Memories, Model, PackedStream, Prompt, Training};
use omnigrpo_ops::{Part, Top};
use omnigrpo_testkit::{
    Golden, Gradients, QWENS, assert_close, case_prompt, check_gradients, larger_model, lengthened, max_diff,
    model_of, take_gradients, train_all, training,
};

/// Every Qwen-VL, tied and untied head, and the layouts of InternVL.
const ALL: [&str; 10] = [
    "qwen2_vl_tied",
    "qwen2_vl_untied",
    "qwen2_5_vl_tied",
    "qwen2_5_vl_untied",
    "qwen3_vl",
    "qwen3_vl_untied",
    "internvl_rms_hf",
    "internvl3_5_original",
    "qwen3_5",
    "qwen3_5_untied",
];
/// Checkpoints with packed goldens.
const GOLDEN: [&str; 2] = ["qwen2_vl_tied", "qwen2_5_vl_untied"];

struct Group {
    prompt: Prompt,
    completions: Vec<Vec<u32>>,
}

impl Group {
    /// Ids that are no control tokens, different for every completion.
    fn new(model: &Model, case: &str, lengths: &[usize]) -> Self {
        let mut state = case.bytes().map(u32::from).sum::<u32>();
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % 290
        };
        let completions = lengths.iter().map(|&n| (0..n).map(|_| next()).collect()).collect();
        Self { prompt: case_prompt(case, model), completions }
    }

    fn stream(&self) -> GroupStream<'_> {
        let completions = self.completions.iter().map(Vec::as_slice).collect();
        GroupStream { prompt: &self.prompt, completions }
    }
}

/// Completions of one group that are in a stream.
type Piece = (usize, Range<usize>);

/// Each completion in a stream of its own.
fn separate(groups: &[Group]) -> Vec<Vec<Piece>> {
    let singles = |g: usize| (0..groups[g].completions.len()).map(move |c| vec![(g, c..c + 1)]);
    (0..groups.len()).flat_map(singles).collect()
}

/// Everything in one stream.
fn packed(groups: &[Group]) -> Vec<Vec<Piece>> {
    vec![groups.iter().enumerate().map(|(g, group)| (g, 0..group.completions.len())).collect()]
}

/// Weight of a token's log-probability, or entropy, in the loss of these tests: some number in [-1, 1].
fn coefficient(group: usize, completion: usize, token: usize, kind: usize) -> f32 {
    let x = (group * 131 + completion * 17 + token * 5 + kind * 3 + 1) as f32;
    (x * 1.7).sin()
}

struct Outcome {
    /// By group and completion.
    logprobs: Vec<Vec<Vec<f32>>>,
    entropies: Vec<Vec<Vec<f32>>>,
    gradients: Gradients,
}

impl Outcome {
    fn flat(nested: &[Vec<Vec<f32>>]) -> Vec<f32> {
        nested.iter().flatten().flatten().copied().collect()
    }
}

/// Forward and backward over the streams, gradients added up.
fn run(
    model: &Model,
    groups: &[Group],
    streams: &[Vec<Piece>],
    temperature: f32,
    recompute: bool,
) -> Outcome {
    let empty = || groups.iter().map(|g| vec![Vec::new(); g.completions.len()]).collect::<Vec<_>>();
    let (mut logprobs, mut entropies) = (empty(), empty());
    take_gradients(model);
    for pieces in streams {
        let members: Vec<GroupStream> = pieces
            .iter()
            .map(|(g, range)| GroupStream {
                prompt: &groups[*g].prompt,
                completions: groups[*g].completions[range.clone()].iter().map(Vec::as_slice).collect(),
            })
            .collect();
        let stream = PackedStream::new(&members).unwrap();
        let prompts: Vec<&Prompt> = pieces.iter().map(|(g, _)| &groups[*g].prompt).collect();
        let features: Vec<Vec<Features>> = prompts.iter().map(|p| model.encode_prompt(p).unwrap()).collect();
        let how = Training { temperature, ..training(recompute) };
        let pass = model.train_pass(&stream, &features, how, None).unwrap();
        let (mut dlogp, mut dentropy, mut at) = (Vec::new(), Vec::new(), 0);
        for (g, range) in pieces {
            for c in range.clone() {
                let n = groups[*g].completions[c].len();
                logprobs[*g][c] = pass.logprobs[at..at + n].to_vec();
                entropies[*g][c] = pass.entropies[at..at + n].to_vec();
                at += n;
                dlogp.extend((0..n).map(|t| coefficient(*g, c, t, 0)));
                dentropy.extend((0..n).map(|t| coefficient(*g, c, t, 1)));
            }
        }
        let gradients = pass.backward(&dlogp, Some(&dentropy)).unwrap();
        model
            .backward_media(&prompts, &features, Memories::default(), gradients, training(recompute))
            .unwrap();
    }
    Outcome { logprobs, entropies, gradients: take_gradients(model) }
}

fn assert_equal(got: &Outcome, expected: &Outcome, what: &str) {
    let d = max_diff(&Outcome::flat(&got.logprobs), &Outcome::flat(&expected.logprobs));
    assert!(d <= 1e-5, "{what}: log-probabilities differ by {d}");
    let d = max_diff(&Outcome::flat(&got.entropies), &Outcome::flat(&expected.entropies));
    assert!(d <= 1e-5, "{what}: entropies differ by {d}");
    assert_close(&got.gradients, &expected.gradients, 5e-5, what);
}

fn golden_group(model: &Model, golden: &Golden, name: &str) -> Group {
    let case = [("g0", "C"), ("g1", "D2"), ("g2", "B")].iter().find(|(g, _)| *g == name).unwrap().1;
    let ids = golden.ids(&format!("{name}.completion_ids"));
    let mut at = 0;
    let completions = golden.i[&format!("{name}.lengths")]
        .iter()
        .map(|&n| {
            at += n as usize;
            ids[at - n as usize..at].to_vec()
        })
        .collect();
    Group { prompt: case_prompt(case, model), completions }
}

#[test]
fn groups_equal_transformers_on_separate_sequences() {
    for name in GOLDEN {
        let model = model_of(name);
        let golden = Golden::read(&format!("packed/{name}.safetensors"));
        for (tag, members, temperature) in [
            ("g0.t1", &["g0"][..], 1.0),
            ("g0.t0.7", &["g0"][..], 0.7),
            ("all.t1", &["g0", "g1", "g2"][..], 1.0),
        ] {
            let what = format!("{name} {tag}");
            let t = tag.split_once('.').unwrap().1;
            let groups: Vec<Group> = members.iter().map(|g| golden_group(&model, &golden, g)).collect();
            let joined = |field: &str| -> Vec<f32> {
                members.iter().flat_map(|g| golden.f[&format!("{g}.{t}.{field}")].clone()).collect()
            };
            let streams: Vec<GroupStream> = groups.iter().map(Group::stream).collect();
            let stream = PackedStream::new(&streams).unwrap();
            train_all(&model);
            let prompts: Vec<&Prompt> = groups.iter().map(|g| &g.prompt).collect();
            let features: Vec<Vec<Features>> =
                prompts.iter().map(|p| model.encode_prompt(p).unwrap()).collect();
            let how = Training { temperature, ..Training::default() };
            let pass = model.train_pass(&stream, &features, how, None).unwrap();
            let d = max_diff(&pass.logprobs, &joined("logp"));
            assert!(d <= 1e-4, "{what}: log-probabilities differ by {d}");
            let d = max_diff(&pass.entropies, &joined("entropy"));
            assert!(d <= 1e-4, "{what}: entropies differ by {d}");

            let wide = |x: Vec<f32>| x.into_iter().map(f64::from).collect::<Vec<f64>>();
            let (logp, old, reference) =
                (wide(pass.logprobs.clone()), wide(joined("old")), wide(joined("ref")));
            let advantages: Vec<f64> =
                members.iter().flat_map(|g| wide(golden.f[&format!("{g}.advantages")].clone())).collect();
            let truncated = vec![false; stream.lengths().len()];
            let plan = LossPlan { beta: 0.04, ..recipe("grpo").unwrap().loss };
            let normalizer = Normalizer::for_step(&plan, stream.lengths(), &truncated, 16).unwrap();
            let batch = Batch {
                lengths: stream.lengths(),
                logp: &logp,
                old: Some(&old),
                sampler: None,
                reference: Some(&reference),
                teacher: None,
                entropy: None,
                kept: None,
                chosen: None,
                advantages: &advantages,
                truncated: &truncated,
            };
            let out = evaluate(&batch, &plan, &normalizer).unwrap();
            let expected = f64::from(golden.f[&format!("loss.{tag}")][0]);
            assert!((out.loss - expected).abs() <= 1e-4, "{what}: loss {} for {expected}", out.loss);
            let dlogp: Vec<f32> = out.dlogp.iter().map(|&x| x as f32).collect();
            let gradients = pass.backward(&dlogp, None).unwrap();
            model
                .backward_media(&prompts, &features, Memories::default(), gradients, Training::default())
                .unwrap();
            let compared = check_gradients(&model, &golden, &format!("{tag}."), 1e-3);
            assert!(compared >= 40, "{what}: only {compared} gradients");
        }
    }
}

/// The most probable tokens of a pass are targets of another. A teacher's token that is the sampled one has its log-probability, and adds to
/// its gradient.
#[test]
fn tokens_of_a_teacher_are_targets_of_their_own() {
    for name in ALL {
        let model = model_of(name);
        train_all(&model);
        let groups = [Group::new(&model, "D1", &[3, 1, 0, 4]), Group::new(&model, "C", &[2, 5])];
        let streams: Vec<GroupStream> = groups.iter().map(Group::stream).collect();
        let stream = PackedStream::new(&streams).unwrap();
        let features: Vec<_> = groups.iter().map(|g| model.encode_prompt(&g.prompt).unwrap()).collect();
        let vocab = model.decoder().config().vocab;
        let all = model.score_top(&stream, &features, 0.9, Top { k: vocab + 5, below: vocab }).unwrap();
        assert_eq!((all.top.k, all.top.tokens.len()), (vocab, vocab * stream.num_targets()), "{name}");
        let sampled: Vec<u32> =
            streams.iter().flat_map(|g| &g.completions).flat_map(|c| c.to_vec()).collect();
        for (at, &token) in sampled.iter().enumerate() {
            let own = all.top.part(at..at + 1);
            let place = own.tokens.iter().position(|id| *id == token).unwrap();
            assert_eq!(own.logprobs[place], all.logprobs[at], "{name}, token {at}");
            let sum: f64 = own.logprobs.iter().map(|&logp| f64::from(logp).exp()).sum();
            assert!((sum - 1.0).abs() < 1e-4 && own.logprobs.is_sorted_by(|a, b| a >= b), "{name}: {sum}");
        }

        // Two tokens at each place: the most probable one and the sampled one.
        let pairs: Vec<u32> =
            sampled.iter().enumerate().flat_map(|(at, &token)| [all.top.tokens[at * vocab], token]).collect();
        let how = Training { temperature: 0.9, ..Training::default() };
        let gradients = |stream: &PackedStream, dlogp: &[f32], dteacher: &[f32]| {
            let pass = model.train_pass(stream, &features, how, None).unwrap();
            let numbers = (pass.logprobs.clone(), pass.teacher.clone());
            pass.backward_by_block(dlogp, None, dteacher, &mut |_| {}).unwrap();
            (numbers, take_gradients(&model))
        };
        let n = stream.num_targets();
        let (a, b) = (vec![0.3; n], vec![0.2; n]);
        let both: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let ((logp, none), want) = gradients(&stream, &both, &[]);
        assert!(none.is_empty());
        let taught = stream.clone().with_teacher_tokens(&pairs, 2).unwrap();
        let of_sampled: Vec<f32> = b.iter().flat_map(|&b| [0.0, b]).collect();
        let ((own, teacher), got) = gradients(&taught, &a, &of_sampled);
        assert_eq!(own, logp, "{name}");
        for (at, pair) in teacher.chunks(2).enumerate() {
            assert_eq!(pair, [all.top.logprobs[at * vocab], logp[at]], "{name}, token {at}");
        }
        assert_close(&got, &want, 5e-5, name);
        // The gradient of the most probable token is another one.
        let of_first: Vec<f32> = b.iter().flat_map(|&b| [b, 0.0]).collect();
        let (_, other) = gradients(&taught, &a, &of_first);
        assert!(other != got, "{name}");
        let refused =
            |tokens: &[u32], k| stream.clone().with_teacher_tokens(tokens, k).unwrap_err().to_string();
        assert!(refused(&pairs[1..], 2).contains("expected 2 for each of"), "{name}");
        assert!(taught.with_teacher_tokens(&pairs, 2).is_err());
    }
}

#[test]
fn packed_equals_separate() {
    /// A title, and case and completion lengths of each group.
    type Shapes = (&'static str, &'static [(&'static str, &'static [usize])]);
    let cases: [Shapes; 7] = [
        ("one token each", &[("C", &[1, 1])]),
        ("unequal lengths", &[("C", &[1, 4, 6])]),
        ("an empty completion", &[("E", &[3, 0, 2])]),
        ("two groups with media", &[("C", &[2, 3]), ("D2", &[3, 1])]),
        ("text beside video", &[("B", &[2, 7]), ("D1", &[4, 2])]),
        ("images and a video in one prompt", &[("A", &[5, 2, 3])]),
        ("text only", &[("B", &[6])]),
    ];
    for name in ALL {
        let model = model_of(name);
        train_all(&model);
        for (title, shapes) in cases {
            let groups: Vec<Group> = shapes.iter().map(|(case, n)| Group::new(&model, case, n)).collect();
            let temperature = if title.starts_with("two") { 0.7 } else { 1.0 };
            let one = run(&model, &groups, &packed(&groups), temperature, false);
            let each = run(&model, &groups, &separate(&groups), temperature, false);
            assert_equal(&one, &each, &format!("{name}: {title}"));
        }
    }
}

#[test]
fn a_split_group_equals_the_whole() {
    for name in ALL {
        let model = model_of(name);
        train_all(&model);
        let groups = [Group::new(&model, "D1", &[3, 5, 1, 4]), Group::new(&model, "C", &[2, 6])];
        let whole = run(&model, &groups, &packed(&groups), 1.0, false);
        let split = [vec![(0, 0..1)], vec![(0, 1..3)], vec![(0, 3..4), (1, 0..1)], vec![(1, 1..2)]];
        assert_equal(&run(&model, &groups, &split, 1.0, false), &whole, name);
    }
}

#[test]
fn a_completion_does_not_see_the_others() {
    for name in ALL {
        let model = model_of(name);
        let first = Group::new(&model, "C", &[3, 5, 4]);
        let bystander = Group::new(&model, "D1", &[2, 4]);
        let score = |first: &Group| {
            let groups = [first, &bystander];
            let streams = groups.map(Group::stream);
            let features: Vec<Vec<Features>> =
                groups.iter().map(|g| model.encode_prompt(&g.prompt).unwrap()).collect();
            let stream = PackedStream::new(&streams).unwrap();
            let (logp, entropy) = model.score(&stream, &features, 1.0).unwrap();
            let split = |x: &[f32]| -> Vec<Vec<u32>> {
                let mut rest = x;
                let take = |n: &usize| {
                    let (head, tail) = rest.split_at(*n);
                    rest = tail;
                    head.iter().map(|x| x.to_bits()).collect()
                };
                stream.lengths().iter().map(take).collect()
            };
            let mut by_completion = split(&logp);
            by_completion.extend(split(&entropy));
            by_completion
        };
        let before = score(&first);
        for changed in 0..3 {
            for (kind, completion) in
                [("other tokens", vec![7; first.completions[changed].len()]), ("longer", vec![9; 11])]
            {
                let mut other =
                    Group { prompt: first.prompt.clone(), completions: first.completions.clone() };
                other.completions[changed] = completion;
                let after = score(&other);
                for kept in (0..5).filter(|&c| c != changed) {
                    let same = before[kept] == after[kept] && before[5 + kept] == after[5 + kept];
                    assert!(same, "{name}: completion {changed} with {kind} changed completion {kept}");
                }
                assert_ne!(before[changed], after[changed]);
            }
        }
    }
}

#[test]
fn recompute_and_threads_leave_every_bit() {
    for name in ALL {
        let model = model_of(name);
        train_all(&model);
        let groups = [Group::new(&model, "A", &[4, 2]), Group::new(&model, "C", &[3, 6])];
        let within = |threads: usize, recompute: bool| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| run(&model, &groups, &packed(&groups), 1.0, recompute))
        };
        let expected = within(1, false);
        for (threads, recompute) in [(1, true), (2, false), (2, true)] {
            let got = within(threads, recompute);
            let what = format!("{name}, {threads} threads, recompute {recompute}");
            assert_eq!(got.logprobs, expected.logprobs, "{what}");
            assert_eq!(got.entropies, expected.entropies, "{what}");
            for (weight, grad) in &expected.gradients {
                assert!(got.gradients[weight] == *grad, "{what}: the gradient of {weight} differs");
            }
        }
    }
}

#[test]
fn larger_models_keep_every_bit_and_bound() {
    for name in QWENS.into_iter().chain(["qwen3_5"]) {
        let model = larger_model(name);
        train_all(&model);
        let mut groups = [Group::new(&model, "A", &[40, 9, 23]), Group::new(&model, "B", &[70, 1])];
        for group in &mut groups {
            group.prompt = lengthened(group.prompt.clone(), 150);
        }
        let within = |threads: usize, recompute: bool, streams: &[Vec<Piece>]| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| run(&model, &groups, streams, 1.0, recompute))
        };
        let whole = within(1, false, &packed(&groups));
        let threaded = within(2, true, &packed(&groups));
        assert_eq!(threaded.logprobs, whole.logprobs, "{name}");
        for (weight, grad) in &whole.gradients {
            assert!(threaded.gradients[weight] == *grad, "{name}: the gradient of {weight} differs");
        }
        assert_equal(&whole, &within(2, false, &separate(&groups)), name);
    }
}

#[test]
fn gradients_reach_exactly_the_selected_parts() {
    use Part::{Llm, Projector, Vision};
    let selections: [&[Part]; 6] =
        [&[Llm], &[Projector], &[Vision], &[Llm, Projector], &[Projector, Vision], &[Llm, Projector, Vision]];
    for name in ["qwen2_vl_untied", "qwen2_5_vl_tied", "qwen3_vl", "internvl3_5_original"] {
        let model = model_of(name);
        let groups = [Group::new(&model, "C", &[3, 2]), Group::new(&model, "D1", &[2, 4])];
        train_all(&model);
        let whole = run(&model, &groups, &packed(&groups), 1.0, false).gradients;
        for selection in selections {
            for param in model.params() {
                param.set_trainable(selection.contains(&param.part()));
            }
            let got = run(&model, &groups, &packed(&groups), 1.0, false).gradients;
            for param in model.params() {
                let chosen = selection.contains(&param.part());
                assert_eq!(got.contains_key(param.name()), chosen, "{name} {selection:?}: {}", param.name());
            }
            // Freezing the rest does not change what remains.
            for (weight, grad) in &got {
                assert!(grad.iter().all(|g| g.is_finite()));
                assert!(whole[weight] == *grad, "{name} {selection:?}: {weight} has another gradient");
            }
            let squares: f64 = got.values().map(|g| omnigrpo_testkit::norm(g).powi(2)).sum();
            assert!(squares > 0.0);
        }
        // One selected weight alone.
        let one = match name {
            "internvl3_5_original" => "language_model.model.layers.1.mlp.up_proj.weight",
            "qwen3_vl" => "model.language_model.layers.1.mlp.up_proj.weight",
            _ => "model.layers.1.mlp.up_proj.weight",
        };
        for param in model.params() {
            param.set_trainable(param.name() == one);
        }
        let got = run(&model, &groups, &packed(&groups), 1.0, false).gradients;
        assert!(got.keys().eq([one]));
        assert!(got[one] == whole[one]);
    }
}

#[test]
fn a_text_only_stream_leaves_the_tower_without_gradient() {
    let model = model_of("qwen2_5_vl_untied");
    train_all(&model);
    let groups = [Group::new(&model, "B", &[3, 2])];
    let got = run(&model, &groups, &packed(&groups), 1.0, false).gradients;
    assert!(got.keys().all(|name| !name.starts_with("visual.")));
    assert_eq!(got.len(), model.params().iter().filter(|p| p.part() == Part::Llm).count());
}

/// Recorded completions come from files.
#[test]
fn ids_outside_the_vocabulary_are_an_error() {
    let model = model_of("qwen2_vl_tied");
    let prompt = case_prompt("B", &model);
    let score = |ids: &[u32]| {
        let groups = [GroupStream { prompt: &prompt, completions: vec![ids] }];
        let stream = PackedStream::new(&groups)?;
        model.score(&stream, &[Vec::new()], 1.0)
    };
    // The embedding has rows that belong to no token; they can be scored.
    score(&[319, 0]).unwrap();
    for ids in [&[320][..], &[5, u32::MAX], &[320, 5], &[5, 320, 5]] {
        let message = score(ids).unwrap_err().to_string();
        assert!(message.contains("320"), "{message}");
    }
}

/// Arrays that a trained tower's blocks kept serve the backward pass that receives them.
#[test]
fn a_memory_stands_in_for_the_tower() {
    for name in ["qwen2_5_vl_tied", "qwen3_vl"] {
        memory_of(&model_of(name));
    }
}

fn memory_of(model: &Model) {
    model.params().iter().for_each(|p| p.set_trainable(true));
    let group = Group::new(model, "C", &[3]);
    let groups = [GroupStream { prompt: &group.prompt, completions: vec![&group.completions[0]] }];
    let stream = PackedStream::new(&groups).unwrap();
    let (features, memories) = model.encode_for_training([&group.prompt]).unwrap();
    let backward = |memories: Memories| {
        let pass = model.train_pass(&stream, &features, Training::default(), None).unwrap();
        let d = vec![1.0; stream.num_targets()];
        let gradients = pass.backward(&d, None).unwrap();
        let before = model.tower_runs();
        model.backward_media(&[&group.prompt], &features, memories, gradients, Training::default()).unwrap();
        (take_gradients(model), model.tower_runs() - before)
    };
    let media = group.prompt.media.len() as u64;
    let (again, runs) = backward(Memories::default());
    assert_eq!(runs, media, "without a memory the tower runs again");
    let (remembered, runs) = backward(memories);
    assert_eq!(runs, 0, "the memory has what the tower computed");
    assert_close(&again, &remembered, 1e-6, "gradients");
}
