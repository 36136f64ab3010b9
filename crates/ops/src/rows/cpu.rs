//! Memory, copies and sums of rows on the CPU.

use omnigrpo_kernels::buffer;

use crate::cpu::Cpu;
use crate::rows::moves;

use super::*;

impl RowOps for Cpu {
    fn zeros(&self, rows: usize, cols: usize, _: Option<&Rows>) -> Rows {
        Rows::on_cpu(buffer::zeros(rows * cols), rows, cols)
    }

    fn upload(&self, data: Vec<f32>, rows: usize, cols: usize) -> Rows {
        Rows::on_cpu(data, rows, cols)
    }

    fn download(&self, x: &Rows) -> Vec<f32> {
        buffer::copy(x.cpu())
    }

    fn add(&self, to: &mut Rows, from: &Rows) {
        buffer::add(to.cpu_mut(), from.cpu());
    }

    fn scale(&self, x: &mut Rows, by: f32) {
        x.cpu_mut().iter_mut().for_each(|x| *x *= by);
    }

    fn part(&self, x: &Rows, of: Window, [rows, cols]: [usize; 2]) -> Rows {
        Rows::on_cpu(moves::part(x.cpu(), x.cols(), of, [rows, cols]), rows, cols)
    }

    fn set_part(&self, to: &mut Rows, at: Window, from: &Rows, of: Window, size: [usize; 2]) {
        let cols = to.cols();
        moves::set_part((to.cpu_mut(), cols, at), (from.cpu(), from.cols(), of), size);
    }
}
