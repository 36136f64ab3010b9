//! The table of kinds of media.
//!
//! A kind has names in rows and templates. Its [`Form`] determines how its files are found and read, so that a kind whose files
//! are pictures needs no decoder of its own.

use std::fmt;
use std::ops::{Index, IndexMut};

use serde::{Deserialize, Serialize, Serializer};

/// Kind of a medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MediumKind {
    /// Still image.
    Image,
    /// Clip of frames.
    Video,
    /// Sound.
    Audio,
}

/// Form of a medium's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One picture.
    Picture,
    /// Frames in time order.
    Clip,
    /// Samples in time order.
    Sound,
}

impl Form {
    /// Returns the type of content that chat templates know for this form.
    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::Picture => "image",
            Self::Clip => "video",
            Self::Sound => "audio",
        }
    }
}

/// Row of the table.
struct Row {
    kind: MediumKind,
    name: &'static str,
    plural: &'static str,
    word: &'static str,
    placeholder: &'static str,
    form: Form,
}

const fn row(kind: MediumKind, [name, plural, word, placeholder]: [&'static str; 4], form: Form) -> Row {
    Row { kind, name, plural, word, placeholder, form }
}

/// All kinds, in the order of [`MediumKind`], with the names of [`Row`].
const ROWS: [Row; 3] = [
    row(MediumKind::Image, ["image", "images", "images", "<image>"], Form::Picture),
    row(MediumKind::Video, ["video", "videos", "videos", "<video>"], Form::Clip),
    row(MediumKind::Audio, ["audio", "audios", "sounds", "<audio>"], Form::Sound),
];

const KINDS: usize = ROWS.len();

impl MediumKind {
    /// All kinds, in the order in which media without a placeholder are shown.
    pub const ALL: [Self; KINDS] = {
        let mut all = [Self::Image; KINDS];
        let mut i = 0;
        while i < KINDS {
            all[i] = ROWS[i].kind;
            i += 1;
        }
        all
    };

    /// Returns the kind with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// Returns the name in `{"type": …}` of rows, which is also that of a column with one medium.
    pub fn as_str(self) -> &'static str {
        self.row().name
    }

    /// Returns the name of a column with a list of media.
    pub fn plural(self) -> &'static str {
        self.row().plural
    }

    /// Returns the word for several media in messages.
    pub fn word(self) -> &'static str {
        self.row().word
    }

    /// Returns the literal that marks the place of a medium in a dataset's text.
    pub fn placeholder(self) -> &'static str {
        self.row().placeholder
    }

    /// Returns the form of the files.
    pub fn form(self) -> Form {
        self.row().form
    }
}

impl fmt::Display for MediumKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A value for each kind of media. It is serialised as a map whose keys are the plurals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PerKind<T>([T; KINDS]);

impl<T> PerKind<T> {
    /// Returns the kinds with their values.
    pub fn iter(&self) -> impl Iterator<Item = (MediumKind, &T)> {
        MediumKind::ALL.into_iter().zip(&self.0)
    }

    /// Returns the result of `f` for each value.
    pub fn each<U>(&self, f: impl FnMut(&T) -> U) -> PerKind<U> {
        PerKind(self.0.each_ref().map(f))
    }
}

impl<T> IntoIterator for PerKind<T> {
    type Item = (MediumKind, T);
    type IntoIter = std::iter::Zip<std::array::IntoIter<MediumKind, KINDS>, std::array::IntoIter<T, KINDS>>;

    fn into_iter(self) -> Self::IntoIter {
        MediumKind::ALL.into_iter().zip(self.0)
    }
}

/// Sets the values of some kinds; the others have the default.
impl<T: Default, const N: usize> From<[(MediumKind, T); N]> for PerKind<T> {
    fn from(some: [(MediumKind, T); N]) -> Self {
        let mut all = Self(std::array::from_fn(|_| T::default()));
        some.into_iter().for_each(|(kind, value)| all[kind] = value);
        all
    }
}

impl<T> Index<MediumKind> for PerKind<T> {
    type Output = T;

    fn index(&self, kind: MediumKind) -> &T {
        &self.0[kind as usize]
    }
}

impl<T> IndexMut<MediumKind> for PerKind<T> {
    fn index_mut(&mut self, kind: MediumKind) -> &mut T {
        &mut self.0[kind as usize]
    }
}

impl<T: Serialize> Serialize for PerKind<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter().map(|(kind, value)| (kind.plural(), value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_the_order_of_the_kinds() {
        for (i, row) in ROWS.iter().enumerate() {
            assert_eq!(row.kind as usize, i);
            assert_eq!(serde_json::to_value(row.kind).unwrap(), row.name);
            assert_eq!(MediumKind::named(row.name), Some(row.kind));
        }
    }

    #[test]
    fn values_are_written_under_the_plurals() {
        let counts = PerKind::from([(MediumKind::Video, 2)]);
        assert_eq!(counts[MediumKind::Video], 2);
        assert_eq!(serde_json::to_string(&counts).unwrap(), r#"{"images":0,"videos":2,"audios":0}"#);
    }
}
