//! Rotary positions on the f64 twin.

use omnigrpo_kernels::{Mat, twin};

use crate::rows::{RowOps, Window};
use crate::twin::Twin;

use super::*;

impl RopeOps for Twin {
    fn rotate(&self, x: &mut Rows, table: &RopeTable, [heads, dim]: [usize; 2], inverse: bool) {
        let angles = |data: &[f32]| data.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (rows, width) = (x.rows(), heads * dim);
        let waves = table.waves().each_ref().map(|wave| angles(wave));
        let [cos, sin] = waves.each_ref().map(|wave| Mat::new(wave, rows, table.half));
        let turned = twin::rope(cos, sin, inverse, x.mat64().columns(0..width), dim);
        let turned = Rows::on_twin(turned, rows, width);
        self.set_part(x, Window::default(), &turned, Window::default(), [rows, width]);
    }
}
