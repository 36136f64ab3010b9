//! Untyped values of the settings: parsing, layers of sources, lookup.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use omnigrpo_guard::names::{nearest, shown};
use serde_json::{Map, Value as Json};

use crate::Settings;
use crate::explain;
use crate::flags::{self, Fallback, Flag, Kind, Names, Verb};
use crate::names::{Named, name_of, named};
use crate::problem::Problem;

/// Value of a setting.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    Bool(bool),
    Int(i64),
    /// A number or a share.
    Float(f64),
    /// A text, a path or a name.
    Text(String),
    /// A list of texts, paths or names.
    Texts(Vec<String>),
    Floats(Vec<f64>),
    Object(Map<String, Json>),
}

impl Value {
    /// Returns the value as JSON.
    pub fn json(&self) -> Json {
        match self {
            Self::Bool(v) => (*v).into(),
            Self::Int(v) => (*v).into(),
            Self::Float(v) => (*v).into(),
            Self::Text(v) => v.as_str().into(),
            Self::Texts(v) => v.clone().into(),
            Self::Floats(v) => v.clone().into(),
            Self::Object(v) => Json::Object(v.clone()),
        }
    }
}

/// Text of a value before its kind is known.
#[derive(Clone, Debug, PartialEq)]
pub enum Raw {
    /// Arguments of a flag, or one scalar of a file. A list is split at its separators.
    Arguments(Vec<String>),
    /// Sequence in a file. Its items are not split.
    Items(Vec<String>),
    /// Mapping in a file.
    Object(Map<String, Json>),
}

impl Raw {
    /// Returns a JSON value as a user would write it in a file; `None` for null.
    pub fn of(value: Json) -> Option<Self> {
        let text = |value: Json| if let Json::String(text) = value { text } else { value.to_string() };
        match value {
            Json::Null => None,
            Json::Array(items) => Some(Self::Items(items.into_iter().map(text).collect())),
            Json::Object(map) => Some(Self::Object(map)),
            one => Some(Self::Arguments(vec![text(one)])),
        }
    }
}

/// Parses text as a kind. [`explain::expected`] describes a valid value.
///
/// # Errors
/// Returns the text that does not fit.
// One `match` with a case per kind of value.
pub fn parse(kind: &Kind, raw: &Raw) -> Result<Value, String> {
    let texts = match (kind, raw) {
        (Kind::Object, Raw::Object(map)) => return Ok(Value::Object(map.clone())),
        (_, Raw::Object(_)) => return Err("a mapping".into()),
        (_, Raw::Items(_)) if !kind.is_list() => return Err("a list".into()),
        (_, Raw::Items(items)) => items.clone(),
        (_, Raw::Arguments(arguments)) if kind.is_list() => {
            arguments.iter().flat_map(|argument| split(kind, argument)).collect()
        }
        (_, Raw::Arguments(arguments)) => arguments.clone(),
    };
    if kind.is_list() {
        return match kind {
            Kind::Floats => texts
                .iter()
                .map(|t| float(t, f64::MIN, f64::MAX))
                .collect::<Result<_, _>>()
                .map(Value::Floats),
            Kind::Choices(names) => {
                texts.iter().map(|t| choice(t, *names)).collect::<Result<_, _>>().map(Value::Texts)
            }
            _ if texts.iter().any(String::is_empty) => Err("an empty item".into()),
            _ => Ok(Value::Texts(texts)),
        };
    }
    let text = match texts.as_slice() {
        [one] => one.as_str(),
        [] => return Err("nothing".into()),
        many => return Err(format!("{} values: `{}`", many.len(), many.join(" "))),
    };
    let quoted = || format!("`{text}`");
    match kind {
        Kind::Bool => match text.to_ascii_lowercase().as_str() {
            "true" | "yes" | "1" => Ok(Value::Bool(true)),
            "false" | "no" | "0" => Ok(Value::Bool(false)),
            _ => Err(quoted()),
        },
        Kind::Int { min, max } => match text.parse::<i64>() {
            Ok(v) if (*min..=*max).contains(&v) => Ok(Value::Int(v)),
            _ => Err(quoted()),
        },
        Kind::Float { min, max } => float(text, *min, *max).map(Value::Float),
        Kind::Fraction => match text.strip_suffix('%') {
            Some(percent) => {
                float(percent.trim(), 0.0, 100.0).map(|v| Value::Float(v / 100.0)).map_err(|_| quoted())
            }
            None => float(text, 0.0, 1.0).map(Value::Float),
        },
        Kind::Choice(names) => choice(text, *names).map(Value::Text),
        Kind::Switch(names) => match parse(&Kind::Bool, raw) {
            Ok(on) => choice(names()[usize::from(on == Value::Bool(true))].0, *names).map(Value::Text),
            Err(_) => choice(text, *names).map(Value::Text),
        },
        Kind::Path if text.is_empty() => Err("an empty path".into()),
        Kind::Object => match serde_json::from_str(text) {
            Ok(Json::Object(map)) => Ok(Value::Object(map)),
            _ => Err(quoted()),
        },
        _ => Ok(Value::Text(text.to_string())),
    }
}

