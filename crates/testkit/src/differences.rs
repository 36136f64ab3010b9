//! Gradients against central differences of fourth order in f64, and the tapes they are computed with.

use std::sync::Arc;

use omnigrpo_ops::Param;

/// A step within one block.
pub const STEP: f32 = 1.0 / 2048.0;

/// A step through a whole network, where moves of many weights add up.
pub const SMALL_STEP: f32 = 1.0 / 65536.0;

/// Random signs, as numbers.
pub fn signs(seed: usize) -> impl Iterator<Item = f32> {
    let mut state = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    std::iter::from_fn(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Some(if state >> 40 & 1 == 0 { 1.0 } else { -1.0 })
    })
}

/// The derivative at 0.
pub fn slope(step: f32, f: impl Fn(f32) -> f64) -> f64 {
    (8.0 * (f(step) - f(-step)) - (f(2.0 * step) - f(-2.0 * step))) / (12.0 * f64::from(step))
}

/// Rounds weights to multiples of the small step, so that f32 holds them moved by steps, and moved back.
pub fn snap(params: &[Arc<Param>]) {
    for param in params {
        param.update(|w| w.iter_mut().for_each(|w| *w = (*w / SMALL_STEP).round() * SMALL_STEP)).unwrap();
    }
}

/// Asserts that the gradients in the weights are the derivatives of `loss`, within 1e-6 of a gradient's 2-norm: along random
/// signs of all elements, of `together` weights at a time. A weight that nothing reached has the gradient 0.
pub fn check_weights(
    what: &str,
    params: &[Arc<Param>],
    (together, step): (usize, f32),
    loss: &dyn Fn() -> f64,
) {
    let gradients: Vec<Vec<f64>> = params
        .iter()
        .map(|p| p.with_grad(|g| g.map_or_else(|| vec![0.0; p.len()], |g| g.to_f64())))
        .collect();
    let members: Vec<usize> = (0..params.len()).collect();
    let groups = params.len().div_ceil(together);
    for group in 0..groups {
        // Weights of one kind stand side by side; those of a group are apart.
        let members: Vec<usize> = members.iter().copied().filter(|i| i % groups == group).collect();
        let move_by = |by: f32| {
            for &i in &members {
                params[i].update(|w| w.iter_mut().zip(signs(i)).for_each(|(w, s)| *w += s * by)).unwrap();
            }
        };
        let want = slope(step, |by| {
            move_by(by);
            let loss = loss();
            move_by(-by);
            loss
        });
        let along = |i: usize| gradients[i].iter().zip(signs(i)).map(|(g, s)| g * f64::from(s)).sum::<f64>();
        let got: f64 = members.iter().map(|&i| along(i)).sum();
        let squares: f64 = members.iter().flat_map(|&i| &gradients[i]).map(|g| g * g).sum();
        let names: Vec<&str> = members.iter().map(|&i| params[i].name()).collect();
        assert!(
            (got - want).abs() <= 1e-6 * squares.sqrt() + 1e-9,
            "{what}, {names:?}: {got} along random signs, central differences give {want}"
        );
    }
}
