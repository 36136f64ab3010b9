//! Files of settings: YAML mappings from the names of the flag table to values.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value as Json};
use serde_saphyr::Spanned;

use crate::explain::Problem;
use crate::flags::{self, FOREIGN};
use crate::values::{Given, Origin, Raw};

/// Largest file of settings in bytes; real ones are a few thousand.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reads a file of settings.
///
/// # Errors
/// A file that cannot be read or is no YAML mapping, an unknown or repeated key, a value of the wrong type; each with
/// file and line.
pub fn read(path: &Path) -> Result<Vec<Given>, Problem> {
    let name = path.display().to_string();
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text));
    if let Err(error) = read {
        return Err(Problem::usage("cannot read the file of settings").at(name).got(error.to_string()));
    }
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(Problem::usage("the file of settings is too large")
            .at(name)
            .expected(format!("at most {MAX_FILE_BYTES} bytes")));
    }
    parse(&text, &name, |line| Origin::Config(format!("{name}:{line}")))
}

/// Reads the text of a file of settings; `origin` makes a source of a line number.
///
/// # Errors
/// As [`read`].
pub fn parse(text: &str, name: &str, origin: impl Fn(u64) -> Origin) -> Result<Vec<Given>, Problem> {
    if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
        return Ok(vec![]);
    }
    let document: Document = serde_saphyr::from_str(text).map_err(|error| {
        let mut problem =
            Problem::usage("not a YAML mapping of settings").got(error.without_snippet().to_string());
        problem = match error.location() {
            Some(at) => problem.at(format!("{name}:{}:{}", at.line(), at.column())),
            None => problem.at(name.to_string()),
        };
        problem.expected("lines of `setting: value`")
    })?;
    let mut given: Vec<Given> = Vec::new();
    for (key, node) in document.0 {
        let line = key.referenced.line();
        let place = || format!("{name}:{line}");
        let Some(flag) = flags::find(&key.value) else {
            return Err(unknown_key(&key.value).at(place()));
        };
        if flag.command_line_only || flag.positional {
            return Err(Problem::usage(format!(
                "`{}` belongs on the command line, not in a file",
                flag.name
            ))
            .at(place()));
        }
        if given.iter().any(|other| other.flag.name == flag.name) {
            return Err(Problem::usage(format!("`{}` is given twice", flag.name))
                .at(place())
                .expected("each setting once, under one of its names"));
        }
        let raw = match node.value {
            Node::Null => {
                return Err(Problem::usage(format!("`{}` has no value", flag.name))
                    .at(place())
                    .expected(crate::explain::expected(&flag.kind))
                    .help("leave the line out to take the default"));
            }
            Node::Scalar(text) => Raw::Arguments(vec![text]),
            Node::Items(items) => Raw::Items(items),
            Node::Mapping(map) => Raw::Object(map),
        };
        given.push(Given::read(flag, &raw, origin(line))?);
    }
    Ok(given)
}

fn unknown_key(key: &str) -> Problem {
    let problem = Problem::usage(format!("unknown setting `{key}`"));
    let normal = key.replace('-', "_");
    if let Some((_, advice)) = FOREIGN.iter().find(|(names, _)| names.contains(&normal.as_str())) {
        return problem.help(*advice);
    }
    match flags::closest(key, |flag| !flag.command_line_only && !flag.positional) {
        Some(near) => problem.help(format!("did you mean `{near}`?")),
        None => problem.help("`docs/flags.md` lists every setting"),
    }
}

/// The top mapping in the order of the file, repeated keys included.
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

/// A value before the kind of its setting is known. Scalars are kept as text, which the flag's kind reads.
enum Node {
    Null,
    Scalar(String),
    Items(Vec<String>),
    Mapping(Map<String, Json>),
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
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
                let mut object = Map::new();
                while let Some((key, value)) = map.next_entry::<String, Json>()? {
                    object.insert(key, value);
                }
                Ok(Node::Mapping(object))
            }
        }
        deserializer.deserialize_any(Any)
    }
}
