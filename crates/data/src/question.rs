//! Question templates: fixed wording around the last question of a prompt. The template `none` leaves rows unchanged.
//!
//! The wordings are those the original systems train and evaluate with (VLM-R1's per task, R1-V's, R1-Omni's). A model tuned on
//! one of them expects it exactly, including double spaces. The wording of `context` was written for this program.

use omnigrpo_text::{Part, Turn};

use crate::error::DataError;

/// Entry of the table of question templates.
#[derive(Debug, PartialEq, Eq)]
pub struct QuestionTemplate {
    /// Name of the template.
    pub name: &'static str,
    /// Purpose of the template.
    pub doc: &'static str,
    /// Wording of the template, in which `{Question}` stands for the row's text. A wording without `{Question}` replaces the
    /// row's text.
    pub wording: &'static str,
}

/// All templates. The first one changes nothing.
pub const QUESTION_TEMPLATES: &[QuestionTemplate] = &[
    QuestionTemplate { name: "none", doc: "the row's text, unchanged", wording: "{Question}" },
    QuestionTemplate {
        name: "default",
        doc: "VLM-R1: thinking, then the final answer",
        wording: "{Question} First output the thinking process in <think> </think> tags and then output the final answer in <answer> </answer> tags.",
    },
    QuestionTemplate {
        name: "rec",
        doc: "VLM-R1, referring expressions: like `default`, with the answer in JSON",
        wording: "{Question} First output the thinking process in <think> </think> tags and then output the final answer in <answer> </answer> tags. Output the final answer in JSON format.",
    },
    QuestionTemplate {
        name: "ic",
        doc: "VLM-R1, image classification",
        wording: "{Question} First thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think><answer> json format answer here </answer>",
    },
    QuestionTemplate {
        name: "odLength",
        doc: "VLM-R1, detection: the instruction before the question",
        wording: "First thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think><answer> answer here </answer>\n{Question}",
    },
    QuestionTemplate {
        name: "r1-v",
        doc: "R1-V: thinking, then a number",
        wording: "{Question}  Output the thinking process in <think> </think> and final answer (number) in <answer> </answer> tags.",
    },
    QuestionTemplate {
        name: "emotion",
        doc: "R1-Omni on the row's own question: thinking, then an emotion",
        wording: "{Question}\nOutput the thinking process in <think> </think> and final emotion in <answer> </answer> tags.",
    },
    QuestionTemplate {
        name: "humanomni",
        doc: "R1-Omni: one fixed question for every clip instead of the row's",
        wording: "As an emotional recognition expert; throughout the video, which emotion conveyed by the characters is the most obvious to you?\nOutput the thinking process in <think> </think> and final emotion in <answer> </answer> tags.",
    },
    QuestionTemplate {
        name: "context",
        doc: "in the form of HumanOmniV2: the context, thinking, then the answer",
        wording: "{Question}\nFirst describe the relevant context in <context> </context> tags, then output the thinking process in <think> </think> and the final answer in <answer> </answer> tags.",
    },
];

impl QuestionTemplate {
    /// Returns the template with this name.
    ///
    /// # Errors
    /// Returns [`DataError::UnknownName`] if the template is unknown.
    pub fn named(name: &str) -> Result<&'static Self, DataError> {
        let names = QUESTION_TEMPLATES.iter().map(|template| template.name);
        QUESTION_TEMPLATES
            .iter()
            .find(|template| template.name == name)
            .ok_or_else(|| DataError::unknown_name("question template", name, names))
    }

    /// Puts the wording around the text of `turn`. The media keep their positions.
    pub(crate) fn apply(&self, turn: &mut Turn) {
        let Some((before, after)) = self.wording.split_once("{Question}") else {
            turn.parts.retain(|part| matches!(part, Part::Medium { .. }));
            turn.parts.push(Part::Text(self.wording.to_owned()));
            return;
        };
        if !before.is_empty() {
            match turn.parts.iter_mut().find_map(text_of) {
                Some(text) => text.insert_str(0, before),
                None => turn.parts.push(Part::Text(before.to_owned())),
            }
        }
        if !after.is_empty() {
            match turn.parts.last_mut().and_then(text_of) {
                Some(text) => text.push_str(after),
                None => turn.parts.push(Part::Text(after.to_owned())),
            }
        }
    }
}

fn text_of(part: &mut Part) -> Option<&mut String> {
    match part {
        Part::Text(text) => Some(text),
        Part::Medium { .. } | Part::Call(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use omnigrpo_text::{MediumKind, Role};

    use super::*;

    fn applied(name: &str, parts: Vec<Part>) -> Vec<Part> {
        let mut turn = Turn { role: Role::User, parts };
        QuestionTemplate::named(name).unwrap().apply(&mut turn);
        turn.parts
    }

    fn text(text: &str) -> Part {
        Part::Text(text.to_owned())
    }

    const IMAGE: Part = Part::Medium { kind: MediumKind::Image, index: 0 };

    #[test]
    fn wording_goes_around_the_text_and_media_stay() {
        assert_eq!(applied("none", vec![IMAGE, text(" a")]), [IMAGE, text(" a")]);
        let r1v = "How many?  Output the thinking process in <think> </think> and final answer (number) in <answer> </answer> tags.";
        assert_eq!(applied("r1-v", vec![IMAGE, text("How many?")]), [IMAGE, text(r1v)]);
        let parts = applied("default", vec![text("Look"), IMAGE]);
        assert_eq!(parts[..2], [text("Look"), IMAGE]);
        assert_eq!(
            parts[2],
            text(
                " First output the thinking process in <think> </think> tags and then output the final answer in <answer> </answer> tags."
            )
        );
        let parts = applied("odLength", vec![IMAGE, text("Find cats.")]);
        let Part::Text(found) = &parts[1] else { panic!() };
        assert!(
            found.starts_with("First thinks about") && found.ends_with("answer here </answer>\nFind cats.")
        );
        let parts = applied("humanomni", vec![text("x"), IMAGE, text("y")]);
        assert_eq!(parts.len(), 2);
        assert_eq!(parts[0], IMAGE);
    }

    #[test]
    fn an_unknown_name_gets_a_suggestion() {
        let message = QuestionTemplate::named("defualt").unwrap_err().to_string();
        assert!(message.contains("did you mean `default`") && message.contains("odLength"), "{message}");
    }
}
