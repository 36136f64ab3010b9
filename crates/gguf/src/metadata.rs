//! Metadata: keys with values, in the order of the file.

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    /// Values of one type, none of which is a list.
    List(Vec<Value>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl Value {
    /// Returns the number of the type in a file. Source: `gguf.h`, `enum gguf_type`.
    pub(crate) fn type_id(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => 8,
            Self::List(_) => LIST,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    /// Returns an integer that is not negative, of any width.
    #[must_use]
    pub fn count(&self) -> Option<u64> {
        match *self {
            Self::U8(x) => Some(x.into()),
            Self::I8(x) => x.try_into().ok(),
            Self::U16(x) => Some(x.into()),
            Self::I16(x) => x.try_into().ok(),
            Self::U32(x) => Some(x.into()),
            Self::I32(x) => x.try_into().ok(),
            Self::U64(x) => Some(x),
            Self::I64(x) => x.try_into().ok(),
            _ => None,
        }
    }

    /// Returns a number with a fraction. One in f32 becomes the shortest decimal that denotes it: 1e-5, not 9.999999747378752e-6.
    #[must_use]
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::F32(x) => x.to_string().parse().ok(),
            Self::F64(x) => Some(*x),
            _ => None,
        }
    }

    /// Returns a truth value.
    #[must_use]
    pub fn truth(&self) -> Option<bool> {
        if let Self::Bool(x) = self { Some(*x) } else { None }
    }

    /// Returns a text.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        if let Self::Text(x) = self { Some(x) } else { None }
    }

    /// Returns a list.
    #[must_use]
    pub fn list(&self) -> Option<&[Value]> {
        if let Self::List(x) = self { Some(x) } else { None }
    }
}

/// Number of the type of lists.
pub(crate) const LIST: u32 = 9;

/// Keys with values, in the order of the file.
pub type Metadata = Vec<(String, Value)>;
