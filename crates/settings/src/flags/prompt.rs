//! Conversion of rows to prompts.

use super::*;
use crate::names::words;
use Kind::{Choice, Object, Text};
use omnigrpo_data::QuestionTemplate;

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row("question_template", Choice(words::<&'static QuestionTemplate>), at!(read.template), ROWS)
        .help("Sentence added to each question that asks for thinking and answer tags."),
    row("system_prompt", Text, at!(prompts.render.system), ROWS)
        .help("System turn for rows that have none.")
        .unset("the row's or the template's"),
    row("chat_template_kwargs", Object, at!(prompts.render.kwargs), ROWS)
        .help("Variables for the chat template, as a JSON object.")
        .unset("none"),
    row("max_prompt_length", int(1, COUNT), at!(prompts.max_prompt_length), RUNS_ROWS)
        .help(
            "Maximum number of tokens of a prompt, including media. HumanOmni counts each medium as one token, as R1-Omni's \
             trainer does. A longer prompt is a bad row; it is never truncated, since a truncated prompt trains \
             on the wrong question.",
        )
        .alias(&["model_max_length"])
        .unset("the model's limit"),
];
