//! Checks that any chat template renders a conversation or is an error, within the limits of time and memory.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use omnigrpo_text::{ChatTemplate, PromptRenderer, RenderOptions, Role, Tokenizer, Turn};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/text/tests/data/tiny");
    Tokenizer::from_dir(&folder).expect("the tokenizer of the tests")
});

fuzz_target!(|source: &str| {
    let Ok(template) = ChatTemplate::from_source(source) else { return };
    let turns = [Turn::text(Role::System, "Be brief."), Turn::text(Role::User, "How many?")];
    let renderer = PromptRenderer::new(&TOKENIZER, &template);
    if let Ok(prompt) = renderer.render(&turns, &[], &RenderOptions::default()) {
        let known = TOKENIZER.vocab_size();
        assert!(prompt.ids.iter().all(|&id| (id as usize) < known), "{:?}", prompt.ids);
        assert!(prompt.spans.is_empty(), "a conversation without media has spans {:?}", prompt.spans);
    }
});
