//! The kernels of convolutional projectors, compared with their f64 twins, whose gradients are checked by central
//! differences. Bits do not depend on the number of threads.

use crate::common::{check_gradient, close, dot, noise, wide, with_threads};
use omnigrpo_kernels::conv::{self, OUTSIDE, RowMix};
use omnigrpo_kernels::{Mat, MatMut, twin};

/// Views `x` as `R` rows of `C` numbers.
fn grid<const R: usize, const C: usize>(x: &[f64]) -> Mat<'_, f64> {
    Mat::new(x, R, C)
}

#[test]
fn depthwise_convolution_matches_its_twin() {
    for (n, h, w, c) in [(1, 1, 1, 1), (2, 3, 4, 5), (1, 2, 1, 9), (3, 5, 5, 33), (0, 2, 2, 3)] {
        let (rows, side) = (n * h * w, [h, w]);
        let (x, weight, dy) = (noise(rows * c, 1), noise(9 * c, 2), noise(rows * c, 3));
        let [x64, weight64, dy64] = [&x, &weight, &dy].map(|x| wide(x));
        let [x, dy] = [&x, &dy].map(|x| Mat::new(x, rows, c));
        let [x64, dy64] = [&x64, &dy64].map(|x| Mat::new(x, rows, c));
        let y = conv::depthwise3(x, &weight, side, false);
        close(&y, &twin::depthwise3_forward(x64, &weight64, side), 1e-6);
        let (dx64, dw64) = twin::depthwise3_backward(dy64, x64, &weight64, side);
        close(&conv::depthwise3(dy, &weight, side, true), &dx64, 1e-6);
        let mut dw = vec![0.5; 9 * c];
        conv::depthwise3_weight(dy, x, side, &mut dw);
        close(&dw, &dw64.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 2e-6);
    }
    let side = [3, 2];
    let (x, weight, dy) = (wide(&noise(24, 4)), wide(&noise(18, 5)), wide(&noise(24, 6)));
    let pictures = grid::<12, 2>;
    let (dx, dw) = twin::depthwise3_backward(pictures(&dy), pictures(&x), &weight, side);
    check_gradient(&x, &dx, |x| dot(&twin::depthwise3_forward(pictures(x), &weight, side), &dy));
    check_gradient(&weight, &dw, |k| dot(&twin::depthwise3_forward(pictures(&x), k, side), &dy));
}

/// Convolves a 2×2 picture of one channel with a window of ones: every output is the sum of the picture.
#[test]
fn depthwise_convolution_pads_with_zeros() {
    let picture = Mat::new(&[1.0, 2.0, 3.0, 4.0], 4, 1);
    assert_eq!(conv::depthwise3(picture, &[1.0; 9], [2, 2], false), [10.0; 4]);
    let left = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    assert_eq!(conv::depthwise3(picture, &left, [2, 2], false), [0.0, 1.0, 0.0, 3.0]);
}

#[test]
fn row_mixing_matches_its_twin() {
    let mix = RowMix {
        offsets: vec![0, 2, 2, 5],
        rows: vec![3, 0, 1, 1, 3],
        weights: vec![0.5, -1.0, 2.0, 0.25, 1.0],
    };
    assert_eq!((mix.len(), mix.reads()), (3, 4));
    for c in [1, 7, 70] {
        let (x, dy) = (noise(4 * c, 1), noise(3 * c, 2));
        let y = conv::mix_forward(Mat::new(&x, 4, c), &mix);
        close(&y, &twin::mix_forward(Mat::new(&wide(&x), 4, c), &mix), 1e-6);
        let mut dx = vec![0.25; 4 * c];
        conv::mix_backward(Mat::new(&dy, 3, c), &mix, MatMut::new(&mut dx, 4, c));
        let dx64 = twin::mix_backward(Mat::new(&wide(&dy), 3, c), &mix, 4);
        close(&dx, &dx64.iter().map(|d| d + 0.25).collect::<Vec<_>>(), 1e-6);
    }
    let (x, dy) = (wide(&noise(8, 3)), wide(&noise(6, 4)));
    let dx = twin::mix_backward(Mat::new(&dy, 3, 2), &mix, 4);
    check_gradient(&x, &dx, |x| dot(&twin::mix_forward(Mat::new(x, 4, 2), &mix), &dy));
    let x = Mat::new(&[1.0, 2.0, 6.0], 3, 1);
    assert_eq!(conv::mix_forward(x, &RowMix::means([vec![0, 1, 2], vec![2]])), [3.0, 6.0]);
    assert_eq!(conv::mix_forward(x, &RowMix::select(vec![2, 0])), [6.0, 1.0]);
    assert_eq!(conv::mix_forward(x, &RowMix::of_ids([Some(2), None, Some(0)])), [6.0, 0.0, 1.0]);
}

