//! The environment `zoom`: a tool that returns a part of the original picture.
//!
//! The rules are those of DeepEyes' `image_zoom_in_tool` (arXiv 2505.14362; also in verl). A box is clamped to the picture. A box
//! whose longer side is more than 100 times the shorter one is refused. A box with a side below 28 px, the size of a token of
//! Qwen2.5-VL, grows around its centre. Two deliberate differences: a box that reaches the edge while it grows is moved inside
//! instead of cut, and `image` chooses among several pictures of a row.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use omnigrpo_data::{Cause, MediumRef, MediumSource, Sample};
use omnigrpo_media::{Rgb8Image, load_image};
use omnigrpo_models::MediaSettings;
use omnigrpo_text::{MediumKind, ToolCall};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::environment::{Answer, AnswerPart, Environment, Episode, EpisodeKey, ModelTurn, answer_calls};

/// Name of the tool.
const TOOL: &str = "image_zoom_in_tool";
/// Smallest side of a returned part, px.
const MIN_SIDE: f64 = 28.0;
/// Largest ratio of the sides of a box.
const MAX_RATIO: f64 = 100.0;

/// Coordinates in which the model gives boxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoxUnit {
    /// Pixels of the original picture.
    Pixels,
    /// Thousandths of the picture's width and height, as Qwen3-VL and InternVL give boxes.
    Thousandths,
}

/// The environment `zoom`.
pub struct Zoom {
    folder: PathBuf,
    unit: BoxUnit,
    media: MediaSettings,
}

impl Zoom {
    /// Creates the environment. Parts of pictures are written into `folder` as PNG files, named by their content. Pictures are read
    /// with the orientation and the limits of `media`, so that the model's boxes fit.
    pub fn new(folder: PathBuf, unit: BoxUnit, media: MediaSettings) -> Self {
        Self { folder, unit, media }
    }
}

impl Environment for Zoom {
    fn name(&self) -> &str {
        "zoom"
    }

    fn tools(&self) -> Vec<Value> {
        let unit = match self.unit {
            BoxUnit::Pixels => "pixels of the original picture",
            BoxUnit::Thousandths => "thousandths of the picture's width and height",
        };
        vec![json!({ "type": "function", "function": {
            "name": TOOL,
            "description": "Zooms into a part of a picture, given as a bounding box, and returns that part.",
            "parameters": { "type": "object", "properties": {
                "bbox_2d": {
                    "type": "array", "items": { "type": "number" }, "minItems": 4, "maxItems": 4,
                    "description": format!("The box [x1, y1, x2, y2], in {unit}: its top left and bottom right corner."),
                },
                "label": { "type": "string", "description": "The name of the object in the box (optional)." },
                "image": { "type": "integer", "description": "The number of the picture, from 1 (optional, 1 by default)." },
            }, "required": ["bbox_2d"] },
        } })]
    }

    fn begin(&self, row: &Sample, _key: EpisodeKey) -> Result<Box<dyn Episode>, Cause> {
        let picture = |medium: &MediumRef| match (&medium.kind, &medium.source) {
            (MediumKind::Image, MediumSource::Path(path)) => Some(path.clone()),
            _ => None,
        };
        Ok(Box::new(Zooming {
            folder: self.folder.clone(),
            unit: self.unit,
            media: self.media.clone(),
            pictures: row.media.iter().filter_map(picture).collect(),
        }))
    }
}

struct Zooming {
    folder: PathBuf,
    unit: BoxUnit,
    media: MediaSettings,
    pictures: Vec<PathBuf>,
}

impl Episode for Zooming {
    fn answer(&mut self, turn: &ModelTurn<'_>) -> Result<Answer, Cause> {
        let mut fault = None;
        let answer = answer_calls(turn, |call| match self.zoom(call) {
            Ok(Ok(path)) => Ok(vec![AnswerPart::Medium { kind: MediumKind::Image, path }]),
            Ok(Err(mistake)) => Err(mistake),
            Err(cause) => {
                fault.get_or_insert(cause);
                Ok(Vec::new())
            }
        });
        fault.map_or(Ok(answer), Err)
    }
}

