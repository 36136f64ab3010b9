//! Environments that answer in the middle of completions: what is recorded is what training computes, answers may arrive in any
//! order, limits hold, and failures name their place.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use omnigrpo_data::{Cause, RecordedCompletion, RecordedTurn, RowReader, Sample};
use omnigrpo_models::{
    AddedTurn, Checkpoint, DecoderMemory, Features, GroupStream, LoadOptions, Memories, Model, ModelError,
    PackedStream, Prompt, PromptBuilder, PromptSettings, Training, WeightDtype,
};
use omnigrpo_ops::{Device, Memory};
use omnigrpo_rollout::{
    Answer, AnswerPart, Completion, Environment, Episode, EpisodeKey, FinishReason, GenerateOptions,
    Generated, Generator, Interaction, ModelTurn, Request, SamplingParams, TokenEvent, TurnLimits,
};
use omnigrpo_testkit::{assert_close, checkpoint, golden, max_diff, take_gradients, train_all};
use omnigrpo_text::{MediumKind, Role, Turn};
use serde_json::json;

/// One of each family whose turns are compared with `transformers`.
const FAMILIES: [&str; 5] = ["qwen2_vl_untied", "qwen2_5_vl_untied", "qwen3_vl", "qwen3_5", "internvl3_5_hf"];
const ANSWERS: usize = 2;
/// Makes half of the answers have no picture.
const FEW: &str = "few pictures";

/// Answers every turn with a text and one or two pictures, after a time that depends on the completion.
struct Pictures {
    /// Milliseconds by the parity of sample and turn.
    delays: [u64; 2],
    fails: Option<&'static str>,
}

struct Showing {
    key: EpisodeKey,
    delays: [u64; 2],
    fails: Option<&'static str>,
}

impl Environment for Pictures {
    fn name(&self) -> &str {
        "pictures"
    }

    fn answers_text(&self) -> bool {
        true
    }

    fn begin(&self, row: &Sample, key: EpisodeKey) -> Result<Box<dyn Episode>, Cause> {
        assert_eq!((row.row, key.seed, key.rollout), (key.row, 7, 5));
        Ok(Box::new(Showing { key, delays: self.delays, fails: self.fails }))
    }
}

impl Episode for Showing {
    fn answer(&mut self, turn: &ModelTurn<'_>) -> Result<Answer, Cause> {
        assert!(turn.tokens_left > 0 && (1..=ANSWERS).contains(&turn.number) && !turn.ids.is_empty());
        match self.fails {
            Some("panic") => panic!("planted"),
            Some("parts") => {
                let parts = vec![AnswerPart::Text("x".to_owned()); 1025];
                return Ok(Answer::Say { role: Role::Tool, parts, failed: 0 });
            }
            Some("letters") => {
                let parts = vec![AnswerPart::Text("x".repeat((1 << 20) + 1))];
                return Ok(Answer::Say { role: Role::Tool, parts, failed: 0 });
            }
            Some("too much") => return Err(ModelError::SaysTooMuch { what: "planted".to_owned() }.into()),
            Some(path) if path.ends_with(".png") => {
                let path = PathBuf::from(path);
                let parts = vec![AnswerPart::Medium { kind: MediumKind::Image, path }];
                return Ok(Answer::Say { role: Role::Tool, parts, failed: 0 });
            }
            Some(FEW) | None => {}
            Some(what) => return Err(what.into()),
        }
        let parity = (self.key.sample as usize + turn.number) % 2;
        std::thread::sleep(Duration::from_millis(self.delays[parity]));
        let path = golden(&format!("media/{}.png", ["shapes", "alpha"][parity]));
        let text = format!("look {} ", turn.number);
        let mut parts = vec![AnswerPart::Text(text)];
        // One of the pictures is shown twice in the same answer.
        let times = if self.fails == Some(FEW) { parity } else { 2 - parity };
        parts.extend((0..times).map(|_| AnswerPart::Medium { kind: MediumKind::Image, path: path.clone() }));
        Ok(Answer::Say { role: Role::Tool, parts, failed: parity })
    }
}

/// Answers every turn with a text. The first answer waits until other completions have got tokens.
struct Patient(Arc<Decoded>);

/// Number of tokens of all completions, and whether a question has waited for more.
#[derive(Default)]
struct Decoded {
    tokens: AtomicUsize,
    waited: AtomicBool,
}

impl Environment for Patient {
    fn name(&self) -> &str {
        "patient"
    }

