//! RMS norm and layer norm over the last dimension.

/// `y = x · rstd · weight`, `rstd = 1 / sqrt(mean(x²) + eps)`; `x`, `y` `[rows, dim]`, `rstd` `[rows]`.
pub fn rms_forward(
    y: &mut [f32],
    rstd: &mut [f32],
    x: &[f32],
    weight: &[f32],
    rows: usize,
    dim: usize,
    eps: f32,
) {
    for r in 0..rows {
        let x = &x[r * dim..(r + 1) * dim];
        let s = 1.0 / (x.iter().map(|v| v * v).sum::<f32>() / dim as f32 + eps).sqrt();
        rstd[r] = s;
        for j in 0..dim {
            y[r * dim + j] = x[j] * s * weight[j];
        }
    }
}

/// Gradients of [`rms_forward`]: `dx` is overwritten, `dw [dim]` is added to.
pub fn rms_backward(
    dx: &mut [f32],
    mut dw: Option<&mut [f32]>,
    dy: &[f32],
    x: &[f32],
    weight: &[f32],
    rstd: &[f32],
    rows: usize,
    dim: usize,
) {
    for r in 0..rows {
        let at = |j: usize| r * dim + j;
        let s = rstd[r];
        let dot: f32 = (0..dim).map(|j| dy[at(j)] * weight[j] * x[at(j)]).sum();
        for j in 0..dim {
            if let Some(dw) = dw.as_deref_mut() {
                dw[j] += dy[at(j)] * x[at(j)] * s;
            }
            dx[at(j)] = s * (dy[at(j)] * weight[j] - x[at(j)] * dot * s * s / dim as f32);
        }
    }
}

/// `y = (x − mean) · rstd · weight + bias` with biased variance; `mean`, `rstd` `[rows]`.
pub fn layer_forward(
    y: &mut [f32],
    mean: &mut [f32],
    rstd: &mut [f32],
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    rows: usize,
    dim: usize,
    eps: f32,
) {
    for r in 0..rows {
        let x = &x[r * dim..(r + 1) * dim];
        mean[r] = x.iter().sum::<f32>() / dim as f32;
        rstd[r] = 1.0 / (x.iter().map(|v| (v - mean[r]).powi(2)).sum::<f32>() / dim as f32 + eps).sqrt();
        for j in 0..dim {
            y[r * dim + j] = (x[j] - mean[r]) * rstd[r] * weight[j] + bias[j];
        }
    }
}

/// Gradients of [`layer_forward`]: `dx` is overwritten, `dw` and `db` `[dim]` are added to.
pub fn layer_backward(
    dx: &mut [f32],
    mut dw: Option<&mut [f32]>,
    mut db: Option<&mut [f32]>,
    dy: &[f32],
    x: &[f32],
    weight: &[f32],
    mean: &[f32],
    rstd: &[f32],
    rows: usize,
    dim: usize,
) {
    for r in 0..rows {
        let at = |j: usize| r * dim + j;
        let hat = |j: usize| (x[at(j)] - mean[r]) * rstd[r];
        let mean_g = (0..dim).map(|j| dy[at(j)] * weight[j]).sum::<f32>() / dim as f32;
        let mean_gx = (0..dim).map(|j| dy[at(j)] * weight[j] * hat(j)).sum::<f32>() / dim as f32;
        for j in 0..dim {
            if let Some(dw) = dw.as_deref_mut() {
                dw[j] += dy[at(j)] * hat(j);
            }
            if let Some(db) = db.as_deref_mut() {
                db[j] += dy[at(j)];
            }
            dx[at(j)] = rstd[r] * (dy[at(j)] * weight[j] - mean_g - hat(j) * mean_gx);
        }
    }
}
