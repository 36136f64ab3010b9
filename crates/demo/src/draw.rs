//! Drawing of the pictures (bright shapes on a noisy dark background, pixel by pixel) and their random numbers.
//!
//! Everything except the property in question is random (place, size, colour, outline, background), so that a model cannot
//! memorise pictures. Sides are multiples of [`CELL_PX`], the side of one vision token of the embedded model, so the processor
//! does not resize any picture. No picture has more than 256 colours, so a GIF stores a clip without loss.

use image::{Rgb, RgbImage};
use rand_chacha::ChaCha8Rng;

use crate::question::Kind;
use crate::random::{between, pick, shuffle};

/// Side of the square that becomes one vision token (patches of 14 pixels, merged 2 × 2), pixels.
pub(crate) const CELL_PX: u32 = 28;
/// Side of every picture except those of a single shape, pixels.
const SIDE_PX: u32 = 2 * CELL_PX;
/// Number of frames of a clip.
pub(crate) const NUM_FRAMES: usize = 4;
/// Side of a background square of uniform grey, pixels. Large squares keep the files small.
const GRAIN_PX: u32 = 4;

/// Outlines, in the order of the answers of [`Kind::Shape`].
#[derive(Clone, Copy)]
enum Outline {
    Circle,
    Square,
    Triangle,
    Cross,
}

const OUTLINES: [Outline; 4] = [Outline::Circle, Outline::Square, Outline::Triangle, Outline::Cross];

/// Colours, in the order of the answers of [`Kind::Colour`].
const COLOURS: [[u8; 3]; 8] = [
    [230, 30, 30],
    [30, 200, 40],
    [40, 70, 235],
    [240, 235, 30],
    [245, 140, 20],
    [165, 40, 200],
    [245, 245, 245],
    [30, 215, 225],
];

/// One shape. Lengths are in pixels; `radius` is the distance from the centre to the middle of a side.
#[derive(Clone, Copy)]
struct Shape {
    outline: Outline,
    colour: [u8; 3],
    x: i32,
    y: i32,
    radius: i32,
}

impl Shape {
    fn random(rng: &mut ChaCha8Rng, radius: (i32, i32)) -> Self {
        let outline = OUTLINES[pick(rng, OUTLINES.len())];
        let colour = pick(rng, COLOURS.len());
        let colour = shade(rng, colour);
        Self { outline, colour, x: 0, y: 0, radius: between(rng, radius.0, radius.1) }
    }

    fn covers(&self, x: i32, y: i32) -> bool {
        let (dx, dy, r) = (x - self.x, y - self.y, self.radius);
        match self.outline {
            Outline::Circle => dx * dx + dy * dy <= r * r,
            Outline::Square => dx.abs().max(dy.abs()) <= r,
            // The point is at the top, and the height equals the base. Half the width at `dy` is half the distance from the
            // point.
            Outline::Triangle => dy.abs() <= r && 2 * dx.abs() <= dy + r,
            Outline::Cross => dx.abs().min(dy.abs()) * 3 <= r && dx.abs().max(dy.abs()) <= r,
        }
    }

    fn draw(&self, picture: &mut RgbImage) {
        for (x, y, pixel) in picture.enumerate_pixels_mut() {
            if self.covers(x as i32, y as i32) {
                *pixel = Rgb(self.colour);
            }
        }
    }
}

/// Returns a random colour near the colour with this index.
fn shade(rng: &mut ChaCha8Rng, colour: usize) -> [u8; 3] {
    COLOURS[colour].map(|channel| (i32::from(channel) + between(rng, -14, 14)).clamp(0, 255) as u8)
}

/// Returns a background of random greys around a random mean.
fn ground(rng: &mut ChaCha8Rng, width: u32, height: u32) -> RgbImage {
    let mean = between(rng, 15, 45);
    let (columns, rows) = (width / GRAIN_PX, height / GRAIN_PX);
    let greys: Vec<u8> = (0..columns * rows).map(|_| (mean + between(rng, -12, 12)) as u8).collect();
    RgbImage::from_fn(width, height, |x, y| Rgb([greys[(y / GRAIN_PX * columns + x / GRAIN_PX) as usize]; 3]))
}

