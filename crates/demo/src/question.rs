//! Questions of the demo: five kinds in two forms.
//!
//! Answers are dealt, not drawn: over any run of rows every answer, every letter and every wording comes up equally
//! often, so the best constant reply earns chance and no more. A choice may be answered by its letter or by its text.

use rand_chacha::ChaCha8Rng;

use crate::draw::{pick, shuffle};

/// Subject of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Colour of the only shape.
    Colour,
    /// Outline of the only shape.
    Shape,
    /// How many shapes there are.
    Count,
    /// At which edge the one shape lies.
    Position,
    /// Which way the shape of a clip moves.
    Direction,
}

impl Kind {
    /// All kinds, in the order in which rows are dealt.
    pub const ALL: [Self; 5] = [Self::Colour, Self::Shape, Self::Count, Self::Position, Self::Direction];

    /// The value of the column `type`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Colour => "colour",
            Self::Shape => "shape",
            Self::Count => "count",
            Self::Position => "position",
            Self::Direction => "direction",
        }
    }

    /// Every answer; chance for a short answer is one over their number, for a choice one quarter.
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

/// How an answer is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    /// One of four options.
    Choice,
    /// The word itself.
    Short,
}

impl Form {
    /// Both forms.
    pub const ALL: [Self; 2] = [Self::Choice, Self::Short];

    /// The value of the column `form`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Choice => "choice",
            Self::Short => "short",
        }
    }
}

const LETTERS: [&str; 4] = ["A", "B", "C", "D"];

/// A question with its answer, before there is a picture for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub kind: Kind,
    pub form: Form,
    /// Answer that the picture must show: index into [`Kind::answers`].
    pub answer: usize,
    /// The text after the medium's placeholder.
    pub text: String,
    /// The letter of a choice, the word of a short answer.
    pub reply: &'static str,
    /// Any answer of the kind, drawn without regard to the right one.
    pub guess: &'static str,
}

impl Question {
    /// The `row`-th question of a split whose forms take turns; `rng` chooses wording and options, never the answer.
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

    /// The word that names what is seen.
    pub fn word(&self) -> &'static str {
        self.kind.answers()[self.answer]
    }

    /// The completion that earns everything: what is seen, as thought and as answer.
    pub fn completion(&self) -> String {
        format!("<think>{0}</think><answer>{0}</answer>", self.word())
    }

    /// The completion to imitate before GRPO: the right one for a choice, a guess in the right form for a short
    /// answer. What a picture shows is learned from choices; saying it without options is left to the reward.
    pub fn first_lesson(&self) -> String {
        match self.form {
            Form::Choice => self.completion(),
            Form::Short => format!("<think>{0}</think><answer>{0}</answer>", self.guess),
        }
    }

    /// The ground truth: the word, behind its letter for a choice.
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
    use crate::draw::stream;

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
        // Among choices about position, each word is right equally often for each of its places in the list.
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