impl Zooming {
    /// Returns the file of the part that a call asks for, or the mistake in the call.
    fn zoom(&mut self, call: &ToolCall) -> Result<Result<PathBuf, String>, Cause> {
        let (number, corners) = match asked(call, self.pictures.len()) {
            Ok(asked) => asked,
            Err(mistake) => return Ok(Err(mistake)),
        };
        // The picture is not kept, because every completion that is being sampled has an episode.
        let picture = load_image(&self.pictures[number], self.media.orientation, &self.media.limits)?;
        let size = [f64::from(picture.width_px), f64::from(picture.height_px)];
        let corners = match self.unit {
            BoxUnit::Pixels => corners,
            BoxUnit::Thousandths => std::array::from_fn(|i| corners[i] * size[i % 2] / 1000.0),
        };
        let [from, to] = match part(corners, size) {
            Ok(part) => part,
            Err(mistake) => return Ok(Err(mistake)),
        };
        Ok(Ok(store_picture(&self.folder, &picture.crop(from, to)?)?))
    }
}

/// A picture that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("{} cannot be written", path.display())]
struct Unwritten {
    path: PathBuf,
    source: std::io::Error,
}

/// Returns the index of the picture and the corners of the box in a call.
fn asked(call: &ToolCall, pictures: usize) -> Result<(usize, [f64; 4]), String> {
    if call.name != TOOL {
        return Err(format!("unknown tool `{}`; expected {TOOL}", call.name));
    }
    let given = call.arguments.get("bbox_2d").unwrap_or(&Value::Null);
    let numbers: Option<Vec<f64>> =
        given.as_array().and_then(|list| list.iter().map(Value::as_f64).collect());
    let corners: Option<[f64; 4]> = numbers.and_then(|numbers| numbers.try_into().ok());
    let corners =
        corners.ok_or_else(|| format!("bbox_2d is {given}; expected four numbers [x1, y1, x2, y2]"))?;
    let number = match call.arguments.get("image") {
        None | Some(Value::Null) => 1,
        Some(given) => given.as_u64().ok_or_else(|| format!("image is {given}; expected a number from 1"))?,
    };
    let index = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
    let index = index.filter(|&index| index < pictures);
    Ok((index.ok_or_else(|| format!("there is no picture {number}; the question has {pictures}"))?, corners))
}

/// Returns the first and the end pixel of a box in a picture of `size` (width, height), or the mistake in the box.
fn part(corners: [f64; 4], size: [f64; 2]) -> Result<[[u32; 2]; 2], String> {
    let [x1, y1, x2, y2] = corners;
    let shown = || format!("the box {corners:?}");
    if x1 >= x2 || y1 >= y2 {
        return Err(format!("{} is empty; expected x1 < x2 and y1 < y2", shown()));
    }
    let clamped: [f64; 4] = std::array::from_fn(|i| corners[i].clamp(0.0, size[i % 2]));
    let sides = [clamped[2] - clamped[0], clamped[3] - clamped[1]];
    let (shorter, longer) = (sides[0].min(sides[1]), sides[0].max(sides[1]));
    if shorter <= 0.0 {
        return Err(format!("{} is outside of the picture of {}x{} px", shown(), size[0], size[1]));
    }
    if longer / shorter > MAX_RATIO {
        return Err(format!("{} is too narrow: a side may be at most {MAX_RATIO} times the other", shown()));
    }
    let grown = (MIN_SIDE / shorter).max(1.0);
    let [mut from, mut to] = [[0; 2]; 2];
    for axis in 0..2 {
        let (centre, half) = ((clamped[axis] + clamped[axis + 2]) / 2.0, sides[axis] * grown / 2.0);
        let (mut low, mut high) = ((centre - half).floor(), (centre + half).ceil());
        if low < 0.0 {
            (low, high) = (0.0, high - low);
        }
        if high > size[axis] {
            (low, high) = ((low - (high - size[axis])).max(0.0), size[axis]);
        }
        (from[axis], to[axis]) = (low as u32, high as u32);
    }
    Ok([from, to])
}

/// Serialises writers of the same process, so that no two of them write the same file.
static WRITING: Mutex<()> = Mutex::new(());

