//! Questions of the demo: five kinds in two forms.
//!
//! Answers are assigned in a cycle, not drawn at random. In any sequence of rows every answer and every letter occurs equally
//! often, so the best constant reply scores no better than chance. A choice may be answered by its letter or by its text.

use rand_chacha::ChaCha8Rng;

use crate::random::{pick, shuffle};

/// Subject of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Colour of the only shape.
    Colour,
    /// Outline of the only shape.
    Shape,
    /// Number of shapes.
    Count,
    /// Edge that is nearest to the only shape.
    Position,
    /// Direction in which the shape of a clip moves.
    Direction,
}

impl Kind {
    /// All kinds. Rows cycle through them in this order.
    pub const ALL: [Self; 5] = [Self::Colour, Self::Shape, Self::Count, Self::Position, Self::Direction];

    /// Returns the value of the column `type`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Colour => "colour",
            Self::Shape => "shape",
            Self::Count => "count",
            Self::Position => "position",
            Self::Direction => "direction",
        }
    }

    /// Returns every possible answer. The chance rate is one over their number for a short answer, and one quarter for a choice.
    pub const fn answers(self) -> &'static [&'static str] {
        match self {
            Self::Colour => &["red", "green", "blue", "yellow", "orange", "purple", "white", "black"],
            Self::Shape => &["circle", "square", "triangle", "cross"],
            Self::Count => &["1", "2", "3", "4"],
            Self::Position => &["left", "right", "top", "bottom"],
            Self::Direction => &["left", "right", "up", "down"],
        }
    }

    const fn wordings(self) -> [&'static str; 2] {
        match self {
            Self::Colour => ["What colour is the shape?", "Which colour is it?"],
            Self::Shape => ["What shape is this?", "Which shape is it?"],
            Self::Count => ["How many shapes are there?", "How many shapes?"],
            Self::Position => ["Where is the shape?", "On which side is the shape?"],
            Self::Direction => ["Which way does the shape move?", "Where does it move?"],
        }
    }
}

/// Form of the expected answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    /// One of four options.
    Choice,
    /// The word, without options.
    Short,
}

impl Form {
    /// Both forms.
    pub const ALL: [Self; 2] = [Self::Choice, Self::Short];

    /// Returns the value of the column `form`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Choice => "choice",
            Self::Short => "short",
        }
    }
}

const LETTERS: [&str; 4] = ["A", "B", "C", "D"];

/// A question and its answer, without a picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub kind: Kind,
    pub form: Form,
    /// Answer that the picture must show, as an index into [`Kind::answers`].
    pub answer: usize,
    /// Text after the placeholder of the medium.
    pub text: String,
    /// Correct reply: the letter for a choice, the word for a short answer.
    pub reply: &'static str,
    /// Random answer of the same kind, independent of the correct one.
    pub guess: &'static str,
}

impl Question {
    /// Returns the question of row `row` in a split that alternates between `forms`. `rng` chooses the wording and the options,
    /// never the answer.
    pub fn deal(row: usize, forms: &[Form], rng: &mut ChaCha8Rng) -> Self {
        let kind = Kind::ALL[row % Kind::ALL.len()];
        let row = row / Kind::ALL.len();
        let form = forms[row % forms.len()];
        let row = row / forms.len();
        let answers = kind.answers();
        let answer = row % answers.len();
        let wording = kind.wordings()[pick(rng, 2)];
        let guess = answers[pick(rng, answers.len())];
        match form {
            Form::Short => {
                Self { kind, form, answer, text: wording.to_owned(), reply: answers[answer], guess }
            }
            Form::Choice => {
                let letter = (answer + row / answers.len()) % LETTERS.len();
                let mut options: Vec<usize> = (0..answers.len()).filter(|&other| other != answer).collect();
                shuffle(rng, &mut options);
                options.insert(letter, answer);
                let mut text = format!("{wording}\nOptions:");
                for (letter, option) in LETTERS.iter().zip(options) {
                    text.push_str(&format!("\n({letter}) {}", answers[option]));
                }
                Self { kind, form, answer, text, reply: LETTERS[letter], guess }
            }
        }
    }

    /// Returns the word for what the picture shows.
    pub fn word(&self) -> &'static str {
        self.kind.answers()[self.answer]
    }

    /// Returns the completion with the full reward: the word for what the picture shows, as thought and as answer.
    pub fn completion(&self) -> String {
        format!("<think>{0}</think><answer>{0}</answer>", self.word())
    }

    /// Returns the completion to imitate before GRPO: the correct one for a choice, a guess in the correct form for a short
    /// answer. Choices teach what a picture shows; the reward then teaches the model to name it without options.
    pub fn first_lesson(&self) -> String {
        match self.form {
            Form::Choice => self.completion(),
            Form::Short => format!("<think>{0}</think><answer>{0}</answer>", self.guess),
        }
    }

    /// Returns the ground truth: the word, preceded by its letter for a choice.
    pub fn solution(&self) -> String {
        match self.form {
            Form::Choice => format!("<answer>({}) {}</answer>", self.reply, self.word()),
            Form::Short => format!("<answer>{}</answer>", self.reply),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::random::stream;

    fn questions(num: usize) -> Vec<Question> {
        (0..num).map(|row| Question::deal(row, &Form::ALL, &mut stream(5, 0, row as u64, 0))).collect()
    }

    #[test]
    fn a_choice_offers_four_different_options_and_its_letter_names_the_answer() {
        let mut wordings = std::collections::BTreeSet::new();
        for question in questions(400) {
            wordings.insert(question.text.lines().next().unwrap().to_owned());
            if question.form == Form::Short {
                assert_eq!(question.reply, question.word());
                continue;
            }
            let lines: Vec<&str> = question.text.lines().collect();
            assert_eq!((lines.len(), lines[1]), (6, "Options:"));
            let mut options: Vec<&str> = lines[2..].iter().map(|line| &line[4..]).collect();
            let named = lines.iter().find(|line| line.starts_with(&format!("({})", question.reply))).unwrap();
            assert_eq!(&named[4..], question.word());
            options.sort_unstable();
            options.dedup();
            assert_eq!(options.len(), 4);
        }
        assert_eq!(wordings.len(), 10);
    }

    #[test]
    fn a_constant_reply_earns_chance() {
        let mut counts: BTreeMap<(Kind, Form, &str), usize> = BTreeMap::new();
        for question in questions(480) {
            *counts.entry((question.kind, question.form, question.reply)).or_default() += 1;
        }
        // 480 rows, 5 kinds, 2 forms: 48 of each, over 4 letters, 4 words, or 8 colours.
        for ((kind, form, reply), count) in counts {
            let expected = if kind == Kind::Colour && form == Form::Short { 6 } else { 12 };
            assert_eq!(count, expected, "{kind:?} {form:?} {reply}");
        }
    }

    #[test]
    fn wording_and_options_do_not_tell_the_answer() {
        // In choices about position, each word is correct equally often at each place in the list.
        let mut seen: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for question in questions(1600) {
            if question.kind == Kind::Position && question.form == Form::Choice {
                *seen.entry((question.word(), question.reply)).or_default() += 1;
            }
        }
        assert_eq!(seen.len(), 16);
        assert!(seen.values().all(|&count| count == 10), "{seen:?}");
    }
}
