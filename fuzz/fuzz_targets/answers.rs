//! Checks that every answer of an environment is read within the limits of an answer, or is an error.
#![no_main]

use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use libfuzzer_sys::fuzz_target;
use omnigrpo_data::{Cause, RowReader, Sample};
use omnigrpo_models::{MAX_SAID_BYTES, MAX_SAID_PARTS, MediaSettings};
use omnigrpo_rollout::{Answer, AnswerPart, Environment, EpisodeKey, ModelTurn};
use omnigrpo_text::{Part, tool_calls};
use omnigrpo_train::{Peer, environment_of};
use serde_json::{Map, Value, json};

/// Answers every request after the first with the latest input.
#[derive(Default)]
struct Says(Mutex<Map<String, Value>>);

impl Peer for Says {
    fn name(&self) -> &str {
        "fuzz"
    }

    fn call(&self, _: &str, _: u64, request: &Map<String, Value>) -> Result<Map<String, Value>, Cause> {
        match request.contains_key("probe") {
            true => Ok([("opens".to_owned(), true.into())].into_iter().collect()),
            false => Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()),
        }
    }
}

struct Setup {
    says: Arc<Says>,
    environment: Arc<dyn Environment>,
    row: Sample,
    _folder: tempfile::TempDir,
}

static SETUP: LazyLock<Setup> = LazyLock::new(|| {
    omnigrpo_fuzz::let_guarded_panics_pass();
    let (says, folder) = (Arc::new(Says::default()), tempfile::tempdir().expect("a folder"));
    let media = folder.path().join("media");
    let settings = MediaSettings::default();
    let environment = environment_of(says.clone(), media, &settings, None).expect("an environment");
    let row = RowReader::new("rows").sample(json!({ "prompt": "?" })).expect("a row");
    Setup { says, environment, row, _folder: folder }
});

fuzz_target!(|bytes: &[u8]| {
    let Ok(answer) = serde_json::from_slice::<Map<String, Value>>(bytes) else { return };
    let Setup { says, environment, row, .. } = &*SETUP;
    *says.0.lock().unwrap_or_else(PoisonError::into_inner) = answer;

    let mut opened = row.clone();
    if environment.open(&mut opened).is_ok() {
        let parts = &opened.turns.last().expect("a turn").parts;
        let text = |part: &Part| if let Part::Text(text) = part { text.len() } else { 0 };
        assert!(parts.len() <= 1 + MAX_SAID_PARTS && parts.iter().map(text).sum::<usize>() <= 1 + MAX_SAID_BYTES);
    }

    let key = EpisodeKey { seed: 1, rollout: 2, row: 3, sample: 4 };
    let mut episode = environment.begin(row, key).expect("an episode");
    let text = r#"<tool_call>{"name": "a", "arguments": {}}</tool_call>"#;
    let calls = tool_calls(text);
    let turn = ModelTurn { text, ids: &[1], calls: &calls, number: 1, tokens_left: 9, media_left: 2 };
    if let Ok(Answer::Say { parts, failed, .. }) = episode.answer(&turn) {
        let media = parts.iter().filter(|part| matches!(part, AnswerPart::Medium { .. })).count();
        assert!(parts.len() <= MAX_SAID_PARTS && media <= 2 && failed <= calls.len());
    }
});