/// Writes a picture into a folder as a PNG file, unless it is there, and returns its path. The name is that of its content.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn store_picture(folder: &Path, picture: &Rgb8Image) -> Result<PathBuf, Cause> {
    let file = &picture.to_png()?;
    let name: String = Sha256::digest(file)[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    let path = folder.join(format!("{name}.png"));
    let wrong = |source| Unwritten { path: path.clone(), source };
    let _one = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    if path.is_file() {
        return Ok(path);
    }
    std::fs::create_dir_all(folder).map_err(wrong)?;
    let part = folder.join(format!(".{name}.{}.part", std::process::id()));
    let mut out = std::fs::File::create(&part).map_err(wrong)?;
    out.write_all(file).and_then(|()| out.sync_all()).map_err(wrong)?;
    std::fs::rename(&part, &path).map_err(wrong)?;
    Ok(path)
}

/// Names of the environments in this crate, for messages.
pub const ENVIRONMENTS: &str =
    "zoom (boxes in pixels of the original picture) or zoom:1000 (boxes in thousandths of its sides)";

/// Creates the environment with this name, or returns the known names.
///
/// # Errors
/// Returns a message that lists the known names.
pub fn environment(
    name: &str,
    folder: PathBuf,
    media: &MediaSettings,
) -> Result<Arc<dyn Environment>, String> {
    let unit = match name {
        "zoom" => BoxUnit::Pixels,
        "zoom:1000" => BoxUnit::Thousandths,
        _ => return Err(format!("unknown environment `{name}`; expected {ENVIRONMENTS}")),
    };
    Ok(Arc::new(Zoom::new(folder, unit, media.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_become_parts_of_the_picture() {
        let size = [448.0, 300.0];
        assert_eq!(part([10.0, 20.0, 110.0, 80.0], size), Ok([[10, 20], [110, 80]]));
        assert_eq!(part([10.4, 20.6, 109.2, 79.5], size), Ok([[10, 20], [110, 80]]));
        // Clamped to the picture.
        assert_eq!(part([-50.0, -9.0, 1000.0, 900.0], size), Ok([[0, 0], [448, 300]]));
        // A small box grows to 28 px on its shorter side and keeps its shape.
        assert_eq!(part([100.0, 100.0, 114.0, 107.0], size), Ok([[79, 89], [135, 118]]));
        // At the edge it moves inside.
        assert_eq!(part([0.0, 0.0, 14.0, 14.0], size), Ok([[0, 0], [28, 28]]));
        assert_eq!(part([434.0, 286.0, 448.0, 300.0], size), Ok([[420, 272], [448, 300]]));
        // A picture smaller than 28 px is returned whole.
        assert_eq!(part([0.0, 0.0, 20.0, 20.0], [20.0, 20.0]), Ok([[0, 0], [20, 20]]));
    }

    #[test]
    fn wrong_boxes_are_mistakes() {
        let size = [448.0, 300.0];
        let mistake = |corners| part(corners, size).unwrap_err();
        assert!(mistake([10.0, 20.0, 10.0, 80.0]).contains("is empty"));
        assert!(mistake([10.0, 80.0, 20.0, 20.0]).contains("is empty"));
        assert!(mistake([0.0, 0.0, 448.0, 4.0]).contains("too narrow"));
        assert!(mistake([500.0, 20.0, 600.0, 80.0]).contains("outside"));
    }

    #[test]
    fn calls_are_checked() {
        let call = |name: &str, arguments: Value| ToolCall {
            name: name.to_owned(),
            arguments: arguments.as_object().cloned().unwrap_or_default(),
        };
        assert_eq!(
            asked(&call(TOOL, json!({ "bbox_2d": [1, 2.5, 3, 4] })), 1),
            Ok((0, [1.0, 2.5, 3.0, 4.0]))
        );
        assert_eq!(
            asked(&call(TOOL, json!({ "bbox_2d": [1, 2, 3, 4], "image": 2 })), 2),
            Ok((1, [1.0, 2.0, 3.0, 4.0]))
        );
        let mistake = |name, arguments| asked(&call(name, arguments), 1).unwrap_err();
        assert!(mistake("zoom", json!({})).contains("unknown tool `zoom`"));
        assert!(mistake(TOOL, json!({ "bbox_2d": [1, 2, 3] })).contains("[1,2,3]"));
        assert!(mistake(TOOL, json!({ "bbox_2d": [1, 2, 3, "4"] })).contains("expected four numbers"));
        assert!(mistake(TOOL, json!({ "bbox_2d": [1, 2, 3, 4], "image": 2 })).contains("no picture 2"));
        assert!(mistake(TOOL, json!({ "bbox_2d": [1, 2, 3, 4], "image": 0 })).contains("no picture 0"));
    }
}
