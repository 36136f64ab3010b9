//! Memory, copies and sums of rows on the f64 twin.

use crate::rows::moves;
use crate::twin::Twin;

use super::*;

impl RowOps for Twin {
    fn zeros(&self, rows: usize, cols: usize, _: Option<&Rows>) -> Rows {
        Rows::on_twin(vec![0.0; rows * cols], rows, cols)
    }

    fn upload(&self, data: Vec<f32>, rows: usize, cols: usize) -> Rows {
        Rows::on_twin(data.into_iter().map(f64::from).collect(), rows, cols)
    }

    fn download(&self, x: &Rows) -> Vec<f32> {
        x.twin().iter().map(|&x| x as f32).collect()
    }

    fn add(&self, to: &mut Rows, from: &Rows) {
        to.twin_mut().iter_mut().zip(from.twin()).for_each(|(to, from)| *to += from);
    }

    fn scale(&self, x: &mut Rows, by: f32) {
        x.twin_mut().iter_mut().for_each(|x| *x *= f64::from(by));
    }

    fn part(&self, x: &Rows, of: Window, [rows, cols]: [usize; 2]) -> Rows {
        Rows::on_twin(moves::part(x.twin(), x.cols(), of, [rows, cols]), rows, cols)
    }

    fn set_part(&self, to: &mut Rows, at: Window, from: &Rows, of: Window, size: [usize; 2]) {
        let cols = to.cols();
        moves::set_part((to.twin_mut(), cols, at), (from.twin(), from.cols(), of), size);
    }
}