fn float(text: &str, min: f64, max: f64) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(v) if v.is_finite() && (min..=max).contains(&v) => Ok(v),
        _ => Err(format!("`{text}`")),
    }
}

fn choice(text: &str, names: Names) -> Result<String, String> {
    // Users may write choices with underscores or dashes, as they may write flags.
    let same = |name: &str| name.replace('-', "_").eq_ignore_ascii_case(&text.replace('-', "_"));
    // YAML reads `no` and `off` without quotes as false, and `yes` and `on` as true.
    let words = match text {
        "false" => ["no", "off"],
        "true" => ["yes", "on"],
        _ => [""; 2],
    };
    let names = names();
    let found = names
        .iter()
        .find(|(name, _)| same(name))
        .or_else(|| names.iter().find(|(name, _)| words.contains(name)));
    found.map(|(name, _)| name.to_string()).ok_or_else(|| format!("`{text}`"))
}

fn split(kind: &Kind, text: &str) -> Vec<String> {
    let pieces: Vec<&str> = match kind {
        Kind::Texts if text.is_empty() => vec![],
        Kind::Texts => vec![text],
        // A program with arguments, or an address, may contain any separator. It may have a name (`mine=cmd:…`).
        Kind::Specs if text.starts_with("cmd:") || text.contains("=cmd:") || text.contains("://") => {
            vec![text]
        }
        // File names may contain separators, for instance a time of day.
        Kind::Paths(_) if Path::new(text).exists() => vec![text],
        Kind::Paths(separators) => text.split(*separators).map(str::trim).collect(),
        // VLM-R1 joins the rules of its files with colons.
        Kind::Choices(_) => text.split(|c: char| c == ',' || c == ':' || c.is_whitespace()).collect(),
        _ => text.split(|c: char| c == ',' || c.is_whitespace()).collect(),
    };
    pieces.into_iter().filter(|p| !p.is_empty()).map(String::from).collect()
}

/// Source of a value. The weakest source is first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The flag table.
    Default,
    /// The recipe with this name.
    Recipe(&'static str),
    /// The environment variable with this name.
    Environment(&'static str),
    /// The preset with this name.
    Preset(String),
    /// A line of a file of settings: `file:line`.
    Config(String),
    /// The command line.
    Flag,
    /// The program that calls the library.
    Caller,
}

impl Origin {
    /// Returns the rank of the source. A value of higher rank replaces one of lower rank.
    pub const fn rank(&self) -> u8 {
        match self {
            Self::Default => 0,
            Self::Recipe(_) => 1,
            Self::Environment(_) => 2,
            Self::Preset(_) => 3,
            Self::Config(_) => 4,
            Self::Flag | Self::Caller => 5,
        }
    }

    /// Returns true if the user gave the value for this run: on the command line, in a file or in a program.
    pub const fn is_users(&self) -> bool {
        self.rank() >= 4
    }
}

/// A given setting and its source.
#[derive(Clone, Debug)]
pub struct Given {
    /// Setting.
    pub flag: &'static Flag,
    /// Value.
    pub value: Value,
    /// Source.
    pub origin: Origin,
}

impl Given {
    /// Parses `raw` as the flag's kind.
    ///
    /// # Errors
    /// Returns an error with the place of the value if the value does not fit.
    pub fn read(flag: &'static Flag, raw: &Raw, origin: Origin) -> Result<Self, Problem> {
        match parse(&flag.kind, raw) {
            Ok(value) => Ok(Self { flag, value, origin }),
            Err(got) => {
                let text = got.trim_matches('`');
                let expected =
                    explain::passed_bound(&flag.kind, text).unwrap_or_else(|| explain::expected(&flag.kind));
                let mut problem = Problem::usage(format!("wrong value for `{}`", flag.name))
                    .got(match got.len() == text.len() + 2 {
                        true => format!("`{}`", shown(text)),
                        false => got.clone(),
                    })
                    .expected(expected)
                    .given_at(&origin);
                if let Kind::Choice(names) | Kind::Choices(names) | Kind::Switch(names) = flag.kind {
                    let names = names();
                    if let Some(name) = nearest(text, names.iter().map(|(name, _)| *name)) {
                        problem = problem.help(format!("did you mean `{name}`?"));
                    }
                }
                Err(problem)
            }
        }
    }
}

/// Value and source of every setting of the table. A setting without an entry is unset.
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    values: BTreeMap<&'static str, (Value, Origin)>,
}

