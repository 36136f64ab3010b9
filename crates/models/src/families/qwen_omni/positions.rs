//! Three-axis positions of a rendered prompt.
//!
//! Source: `get_rope_index` of Qwen2.5-Omni in `transformers` 5.23. A second is 25 temporal positions, for frames and for sounds. The
//! position after a medium is its largest position plus one on all axes.
//!
//! A clip that is interleaved with its sound has its own rule. Its two opening tokens share a position, as do its two closing ones.
//! Text continues after the largest position of its last stretch of picture or sound, which may be below that of the whole clip. Positions
//! of a completion follow those of the prompt's text, as in a forward pass over both. `generate` of `transformers` continues after the
//! largest position of the whole prompt instead, which is larger if the clip is longer than its sound and the question is short.

use omnigrpo_text::Span;

use crate::decoder::Position;
use crate::families::qwen_vl::positions::after;

/// Number of tokens on each side of a clip with its sound that share a position.
const MARKS: usize = 2;

/// Returns the positions of `len` tokens with media at `spans`, and the position of the token after the last. `features` returns the
/// positions of the features of a medium that begins at a position, in order. `is_of_clip` returns whether a medium is the sound of a clip.
pub fn positions(
    len: usize,
    spans: &[Span],
    features: impl Fn(usize, u32) -> Vec<Position>,
    is_of_clip: impl Fn(usize) -> bool,
) -> (Vec<Position>, u32) {
    let mut out: Vec<Position> = Vec::with_capacity(len);
    let mut next = 0u32;
    let text = |out: &mut Vec<Position>, next: &mut u32, until: usize| {
        while out.len() < until {
            out.push([*next; 3]);
            *next += 1;
        }
    };
    // A clip and its sound have no token between them. Other media are separate, whatever a template writes between them.
    let joins = |a: &Span, b: &Span| a.medium == b.medium || is_of_clip(a.medium) || is_of_clip(b.medium);
    for group in spans.chunk_by(|a, b| a.start + a.len == b.start && joins(a, b)) {
        let is_interleaved = group.iter().any(|span| span.medium != group[0].medium);
        let marks = |out: &mut Vec<Position>, next: &mut u32| {
            out.extend([[*next; 3]; MARKS]);
            *next += 1;
        };
        if is_interleaved {
            text(&mut out, &mut next, group[0].start.saturating_sub(MARKS));
            marks(&mut out, &mut next);
        }
        text(&mut out, &mut next, group[0].start);
        let mut media: Vec<(usize, std::vec::IntoIter<Position>)> = Vec::new();
        let start = next;
        for span in group {
            let known = media.iter().position(|(medium, _)| *medium == span.medium);
            let at = known.unwrap_or_else(|| {
                media.push((span.medium, features(span.medium, start).into_iter()));
                media.len() - 1
            });
            let first = out.len();
            out.extend(media[at].1.by_ref().take(span.len));
            next = after(&out[first..]);
        }
        if is_interleaved {
            marks(&mut out, &mut next);
        }
    }
    text(&mut out, &mut next, len);
    (out, next)
}

/// Returns the lengths of the stretches of features at these ascending temporal positions, counted from the first, if a stretch has
/// `stretch` positions. A stretch ends before the first feature beyond it; the next one ends a stretch later, wherever that feature is.
pub fn stretches(times: &[u32], stretch: u32) -> Vec<usize> {
    let (mut lengths, mut start, mut end) = (Vec::new(), 0, stretch);
    for (at, &time) in times.iter().enumerate() {
        if time >= end {
            lengths.push(at - start);
            (start, end) = (at, end.saturating_add(stretch));
        }
    }
    lengths.push(times.len() - start);
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values: `get_chunked_index` of `transformers` 5.23.
    #[test]
    fn stretches_are_those_of_the_reference() {
        assert_eq!(stretches(&[0, 0, 25, 25, 50, 50, 75, 75], 50), [4, 4]);
        assert_eq!(stretches(&[0, 1, 2], 50), [3]);
        // A feature that is two stretches away ends a stretch alone.
        assert_eq!(stretches(&[0, 0, 100, 100, 100], 50), [2, 1, 2]);
    }
}