/// Returns the frames that show `answer`, an index into the answers of `kind`: one for a picture, [`NUM_FRAMES`] for a clip.
pub(crate) fn frames(kind: Kind, answer: usize, rng: &mut ChaCha8Rng) -> Vec<RgbImage> {
    match kind {
        Kind::Colour | Kind::Shape => vec![single(kind, answer, rng)],
        Kind::Count => vec![several(answer + 1, rng)],
        Kind::Position => vec![at_edge(answer, rng)],
        Kind::Direction => moving(answer, rng),
    }
}

/// Draws one large shape at a random place. Pictures for questions about colour vary in size.
fn single(kind: Kind, answer: usize, rng: &mut ChaCha8Rng) -> RgbImage {
    let num_cells = if kind == Kind::Colour { 2 } else { 1 };
    let [width, height] = [(); 2].map(|()| CELL_PX * (2 + pick(rng, num_cells) as u32));
    let mut picture = ground(rng, width, height);
    let mut shape = Shape::random(rng, (14, 20));
    if kind == Kind::Colour {
        shape.colour = shade(rng, answer);
    } else {
        shape.outline = OUTLINES[answer];
    }
    shape.x = between(rng, shape.radius, width as i32 - 1 - shape.radius);
    shape.y = between(rng, shape.radius, height as i32 - 1 - shape.radius);
    shape.draw(&mut picture);
    picture
}

/// Draws small shapes, at most one per cell, so that no two touch.
fn several(num: usize, rng: &mut ChaCha8Rng) -> RgbImage {
    let mut picture = ground(rng, SIDE_PX, SIDE_PX);
    let (columns, rows) = (SIDE_PX / CELL_PX, SIDE_PX / CELL_PX);
    let mut cells: Vec<(u32, u32)> =
        (0..columns * rows).map(|cell| (cell % columns, cell / columns)).collect();
    shuffle(rng, &mut cells);
    for (column, row) in cells.into_iter().take(num) {
        let mut shape = Shape::random(rng, (7, 10));
        let slack = CELL_PX as i32 - 2 - 2 * shape.radius;
        shape.x = (column * CELL_PX) as i32 + 1 + shape.radius + between(rng, 0, slack);
        shape.y = (row * CELL_PX) as i32 + 1 + shape.radius + between(rng, 0, slack);
        shape.draw(&mut picture);
    }
    picture
}

/// Draws one shape near the left, right, top or bottom edge, in the middle third of that edge.
fn at_edge(answer: usize, rng: &mut ChaCha8Rng) -> RgbImage {
    let side = SIDE_PX as i32;
    let mut picture = ground(rng, SIDE_PX, SIDE_PX);
    let mut shape = Shape::random(rng, (8, 12));
    let gap = between(rng, 1, 5) + shape.radius;
    let near = if answer.is_multiple_of(2) { gap } else { side - 1 - gap };
    let middle = side / 2 + between(rng, -side / 10, side / 10);
    (shape.x, shape.y) = if answer < 2 { (near, middle) } else { (middle, near) };
    shape.draw(&mut picture);
    picture
}