impl Values {
    /// Returns the defaults of a verb.
    pub fn defaults(verb: Verb) -> Self {
        let mut values = BTreeMap::new();
        for flag in flags::all() {
            if let Fallback::Is(value) = flag.default_for(verb) {
                values.insert(flag.name, (value, Origin::Default));
            }
        }
        Self { values }
    }

    /// Reads the value of every setting from its field. A setting whose field is empty is unset.
    pub fn of(settings: &Settings) -> Self {
        let read = |flag: &Flag| Some((flag.name, ((flag.place.get)(settings)?, Origin::Caller)));
        Self { values: flags::all().filter_map(read).collect() }
    }

    /// Stores a value, replacing that of a weaker layer.
    pub fn set(&mut self, given: Given) {
        self.values.insert(given.flag.name, (given.value, given.origin));
    }

    /// Stores a value if the setting is unset.
    pub fn fill(&mut self, name: &'static str, value: Value, origin: Origin) {
        self.values.entry(name).or_insert((value, origin));
    }

    /// Resets a setting to the default of a verb.
    pub fn reset(&mut self, name: &'static str, verb: Verb) {
        self.values.remove(name);
        if let Some(Fallback::Is(value)) = flags::find(name).map(|flag| flag.default_for(verb)) {
            self.values.insert(name, (value, Origin::Default));
        }
    }

    /// Returns the rank of a value's source; 0 if no source gave one.
    pub fn rank(&self, name: &str) -> u8 {
        self.lookup(name).map_or(0, |(_, origin)| origin.rank())
    }

    /// Returns the value of a setting and its source, or `None` if the setting is unset.
    pub fn lookup(&self, name: &str) -> Option<&(Value, Origin)> {
        self.values.get(name)
    }
}

impl Values {
    /// Returns every given value with its source.
    pub fn given(&self) -> Vec<Given> {
        self.values
            .iter()
            .filter(|(_, (_, origin))| !matches!(origin, Origin::Default | Origin::Recipe(_)))
            .filter_map(|(name, (value, origin))| {
                let flag = flags::find(name)?;
                Some(Given { flag, value: value.clone(), origin: origin.clone() })
            })
            .collect()
    }

    /// Returns every set value as JSON, without the secrets of rewards.
    pub fn plain(&self) -> impl Iterator<Item = (&'static Flag, Json)> {
        let set = flags::all().filter_map(|flag| Some((flag, &self.lookup(flag.name)?.0)));
        set.map(|(flag, value)| (flag, explain::without_secrets(flag, value).json()))
    }

    /// Returns the values on which the result of a verb depends: all except those that may change between runs.
    pub fn binding(&self, verb: Verb) -> impl Iterator<Item = (&'static Flag, Json)> {
        self.plain().filter(move |(flag, _)| flag.binds(verb))
    }

    /// Returns the values that all processes of a run must have in common.
    pub fn common(&self) -> impl Iterator<Item = (&'static Flag, Json)> {
        self.plain().filter(|(flag, _)| !flag.per_rank)
    }
}

/// Type of a field that a setting can fill.
pub trait Field: Sized {
    /// Converts a value to this type; `None` if the value has another type.
    fn read(value: &Value) -> Option<Self>;

    /// Returns the value of the field; `None` if it is empty.
    fn value(&self) -> Option<Value>;
}

