//! Files of settings: YAML mappings from names in the flag table to values.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

use omnigrpo_guard::inside;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value as Json};
use serde_saphyr::{NonFiniteFloatPolicy, Spanned};

use crate::layer::{Entry, Layer};
use crate::problem::Problem;
use crate::values::{Origin, Raw};

/// Maximum size of a file of settings, bytes. Real files have a few thousand.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reads a file of settings. The returned layer contains its mistakes, with file and line.
pub fn read(path: &Path) -> Layer {
    let name = path.display().to_string();
    match text(path, MAX_FILE_BYTES) {
        Ok(text) => parse(&text, &name, |line| Origin::Config(format!("{name}:{line}"))),
        Err(problem) => Layer::unreadable(problem),
    }
}

/// Returns the text of a regular file of at most this size.
///
/// # Errors
/// Returns an error if the file cannot be read or is larger, and for a pipe, a device or a directory.
pub fn text(path: &Path, max_bytes: u64) -> Result<String, Problem> {
    inside::read_named(path, max_bytes).map_err(|error| {
        let problem = match error.kind() {
            ErrorKind::FileTooLarge => Problem::usage("the file of settings is too large")
                .expected(format!("at most {max_bytes} bytes")),
            _ => Problem::usage("cannot read the file of settings").got(error.to_string()),
        };
        problem.at(path.display().to_string())
    })
}

/// Reads the text of a file of settings; `origin` turns a line number into a source.
pub fn parse(text: &str, name: &str, origin: impl Fn(u64) -> Origin) -> Layer {
    if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
        return Layer::default();
    }
    // A number that is not finite is refused with the name of its setting.
    let options = serde_saphyr::options! { non_finite_float_policy: NonFiniteFloatPolicy::PassThrough };
    let document: Document = match serde_saphyr::from_str_with_options(text, options) {
        Ok(document) => document,
        Err(error) => return Layer::unreadable(no_yaml(&error, name)),
    };
    let (mut entries, mut problems) = (Vec::new(), Vec::new());
    for (Spanned { value: name, referenced: at, .. }, node) in document.0 {
        let origin = origin(at.line());
        let raw = match node.value {
            Node::Null => None,
            Node::Scalar(text) => Some(Raw::Arguments(vec![text])),
            Node::Items(items) => Some(Raw::Items(items)),
            Node::Mapping(Plain { value: Json::Object(map), odd: None }) => Some(Raw::Object(map)),
            Node::Mapping(Plain { odd, .. }) => {
                let got = odd.map_or_else(String::new, |number| number.to_string());
                let problem = Problem::usage(format!("wrong value for `{name}`")).got(got);
                problems.push(problem.expected("finite numbers").given_at(&origin));
                continue;
            }
        };
        entries.push(Entry { name, raw, origin });
    }
    let mut layer = Layer::read(entries, None);
    layer.problems.extend(problems);
    layer
}

fn no_yaml(error: &serde_saphyr::Error, name: &str) -> Problem {
    let mut got = error.without_snippet().to_string();
    // This part of the library's message is meant for programmers.
    if let Some((what, rest)) = got.split_once(", set DuplicateKeyPolicy in Options if acceptable") {
        got = format!("{what}{rest}");
    }
    let problem = Problem::usage("not a YAML mapping of settings").got(got);
    let problem = match error.location() {
        Some(at) => problem.at(format!("{name}:{}:{}", at.line(), at.column())),
        None => problem.at(name.to_string()),
    };
    problem.expected("lines of `setting: value`, each setting once")
}

/// Top-level mapping in the order of the file, with repeated keys.
struct Document(Vec<(Spanned<String>, Spanned<Node>)>);

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Document;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping from settings to values")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Document, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Document(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// A value before the kind of its setting is known. Scalars stay text, to be parsed later by the kind of the flag.
enum Node {
    Null,
    Scalar(String),
    Items(Vec<String>),
    Mapping(Plain),
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Node;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value, a list of values or a mapping")
            }
            fn visit_bool<E>(self, v: bool) -> Result<Node, E> {
                Ok(Node::Scalar(v.to_string()))
            }
            fn visit_i64<E>(self, v: i64) -> Result<Node, E> {
                Ok(Node::Scalar(v.to_string()))
            }
            fn visit_u64<E>(self, v: u64) -> Result<Node, E> {
                Ok(Node::Scalar(v.to_string()))
            }
            fn visit_f64<E>(self, v: f64) -> Result<Node, E> {
                Ok(Node::Scalar(v.to_string()))
            }
            fn visit_str<E>(self, v: &str) -> Result<Node, E> {
                Ok(Node::Scalar(v.to_string()))
            }
            fn visit_unit<E>(self) -> Result<Node, E> {
                Ok(Node::Null)
            }
            fn visit_none<E>(self) -> Result<Node, E> {
                Ok(Node::Null)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element::<Node>()? {
                    match item {
                        Node::Scalar(text) => items.push(text),
                        _ => return Err(A::Error::custom("a list of settings holds plain values only")),
                    }
                }
                Ok(Node::Items(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Node, A::Error> {
                PlainVisitor.visit_map(map).map(Node::Mapping)
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// A JSON value. A number that JSON does not have, an infinite one or NaN, is null in it and stands beside it.
struct Plain {
    value: Json,
    odd: Option<f64>,
}

impl Plain {
    fn of(value: impl Into<Json>) -> Self {
        Self { value: value.into(), odd: None }
    }
}

impl<'de> Deserialize<'de> for Plain {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PlainVisitor)
    }
}

struct PlainVisitor;

impl<'de> Visitor<'de> for PlainVisitor {
    type Value = Plain;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }
    fn visit_bool<E>(self, v: bool) -> Result<Plain, E> {
        Ok(Plain::of(v))
    }
    fn visit_i64<E>(self, v: i64) -> Result<Plain, E> {
        Ok(Plain::of(v))
    }
    fn visit_u64<E>(self, v: u64) -> Result<Plain, E> {
        Ok(Plain::of(v))
    }
    fn visit_f64<E>(self, v: f64) -> Result<Plain, E> {
        Ok(Plain { value: v.into(), odd: (!v.is_finite()).then_some(v) })
    }
    fn visit_str<E>(self, v: &str) -> Result<Plain, E> {
        Ok(Plain::of(v))
    }
    fn visit_unit<E>(self) -> Result<Plain, E> {
        Ok(Plain::of(()))
    }
    fn visit_none<E>(self) -> Result<Plain, E> {
        Ok(Plain::of(()))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Plain, A::Error> {
        let (mut items, mut odd) = (Vec::new(), None);
        while let Some(item) = seq.next_element::<Plain>()? {
            odd = odd.or(item.odd);
            items.push(item.value);
        }
        Ok(Plain { value: items.into(), odd })
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Plain, A::Error> {
        let (mut object, mut odd) = (Map::new(), None);
        while let Some((key, value)) = map.next_entry::<String, Plain>()? {
            odd = odd.or(value.odd);
            object.insert(key, value.value);
        }
        Ok(Plain { value: object.into(), odd })
    }
}