#[test]
fn unfolding_matches_its_twin() {
    let sources = [0, 2, OUTSIDE, 1, 1, 2];
    let y = conv::unfold(Mat::new(&[1.0, 10.0, 2.0, 20.0, 3.0, 30.0], 3, 2), &sources, 3);
    assert_eq!(y, [1.0, 3.0, 0.0, 10.0, 30.0, 0.0, 2.0, 2.0, 3.0, 20.0, 20.0, 30.0]);
    for c in [1, 5, 40] {
        let (x, dy) = (noise(3 * c, 1), noise(6 * c, 2));
        let y = conv::unfold(Mat::new(&x, 3, c), &sources, 3);
        close(&y, &twin::unfold(Mat::new(&wide(&x), 3, c), &sources, 3), 0.0);
        let mut dx = vec![0.25; 3 * c];
        conv::fold(Mat::new(&dy, 2, 3 * c), &sources, 3, MatMut::new(&mut dx, 3, c));
        let dx64 = twin::fold(Mat::new(&wide(&dy), 2, 3 * c), &sources, 3, 3);
        close(&dx, &dx64.iter().map(|d| d + 0.25).collect::<Vec<_>>(), 1e-6);
    }
    let (x, dy) = (wide(&noise(6, 3)), wide(&noise(12, 4)));
    let dx = twin::fold(Mat::new(&dy, 2, 6), &sources, 3, 3);
    check_gradient(&x, &dx, |x| dot(&twin::unfold(Mat::new(x, 3, 2), &sources, 3), &dy));
}

#[test]
fn gates_match_their_twins() {
    for (n, s, c) in [(1, 1, 1), (2, 3, 5), (3, 4, 33), (0, 2, 2)] {
        let (x, gate, dy) = (noise(n * s * c, 1), noise(n * c, 2), noise(n * s * c, 3));
        let [x64, gate64, dy64] = [&x, &gate, &dy].map(|x| wide(x));
        let [x, dy] = [&x, &dy].map(|x| Mat::new(x, n * s, c));
        let [x64, dy64] = [&x64, &dy64].map(|x| Mat::new(x, n * s, c));
        let (gate, gate64) = (Mat::new(&gate, n, c), Mat::new(&gate64, n, c));
        close(&conv::gate_forward(x, gate), &twin::gate_forward(x64, gate64), 1e-6);
        let (dx, dgate) = conv::gate_backward(dy, x, gate);
        let (dx64, dgate64) = twin::gate_backward(dy64, x64, gate64);
        close(&dx, &dx64, 1e-6);
        close(&dgate, &dgate64, 1e-6);
    }
    let (x, gate, dy) = (wide(&noise(12, 4)), wide(&noise(6, 5)), wide(&noise(12, 6)));
    let (rows, gates) = (grid::<4, 3>, grid::<2, 3>);
    let (dx, dgate) = twin::gate_backward(rows(&dy), rows(&x), gates(&gate));
    check_gradient(&x, &dx, |x| dot(&twin::gate_forward(rows(x), gates(&gate)), &dy));
    check_gradient(&gate, &dgate, |g| dot(&twin::gate_forward(rows(&x), gates(g)), &dy));
}

#[test]
fn blending_matches_its_twin() {
    let logits = [0.3, -1.2, 2.0];
    for len in [1, 9, 200] {
        let (x, dy) = (noise(3 * len, 1), noise(len, 2));
        let (x64, logits64) = (wide(&x), wide(&logits));
        let (x, x64) = (Mat::new(&x, 3, len), Mat::new(&x64, 3, len));
        close(&conv::blend_forward(x, &logits), &twin::blend_forward(x64, &logits64), 1e-6);
        let (dx, dlogits) = conv::blend_backward(&dy, x, &logits);
        let (dx64, dlogits64) = twin::blend_backward(&wide(&dy), x64, &logits64);
        close(&dx, &dx64, 1e-6);
        close(&dlogits, &dlogits64, 1e-6);
    }
    let (x, logits, dy) = (wide(&noise(12, 3)), wide(&noise(3, 4)), wide(&noise(4, 5)));
    let alternatives = grid::<3, 4>;
    let (dx, dlogits) = twin::blend_backward(&dy, alternatives(&x), &logits);
    check_gradient(&x, &dx, |x| dot(&twin::blend_forward(alternatives(x), &logits), &dy));
    check_gradient(&logits, &dlogits, |l| dot(&twin::blend_forward(alternatives(&x), l), &dy));
}

#[test]
fn threads_do_not_change_bits() {
    let (n, side, c) = (4, [9, 9], 130);
    let rows = n * 81;
    let (x, dy, weight) = (noise(rows * c, 1), noise(rows * c, 2), noise(9 * c, 3));
    let (x, dy) = (Mat::new(&x, rows, c), Mat::new(&dy, rows, c));
    let means = RowMix::means((0..n as u32).map(|p| (0..81).map(|i| p * 81 + i).collect()));
    let run = |threads| {
        with_threads(threads, || {
            let y = conv::depthwise3(x, &weight, side, false);
            let mut dw = vec![0.0; 9 * c];
            conv::depthwise3_weight(dy, x, side, &mut dw);
            let pooled = conv::mix_forward(x, &means);
            let gate = Mat::new(&pooled, n, c);
            let mut dx = vec![0.0; rows * c];
            conv::mix_backward(gate, &means, MatMut::new(&mut dx, rows, c));
            let gates = conv::gate_backward(dy, x, gate);
            (y, dw, pooled.clone(), dx, gates)
        })
    };
    assert!(run(1) == run(2), "bits differ");
}