/// Converts a value to the type of a field.
///
/// # Errors
/// Returns an error if the type does not match the row's kind. That is a mistake in the table, which the tests exclude.
pub fn take<T: Field>(value: &Value) -> Result<T, Problem> {
    T::read(value).ok_or_else(|| Problem::failure("a setting does not have the type of its field"))
}

/// Implements [`Field`] for types that a value stores unchanged.
macro_rules! plain_fields {
    ($($type:ty: $variant:ident),+ $(,)?) => { $(
        impl Field for $type {
            fn read(value: &Value) -> Option<Self> {
                if let Value::$variant(v) = value { Some(v.clone()) } else { None }
            }

            fn value(&self) -> Option<Value> {
                Some(Value::$variant(self.clone()))
            }
        }
    )+ };
}
plain_fields!(bool: Bool, i64: Int, f64: Float, String: Text, Vec<f64>: Floats, Map<String, Json>: Object);

macro_rules! whole_numbers {
    ($($type:ty),+) => { $(
        impl Field for $type {
            fn read(value: &Value) -> Option<Self> {
                if let Value::Int(v) = value { Self::try_from(*v).ok() } else { None }
            }

            fn value(&self) -> Option<Value> {
                i64::try_from(*self).ok().map(Value::Int)
            }
        }
    )+ };
}
whole_numbers!(u16, u32, u64, usize);

impl Field for f32 {
    fn read(value: &Value) -> Option<Self> {
        f64::read(value).map(|v| v as Self)
    }

    fn value(&self) -> Option<Value> {
        // Parsing the decimal text gives the number as written. A direct conversion would show the rounding error of `f32`.
        self.to_string().parse().ok().map(Value::Float)
    }
}

/// A duration, in seconds.
impl Field for Duration {
    fn read(value: &Value) -> Option<Self> {
        Self::try_from_secs_f64(f64::read(value)?).ok()
    }

    fn value(&self) -> Option<Value> {
        self.as_secs_f64().value()
    }
}

impl Field for PathBuf {
    fn read(value: &Value) -> Option<Self> {
        String::read(value).map(Self::from)
    }

    fn value(&self) -> Option<Value> {
        self.to_string_lossy().into_owned().value()
    }
}

impl<T: Named> Field for T {
    fn read(value: &Value) -> Option<Self> {
        if let Value::Text(text) = value { named(text) } else { None }
    }

    fn value(&self) -> Option<Value> {
        name_of(*self).map(|name| Value::Text(name.to_owned()))
    }
}

/// Types that can be items of a list of texts.
trait Item: Field {}
impl Item for String {}
impl Item for PathBuf {}
impl<T: Named> Item for T {}

fn read_items<T: Item, C: FromIterator<T>>(value: &Value) -> Option<C> {
    let Value::Texts(texts) = value else { return None };
    texts.iter().map(|text| T::read(&Value::Text(text.clone()))).collect()
}

fn items_value<'t, T: Item + 't>(items: impl Iterator<Item = &'t T>) -> Option<Value> {
    let text = |item: &T| match item.value() {
        Some(Value::Text(text)) => Some(text),
        _ => None,
    };
    items.map(text).collect::<Option<_>>().map(Value::Texts)
}

impl<T: Item> Field for Vec<T> {
    fn read(value: &Value) -> Option<Self> {
        read_items(value)
    }

    fn value(&self) -> Option<Value> {
        items_value(self.iter())
    }
}

impl<T: Item + Ord> Field for BTreeSet<T> {
    fn read(value: &Value) -> Option<Self> {
        read_items(value)
    }

    fn value(&self) -> Option<Value> {
        items_value(self.iter())
    }
}

impl<T: Field> Field for Option<T> {
    fn read(value: &Value) -> Option<Self> {
        T::read(value).map(Some)
    }

    fn value(&self) -> Option<Value> {
        self.as_ref().and_then(Field::value)
    }
}

/// The settings of a run and their sources.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// Verb to which the settings belong.
    pub verb: Verb,
    /// Value and source of each setting.
    pub values: Values,
    /// Settings without effect in this run, each with the reason.
    pub idle: Vec<(&'static str, String)>,
    /// Typed form of the settings.
    pub settings: Settings,
    /// Notes about the settings, for the user.
    pub notes: Vec<String>,
}