/// Draws one shape that moves left, right, up or down by the same step in each frame. Its path starts at a random place.
fn moving(answer: usize, rng: &mut ChaCha8Rng) -> Vec<RgbImage> {
    let side = SIDE_PX as i32;
    let empty = ground(rng, SIDE_PX, SIDE_PX);
    let mut shape = Shape::random(rng, (7, 10));
    let step = between(rng, 7, 10);
    let travel = step * (NUM_FRAMES as i32 - 1);
    let margin = shape.radius;
    let start = between(rng, margin, side - 1 - margin - travel);
    let across = between(rng, margin, side - 1 - margin);
    (0..NUM_FRAMES as i32)
        .map(|frame| {
            let forward = start + step * frame;
            let backward = side - 1 - forward;
            (shape.x, shape.y) = match answer {
                0 => (backward, across),
                1 => (forward, across),
                2 => (across, backward),
                _ => (across, forward),
            };
            let mut picture = empty.clone();
            shape.draw(&mut picture);
            picture
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::stream;

    /// Returns the mean x and y of the pixels outside the background, and their number.
    fn drawn(picture: &RgbImage) -> (f64, f64, usize) {
        let is_ground = |p: &Rgb<u8>| p[0] == p[1] && p[1] == p[2] && p[0] < 60;
        let inked: Vec<(u32, u32)> =
            picture.enumerate_pixels().filter(|(_, _, p)| !is_ground(p)).map(|(x, y, _)| (x, y)).collect();
        let num = inked.len() as f64;
        let (x, y) = inked.iter().fold((0, 0), |sum, p| (sum.0 + p.0, sum.1 + p.1));
        (f64::from(x) / num, f64::from(y) / num, inked.len())
    }

    /// Returns the number of connected areas outside the background.
    fn num_areas(picture: &RgbImage) -> usize {
        let is_ground = |p: &Rgb<u8>| p[0] == p[1] && p[1] == p[2] && p[0] < 60;
        let (width, height) = picture.dimensions();
        let mut open: Vec<bool> = picture.pixels().map(|p| !is_ground(p)).collect();
        let mut areas = 0;
        for start in 0..open.len() {
            if !open[start] {
                continue;
            }
            areas += 1;
            let mut todo = vec![start];
            while let Some(at) = todo.pop() {
                if !std::mem::take(&mut open[at]) {
                    continue;
                }
                let (x, y) = (at as u32 % width, at as u32 / width);
                for (nx, ny) in [(x.wrapping_sub(1), y), (x + 1, y), (x, y.wrapping_sub(1)), (x, y + 1)] {
                    if nx < width && ny < height {
                        todo.push((ny * width + nx) as usize);
                    }
                }
            }
        }
        areas
    }

    #[test]
    fn counts_are_the_connected_areas() {
        for num in 1..=4 {
            for row in 0..50 {
                let picture = several(num, &mut stream(1, 0, row, 0));
                assert_eq!(num_areas(&picture), num, "row {row}");
            }
        }
    }

    #[test]
    fn positions_are_where_the_answer_says() {
        for answer in 0..4 {
            for row in 0..50 {
                let picture = at_edge(answer, &mut stream(1, 0, row, 0));
                let (width, height) = (f64::from(picture.width()), f64::from(picture.height()));
                let (x, y, _) = drawn(&picture);
                // Signed distance from the middle as a share of the side.
                let (right, down) = (x / width - 0.5, y / height - 0.5);
                let along = [-right, right, -down, down][answer];
                let other = if answer < 2 { down.abs() } else { right.abs() };
                assert!(along > other && along > 0.1, "{answer} row {row}: {right} {down}");
            }
        }
    }

    #[test]
    fn clips_move_the_way_the_answer_says_by_even_steps() {
        for answer in 0..4 {
            for row in 0..50 {
                let clip = moving(answer, &mut stream(1, 0, row, 0));
                assert_eq!(clip.len(), NUM_FRAMES);
                for pair in clip.windows(2) {
                    let ((x0, y0, n0), (x1, y1, n1)) = (drawn(&pair[0]), drawn(&pair[1]));
                    assert_eq!(n0, n1, "the shape stays whole");
                    let step = [x0 - x1, x1 - x0, y0 - y1, y1 - y0][answer];
                    let aside = if answer < 2 { y1 - y0 } else { x1 - x0 };
                    assert!((step - step.round()).abs() < 1e-9 && aside.abs() < 1e-9, "{answer} row {row}");
                    assert!((7.0..=10.0).contains(&step.round()), "{answer} row {row}: {step}");
                }
            }
        }
    }

    #[test]
    fn a_single_shape_has_the_colour_asked_for_and_fits() {
        for (answer, colour) in COLOURS.iter().enumerate() {
            for row in 0..20 {
                let picture = single(Kind::Colour, answer, &mut stream(1, 0, row, 0));
                let near = |p: &Rgb<u8>| (0..3).all(|c| p[c].abs_diff(colour[c]) <= 14);
                let num_near = picture.pixels().filter(|p| near(p)).count();
                assert_eq!(num_near, drawn(&picture).2);
                assert!(num_near > 200, "{num_near}");
            }
        }
    }

    #[test]
    fn outlines_differ_in_area_as_geometry_says() {
        let area = |outline| {
            let shape = Shape { outline, colour: [0; 3], x: 28, y: 28, radius: 18 };
            (0..56).flat_map(|y| (0..56).map(move |x| (x, y))).filter(|&(x, y)| shape.covers(x, y)).count()
        };
        assert_eq!(area(Outline::Square), 37 * 37);
        assert_eq!(area(Outline::Cross), 2 * 37 * 13 - 13 * 13);
        // Two rows each of width 1, 3, 5, … 35, and the base of 37.
        assert_eq!(area(Outline::Triangle), 2 * 18 * 18 + 37);
        let circle = area(Outline::Circle) as f64;
        assert!((circle / (std::f64::consts::PI * 18.0 * 18.0) - 1.0).abs() < 0.02);
    }
}
