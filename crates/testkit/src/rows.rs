//! Prompts of the InternVL, Aria, SmolVLM and Qwen3-VL cases, read from their rows as a run reads them.

use std::path::Path;

use omnigrpo_data::{Dataset, DatasetSpec, ReadOptions, Roots, Sample};
use omnigrpo_models::{
    Checkpoint, Limits, MediaSettings, Prompt, PromptBuilder, PromptSettings, probe_medium,
};

use omnigrpo_text::MediumKind;

use crate::golden::golden;

/// Checkpoints and the cases they have results for.
pub const INTERNVL: [(&str, &str); 8] = [
    ("internvl_hf", "ABCDEF"),
    ("internvl_original", "ABCDEF"),
    ("internvl_rms_hf", "CE"),
    ("internvl_rms_original", "CE"),
    ("internvl3_5_hf", "ABCDE"),
    ("internvl3_5_original", "CE"),
    ("internvl3_5_moe_hf", "BCE"),
    ("internvl3_5_moe_original", "CE"),
];

pub const ARIA: [(&str, &str); 2] = [("aria", "ABCDEF"), ("aria_own", "CEF")];

pub const SMOLVLM: [(&str, &str); 3] =
    [("smolvlm", "ABCDEF"), ("smolvlm_tied", "CDE"), ("smolvlm_v1", "ABCF")];

pub const QWEN3_VL: [(&str, &str); 3] =
    [("qwen3_vl", "ABCDEF"), ("qwen3_vl_untied", "CE"), ("qwen3_vl_moe", "BCDE")];

pub const OMNI: [(&str, &str); 2] = [("omni", "ABCDEFGHI"), ("omni_thinker", "CDEFGH")];

pub const QWEN_AUDIO: [(&str, &str); 1] = [("qwen2_audio", "ABCD")];

/// The rows of the cases are those of Qwen3-VL.
pub const QWEN3_5: [(&str, &str); 3] =
    [("qwen3_5", "ABCDEF"), ("qwen3_5_untied", "CE"), ("qwen3_5_text", "B")];

/// Returns each checkpoint with each of its cases.
pub fn cases_of(
    all: &'static [(&'static str, &'static str)],
) -> impl Iterator<Item = (&'static str, String)> {
    all.iter().flat_map(|(name, cases)| cases.chars().map(move |case| (*name, case.to_string())))
}

pub fn dataset() -> Dataset {
    dataset_of("internvl")
}

/// The rows of a folder's cases.
pub fn dataset_of(folder: &str) -> Dataset {
    let spec = DatasetSpec::file(golden(&format!("{folder}/rows.jsonl"))).with_roots(Roots::all(golden("")));
    Dataset::open(&[spec], &ReadOptions::default()).unwrap()
}

pub fn settings(media: MediaSettings) -> PromptSettings {
    PromptSettings { media, max_completion_length: 16, ..PromptSettings::default() }
}

pub fn builder(dir: &Path, media: MediaSettings) -> PromptBuilder {
    PromptBuilder::open(&Checkpoint::open(dir).unwrap(), settings(media)).unwrap()
}

pub fn prompt(dir: &Path, case: &str) -> Prompt {
    prompt_of("internvl", dir, case)
}

pub fn prompt_of(folder: &str, dir: &Path, case: &str) -> Prompt {
    builder(dir, MediaSettings::default()).build(&sample_of(folder, case)).unwrap()
}

/// The row of a case. In rows with `interleave`, the sound is that of the clip, as `use_audio_in_video` reads it from a file.
pub fn sample_of(folder: &str, case: &str) -> Sample {
    let mut sample = dataset_of(folder).get(u64::from(case.as_bytes()[0] - b'A')).unwrap();
    if sample.columns.contains_key("interleave") {
        let sound = sample.media.iter_mut().find(|medium| medium.kind == MediumKind::Audio);
        sound.unwrap().options.of_clip = Some(0);
    }
    sample
}

/// Asserts that what is planned from the headers of each row's media is what decoding gives.
pub fn check_plans(builder: &PromptBuilder, rows: &Dataset) {
    for row in 0..rows.len() {
        let sample = rows.get(row).unwrap();
        let headers: Vec<_> =
            sample.media.iter().map(|m| probe_medium(m, &Limits::default()).unwrap()).collect();
        let (rendered, plans) = builder.plan(&sample, &headers).unwrap();
        let built = builder.build(&sample).unwrap();
        assert_eq!((rendered.ids, rendered.spans), (built.ids, built.spans));
        assert_eq!(plans.len(), built.media.len());
        for (plan, medium) in plans.iter().zip(&built.media) {
            assert_eq!((plan.kind, plan.shape), (medium.kind, medium.shape));
            assert_eq!(plan.frame_times_secs, medium.frame_times_secs);
            if let Ok([tiles, ..]) = medium.shape.pictures() {
                assert_eq!(plan.tokens, 4 * tiles);
            }
        }
    }
}
