//! Inputs and comparisons shared by the kernel tests.
#![allow(dead_code, clippy::unwrap_used)]

/// Returns reproducible values in −1..1. Every test begins with them, so this function also selects the instruction
/// set.
pub fn noise(n: usize, seed: u32) -> Vec<f32> {
    crate::choose_instructions();
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..n).map(next).collect()
}

pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Checks that every element is within `tolerance` of the expected one, relative to the largest of it, the RMS of all
/// and 0.1. Portable code is allowed more, since it adds elements one by one and rounds products.
#[track_caller]
pub fn close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    let tolerance = tolerance * crate::choose_instructions();
    let rms = (dot(expected, expected) / expected.len().max(1) as f64).sqrt();
    for (i, (&g, &e)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(g) - e).abs() / rms.max(e.abs()).max(0.1);
        assert!(error <= tolerance, "element {i}: {g}, expected {e}, error {error:.1e}");
    }
}

/// Checks `gradient` against central differences of `f` at `x`: relative error at most 1e-6 of the largest component.
#[track_caller]
pub fn check_gradient(x: &[f64], gradient: &[f64], f: impl Fn(&[f64]) -> f64) {
    let size = gradient.iter().fold(1e-3f64, |m, g| m.max(g.abs()));
    let mut x = x.to_vec();
    for i in 0..x.len() {
        let (at, h) = (x[i], 1e-5);
        x[i] = at + h;
        let up = f(&x);
        x[i] = at - h;
        let down = f(&x);
        x[i] = at;
        let numeric = (up - down) / (2.0 * h);
        assert!(
            (numeric - gradient[i]).abs() <= 1e-6 * size,
            "component {i}: {}, numeric {numeric}",
            gradient[i]
        );
    }
}

/// Runs `f` in a rayon pool of `n` threads.
pub fn with_threads<T: Send>(n: usize, f: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap().install(f)
}
