//! The kernels of convolutional projectors: against their f64 twins, whose gradients are checked by central
//! differences; bits do not depend on the number of threads.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

/// What the machine has.
pub fn choose_instructions() -> f64 {
    1.0
}

use common::{check_gradient, close, dot, noise, wide, with_threads};
use omnigrpo_kernels::conv::{self, OUTSIDE, RowMix};
use omnigrpo_kernels::twin;

#[test]
fn depthwise_convolution_matches_its_twin() {
    for (n, h, w, c) in [(1, 1, 1, 1), (2, 3, 4, 5), (1, 2, 1, 9), (3, 5, 5, 33), (0, 2, 2, 3)] {
        let len = n * h * w * c;
        let (x, weight, dy) = (noise(len, 1), noise(9 * c, 2), noise(len, 3));
        let mut y = vec![7.0; len];
        conv::depthwise3(&mut y, &x, &weight, n, h, w, c, false);
        close(&y, &twin::depthwise3_forward(&wide(&x), &wide(&weight), n, h, w, c), 1e-6);
        let (dx64, dw64) = twin::depthwise3_backward(&wide(&dy), &wide(&x), &wide(&weight), n, h, w, c);
        let mut dx = vec![7.0; len];
        conv::depthwise3(&mut dx, &dy, &weight, n, h, w, c, true);
        close(&dx, &dx64, 1e-6);
        let mut dw = vec![0.5; 9 * c];
        conv::depthwise3_weight(&mut dw, &dy, &x, n, h, w, c);
        close(&dw, &dw64.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 2e-6);
    }
    let (n, h, w, c) = (2, 3, 2, 2);
    let (x, weight, dy) = (wide(&noise(24, 4)), wide(&noise(18, 5)), wide(&noise(24, 6)));
    let (dx, dw) = twin::depthwise3_backward(&dy, &x, &weight, n, h, w, c);
    check_gradient(&x, &dx, |x| dot(&twin::depthwise3_forward(x, &weight, n, h, w, c), &dy));
    check_gradient(&weight, &dw, |k| dot(&twin::depthwise3_forward(&x, k, n, h, w, c), &dy));
}

/// A 2×2 picture of one channel under a window that is 1 everywhere: every output is the sum of the picture.
#[test]
fn depthwise_convolution_pads_with_zeros() {
    let mut y = [0.0; 4];
    conv::depthwise3(&mut y, &[1.0, 2.0, 3.0, 4.0], &[1.0; 9], 1, 2, 2, 1, false);
    assert_eq!(y, [10.0; 4]);
    let left = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    conv::depthwise3(&mut y, &[1.0, 2.0, 3.0, 4.0], &left, 1, 2, 2, 1, false);
    assert_eq!(y, [0.0, 1.0, 0.0, 3.0]);
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
        let mut y = vec![7.0; 3 * c];
        conv::mix_forward(&mut y, &x, &mix, c);
        close(&y, &twin::mix_forward(&wide(&x), &mix, c), 1e-6);
        let mut dx = vec![0.0; 4 * c];
        conv::mix_backward(&mut dx, &dy, &mix, c);
        close(&dx, &twin::mix_backward(&wide(&dy), &mix, 4, c), 1e-6);
    }
    let (x, dy) = (wide(&noise(8, 3)), wide(&noise(6, 4)));
    check_gradient(&x, &twin::mix_backward(&dy, &mix, 4, 2), |x| dot(&twin::mix_forward(x, &mix, 2), &dy));
    let mut y = [0.0; 2];
    conv::mix_forward(&mut y, &[1.0, 2.0, 6.0], &RowMix::means([vec![0, 1, 2], vec![2]]), 1);
    assert_eq!(y, [3.0, 6.0]);
    conv::mix_forward(&mut y, &[1.0, 2.0, 6.0], &RowMix::select(vec![2, 0]), 1);
    assert_eq!(y, [6.0, 1.0]);
}

#[test]
fn unfolding_matches_its_twin() {
    let sources = [0, 2, OUTSIDE, 1, 1, 2];
    let mut y = [9.0; 12];
    conv::unfold(&mut y, &[1.0, 10.0, 2.0, 20.0, 3.0, 30.0], &sources, 3, 2);
    assert_eq!(y, [1.0, 3.0, 0.0, 10.0, 30.0, 0.0, 2.0, 2.0, 3.0, 20.0, 20.0, 30.0]);
    for c in [1, 5, 40] {
        let (x, dy) = (noise(3 * c, 1), noise(6 * c, 2));
        let mut y = vec![7.0; 6 * c];
        conv::unfold(&mut y, &x, &sources, 3, c);
        close(&y, &twin::unfold(&wide(&x), &sources, 3, c), 0.0);
        let mut dx = vec![0.0; 3 * c];
        conv::fold(&mut dx, &dy, &sources, 3, c);
        close(&dx, &twin::fold(&wide(&dy), &sources, 3, 3, c), 1e-6);
    }
    let (x, dy) = (wide(&noise(6, 3)), wide(&noise(12, 4)));
    check_gradient(&x, &twin::fold(&dy, &sources, 3, 3, 2), |x| dot(&twin::unfold(x, &sources, 3, 2), &dy));
}

