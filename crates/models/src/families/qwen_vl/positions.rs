//! Three-axis positions of a rendered prompt.
//!
//! Source: `get_rope_index` of Qwen2-VL and Qwen2.5-VL. The position after a medium is its largest position plus one on
//! all axes, which is the rule used in the models' training. `transformers` 5.23 continues at `max(h, w) / merge` instead,
//! which differs for videos with more temporal positions than rows or columns.

use omnigrpo_media::qwen_vl::PatchGrid;
use omnigrpo_text::Span;

use crate::decoder::Position;

/// The grid of one medium on the position axes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MediumAxes {
    /// Grid in patches. Height and width are divided by `merge`.
    pub grid: PatchGrid,
    /// Number of patches per side that are merged into a token.
    pub merge: usize,
    /// Temporal positions from one temporal patch to the next. The product with the patch's index is rounded to f32
    /// and then down, as the reference computes it.
    pub temporal_step: f32,
}

impl MediumAxes {
    /// Returns the positions of the features of a medium that begins at `start`, in the order of the prompt.
    pub fn from(self, start: u32) -> impl Iterator<Item = Position> {
        let Self { grid, merge, temporal_step } = self;
        let time = move |t: usize| (t as f32 * temporal_step).floor() as u32;
        grid_positions(start, [grid.t, grid.h / merge, grid.w / merge], time)
    }
}

/// Returns the positions of a grid `[t, h, w]` of features that begins at `start`. `time` returns the temporal position of a slice.
pub fn grid_positions(
    start: u32,
    [t, h, w]: [usize; 3],
    time: impl Fn(usize) -> u32,
) -> impl Iterator<Item = Position> {
    (0..t).map(move |t| start.saturating_add(time(t))).flat_map(move |t| {
        (0..h * w).map(move |cell| [t, start + (cell / w) as u32, start + (cell % w) as u32])
    })
}

/// Returns the position after these, one above the largest on all axes; 0 if there are none.
pub fn after(positions: &[Position]) -> u32 {
    positions.iter().flatten().max().map_or(0, |largest| largest.saturating_add(1))
}

/// Returns the positions of `len` tokens with media at `spans`, and the position of the token after the last.
pub fn positions(len: usize, spans: &[Span], axes: impl Fn(usize) -> MediumAxes) -> (Vec<Position>, u32) {
    let mut out: Vec<Position> = Vec::with_capacity(len);
    let mut next = 0u32;
    let text = |out: &mut Vec<Position>, next: &mut u32, until: usize| {
        while out.len() < until {
            out.push([*next; 3]);
            *next += 1;
        }
    };
    for span in spans {
        text(&mut out, &mut next, span.start);
        let first = out.len();
        out.extend(axes(span.medium).from(next));
        next = after(&out[first..]);
    }
    text(&mut out, &mut next, len);
    (out, next)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the prompt of the test data of `transformers`: text, a 10×6 image, text, an 8×8 image, text, a video of four
    /// 4×4 slices, text.
    fn prompt() -> (usize, Vec<Span>, [PatchGrid; 3]) {
        let spans = vec![
            Span { medium: 0, start: 3, len: 15 },
            Span { medium: 1, start: 21, len: 16 },
            Span { medium: 2, start: 40, len: 16 },
        ];
        (
            60,
            spans,
            [PatchGrid { t: 1, h: 10, w: 6 }, PatchGrid { t: 1, h: 8, w: 8 }, PatchGrid { t: 4, h: 4, w: 4 }],
        )
    }

    #[test]
    fn absolute_time_continues_after_the_largest_position() {
        let (len, spans, grids) = prompt();
        let (at, next) =
            positions(len, &spans, |m| MediumAxes { grid: grids[m], merge: 2, temporal_step: 2.0 });
        assert_eq!(at[2], [2, 2, 2]);
        assert_eq!((at[3], at[17]), ([3, 3, 3], [3, 7, 5]));
        assert_eq!(at[18], [8, 8, 8]);
        assert_eq!(at[21], [11, 11, 11]);
        assert_eq!((at[40], at[44], at[55]), ([18, 18, 18], [20, 18, 18], [24, 19, 19]));
        assert_eq!(at[56..], [[25; 3], [26; 3], [27; 3], [28; 3]]);
        assert_eq!(next as i64 - len as i64, -31);
    }

    #[test]
    fn counted_time_continues_after_the_largest_position() {
        let (len, spans, grids) = prompt();
        let (at, next) =
            positions(len, &spans, |m| MediumAxes { grid: grids[m], merge: 2, temporal_step: 1.0 });
        assert_eq!(at[52], [21, 18, 18]);
        assert_eq!(at[56..], [[22; 3], [23; 3], [24; 3], [25; 3]]);
        assert_eq!(next as i64 - len as i64, -34);
    }

    #[test]
    fn half_steps_are_rounded_down() {
        let spans = [Span { medium: 0, start: 0, len: 4 }];
        let grid = PatchGrid { t: 4, h: 2, w: 2 };
        let (at, next) = positions(5, &spans, |_| MediumAxes { grid, merge: 2, temporal_step: 0.5 });
        assert_eq!(at.iter().map(|p| p[0]).collect::<Vec<_>>(), [0, 0, 1, 1, 2]);
        assert_eq!(next, 3);
    }
}
