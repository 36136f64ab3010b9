//! Line plots as SVG.

use plotters::prelude::*;

const SIZE: (u32, u32) = (480, 260);
/// Largest absolute value for which axes can be laid out, and reciprocal of the smallest range.
const MAX_VALUE: f64 = 1e30;
/// Largest number of points in a plot. More points than pixels would not be visible.
const MAX_POINTS: usize = 600;
const COLOURS: [RGBColor; 8] = [
    RGBColor(47, 111, 222),
    RGBColor(224, 122, 31),
    RGBColor(44, 154, 91),
    RGBColor(178, 69, 184),
    RGBColor(210, 75, 75),
    RGBColor(13, 151, 168),
    RGBColor(138, 109, 31),
    RGBColor(107, 91, 214),
];

/// A line over steps.
pub(crate) struct Line {
    pub(crate) label: String,
    /// Step and value of each point, ordered by step.
    pub(crate) points: Vec<(f64, f64)>,
}

/// Lines that share one plot.
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) lines: Vec<Line>,
}

/// Arranges plots in two columns as one picture; `None` without plots.
pub(crate) fn grid(plots: &[&Plot]) -> Option<String> {
    let (width, height) = SIZE;
    let columns = plots.len().min(2) as u32;
    let rows = plots.len().div_ceil(2) as u32;
    let (all_width, all_height) = (columns * width, rows * height);
    let places = (0..rows).flat_map(|row| (0..2).map(move |column| (column * width, row * height)));
    let each: String = plots
        .iter()
        .zip(places)
        .map(|(plot, (x, y))| plot.svg().replacen("<svg ", &format!("<svg x=\"{x}\" y=\"{y}\" "), 1))
        .collect();
    (!plots.is_empty()).then(|| {
        format!(
            "<svg width=\"{all_width}\" height=\"{all_height}\" viewBox=\"0 0 {all_width} {all_height}\" xmlns=\"http://www.w3.org/2000/svg\">\n{each}</svg>\n"
        )
    })
}

impl Plot {
    /// Returns the title as a file name.
    pub(crate) fn file_name(&self) -> String {
        self.title.to_lowercase().replace(' ', "-")
    }

    /// Draws the plot. Steps that share a pixel are averaged.
    pub(crate) fn svg(&self) -> String {
        let mut svg = String::new();
        // Writing to a string cannot fail. A plot that cannot be laid out becomes an empty picture.
        let _ = self.draw(&mut svg);
        svg
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let lines: Vec<Vec<(f64, f64)>> = self.lines.iter().map(|line| thinned(&line.points)).collect();
        let range = |values: &mut dyn Iterator<Item = f64>, room: f64| {
            let (low, high) =
                values.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| (a.min(v), b.max(v)));
            // Means of equal numbers can differ by rounding.
            let size = low.abs().max(high.abs());
            let is_wide = high - low > (1e-9 * size).max(1.0 / MAX_VALUE);
            let by = if is_wide { (high - low) * room } else { size.max(1.0) * 0.1 };
            low - by..high + by
        };
        let x = range(&mut lines.iter().flatten().map(|point| point.0), 0.0);
        let y = range(&mut lines.iter().flatten().map(|point| point.1), 0.05);
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(&self.title, ("sans-serif", 16))
            .margin(8)
            .x_label_area_size(24)
            .y_label_area_size(54)
            .build_cartesian_2d(x, y)?;
        let tick = |value: &f64| {
            // Rounding errors are shown as 0.
            let value = if value.abs() < 1e-12 { 0.0 } else { *value };
            let size = value.abs();
            if size != 0.0 && !(1e-3..1e5).contains(&size) {
                format!("{value:.0e}")
            } else {
                format!("{}", (value * 1e4).round() / 1e4)
            }
        };
        chart
            .configure_mesh()
            .x_labels(6)
            .y_labels(6)
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&tick)
            .draw()?;
        for (at, points) in lines.into_iter().enumerate() {
            let colour = COLOURS[at % COLOURS.len()];
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
                .label(&self.lines[at].label)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2)));
        }
        if self.lines.len() > 1 {
            chart
                .configure_series_labels()
                .background_style(WHITE.mix(0.8))
                .border_style(BLACK.mix(0.2))
                .draw()?;
        }
        root.present()?;
        Ok(())
    }
}

fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    points
        .chunks(points.len().div_ceil(MAX_POINTS).max(1))
        .map(|some| {
            let bounded = |value: f64| value.clamp(-MAX_VALUE, MAX_VALUE);
            let mean = |of: fn(&(f64, f64)) -> f64| {
                some.iter().map(|point| bounded(of(point))).sum::<f64>() / some.len() as f64
            };
            (mean(|point| point.0), mean(|point| point.1))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plots_stand_side_by_side_in_one_picture() {
        let line = || Line { label: "a".to_owned(), points: vec![(1.0, 2.0), (2.0, 3.0)] };
        let [a, b, c] = ["A", "B", "C"].map(|title| Plot { title: title.to_owned(), lines: vec![line()] });
        let svg = grid(&[&a, &b, &c]).unwrap();
        assert!(svg.starts_with("<svg width=\"960\" height=\"520\" viewBox=\"0 0 960 520\""), "{svg}");
        for place in ["x=\"0\" y=\"0\"", "x=\"480\" y=\"0\"", "x=\"0\" y=\"260\""] {
            assert_eq!(svg.matches(&format!("<svg {place} ")).count(), 1, "{place}");
        }
        assert_eq!((svg.matches("<svg ").count(), svg.matches("</svg>").count()), (4, 4));
        assert!(grid(&[&a]).unwrap().starts_with("<svg width=\"480\" height=\"260\""));
        assert_eq!(grid(&[]), None);
    }

    #[test]
    fn long_curves_are_means() {
        let points: Vec<(f64, f64)> = (0..1200).map(|at| (f64::from(at), f64::from(at % 2))).collect();
        let thin = thinned(&points);
        assert_eq!((thin.len(), thin[0]), (600, (0.5, 0.5)));
        assert_eq!(thinned(&points[..3]), &points[..3]);
        assert!(thinned(&[]).is_empty());
    }

    #[test]
    fn every_number_can_be_drawn() {
        let ends = [
            [1e308, -1.7e308],
            [1e-320, 2e-320],
            [5.0, 5.000_000_000_000_001],
            [0.0, 0.0],
            [-1e300, -1e300],
            [3.6e-17, -2e-17],
        ];
        for [first, last] in ends {
            for points in [vec![(1.0, first), (2.0, last)], vec![(first, 1.0), (last, 2.0)]] {
                let plot = Plot {
                    title: "Any".to_owned(),
                    lines: vec![Line { label: "any".to_owned(), points: points.clone() }],
                };
                assert!(plot.svg().contains("polyline"), "{points:?}");
            }
        }
    }
}
