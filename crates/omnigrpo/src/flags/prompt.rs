//! How rows become prompts.

use super::*;
use crate::names::words;
use Kind::{Choice, Object, Text};
use omnigrpo_data::QuestionTemplate;

/// How HumanOmni prompts are written.
fn prompt_forms() -> Vec<(&'static str, &'static str)> {
    vec![
        ("sft", "As in supervised training and inference."),
        ("r1omni_grpo", "As the original GRPO trainer: an empty Qwen2-VL video before the media."),
    ]
}

/// The settings.
pub const FLAGS: &[Flag] = &[
    row("question_template", Choice(words::<&'static QuestionTemplate>), at!(read.template), ROWS)
        .help("Sentence added to each question that asks for thinking and answer tags."),
    row("prompt_form", Choice(prompt_forms), of_family!("prompt_form"), ROWS)
        .help(
            "How HumanOmni prompts are written: as in its supervised training and inference, or as \
             the original GRPO trainer did.",
        )
        .unset("config.json's, else sft"),
    row("system_prompt", Text, at!(prompts.render.system), ROWS)
        .help("System turn for rows that have none.")
        .unset("the row's or the template's"),
    row("chat_template_kwargs", Object, at!(prompts.render.kwargs), ROWS)
        .help("Variables for the chat template, as a JSON object.")
        .unset("none"),
    row("max_prompt_length", int(1, COUNT), at!(prompts.max_prompt_length), RUNS_ROWS)
        .help(
            "Most tokens of a prompt, features of media included. HumanOmni counts each medium as one \
             token, as R1-Omni's trainer does. A longer prompt is a bad row; it is never cut, since a cut \
             prompt trains on the wrong question.",
        )
        .alias(&["model_max_length"])
        .unset("the model's limit"),
];