    fn answers_text(&self) -> bool {
        true
    }

    fn begin(&self, _row: &Sample, _key: EpisodeKey) -> Result<Box<dyn Episode>, Cause> {
        Ok(Box::new(Self(Arc::clone(&self.0))))
    }
}

impl Episode for Patient {
    fn answer(&mut self, _turn: &ModelTurn<'_>) -> Result<Answer, Cause> {
        let tokens = || self.0.tokens.load(Ordering::Relaxed);
        if !self.0.waited.swap(true, Ordering::Relaxed) {
            let (until, deadline) = (tokens() + 100, Instant::now() + Duration::from_secs(60));
            while tokens() < until {
                if Instant::now() > deadline {
                    return Err("no other completion got tokens".into());
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(Answer::Say { role: Role::Tool, parts: vec![AnswerPart::Text("go on ".to_owned())], failed: 0 })
    }
}

struct Setup {
    model: Model,
    prompts: PromptBuilder,
    rows: Vec<(Sample, Prompt, Vec<Features>)>,
}

impl Setup {
    fn new(name: &str, device: Device) -> Self {
        let options = LoadOptions { dtype: WeightDtype::Float32, device, ..LoadOptions::default() };
        let opened = Checkpoint::open(&checkpoint(name)).unwrap();
        let model = Model::load(&opened, &options).unwrap();
        let settings = PromptSettings { max_completion_length: MOST, ..PromptSettings::default() };
        let prompts = PromptBuilder::open(&opened, settings).unwrap();
        let rows = [
            json!({ "prompt": "Which is larger, 3 or 5?" }),
            json!({ "prompt": "<image>What is it?", "image": golden("media/shapes.png") }),
        ];
        let rows = RowReader::new("turns").media_in(golden("media")).dataset(rows).unwrap();
        let row = |row: u64| {
            let sample = rows.get(row).unwrap();
            let prompt = prompts.build(&sample).unwrap();
            let features = model.encode_prompt(&prompt).unwrap();
            (sample, prompt, features)
        };
        Self { rows: (0..2).map(row).collect(), model, prompts }
    }

    fn generate(
        &self,
        params: &Asking,
        max_live: usize,
        memory: Option<&mut DecoderMemory>,
    ) -> omnigrpo_rollout::Result<Vec<Generated>> {
        self.generate_told(params, max_live, memory, |_| {})
    }

    fn generate_told(
        &self,
        params: &Asking,
        max_live: usize,
        memory: Option<&mut DecoderMemory>,
        mut on_token: impl FnMut(TokenEvent),
    ) -> omnigrpo_rollout::Result<Vec<Generated>> {
        // The twin and the emulator are slow.
        let num_samples = if self.model.device() == Device::Cpu { SAMPLES } else { 6 };
        let requests: Vec<Request> = self
            .rows
            .iter()
            .map(|(sample, prompt, features)| Request {
                num_samples,
                rollout: 5,
                row: sample.row,
                sample: Some(sample),
                ..Request::new(prompt, features)
            })
            .collect();
        let options = GenerateOptions { on_token: Some(&mut on_token), memory, experts: false };
        Generator::new(&self.model, &self.prompts, &params.sampling)
            .with_max_live(max_live)
            .with_interaction(Some(&params.interaction))
            .generate(requests, options)
    }

    /// Packs all completions, with the features of all media.
    fn packed(&self, generated: &[Generated]) -> (PackedStream, Vec<Prompt>, Vec<Vec<Features>>) {
        let groups: Vec<GroupStream> = self
            .rows
            .iter()
            .zip(generated)
            .map(|((_, prompt, _), of)| GroupStream {
                prompt,
                completions: of.completions.iter().map(|c| c.ids.as_slice()).collect(),
            })
            .collect();
        let stream = PackedStream::with_turns(&groups, |g, c| &generated[g].completions[c].turns).unwrap();
        let (mut prompts, mut features) = (Vec::new(), Vec::new());
        for ((_, prompt, own), of) in self.rows.iter().zip(generated) {
            let media =
                prompt.media.iter().chain(of.media.iter().map(|(medium, _)| medium)).cloned().collect();
            prompts.push(Prompt { media, ..prompt.clone() });
            features.push(own.iter().chain(of.media.iter().map(|(_, own)| own)).cloned().collect());
        }
        (stream, prompts, features)
    }
}

/// Completions per prompt: enough for the random models to end some turns.
const SAMPLES: usize = 24;
const MOST: usize = 160;

/// Sampling parameters, and the environment that answers.
struct Asking {
    sampling: SamplingParams,
    interaction: Interaction,
}

fn params(delays: [u64; 2], fails: Option<&'static str>) -> Asking {
    let sampling = SamplingParams {
        max_completion_length: MOST,
        // Random models rarely end a turn; nearly uniform draws do. The numbers are those of temperature 1.
        temperature: 8.0,
        logprob_temperature: Some(1.0),
        seed: 7,
        turns: Some(TurnLimits { max_turns: ANSWERS, ..TurnLimits::default() }),
        ..SamplingParams::default()
    };
    Asking { sampling, interaction: Interaction::new(Arc::new(Pictures { delays, fails })) }
}

fn num_turns(generated: &[Generated]) -> usize {
    generated.iter().flat_map(|of| &of.completions).map(|c| c.turns.len()).sum()
}

#[test]
fn recorded_numbers_are_those_of_training_and_can_be_recalled() {
    let mut own_shown = 0;
    for name in FAMILIES {
        let setup = Setup::new(name, Device::Cpu);
        let model = &setup.model;
        let (before, read) = (model.tower_runs(), model.decoder().rows_read());
        let mut memory = DecoderMemory::new(1 << 14, false);
        let generated = setup.generate(&params([5, 0], None), 64, Some(&mut memory)).unwrap();
        assert!(num_turns(&generated) >= 3, "{name}: {} turns", num_turns(&generated));
        // Each medium is encoded once for the completions of a prompt.
        let media: usize = generated.iter().map(|of| of.media.len()).sum();
        assert_eq!(model.tower_runs() - before, media as u64, "{name}");
        // The second prompt has one of the two pictures of the answers.
        assert!(generated[0].media.len() <= 2 && generated[1].media.len() <= 1, "{name}");
        let shown =
            |of: &Generated| of.completions.iter().flat_map(|c| &c.turns).any(|t| t.media.contains(&0));
        own_shown += usize::from(shown(&generated[1]));
        let completions = || generated.iter().flat_map(|of| &of.completions);
        // Every token but a completion's last is read once: no turn is prefilled again.
        let prompts: usize = setup.rows.iter().map(|(_, prompt, _)| prompt.ids.len()).sum();
        let once = prompts + completions().map(|c| c.ids.len() - 1).sum::<usize>();
        assert_eq!(model.decoder().rows_read() - read, once as u64, "{name}");
        for c in completions() {
            assert_eq!([c.logprobs.len(), c.entropies.len()], [c.num_sampled(); 2], "{name}");
            assert!(
                c.ids.len() <= MOST && c.turns.len() <= ANSWERS && c.earlier.len() == c.turns.len(),
                "{name}"
            );
            assert_eq!(c.model_turns().map(<[u32]>::len).sum::<usize>(), c.num_sampled());
            assert_eq!(
                setup.prompts.tokenizer().decode(c.model_turns().last().unwrap(), true).unwrap(),
                c.text
            );
            for turn in &c.turns {
                assert!(
                    turn.turn.text.contains("look ") && turn.turn.text.ends_with("assistant\n"),
                    "{name}: {:?}",
                    turn.turn.text
                );
                assert_eq!(turn.sources.len(), turn.turn.media.len());
                assert!(matches!(turn.sources.len(), 1 | 2), "{name}");
            }
        }
        let twice = completions().flat_map(|c| &c.turns).filter(|turn| turn.sources.len() == 2).count();
        assert!(twice > 0, "{name}: no answer shows a picture twice");
        // A placeholder that the model itself writes is text.
        let placeholder = |text| setup.prompts.tokenizer().token_id(text);
        let placeholder = placeholder("<|image_pad|>").or_else(|| placeholder("<IMG_CONTEXT>")).unwrap();
        assert!(completions().any(|c| c.sampled_ids().contains(&placeholder)), "{name}");
        let (stream, prompts, features) = setup.packed(&generated);
        let recorded: Vec<f32> = completions().flat_map(|c| c.logprobs.clone()).collect();
        let scored = model.score(&stream, &features, 1.0).unwrap().0;
        let delta = max_diff(&recorded, &scored);
        assert!(delta <= 1e-4, "{name}: recorded and trained log-probabilities differ by {delta}");

        let memory = memory.of_stream(&stream).unwrap().unwrap();
        train_all(model);
        let gradients = |recalled: Memory| {
            let how = Training::default();
            let pass = model.train_pass(&stream, &features, how, Some(recalled)).unwrap();
            let logprobs = pass.logprobs.clone();
            let d: Vec<f32> = (0..logprobs.len()).map(|i| (i as f32 * 0.7).sin()).collect();
            let of_features = pass.backward(&d, Some(&d)).unwrap();
            let prompts: Vec<&Prompt> = prompts.iter().collect();
            model.backward_media(&prompts, &features, Memories::default(), of_features, how).unwrap();
            (logprobs, take_gradients(model))
        };
        let (want, expected) = gradients(Memory::default());
        let (got, recalled) = gradients(memory);
        assert!(max_diff(&got, &want) <= 1e-4, "{name}: {}", max_diff(&got, &want));
        assert_ne!(got, want, "{name}: nothing was recalled");
        assert_close(&recalled, &expected, 1e-4, name);
    }
    assert!(own_shown >= 2, "answers show the prompt's own picture to {own_shown} families");
}

/// Answers without a picture stand beside answers with one.
#[test]
fn answers_with_and_without_pictures_share_a_stream() {
    for name in FAMILIES {
        let setup = Setup::new(name, Device::Cpu);
        let generated = setup.generate(&params([0, 0], Some(FEW)), 64, None).unwrap();
        let completions = || generated.iter().flat_map(|of| &of.completions);
        for pictures in [0, 1] {
            let mut turns = completions().flat_map(|c| &c.turns);
            assert!(turns.any(|turn| turn.sources.len() == pictures), "{name}: {pictures}");
        }
        let (stream, _, features) = setup.packed(&generated);
        let recorded: Vec<f32> = completions().flat_map(|c| c.logprobs.clone()).collect();
        let far = max_diff(&recorded, &setup.model.score(&stream, &features, 1.0).unwrap().0);
        assert!(far <= 1e-4, "{name}: recorded and trained log-probabilities differ by {far}");
    }
}

/// Sampling runs on every device.
#[test]
fn recorded_numbers_on_every_device() {
    for device in Device::all() {
        let setup = Setup::new("qwen2_5_vl_untied", device);
        let generated = setup.generate(&params([0, 0], None), 64, None).unwrap();
        assert!(num_turns(&generated) >= 1, "{device}");
        let (stream, _, features) = setup.packed(&generated);
        let recorded: Vec<f32> =
            generated.iter().flat_map(|of| &of.completions).flat_map(|c| c.logprobs.clone()).collect();
        let delta = max_diff(&recorded, &setup.model.score(&stream, &features, 1.0).unwrap().0);
        assert!(delta <= 1e-4, "{device}: {delta}");
    }
}

/// Neither the time of answers nor the number of completions in flight changes a bit.
#[test]
fn answers_may_arrive_in_any_order() {
    let setup = Setup::new("qwen2_5_vl_untied", Device::Cpu);
    let of = |delays, max_live| {
        let generated = setup.generate(&params(delays, None), max_live, None).unwrap();
        generated
            .into_iter()
            .map(|of| (of.completions, of.media.into_iter().map(|(m, _)| m).collect::<Vec<_>>()))
            .collect::<Vec<_>>()
    };
    let want = of([0, 0], 64);
    for (delays, max_live) in [([30, 0], 64), ([0, 30], 64), ([5, 5], 8)] {
        assert!(of(delays, max_live) == want, "{delays:?}, {max_live}");
    }
}

/// The first answer comes only after other completions have got 100 tokens.
#[test]
fn other_completions_decode_while_one_waits() {
    let setup = Setup::new("qwen2_5_vl_untied", Device::Cpu);
    let decoded = Arc::new(Decoded::default());
    let interaction = Interaction::new(Arc::new(Patient(Arc::clone(&decoded))));
    let params = Asking { interaction, ..params([0, 0], None) };
    let count = |_| _ = decoded.tokens.fetch_add(1, Ordering::Relaxed);
    setup.generate_told(&params, 64, None, count).unwrap();
    assert!(decoded.waited.load(Ordering::Relaxed), "no turn ended");
}

#[test]
fn answers_beyond_a_limit_end_the_completion() {
    let setup = Setup::new("qwen2_vl_untied", Device::Cpu);
    let limited = |limit: &dyn Fn(&mut TurnLimits)| {
        let mut params = params([0, 0], None);
        limit(params.sampling.turns.as_mut().unwrap());
        setup.generate(&params, 64, None).unwrap()
    };
    let open = limited(&|_| {});
    let asked = |c: &omnigrpo_rollout::Completion| c.finish_reason == FinishReason::Stop;
    for (what, limited) in [
        ("tokens", limited(&|of| of.max_answer_tokens = Some(5))),
        ("media", limited(&|of| of.max_answer_media = 0)),
    ] {
        assert_eq!(num_turns(&limited), 0, "{what}");
        for (cut, whole) in
            limited.iter().zip(&open).flat_map(|(a, b)| a.completions.iter().zip(&b.completions))
        {
            let first = whole.turns.first().map_or(whole.ids.len(), |turn| turn.start);
            assert_eq!(cut.ids, whole.ids[..first], "{what}");
            assert!(
                whole.turns.is_empty() || !asked(cut),
                "{what}: the end of an episode counts as truncated"
            );
        }
    }
    for what in ["parts", "letters", "too much"] {
        let cut = setup.generate(&params([0, 0], Some(what)), 64, None).unwrap();
        assert_eq!(num_turns(&cut), 0, "{what}");
        let ended: Vec<_> = cut.iter().flat_map(|of| &of.completions).map(asked).collect();
        let of_media = limited(&|of| of.max_answer_media = 0);
        assert_eq!(ended, of_media.iter().flat_map(|of| &of.completions).map(asked).collect::<Vec<_>>());
    }
    let once = limited(&|of| of.max_turns = 1);
    let lengths: BTreeSet<usize> =
        once.iter().flat_map(|of| &of.completions).map(|c| c.turns.len()).collect();
    assert_eq!(lengths, BTreeSet::from([0, 1]));
}

#[test]
fn a_broken_environment_ends_the_rollout_with_its_place() {
    let setup = Setup::new("qwen2_vl_untied", Device::Cpu);
    let error = |fails| setup.generate(&params([0, 0], Some(fails)), 64, None).unwrap_err().to_string();
    let told = error("the server is gone");
    assert!(
        told.starts_with("environment `pictures`, sample ") && told.ends_with(": the server is gone"),
        "{told}"
    );
    assert!(told.contains(" of row "), "{told}");
    assert!(error("panic").ends_with(": it panicked"));
}

/// The model reads why a picture of an answer cannot be read: it does not exist, or it claims 60,000 by 60,000 pixels.
#[test]
fn a_picture_that_cannot_be_read_is_an_error_of_the_model() {
    let setup = Setup::new("qwen2_vl_untied", Device::Cpu);
    let mut bomb = std::fs::read(golden("media/shapes.png")).unwrap();
    bomb[16..24].copy_from_slice(&[0, 0, 0xEA, 0x60, 0, 0, 0xEA, 0x60]);
    let folder = tempfile::TempDir::new().unwrap();
    let claims = folder.path().join("bomb.png");
    std::fs::write(&claims, bomb).unwrap();
    // The environment outlives this test.
    let claims: &'static str = claims.to_str().unwrap().to_owned().leak();
    for path in ["/nonexistent/picture.png", claims] {
        let mut params = params([0, 0], Some(path));
        params.sampling.max_completion_length = 360;
        let generated = setup.generate(&params, 64, None).unwrap();
        let turns: Vec<_> = generated.iter().flat_map(|of| &of.completions).flat_map(|c| &c.turns).collect();
        assert!(turns.len() >= 3, "{path}: {}", turns.len());
        for AddedTurn { turn, sources, .. } in turns {
            assert!(sources.is_empty() && turn.media.is_empty());
            assert!(turn.text.contains("{\"error\":") && turn.text.contains(".png"), "{}", turn.text);
        }
        assert!(generated.iter().all(|of| of.media.is_empty()));
    }
}

/// Families whose projector reads the question, or whose template ends a turn with ordinary tokens, take no turns.
#[test]
fn families_without_turns_are_refused_with_the_reason() {
    for (name, why) in [("humanomni", "projector reads the question"), ("aria", "which is not one token")] {
        let opened = Checkpoint::open(&checkpoint(name)).unwrap();
        let prompts = PromptBuilder::open(&opened, PromptSettings::default()).unwrap();
        let error = prompts.turn_stop().unwrap_err().to_string();
        assert!(error.contains(why), "{name}: {error}");
    }
}

/// A box on the original picture comes back as that part of it.
#[test]
fn zoom_returns_parts_of_the_original() {
    let folder = tempfile::TempDir::new().unwrap();
    let media = omnigrpo_models::MediaSettings::default();
    let load = |path: &Path| omnigrpo_media::load_image(path, media.orientation, &media.limits).unwrap();
    let zoom = omnigrpo_rollout::environment("zoom", folder.path().join("media"), &media).unwrap();
    let thousandths =
        omnigrpo_rollout::environment("zoom:1000", folder.path().join("media"), &media).unwrap();
    let unknown = omnigrpo_rollout::environment("zom", PathBuf::new(), &media).err();
    assert!(unknown.is_some_and(|what| what.contains("expected zoom")));
    assert_eq!(zoom.tools()[0]["function"]["name"], "image_zoom_in_tool");
    let picture = load(&golden("media/noise.png"));
    let row = json!({ "prompt": "<image>?", "image": golden("media/noise.png") });
    let sample = RowReader::new("zoom").media_in(golden("media")).sample(row).unwrap();
    let key = EpisodeKey { seed: 0, rollout: 0, row: 0, sample: 0 };
    let ask = |zoom: &dyn Environment, text: &str| {
        let calls = omnigrpo_text::tool_calls(text);
        let turn = ModelTurn { text, ids: &[1], calls: &calls, number: 1, tokens_left: 100, media_left: 4 };
        zoom.begin(&sample, key).unwrap().answer(&turn).unwrap()
    };
    let call = |corners: &str| {
        format!(
            "<tool_call>{{\"name\": \"image_zoom_in_tool\", \"arguments\": {{\"bbox_2d\": {corners}}}}}</tool_call>"
        )
    };
    let (w, h) = (picture.width_px, picture.height_px);
    assert!(w > 40 && h > 40, "{w}x{h}");
    let file = |answer: Answer| {
        let Answer::Say { role: Role::Tool, parts, failed: 0 } = answer else { panic!("{answer:?}") };
        let [AnswerPart::Medium { kind: MediumKind::Image, path }] = &parts[..] else { panic!("{parts:?}") };
        path.clone()
    };
    let path = file(ask(&*zoom, &call("[3, 5, 37, 40]")));
    let part = load(&path);
    assert_eq!(part, picture.crop([3, 5], [37, 40]).unwrap());
    // Row 1, column 2 of the part is row 6, column 5 of the picture.
    assert_eq!(part.pixels[3 * (34 + 2)..][..3], picture.pixels[3 * (6 * w as usize + 5)..][..3]);
    // A part that was stored before is not written again.
    assert_eq!(file(ask(&*zoom, &call("[3, 5, 37, 40]"))), path);
    let whole = file(ask(&*thousandths, &call("[0, 0, 1000, 1000]")));
    assert_eq!(load(&whole), picture);
    for (wrong, why) in [
        (call("[3, 5, 3, 40]"), "is empty"),
        ("<tool_call>zoom</tool_call>".to_owned(), "is not JSON"),
        ("<tool_call>{\"name\": \"other\"}</tool_call>".to_owned(), "unknown tool `other`"),
    ] {
        let Answer::Say { parts, failed: 1, .. } = ask(&*zoom, &wrong) else { panic!("{wrong}") };
        let [AnswerPart::Text(text)] = &parts[..] else { panic!("{parts:?}") };
        assert!(text.starts_with("{\"error\":") && text.contains(why), "{text}");
    }
}

/// A record comes from a file, so its numbers of tokens may be any. If they do not fit its ids, the completion has no ids.
#[test]
fn numbers_of_tokens_in_a_record_may_be_wrong() {
    let read = |model_tokens, tokens| {
        let said = Turn::text(Role::Tool, "here");
        let turn = RecordedTurn { model: "look".to_owned(), model_tokens, said, media: Vec::new(), tokens };
        let ids = Some(vec![1, 2, 3, 4]);
        let record = RecordedCompletion { completion_ids: ids, turns: vec![turn], ..Default::default() };
        Completion::of_record(&record)
    };
    let right = read(Some(1), Some(2));
    assert_eq!((right.ids.as_slice(), right.sampled_ids().as_slice()), (&[1, 2, 3, 4][..], &[1, 4][..]));
    for (model, own) in [(usize::MAX, 2), (2, usize::MAX), (3, 2), (5, 0)] {
        let wrong = read(Some(model), Some(own));
        assert_eq!((wrong.ids.len(), wrong.turns.len()), (0, 1), "{model} and {own} tokens");
    }
    assert!(read(None, Some(2)).ids.is_empty());
}
