//! Bounding boxes in text: one box, or a JSON list of labelled boxes. Coordinates are corners in pixels.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;

/// x1, y1, x2, y2.
pub(crate) type Corners = [f64; 4];

/// A labelled box.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Detection {
    pub corners: Corners,
    /// Label in lower case, trimmed; empty for a box without a label.
    pub label: String,
}

/// Maximum number of boxes of a list. Further boxes earn nothing (COCO uses 100), and matching takes quadratic time.
const MAX_BOXES: usize = 512;

/// Returns the area of the intersection divided by that of the union. With `pixel_convention`, as in VLM-R1, `x2` is the first
/// pixel outside the box, and an intersection of one pixel counts as none.
pub(crate) fn iou(a: &Corners, b: &Corners, pixel_convention: bool) -> f64 {
    let overlap = |axis: usize| a[axis + 2].min(b[axis + 2]) - a[axis].max(b[axis]);
    let (width, height) = (overlap(0), overlap(1));
    let least = if pixel_convention { 1.0 } else { 0.0 };
    if width <= least || height <= least {
        return 0.0;
    }
    let shared = width * height;
    let union = area(a) + area(b) - shared;
    // The union of degenerate boxes is empty.
    if union > 0.0 { (shared / union).clamp(0.0, 1.0) } else { 0.0 }
}

fn area(corners: &Corners) -> f64 {
    (corners[2] - corners[0]).max(0.0) * (corners[3] - corners[1]).max(0.0)
}

// The expression is constant. If it did not compile, the first test would fail.
static FOUR: LazyLock<Option<Regex>> = LazyLock::new(|| {
    let number = r"\s*(-?\d+(?:\.\d+)?)\s*";
    Regex::new(&format!(r"\[{number},{number},{number},{number}\]")).ok()
});

/// Returns the first `[x1, y1, x2, y2]` of a text.
pub(crate) fn first_box(text: &str) -> Option<Corners> {
    let found = FOUR.as_ref()?.captures(text)?;
    let number = |index| found.get(index)?.as_str().parse::<f64>().ok().filter(|n| n.is_finite());
    Some([number(1)?, number(2)?, number(3)?, number(4)?])
}

/// Returns true if the text is exactly one box.
pub(crate) fn is_one_box(text: &str) -> bool {
    text.len() < 256 && FOUR.as_ref().and_then(|e| e.find(text)).is_some_and(|m| m.as_str() == text.trim())
}

/// Returns the list of boxes in a text, or `None` if the text has no list. The list is the content of the last ```` ```json ````
/// fence or, without a fence, the complete text as JSON. "None" is an empty list. Entries that are not boxes are ignored.
pub(crate) fn detections(text: &str) -> Option<Vec<Detection>> {
    let text = text.trim();
    if text.eq_ignore_ascii_case("none") {
        return Some(Vec::new());
    }
    let json = fenced(text).or_else(|| text.starts_with('[').then_some(text))?;
    let Ok(Value::Array(entries)) = serde_json::from_str::<Value>(json) else { return None };
    let boxes: Vec<Detection> = entries.iter().take(MAX_BOXES).filter_map(detection).collect();
    // The list has other content, for example the four numbers of one box.
    (entries.is_empty() || !boxes.is_empty()).then_some(boxes)
}

/// Returns the first list of labelled boxes in a text, with or without other text around it.
pub(crate) fn detections_in_prose(text: &str) -> Option<Vec<Detection>> {
    // Maximum number of opening brackets that are tried. Each is parsed up to its end, so a limit keeps the time linear.
    const MAX_OPENINGS: usize = 8;
    let whole = detections(text).filter(|boxes| !boxes.is_empty());
    whole.or_else(|| {
        let lists = text.match_indices('[').filter(|(at, _)| text[at + 1..].trim_start().starts_with('{'));
        lists.take(MAX_OPENINGS).find_map(|(at, _)| {
            let value = serde_json::Deserializer::from_str(&text[at..]).into_iter::<Value>().next()?.ok()?;
            let boxes: Vec<_> = value.as_array()?.iter().take(MAX_BOXES).filter_map(detection).collect();
            (!boxes.is_empty()).then_some(boxes)
        })
    })
}

fn fenced(text: &str) -> Option<&str> {
    let start = text.rfind("```json")? + "```json".len();
    let length = text[start..].find("```")?;
    Some(text[start..start + length].trim())
}

fn detection(entry: &Value) -> Option<Detection> {
    let corners = entry.get("bbox_2d")?.as_array()?;
    let corners: Vec<f64> = corners.iter().map(Value::as_f64).collect::<Option<_>>()?;
    let corners = Corners::try_from(corners).ok()?;
    let label = entry.get("label").and_then(Value::as_str).unwrap_or_default();
    Some(Detection { corners, label: label.trim().to_lowercase() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_iou() {
        let square = [0.0, 0.0, 10.0, 10.0];
        for (other, source, ours) in [
            (square, 1.0, 1.0),
            ([5.0, 5.0, 15.0, 15.0], 25.0 / 175.0, 25.0 / 175.0),
            ([9.0, 0.0, 20.0, 10.0], 0.0, 10.0 / 200.0),
            ([8.0, 0.0, 20.0, 10.0], 0.1, 0.1),
            ([20.0, 20.0, 30.0, 30.0], 0.0, 0.0),
            ([5.0, 5.0, 5.0, 5.0], 0.0, 0.0),
            ([8.0, 8.0, 2.0, 2.0], 0.0, 0.0),
        ] {
            assert!((iou(&square, &other, true) - source).abs() < 1e-12, "{other:?}");
            assert!((iou(&square, &other, false) - ours).abs() < 1e-12, "{other:?}");
        }
    }

    #[test]
    fn parsing() {
        assert_eq!(first_box("at [1, 2.5,3 , 4] or [5,6,7,8]"), Some([1.0, 2.5, 3.0, 4.0]));
        assert_eq!(first_box("[1,2,3]"), None);
        assert!(is_one_box(" [1,2,3,4] "));
        assert!(!is_one_box("x [1,2,3,4]"));
        assert_eq!(detections("None"), Some(vec![]));
        assert_eq!(detections("[]"), Some(vec![]));
        assert_eq!(detections("[1,2,3,4]"), None);
        assert_eq!(detections("```json\n[{]```"), None);
        let one = vec![Detection { corners: [0.0, 1.0, 2.0, 3.0], label: "cat".to_owned() }];
        let text =
            "x ```json\n[]\n``` y ```json\n[{\"bbox_2d\":[0,1,2,3],\"label\":\" Cat\"},{\"label\":3}]\n```";
        assert_eq!(detections(text), Some(one));
        // The parser refuses deeply nested JSON before the stack overflows.
        assert_eq!(detections(&"[".repeat(100_000)), None);
    }
}