#[test]
fn gates_match_their_twins() {
    for (n, s, c) in [(1, 1, 1), (2, 3, 5), (3, 4, 33), (0, 2, 2)] {
        let (x, gate, dy) = (noise(n * s * c, 1), noise(n * c, 2), noise(n * s * c, 3));
        let mut y = vec![7.0; n * s * c];
        conv::gate_forward(&mut y, &x, &gate, n, s, c);
        close(&y, &twin::gate_forward(&wide(&x), &wide(&gate), s, c), 1e-6);
        let (mut dx, mut dgate) = (vec![7.0; n * s * c], vec![7.0; n * c]);
        conv::gate_backward(&mut dx, &mut dgate, &dy, &x, &gate, n, s, c);
        let (dx64, dgate64) = twin::gate_backward(&wide(&dy), &wide(&x), &wide(&gate), s, c);
        close(&dx, &dx64, 1e-6);
        close(&dgate, &dgate64, 1e-6);
    }
    let (x, gate, dy) = (wide(&noise(12, 4)), wide(&noise(6, 5)), wide(&noise(12, 6)));
    let (dx, dgate) = twin::gate_backward(&dy, &x, &gate, 2, 3);
    check_gradient(&x, &dx, |x| dot(&twin::gate_forward(x, &gate, 2, 3), &dy));
    check_gradient(&gate, &dgate, |g| dot(&twin::gate_forward(&x, g, 2, 3), &dy));
}

#[test]
fn blending_matches_its_twin() {
    let logits = [0.3, -1.2, 2.0];
    for len in [1, 9, 200] {
        let (x, dy) = (noise(3 * len, 1), noise(len, 2));
        let mut y = vec![7.0; len];
        conv::blend_forward(&mut y, &x, &logits);
        close(&y, &twin::blend_forward(&wide(&x), &wide(&logits)), 1e-6);
        let (mut dx, mut dlogits) = (vec![7.0; 3 * len], [7.0; 3]);
        conv::blend_backward(&mut dx, &mut dlogits, &dy, &x, &logits);
        let (dx64, dlogits64) = twin::blend_backward(&wide(&dy), &wide(&x), &wide(&logits));
        close(&dx, &dx64, 1e-6);
        close(&dlogits, &dlogits64, 1e-6);
    }
    let (x, logits, dy) = (wide(&noise(12, 3)), wide(&noise(3, 4)), wide(&noise(4, 5)));
    let (dx, dlogits) = twin::blend_backward(&dy, &x, &logits);
    check_gradient(&x, &dx, |x| dot(&twin::blend_forward(x, &logits), &dy));
    check_gradient(&logits, &dlogits, |l| dot(&twin::blend_forward(&x, l), &dy));
}

#[test]
fn threads_do_not_change_bits() {
    let (n, h, w, c) = (4, 9, 9, 130);
    let len = n * h * w * c;
    let (x, dy, weight) = (noise(len, 1), noise(len, 2), noise(9 * c, 3));
    let means = RowMix::means((0..n as u32).map(|p| (0..81).map(|i| p * 81 + i).collect()));
    let run = |threads| {
        with_threads(threads, || {
            let (mut y, mut dw) = (vec![0.0; len], vec![0.0; 9 * c]);
            conv::depthwise3(&mut y, &x, &weight, n, h, w, c, false);
            conv::depthwise3_weight(&mut dw, &dy, &x, n, h, w, c);
            let mut pooled = vec![0.0; n * c];
            conv::mix_forward(&mut pooled, &x, &means, c);
            let mut dx = vec![0.0; len];
            conv::mix_backward(&mut dx, &pooled, &means, c);
            let (mut dg, mut back) = (vec![0.0; len], vec![0.0; n * c]);
            conv::gate_backward(&mut dg, &mut back, &dy, &x, &pooled, n, h * w, c);
            (y, dw, pooled, dx, dg, back)
        })
    };
    assert!(run(1) == run(2), "bits differ");
}
